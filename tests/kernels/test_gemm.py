from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tinyllm.kernels import gemm
from tinyllm.kernels.gemm import input_gradient, linear, weight_gradient, weight_gradients

from .checks import FLOAT32_EPS, assert_surroundings_kept, normal, poisoned, replicas

M, IN, OUT = 21, 64, 96


def products(workers: int, **options: str) -> tuple[Tensor, Tensor, Tensor]:
    """x, a weight with a gap between workers, and dy; in float64 on a CPU."""
    x, weight = normal(workers, M, IN, **options), normal(workers, OUT, IN, gap=64, **options)
    dy = normal(workers, M, OUT, **options)
    x, weight, dy = replicas((x, weight, dy), double=True)
    return x, weight, dy


def expected_gradient(dy: Tensor, x: Tensor) -> Tensor:
    return torch.einsum("wmo,wmi->woi", dy, x)


@pytest.mark.parametrize("workers", [1, 3])
def test_forward_and_input_gradient(workers: int) -> None:
    x, weight, dy = products(workers)
    expected = torch.einsum("wmi,woi->wmo", x, weight)
    torch.testing.assert_close(linear(x, weight), expected, rtol=0, atol=1e-12)
    expected = torch.einsum("wmo,woi->wmi", dy, weight)
    torch.testing.assert_close(input_gradient(dy, weight), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("accumulate", [False, True])
def test_weight_gradient_goes_into_an_arena(workers: int, accumulate: bool) -> None:
    x, _, dy = products(workers)
    (out,) = replicas([(normal if accumulate else poisoned)(workers, OUT, IN, gap=128)], True)
    (before,) = replicas([out])
    weight_gradient(dy, x, out, accumulate)
    expected = expected_gradient(dy, x) + (before if accumulate else 0)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    assert_surroundings_kept(out, before)


@pytest.mark.parametrize("workers", [1, 3])
def test_weight_gradient_of_a_part_of_wider_rows(workers: int) -> None:
    x, _, wide = products(workers)
    dy = wide[:, :, : OUT - 5]  # as the head's rows of exponentials
    out = torch.empty(workers, OUT - 5, IN, dtype=x.dtype)
    weight_gradient(dy, x, out, False)
    torch.testing.assert_close(out, expected_gradient(dy, x), rtol=0, atol=1e-12)


class Layers(NamedTuple):
    """Factors ``[L, W, M, ·]``, and views of an arena that has other parameters between them."""

    dys: Tensor
    xs: Tensor
    outs: list[Tensor]
    arena: Tensor
    expected: Tensor


def all_layers(layers: int, workers: int, accumulate: bool, even: bool = True) -> Layers:
    dys = torch.randn(layers, workers, M, OUT, dtype=torch.float64)
    xs = torch.randn(layers, workers, M, IN, dtype=torch.float64)
    step = OUT * IN + 64
    starts = [step * layer for layer in range(layers)]
    if not even:
        starts[-1] += 64
    fill = 1.0 if accumulate else torch.nan
    arena = torch.full((workers, step * layers + 64), fill, dtype=torch.float64)
    outs = [arena[:, s : s + OUT * IN].view(workers, OUT, IN) for s in starts]
    expected = torch.einsum("lwmo,lwmi->lwoi", dys, xs) + (1.0 if accumulate else 0.0)
    return Layers(dys, xs, outs, arena, expected)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(
    ("layers", "workers", "how", "products"),
    [
        (5, 1, "together", 1),
        (5, 3, "together", 3),
        (3, 3, "together", 3),
        (2, 3, "together", 2),  # fewer products by layer than by worker
        (1, 1, "together", 1),
        (5, 3, "at odd distances", 5),
        (5, 3, "listed", 5),
        (5, 3, "long", 5),
    ],
)
def test_weight_gradients_of_all_layers(
    monkeypatch: pytest.MonkeyPatch,
    *,
    layers: int,
    workers: int,
    how: str,
    products: int,
    accumulate: bool,
) -> None:
    case = all_layers(layers, workers, accumulate, even=how != "at odd distances")
    calls: list[int] = []

    def counted(dy: Tensor, x: Tensor, out: Tensor, accumulate: bool) -> None:
        calls.append(len(dy))
        weight_gradient(dy, x, out, accumulate)

    monkeypatch.setattr(gemm, "weight_gradient", counted)
    if how == "long":
        monkeypatch.setattr(gemm, "_LONG", M - 1)
    weight_gradients(case.dys, list(case.xs) if how == "listed" else case.xs, case.outs, accumulate)
    assert len(calls) == products
    torch.testing.assert_close(torch.stack(case.outs), case.expected, rtol=0, atol=1e-12)
    written = ~case.arena.isnan() & (case.arena != 1)
    assert written.sum() == layers * workers * OUT * IN  # and nothing between them


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("accumulate", [False, True])
def test_weight_gradients_of_all_layers_on_gpu(workers: int, accumulate: bool) -> None:
    low = {"dtype": torch.bfloat16, "device": "cuda"}
    xs, dys = (torch.randn(8, workers, 2_048, size, **low) for size in (320, 896))
    arena = torch.full((workers, 8 * 896 * 384), 1.0 if accumulate else torch.nan, device="cuda")
    outs = [part[:, : 896 * 320].view(workers, 896, 320) for part in arena.chunk(8, dim=1)]
    weight_gradients(dys, xs, outs, accumulate)
    expected = torch.einsum("lwmo,lwmi->lwoi", dys.double(), xs.double()) + float(accumulate)
    error = (torch.stack(outs).double() - expected).abs().max().item()
    assert error <= FLOAT32_EPS * 2_048**0.5 * expected.abs().max().item()


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [1, 8])
@pytest.mark.parametrize("accumulate", [False, True])
def test_weight_gradient_on_gpu(workers: int, accumulate: bool) -> None:
    """bf16 factors, and sums in fp32 that are not rounded to bf16 on the way out."""
    low = {"dtype": torch.bfloat16, "device": "cuda"}
    x, dy = normal(workers, 2_048, 320, **low), normal(workers, 2_048, 896, **low)
    make = normal if accumulate else poisoned
    out = make(workers, 896, 320, device="cuda", gap=4_096)
    (before,) = replicas([out])
    weight_gradient(dy, x, out, accumulate)
    expected = expected_gradient(dy.double(), x.double()) + (before.double() if accumulate else 0)
    error = (out.double() - expected).abs().max().item()
    # sums of 2,048 terms, whose size is that of the largest result
    assert error <= FLOAT32_EPS * 2_048**0.5 * expected.abs().max().item()
    assert_surroundings_kept(out, before)


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [1, 8])
def test_forward_and_input_gradient_on_gpu(workers: int) -> None:
    low = {"dtype": torch.bfloat16, "device": "cuda"}
    x, dy = normal(workers, 1_031, 320, **low), normal(workers, 1_031, 896, **low)
    weight = normal(workers, 896, 320, gap=4_096, **low)
    for mine, expected in (
        (linear(x, weight), torch.einsum("wmi,woi->wmo", x.double(), weight.double())),
        (input_gradient(dy, weight), torch.einsum("wmo,woi->wmi", dy.double(), weight.double())),
    ):
        # one rounding to bf16; sums of up to 896 terms in fp32
        torch.testing.assert_close(mine.double(), expected, rtol=2.0**-8, atol=1e-3)
