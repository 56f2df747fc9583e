"""The optimizer's update against torch.optim.AdamW, one per worker, and dense mixing in float64."""

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, get_args

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

MIXINGS: tuple[Mixing, ...] = get_args(Mixing)
EPS = 1e-8
DECAYS = (0.1, 0.0)
TARGETS = 7
GROUPS = ((0, 64 * 17), (64 * 17, 64 * 21))
"""Neither range is a multiple of any block, and each has more than one at eight workers."""

pytestmark = pytest.mark.filterwarnings(
    "ignore:.* encountered in:RuntimeWarning"
)  # NumPy's, of NaN

either = pytest.mark.parametrize("run", ["reference", pytest.param("launch", marks=interpreted)])


def matrix_of(workers: int) -> Tensor:
    """Doubly stochastic, dense and without symmetry, in float64."""
    turns = [torch.eye(workers, dtype=torch.float64).roll(turn, 1) for turn in range(workers)]
    weights = torch.linspace(1, 2, workers, dtype=torch.float64)
    return sum((w * turn for w, turn in zip(weights, turns, strict=True)), 0 * turns[0]) / (
        weights.sum()
    )


def learning_rate(update: int) -> float:
    """Warm-up over ten updates, then some decay; update 0 is the first."""
    return 0.008 * min((update + 1) / 10, 1 / (1 + 0.01 * update))


@dataclass
class Update:
    """The tensors of an update, as an engine holds them."""

    weights: Tensor
    gradients: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    shadow: Tensor | None
    partials: Tensor
    nll: Tensor
    targets: Tensor
    clip_norm: Tensor
    failed: Tensor
    failed_workers: Tensor
    loss: Tensor
    norm: Tensor
    scale: Tensor
    step: Tensor
    hyperparameters: Tensor
    matrix: Tensor
    blocks: Tensor
    spread: Tensor | None
    betas: tuple[float, float] = (0.95, 0.99)

    @classmethod
    def of(
        cls,
        workers: int,
        *,
        groups: Sequence[tuple[int, int]] = GROUPS,
        clip_norm: float = torch.inf,
        dtype: torch.dtype = torch.float32,
        low: torch.dtype | None = None,
        flags: torch.dtype = torch.int32,
        device: str = "cpu",
    ) -> "Update":
        row = groups[-1][1]
        blocks = torch.tensor(column_blocks(groups, workers), device=device)

        def poison(*shape: int) -> Tensor:
            return poisoned(*shape, dtype=dtype, device=device)

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return normal(*shape, dtype=dtype, device=device).zero_()

        return cls(
            weights=normal(workers, row, dtype=dtype, device=device).mul_(0.02),
            gradients=normal(workers, row, dtype=dtype, device=device),
            exp_avg=zeros(workers, row, dtype=dtype),
            exp_avg_sq=zeros(workers, row, dtype=dtype),
            shadow=poisoned(workers, row, dtype=low, device=device) if low else None,
            partials=poison(workers, 5),
            nll=torch.arange(1.0, workers + 1, dtype=dtype, device=device),
            targets=torch.full((workers,), TARGETS, device=device),
            clip_norm=torch.tensor(clip_norm, dtype=dtype, device=device),
            failed=torch.zeros((), dtype=flags, device=device),
            failed_workers=torch.zeros(workers, dtype=flags, device=device),
            loss=poison(workers),
            norm=poison(workers),
            scale=poison(workers),
            step=torch.zeros((), dtype=torch.int64, device=device),
            hyperparameters=poison(len(groups), 6),
            matrix=matrix_of(workers).to(device, dtype),
            blocks=blocks,
            spread=poison(len(blocks), workers + 1) if workers > 1 else None,
        )

    def set_rates(self, update: int) -> None:
        rows = [
            hyperparameter_row(learning_rate(update), self.betas, EPS, decay, update + 1)
            for decay in DECAYS[: len(self.hyperparameters)]
        ]
        self.hyperparameters.copy_(torch.tensor(rows, dtype=torch.float64))

    def set_gradients(self, means: Tensor) -> None:
        """``means``: the gradients of each worker's mean loss ``[W, D]``."""
        self.gradients.copy_(means * TARGETS)

    def prepare_arguments(self) -> list[Any]:
        return [
            *(self.partials, self.nll, self.targets, self.clip_norm, self.failed),
            *(self.failed_workers, self.loss, self.norm, self.scale),
        ]

    def adamw_arguments(self, mixing: Mixing) -> list[Any]:
        return [
            *(self.weights, self.gradients, self.exp_avg, self.exp_avg_sq, self.shadow),
            *(self.scale, self.failed, self.step, self.hyperparameters, self.matrix),
            *(self.blocks, self.spread, mixing),
        ]

    def apply(self, mixing: Mixing, run: str = "__call__") -> None:
        getattr(gradient_squares, run)(self.gradients, self.partials)
        getattr(prepare, run)(*self.prepare_arguments())
        getattr(adamw, run)(*self.adamw_arguments(mixing))

    def written(self) -> dict[str, Tensor]:
        """What a failed update must leave alone."""
        names = ["weights", "exp_avg", "exp_avg_sq", "shadow", "step", "spread"]
        return {n: t.clone() for n in names if (t := getattr(self, n)) is not None}


class Independent:
    """One torch.optim.AdamW per worker, clipped with torch's function, mixed with a product."""

    def __init__(
        self, weights: Tensor, clip_norm: float, betas: tuple[float, float], **options: Any
    ) -> None:
        self.clip_norm = clip_norm
        self.parameters = [
            [row[start:stop].clone() for start, stop in GROUPS] for row in weights.unbind()
        ]
        self.optimizers = [
            torch.optim.AdamW(
                [{"params": [p], "weight_decay": d} for p, d in zip(own, DECAYS, strict=True)],
                betas=betas,
                eps=EPS,
                **options,
            )
            for own in self.parameters
        ]

    def rows(self) -> Tensor:
        return torch.stack([torch.cat(own) for own in self.parameters])

    def moments(self, name: str) -> Tensor:
        return torch.stack(
            [
                torch.cat([optimizer.state[p][name] for p in own])
                for own, optimizer in zip(self.parameters, self.optimizers, strict=True)
            ]
        )

    def mix(self, matrix: Tensor) -> None:
        mixed = matrix @ self.rows()
        for own, row in zip(self.parameters, mixed, strict=True):
            for parameter, (start, stop) in zip(own, GROUPS, strict=True):
                parameter.copy_(row[start:stop])

    def update(self, means: Tensor, lr: float, matrix: Tensor, mixing: Mixing) -> Tensor:
        """Returns the norms ``[W]`` before clipping."""
        norms = []
        if mixing == "awc":
            self.mix(matrix)
        for own, optimizer, row in zip(self.parameters, self.optimizers, means, strict=True):
            for parameter, (start, stop) in zip(own, GROUPS, strict=True):
                parameter.grad = row[start:stop].clone().to(parameter.dtype)
            norms.append(torch.nn.utils.clip_grad_norm_(own, self.clip_norm))
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
        if mixing == "atc":
            self.mix(matrix)
        return torch.stack(norms)


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


def adamw_results(*arguments: Any) -> dict[str, Tensor]:
    names = {
        **{"weights": arguments[0], "exp_avg": arguments[2], "exp_avg_sq": arguments[3]},
        **{"shadow": arguments[4], "step": arguments[7], "spread": arguments[11]},
    }
    return {name: tensor.double() for name, tensor in names.items() if tensor is not None}


def mid_training(update: Update) -> Update:
    """As after 100 updates, with clipping factors that differ."""
    update.exp_avg.normal_().mul_(1e-3)
    update.exp_avg_sq.uniform_().mul_(1e-5)
    update.scale.copy_(torch.linspace(1e-3, 3e-3, len(update.scale)))
    update.set_rates(99)
    return update


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


# --- on a GPU ---------------------------------------------------------------------------------


@pytest.mark.gpu
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


@pytest.mark.gpu
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


@pytest.mark.gpu
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


@pytest.mark.gpu
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
