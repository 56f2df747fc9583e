"""The optimizer's update against torch.optim.AdamW, one per worker, and dense mixing in float64."""

from decimal import Decimal

import pytest
import torch
from torch import Tensor

from tinyllm.kernels.adamw import (
    Mixing,
    adamw,
    block_columns,
    column_blocks,
    gradient_squares,
    hyperparameter_row,
    prepare,
    spread_norms,
)

from .checks import (
    INTERPRETED_LOW,
    assert_accurate,
    assert_surroundings_kept,
    interpreted,
    normal,
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
    mid_training,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:.* encountered in:RuntimeWarning"
)  # NumPy's, of NaN

either = pytest.mark.parametrize("run", ["reference", pytest.param("launch", marks=interpreted)])


def same(actual: Tensor, expected: Tensor) -> None:
    """Equal up to float64's rounding."""
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("clip_norm", [1.0, torch.inf])
@pytest.mark.parametrize("mixing", MIXINGS)
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 8])
def test_reference_is_torchs_adamw_with_dense_mixing(
    workers: int, mixing: Mixing, clip_norm: float
) -> None:
    update = Update.of(workers, clip_norm=clip_norm, dtype=torch.float64)
    independent = Independent(update.weights, clip_norm, update.betas)
    sizes = torch.linspace(0.01, 0.1, workers, dtype=torch.float64)[:, None]  # norms 0.4 to 4
    for number in range(12):
        means = torch.randn_like(update.weights) * sizes
        update.set_rates(number)
        update.set_gradients(means)
        update.apply(mixing, "reference")
        norms = independent.update(means, learning_rate(number), update.matrix, mixing)
        same(update.norm, norms)
        same(update.weights, independent.rows())
    same(update.exp_avg, independent.moments("exp_avg"))
    same(update.exp_avg_sq, independent.moments("exp_avg_sq"))
    same(update.loss, update.nll / TARGETS)
    assert update.step == 12
    assert not update.failed
    if update.spread is not None:
        mean = update.weights.mean(0)
        distance, average_norm = spread_norms(update.spread)
        same(distance, (update.weights - mean).norm(dim=1))
        same(average_norm, mean.norm()[None])


@interpreted
@pytest.mark.parametrize("mixing", MIXINGS)
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 8, 11])
def test_adamw_kernel(workers: int, mixing: Mixing) -> None:
    update = mid_training(Update.of(workers, low=INTERPRETED_LOW))
    assert_accurate(adamw, update.adamw_arguments(mixing), adamw_results, terms=block_columns(1))


@interpreted
def test_kernel_takes_none_for_what_is_not_wanted() -> None:
    update = mid_training(Update.of(2))
    update.shadow = update.spread = None
    arguments = update.adamw_arguments("none")
    arguments[9] = None
    assert_accurate(adamw, arguments, adamw_results)


@either
@pytest.mark.parametrize("workers", [1, 3])
def test_shadow_is_the_rounded_weights(workers: int, run: str) -> None:
    low = torch.bfloat16 if run == "reference" else INTERPRETED_LOW
    update = mid_training(Update.of(workers, low=low))
    update.apply("atc" if workers > 1 else "none", run)
    assert update.shadow is not None
    assert torch.equal(update.shadow, update.weights.to(low))


@either
def test_columns_outside_the_blocks_and_gradients_stay(run: str) -> None:
    update = mid_training(Update.of(3, low=INTERPRETED_LOW))
    update.blocks = update.blocks[1:-1].contiguous()
    start, stop = int(update.blocks[0, 0]), int(update.blocks[-1, 1])
    arguments = update.adamw_arguments("awc")
    arguments[11] = None
    before = replicas(arguments)
    getattr(adamw, run)(*arguments)
    assert torch.equal(arguments[1], before[1])
    for arena, kept in zip(arguments[:5], before[:5], strict=True):
        torch.testing.assert_close(
            arena[:, :start], kept[:, :start], rtol=0, atol=0, equal_nan=True
        )
        torch.testing.assert_close(arena[:, stop:], kept[:, stop:], rtol=0, atol=0, equal_nan=True)
        assert not arena[:, start:stop].isnan().any()


@either
@pytest.mark.parametrize("mixing", MIXINGS)
def test_padding_stays_zero(mixing: Mixing, run: str) -> None:
    update = mid_training(Update.of(3))
    padding = torch.rand(update.weights.shape[1]) < 0.2
    for arena in (update.weights, update.gradients, update.exp_avg, update.exp_avg_sq):
        arena[:, padding] = 0
    update.apply(mixing, run)
    for arena in (update.weights, update.exp_avg, update.exp_avg_sq):
        assert (arena[:, padding] == 0).all()


@either
def test_workers_that_mix_alike_agree_in_bits(run: str) -> None:
    update = mid_training(Update.of(4))
    update.matrix.copy_(torch.tensor([[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]) / 2)
    update.apply("atc", run)
    assert torch.equal(update.weights[0], update.weights[1])
    assert torch.equal(update.weights[2], update.weights[3])
    assert not torch.equal(update.weights[0], update.weights[2])


# --- failures ---------------------------------------------------------------------------------


@either
@pytest.mark.parametrize(
    ("mixing", "flags"), [("none", torch.int32), ("awc", torch.bool), ("atc", torch.int32)]
)
@pytest.mark.parametrize("what", ["nan gradient", "inf gradient", "nan loss", "inf loss"])
def test_a_failure_names_its_worker_and_leaves_everything_for_good(
    what: str, mixing: Mixing, flags: torch.dtype, run: str
) -> None:
    update = mid_training(Update.of(3, low=INTERPRETED_LOW, flags=flags))
    update.apply(mixing, run)
    before = update.written()
    value, where = float(what[:3]), what[4:]
    good = update.gradients.clone(), update.nll.clone()
    (update.gradients[2] if where == "gradient" else update.nll)[-1] = value
    update.apply(mixing, run)
    for _ in range(2):  # good or bad, what follows changes nothing
        assert update.failed
        assert update.failed_workers.tolist() == [0, 0, 1]
        for name, tensor in update.written().items():
            assert torch.equal(tensor, before[name]), name
        update.gradients.copy_(good[0])
        update.nll.copy_(good[1])
        update.nll[0] = torch.nan
        update.apply(mixing, run)
    assert update.step == 1


@either
def test_a_failure_elsewhere_counts(run: str) -> None:
    update = mid_training(Update.of(2))
    before = update.written()
    getattr(gradient_squares, run)(update.gradients, update.partials)
    getattr(prepare, run)(*update.prepare_arguments())
    update.failed.fill_(1)  # what another rank says
    getattr(adamw, run)(*update.adamw_arguments("awc"))
    for name, tensor in update.written().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0, equal_nan=True)
    assert not update.failed_workers.any()


@either
def test_sums_beyond_fp32_fail(run: str) -> None:
    update = mid_training(Update.of(2))
    update.gradients[1, :2] = 1e25
    update.apply("none", run)
    assert update.failed_workers.tolist() == [0, 1]


# --- decisions --------------------------------------------------------------------------------


@either
def test_no_target_counts_as_one(run: str) -> None:
    update = Update.of(2)
    update.targets.copy_(torch.tensor([0, 4]))
    update.nll.copy_(torch.tensor([0.0, 6.0]))
    update.partials.copy_(torch.tensor([[0.0] * 5, [20.0] * 5]))
    getattr(prepare, run)(*update.prepare_arguments())
    assert update.loss.tolist() == [0, 1.5]
    assert update.norm.tolist() == [0, 2.5]
    assert update.scale.tolist() == [1, 0.25]


@either
def test_one_workers_norm_does_not_clip_another(run: str) -> None:
    update = Update.of(2, clip_norm=1.0)
    update.partials.copy_(torch.tensor([[4.0] + [0.0] * 4, [40_000.0] + [0.0] * 4]))
    update.targets.fill_(4)
    getattr(prepare, run)(*update.prepare_arguments())
    torch.testing.assert_close(update.norm, torch.tensor([0.5, 50.0]))
    torch.testing.assert_close(update.scale, torch.tensor([1.0, 1 / 50]) / 4)


@interpreted
@pytest.mark.parametrize(("workers", "parts"), [(1, 1), (1, 5_000), (3, 7), (8, 1_000)])
def test_prepare_kernel(workers: int, parts: int) -> None:
    update = Update.of(workers, clip_norm=2.0)
    update.partials = normal(workers, parts).square_()
    assert_accurate(
        prepare,
        update.prepare_arguments(),
        lambda *a: {"loss": a[6], "norm": a[7], "scale": a[8]},
        terms=parts,
    )


@either
@pytest.mark.parametrize("parts", [1, 2, 3, 20, 70])
@pytest.mark.parametrize("workers", [1, 3])
def test_squares_are_summed(workers: int, parts: int, run: str) -> None:
    gradients = normal(workers, 64 * 67)  # more than a program's loop takes at once
    partials = poisoned(workers, parts)
    before = replicas([gradients, partials])
    getattr(gradient_squares, run)(gradients, partials)
    torch.testing.assert_close(
        partials.double().sum(1), gradients.double().square().sum(1), rtol=1e-6, atol=0
    )
    assert torch.equal(gradients, before[0])
    assert_surroundings_kept(partials, before[1])


@interpreted
@pytest.mark.parametrize("parts", [1, 3, 70])
def test_squares_kernel(parts: int) -> None:
    arguments = [normal(2, 64 * 67), poisoned(2, parts)]
    assert_accurate(gradient_squares, arguments, lambda *a: {"partials": a[1]}, terms=64 * 67)


# --- what is computed on the host -------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 8, 16])
def test_blocks_cover_each_group_once(workers: int) -> None:
    groups = [(0, 64 * 100), (64 * 100, 64 * 101), (64 * 101, 64 * 101), (64 * 101, 64 * 150)]
    blocks = column_blocks(groups, workers)
    for group, (start, stop) in enumerate(groups):
        own = [column for a, b, g in blocks if g == group for column in range(a, b)]
        assert own == list(range(start, stop))
    assert max(stop - start for start, stop, _ in blocks) <= block_columns(workers)


def test_blocks_need_aligned_groups() -> None:
    with pytest.raises(ValueError, match=r"multiples of 64, got \[\(0, 100\)\]"):
        column_blocks([(0, 100)], 1)


@pytest.mark.parametrize("step", [1, 20, 10_000])
def test_hyperparameters_keep_their_digits_in_fp32(step: int) -> None:
    lr, decay, beta1, beta2 = (Decimal(text) for text in ("0.004", "0.1", "0.98", "0.999999"))
    expected = [
        *(lr * decay, 1 - beta1, 1 - beta2, Decimal("1e-8")),
        *(lr / (1 - beta1**step), 1 / (1 - beta2**step).sqrt()),
    ]
    row = hyperparameter_row(0.004, (0.98, 0.999999), 1e-8, 0.1, step)
    torch.testing.assert_close(
        torch.tensor(row), torch.tensor([float(value) for value in expected]), rtol=1.2e-7, atol=0
    )
