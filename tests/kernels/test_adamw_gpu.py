"""The optimizer's kernels when they are compiled, and in a CUDA graph."""

import pytest
import torch
from torch import Tensor

from tinyllm.kernels.adamw import (
    Mixing,
    adamw,
    block_columns,
    gradient_squares,
    prepare,
)

from .checks import (
    assert_accurate,
    poisoned,
    replicas,
)
from .updates import (
    MIXINGS,
    TARGETS,
    Independent,
    Update,
    adamw_results,
    learning_rate,
    matrix_of,
    mid_training,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("workers", "mixing"),
    [(1, "none"), *((workers, mixing) for workers in (3, 4, 8) for mixing in MIXINGS), (16, "awc")],
)
def test_kernels_when_compiled(workers: int, mixing: Mixing) -> None:
    groups = [(0, 64 * 1_001), (64 * 1_001, 64 * 1_010)]
    update = Update.of(workers, groups=groups, low=torch.bfloat16, device="cuda")
    update.partials = poisoned(workers, 33, device="cuda")
    assert_accurate(
        gradient_squares,
        [update.gradients, update.partials],
        lambda *a: {"partials": a[1]},
        terms=64 * 31,
    )
    update.partials.uniform_()
    assert_accurate(
        prepare,
        update.prepare_arguments(),
        lambda *a: {"loss": a[6], "norm": a[7], "scale": a[8]},
        terms=33,
    )
    mid_training(update)
    arguments = update.adamw_arguments(mixing)
    assert_accurate(adamw, arguments, adamw_results, terms=block_columns(workers))
    again = replicas(arguments)
    adamw(*arguments)
    adamw(*again)
    for first, second in zip(arguments, again, strict=True):
        assert not isinstance(first, Tensor) or torch.equal(first, second)
    assert update.shadow is not None
    assert torch.equal(update.shadow, update.weights.bfloat16())


@pytest.mark.parametrize("betas", [(0.9, 0.98), (0.98, 0.999999)])
@pytest.mark.parametrize("mixing", MIXINGS)
@pytest.mark.parametrize("workers", [1, 4])
def test_twenty_updates_of_a_graph_are_adamws(
    workers: int, mixing: Mixing, betas: tuple[float, float]
) -> None:
    """The protocol's rtol 1e-6 and atol 1e-8 against float64; and as near as torch's fused kernel.

    Gradients have the size that they have in training: moments of mixed signs cancel, so with
    larger ones fp32 itself would pass atol.
    """
    update = Update.of(workers, low=torch.bfloat16, device="cuda")
    update.betas = betas
    update.matrix.copy_(matrix_of(workers).float())
    exact = update.matrix.double()
    oracle = Independent(update.weights.double(), torch.inf, betas)
    fused = Independent(update.weights, torch.inf, betas, fused=True)
    before = replicas([*vars(update).values()])
    update.set_rates(0)
    update.apply(mixing)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        update.apply(mixing)
    for tensor, old in zip(vars(update).values(), before, strict=True):
        if isinstance(tensor, Tensor):
            tensor.copy_(old)
    for number in range(20):
        means = torch.randn_like(update.weights) * 3e-3
        update.set_rates(number)
        update.set_gradients(means)
        means = update.gradients.double() / TARGETS
        graph.replay()
        oracle.update(means, learning_rate(number), exact, mixing)
        fused.update(means, learning_rate(number), exact.float(), mixing)
    assert update.step == 20
    expected = oracle.rows()
    torch.testing.assert_close(update.weights.double(), expected, rtol=1e-6, atol=1e-8)
    for name in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(
            getattr(update, name).double(), oracle.moments(name), rtol=1e-6, atol=1e-8
        )
    error, fused_error = ((rows - expected).abs().max() for rows in (update.weights, fused.rows()))
    assert error <= fused_error + 1e-8


@pytest.mark.parametrize("what", ["gradient", "nll"])
def test_failures_when_compiled(what: str) -> None:
    update = mid_training(Update.of(8, low=torch.bfloat16, flags=torch.bool, device="cuda"))
    update.apply("atc")
    before = update.written()
    (update.gradients[6] if what == "gradient" else update.nll[6:7])[-1] = torch.nan
    update.apply("atc")
    assert update.failed
    assert update.failed_workers.nonzero().flatten().tolist() == [6]
    for name, tensor in update.written().items():
        assert torch.equal(tensor, before[name]), name


def test_more_elements_than_int32_counts() -> None:
    """Eight rows of 2^28 and some columns, of which the last few are looked at."""
    workers, row, own = 8, 2**28 + 64 * 13, 64 * 13
    small = mid_training(Update.of(workers, groups=[(0, own)], device="cuda"))
    large = [torch.empty(workers, row, device="cuda") for _ in range(4)]
    large[1].zero_()
    rows: list[Tensor] = small.adamw_arguments("atc")[:4]
    for arena, few in zip(large, rows, strict=True):
        arena[:, -own:] = few
    partials = poisoned(workers, 1_000, device="cuda")
    gradient_squares(large[1], partials)
    torch.testing.assert_close(partials.sum(1), small.gradients.square().sum(1))
    blocks = small.blocks + torch.tensor([row - own, row - own, 0], device="cuda")
    arguments = replicas(small.adamw_arguments("atc"))
    arguments[:4], arguments[10] = large, blocks
    adamw(*arguments)
    adamw(*small.adamw_arguments("atc"))
    for arena, few in zip(large, rows, strict=True):
        assert torch.equal(arena[:, -own:], few)
