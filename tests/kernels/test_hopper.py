"""Hopper kernels cannot be interpreted: here they are compiled, and their schedule is checked."""

from collections import Counter
from typing import Any

import pytest

from tinyllm.kernels import hopper
from tinyllm.kernels.hopper_schedule import schedule

from .checks import compiled_by

CASES = [
    *((name, width, 0) for name in ("rotation", "swiglu") for width in (64, 320, 512, 640)),
    *(("swiglu_backward", width, 0) for width in (64, 320, 512)),
    *(("exponentials", width, 32_000) for width in (64, 320, 512, 640)),
    *(("exponentials", width, 32_001) for width in (320, 640)),
]
"""What is done with a product, C, V: all models, a masked tile."""


@pytest.mark.parametrize("programs", [1, 3, 132])
@pytest.mark.parametrize("tiles_h", [1, 2, 32, 2_048])
@pytest.mark.parametrize("tiles_e", [1, 7, 125, 132, 133, 1_000])
def test_every_product_is_computed_once(tiles_e: int, tiles_h: int, programs: int) -> None:
    shares = schedule(tiles_e, tiles_h, programs)
    products = Counter(
        (tile, row) for share in shares for tile, low, high in share for row in range(low, high)
    )
    assert set(products.values()) == {1}
    assert len(products) == tiles_e * tiles_h
    assert len(shares) == programs


def cost(share: list[tuple[int, int, int]]) -> int:
    return sum(high - low + 1 for _, low, high in share)


@pytest.mark.parametrize(("tiles_e", "tiles_h"), [(125, 2_048), (1_000, 256), (250, 512)])
def test_programs_have_as_much_to_do(tiles_e: int, tiles_h: int) -> None:
    costs = [cost(share) for share in schedule(tiles_e, tiles_h, 132)]
    assert max(costs) < 1.03 * sum(costs) / 132


def test_few_products_are_not_dealt_out() -> None:
    """Seven programs would have to fetch 125 tiles of the weight for one product each."""
    assert {len(share) for share in schedule(125, 32, 132)} == {0, 1}


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    return compiled_by("compile_hopper.py", CASES)


@pytest.mark.parametrize("case", CASES)
def test_compiles_for_hopper(compiled: dict[str, Any], case: tuple[Any, ...]) -> None:
    kernel = compiled[",".join(map(str, case))]
    assert kernel["products_are_asynchronous"]
    # No buffer is written before what was sent from it has left. In both consumers a tile's first
    # result, and the end, wait for all that was sent; its others wait for all if there is one
    # buffer, and for all but the last if there are two.
    parts = {"swiglu": 3, "swiglu_backward": 4}.get(case[0], 4 if case[1] <= 320 else 2)
    results = parts * hopper.PART // kernel["SENT"]
    of_one, of_two = [2 * (results + 1), 0], [4, 2 * (results - 1)]
    assert kernel["waits"] == (of_one if kernel["BUFFERS"] == 1 else of_two)
    assert kernel["shared_bytes"] <= 227 * 1024
    # of numbers that a tile needs once, and where columns are masked
    assert kernel["spills"] <= (40 if case[0] == "swiglu_backward" else 24)
