"""The gh200 engine over its references: what native does, to rounding in float64."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from engines import BETAS, EPS, Backend, Run, assert_same
from simulation import (
    CONFIG,
    UPDATES,
    batches,
    gammas,
    learning_rates,
)
from torch import Tensor

from tinyllm.errors import NonFiniteError
from tinyllm.strategies.engine import GroupHyperparameters
from tinyllm.strategies.topology import make_topology

# Float64 rounding of other orders of summation, grown over 12 updates: differences seen are below
# 1e-13 of the largest element.
TOLERANCE = 1e-10

WORKERS = (1, 2, 3, 4, 5, 8)
TOPOLOGIES = ("complete", "ring", "one_peer_ring", "one_peer_exponential", "exponential", "base_k")
CASES = [
    (topology, scheme, workers)
    for topology, scheme, workers in product(TOPOLOGIES, ("awc", "atc"), WORKERS)
    if not (topology == "one_peer_ring" and workers in (3, 5))  # needs an even N
]


def both(workers: int, micro_batch_size: int | None = None) -> tuple[Run, Run]:
    """Both engines from one state."""
    gh200, native = (
        Run(backend, CONFIG, workers, micro_batch_size) for backend in ("gh200", "native")
    )
    assert torch.equal(gh200.arena.weights, native.arena.weights)
    return gh200, native


# --- whole updates --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("topology", "scheme", "workers", "index"),
    [(*case, index) for index, case in enumerate(CASES)],
)
def test_updates_are_natives(topology: str, scheme: Any, workers: int, index: int) -> None:
    # from case to case, clipping and adaptive consensus go through all four combinations
    clip = 0.5 if index % 2 else None
    rates = learning_rates()
    gamma = gammas(rates, 0.25, 0.5) if index // 2 % 2 else [1.0] * UPDATES
    graph = make_topology(topology, workers) if workers > 1 else None
    mine, other = both(workers)
    for t, rows in enumerate(batches(workers, rows_per_worker=1)):
        options: Any = {"clip": clip, "topology": graph, "scheme": scheme, "gamma": gamma[t]}
        assert_same(
            mine.recorded([rows], rates[t], **options),
            other.recorded([rows], rates[t], **options),
            TOLERANCE,
        )


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("workers", [1, 3])
def test_sync_updates_are_natives(workers: int, clip: float | None) -> None:
    mine, other = both(workers)
    for rate, rows in zip(learning_rates(), batches(workers), strict=True):
        found, expected = (run.recorded([rows], rate, clip) for run in (mine, other))
        assert_same(found, expected, TOLERANCE)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("visible", [False, True])
def test_accumulated_and_ragged_micro_batches(workers: int, visible: bool) -> None:
    """Two batches for an update, 5 and 4 rows by 3; ignored targets; short rows; none at all."""
    mine, other = both(workers, micro_batch_size=3)
    five, four = batches(workers, 5), batches(workers, 4)
    for t, rate in enumerate(learning_rates()):
        given = [five[t], four[t]][: 1 + (t % 3 > 0)]  # one or two
        if t % 4 == 1:
            given[0][: 2 * workers, 3:5] = -100
        if t % 4 == 2:
            given[-1][workers - 1 :: workers] = -100  # the last worker has nothing in it
        if t == 7:
            given = [batch[:, :6] for batch in given]
        if t == 9:
            given = [torch.full_like(given[0], -100)]
        found, expected = (run.recorded(given, rate, 0.5, visible=visible) for run in (mine, other))
        assert_same(found, expected, TOLERANCE)


def test_accumulate_returns_the_mean_loss_of_its_batch() -> None:
    mine, other = both(3, micro_batch_size=2)
    rows = batches(3, rows_per_worker=5)
    rows[1][4:9, 2:] = -100
    rows[2][:] = -100
    for batch in rows[:4]:
        found, expected = mine.engine.accumulate(batch), other.engine.accumulate(batch)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
        assert found.shape == ()
        assert not found.requires_grad
        torch.testing.assert_close(mine.engine.nll, other.engine.nll)
        assert torch.equal(mine.engine.targets, other.engine.targets)


def test_the_loss_it_returns_stays_what_it_was() -> None:
    run = Run("gh200", CONFIG, 2)
    losses = [run.engine.accumulate(rows) for rows in batches(2)[:3]]
    before = [loss.item() for loss in losses]
    run.engine.finish_gradients(False)
    metrics = run.update(batches(2)[3:4], 0.1)
    values = [metrics.loss.clone(), metrics.grad_norm.clone(), metrics.targets.clone()]
    run.update(batches(2)[4:6], 0.1)
    assert [loss.item() for loss in losses] == before
    for kept, now in zip(values, (metrics.loss, metrics.grad_norm, metrics.targets), strict=True):
        assert torch.equal(kept, now)


@pytest.mark.parametrize("visible", [False, True])
def test_visible_gradients_are_means(visible: bool) -> None:
    mine, other = both(3, micro_batch_size=2)
    rows = batches(3, rows_per_worker=3)[0]
    rows[1::3, 4:] = -100
    for run in (mine, other):
        run.engine.accumulate(rows)
        run.engine.finish_gradients(visible)
    if visible:  # otherwise they may be sums
        torch.testing.assert_close(mine.arena.gradients, other.arena.gradients)
    mine.arena.gradients[0] *= 2  # a hook may change them
    other.arena.gradients[0] *= 2
    groups = [GroupHyperparameters(0.1, BETAS, EPS, 0.1)] * 2
    found, expected = mine.engine.update(groups, 0.5), other.engine.update(groups, 0.5)
    torch.testing.assert_close(found.grad_norm, expected.grad_norm, rtol=1e-12, atol=0)
    torch.testing.assert_close(mine.arena.weights, other.arena.weights, rtol=0, atol=1e-12)


def test_weights_that_somebody_sets_are_used() -> None:
    mine, other = both(2)
    for run in (mine, other):
        run.update(batches(2)[:1], 0.1)
        run.arena.weights *= 1.5
        with torch.no_grad():
            run.llama.norm.weight.fill_(0.7)
    found, expected = (run.recorded(batches(2)[1:2], 0.1) for run in (mine, other))
    assert_same(found, expected, TOLERANCE)


# --- counters -------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["gh200", "native"])
def test_counts_updates(backend: Backend) -> None:
    run = Run(backend, CONFIG, 2)
    engine, rows = run.engine, batches(2)
    assert (engine.next_update, engine.updates, engine.pending) == (0, 0, False)
    engine.accumulate(rows[0])
    assert (engine.next_update, engine.updates, engine.pending) == (0, 0, True)
    run.update(rows[1:2], 0.1)
    assert (engine.next_update, engine.updates, engine.pending) == (1, 1, False)
    engine.updates = 7  # as from a checkpoint
    assert (engine.next_update, engine.updates) == (7, 7)
    engine.next_update = 9  # after a failure, the Trainer may have counted more
    run.update(rows[2:3], 0.1)
    assert (engine.next_update, engine.updates) == (10, 8)


def test_bias_corrections_go_by_the_updates_applied() -> None:
    mine, other = both(2)
    for run in (mine, other):
        run.engine.updates, run.engine.next_update = 3, 5
    for rows in batches(2)[:3]:
        found, expected = (run.recorded([rows], 0.1) for run in (mine, other))
        assert_same(found, expected, TOLERANCE)


@pytest.mark.parametrize("backend", ["gh200", "native"])
def test_fp32_moments_at_a_beta_that_fp32_does_not_hold(backend: Backend) -> None:
    """Both make the updates of AdamW in float64 with the nearest betas that fp32 does hold."""
    group = {"lr": 0.01, "betas": (0.98, 0.999999), "eps": EPS, "weight_decay": 0.1}
    run = Run(backend, CONFIG, 2, dtype=torch.float32)
    arena = run.arena
    betas = GroupHyperparameters.of(group, torch.float32).betas
    oracle = [row.double().clone() for row in arena.weights]
    adamw = torch.optim.AdamW(oracle, **group | {"betas": betas})
    means = 1e-2 * torch.randn(arena.weights.shape, generator=torch.Generator().manual_seed(3))
    for _ in range(5):
        run.supply(means, 1)
        of_columns = GroupHyperparameters.of(group, torch.float32)
        run.engine.finish_gradients(True)
        run.engine.update([of_columns, of_columns], None)
        for row, mean in zip(oracle, means, strict=True):
            row.grad = mean.double()
        adamw.step()
    for own in (slice(*bounds) for bounds in arena.layout.groups):
        for name in ("exp_avg", "exp_avg_sq"):
            exact = torch.stack([adamw.state[row][name] for row in oracle])[:, own]
            found = getattr(arena, name)[:, own].double()
            torch.testing.assert_close(found, exact, rtol=2e-6, atol=0)
        torch.testing.assert_close(
            arena.weights[:, own].double(), torch.stack(oracle)[:, own], rtol=2e-6, atol=1e-8
        )


# --- a loss or gradient that is not finite --------------------------------------------------------


def state(run: Run) -> list[Tensor]:
    arena = run.arena
    return [t.clone() for t in (arena.weights, arena.exp_avg, arena.exp_avg_sq)]


def poison_gradient(run: Run, worker: int) -> None:
    run.arena.gradients[worker, 5] = torch.inf


def poison_weight(run: Run, worker: int) -> None:
    run.arena.weights[worker, 5] = torch.nan


def assert_failed(run: Run, update: int, workers: list[int]) -> None:
    with pytest.raises(NonFiniteError) as error:
        run.engine.raise_if_failed()
    assert (error.value.update, error.value.workers) == (update, workers)


@pytest.mark.parametrize("scheme", ["none", "awc", "atc"])
@pytest.mark.parametrize("poison", [poison_gradient, poison_weight])
def test_a_failure_is_sticky_and_nothing_is_written(
    scheme: Any, poison: Callable[[Run, int], None]
) -> None:
    run, rows = Run("gh200", CONFIG, 3), batches(3)
    options: Any = {} if scheme == "none" else {"topology": make_topology("ring", 3)}
    options |= {} if scheme == "none" else {"scheme": scheme}
    for t in range(2):
        run.update(rows[t : t + 1], 0.1, 0.5, **options)
    run.engine.raise_if_failed()
    if poison is poison_weight:
        poison(run, 1)
    before = state(run)
    spread = run.engine.consensus_distance()
    run.engine.accumulate(rows[2])
    if poison is poison_gradient:
        poison(run, 1)
    run.update([], 0.1, 0.5, **options)
    for t in (3, 4):  # afterwards others fail as well
        run.engine.accumulate(rows[t])
        poison_gradient(run, 2)
        run.update([], 0.1, 0.5, **options)
    for kept, now in zip(before, state(run), strict=True):
        assert torch.equal(kept.nan_to_num(7), now.nan_to_num(7))
    assert_failed(run, 2, [1])
    assert_failed(run, 2, [1])
    assert run.engine.updates == 2
    for kept, now in zip(spread, run.engine.consensus_distance(), strict=True):
        assert torch.equal(kept, now)


def test_names_every_worker_that_failed_first() -> None:
    run = Run("gh200", CONFIG, 4)
    run.engine.next_update = 11
    run.engine.accumulate(batches(4)[0])
    poison_gradient(run, 0)
    poison_gradient(run, 3)
    run.update([], 0.1)
    assert_failed(run, 11, [0, 3])


def test_a_target_outside_the_vocabulary_is_a_failure() -> None:
    run, rows = Run("gh200", CONFIG, 2), batches(2)[0]
    rows[1, -1] = CONFIG.vocab_size  # the last one is no input
    run.update([rows], 0.1)
    assert_failed(run, 0, [1])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (torch.zeros(3, 9, dtype=torch.int64), "3 rows cannot be shared out among 2 workers"),
        (torch.zeros(4, 9), r"\[rows, T\+1\] int64, got"),
    ],
)
def test_batches_that_do_not_fit_are_refused(rows: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Run("gh200", CONFIG, 2).engine.accumulate(rows)


def test_rows_longer_than_the_context_are_refused() -> None:
    rows = torch.zeros(2, CONFIG.context + 2, dtype=torch.int64)
    with pytest.raises(ValueError, match=f"{CONFIG.context + 1} tokens exceed the model's context"):
        Run("gh200", CONFIG, 2).engine.accumulate(rows)
