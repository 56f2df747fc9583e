"""The gh200 engine on a GPU: right, captured, memory flat; native is its equal."""

from typing import Any

import pytest
import torch
from engines import Backend, Run
from gpu_batches import CONFIG, chained_rows, token_rows
from torch import Tensor

from tinyllm.errors import NonFiniteError
from tinyllm.kernels.llama import EMBEDDING
from tinyllm.strategies.gh200 import Gh200Engine
from tinyllm.strategies.topology import make_topology

pytestmark = pytest.mark.gpu


def engine_run(
    backend: Backend, workers: int, micro: int | None = None, high: torch.dtype = torch.float32
) -> Run:
    low = torch.bfloat16 if high == torch.float32 else None
    return Run(backend, CONFIG, workers, micro, high, "cuda", low)


# --- gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("workers", "micro"), [(1, None), (3, None), (1, 2), (3, 2)])
def test_gradients_are_as_good_as_natives(workers: int, micro: int | None) -> None:
    """Against float64, the error is at most native's in the same dtypes.

    A tenth more is allowed, since both are sums of many roundings to bf16 at other places; for
    single parameters, which are fewer roundings, a half more.
    """
    rows = token_rows(workers, 5, 1)[0]
    oracle = engine_run("native", workers, high=torch.float64)
    runs = {name: engine_run(name, workers, micro) for name in ("gh200", "native")}  # type: ignore[arg-type]
    oracle.arena.weights.copy_(runs["native"].arena.weights)
    for run in (oracle, *runs.values()):
        run.engine.accumulate(rows)
        assert torch.equal(run.engine.targets, oracle.engine.targets)
    truth = oracle.arena.gradients
    errors = {name: run.arena.gradients.double() - truth for name, run in runs.items()}
    for worker, size in enumerate(truth.norm(dim=1)):
        mine, native = ((errors[n][worker].norm() / size).item() for n in ("gh200", "native"))
        assert mine <= 1.1 * native + 1e-6, f"worker {worker}: {mine} against {native}"
    layout = oracle.arena.layout
    sizes, mine_of, native_of = map(layout.views, (truth, errors["gh200"], errors["native"]))
    for name, size in sizes.items():
        mine, native = ((e[name].norm() / size.norm()).item() for e in (mine_of, native_of))
        assert mine <= 1.5 * native + 1e-4, f"{name}: {mine} against {native}"
    losses = {name: (run.engine.nll - oracle.engine.nll).norm() for name, run in runs.items()}
    assert losses["gh200"] <= 1.1 * losses["native"] + 1e-5 * oracle.engine.nll.norm()


def test_gradients_have_no_bias_that_native_has_not() -> None:
    """Summed over many batches, errors that are chance nearly vanish along the sum.

    The weights are trained, so that tokens' probabilities and gradients are not all alike.
    """
    runs = {name: engine_run(name, 1) for name in ("gh200", "native")}  # type: ignore[arg-type]
    oracle = engine_run("native", 1, high=torch.float64)
    mine = runs["gh200"]
    batches = chained_rows(8, 132)
    for rows in batches[:100]:
        mine.update([rows], 0.003, 1.0)
    for run in (runs["native"], oracle):
        run.arena.weights.copy_(mine.arena.weights)
    for rows in batches[100:]:
        for run in (oracle, *runs.values()):
            run.engine.accumulate(rows)
    truth = oracle.arena.gradients
    errors = {name: run.arena.gradients.double() - truth for name, run in runs.items()}
    mine_error, native_error = ((e.norm() / truth.norm()).item() for e in errors.values())
    assert mine_error <= 1.1 * native_error + 1e-6
    mine_along, native_along = (
        abs((e * truth).sum() / truth.square().sum()).item() for e in errors.values()
    )
    assert mine_along <= native_along + 0.1 * native_error


def assert_same_gradients(run: Run, expected: Tensor) -> None:
    """To the bit, but for the embedding's, which are added in no certain order."""
    views = run.arena.layout.views
    for name, found in views(run.arena.gradients).items():
        wanted = views(expected)[name]
        if name.endswith(EMBEDDING + ".weight"):
            assert (found - wanted).norm() <= 1e-5 * wanted.norm()
        else:
            assert torch.equal(found, wanted), name


@pytest.mark.parametrize(
    ("workers", "micro", "per_worker"),
    [(1, 2, 5), (3, 2, 5), (1, None, 520), (3, None, 180)],  # of many rows, Hopper's products
)
def test_a_replay_is_the_first_call(workers: int, micro: int | None, per_worker: int) -> None:
    run, rows = engine_run("gh200", workers, micro), token_rows(workers, per_worker, 1)[0]
    seen = []
    for _ in range(4):  # as it is, captured, replayed twice
        run.engine.pending = False
        loss = run.engine.accumulate(rows)
        seen.append((loss, run.engine.nll.clone(), run.arena.gradients.clone()))
        assert torch.equal(loss, seen[0][0])
        assert torch.equal(run.engine.nll, seen[0][1])
        assert_same_gradients(run, seen[0][2])


def test_gradients_do_not_depend_on_what_was_there_before() -> None:
    run, rows = engine_run("gh200", 3), token_rows(3, 5, 2)
    run.engine.accumulate(rows[0])
    expected = run.arena.gradients.clone()
    for _ in range(3):
        run.arena.gradients.fill_(torch.nan)
        run.engine.pending = False
        run.engine.accumulate(rows[0])
        assert_same_gradients(run, expected)
        run.update(rows[1:], 0.0)  # other work in the same memory


# --- updates --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "scheme", "visible"), [(1, "none", False), (4, "awc", True), (4, "atc", False)]
)
def test_nothing_is_frozen_at_capture(workers: int, scheme: Any, visible: bool) -> None:
    """Supplied gradients; rates, clipping, mixing change with every update, float64 follows."""
    mine, oracle = engine_run("gh200", workers), engine_run("native", workers, high=torch.float64)
    oracle.arena.weights.copy_(mine.arena.weights)
    options: dict[str, Any] = {"visible": visible}
    if scheme != "none":
        options |= {"scheme": scheme, "topology": make_topology("one_peer_exponential", workers)}
    padding = oracle.arena.weights == 0
    for t, (lr, clip, gamma) in enumerate(
        zip(
            (1e-3, 2e-3, 5e-3, 0.0, 4e-3, 3e-3, 1e-4, 1e-2),
            (None, 10.0, 0.1, 0.1, None, 1.0, 1e-3, 100.0),
            (1.0, 1.0, 0.9, 0.8, 0.7, 0.1, 0.0, 0.5),
            strict=True,
        )
    ):
        gradients = torch.randn_like(mine.arena.gradients).masked_fill(padding, 0)
        for run in (mine, oracle):
            run.supply(gradients.to(run.arena.gradients), 64)
            metrics = run.update([], lr, clip, gamma=gamma, **options)
            norms = gradients.double().norm(dim=1)
            torch.testing.assert_close(metrics.grad_norm.double(), norms, rtol=1e-5, atol=0)
            assert run.engine.next_update == t + 1
        for name in ("weights", "exp_avg", "exp_avg_sq"):
            found, expected = getattr(mine.arena, name), getattr(oracle.arena, name)
            # up to eight updates with a few fp32 roundings each, of values up to the largest
            torch.testing.assert_close(
                found.double(), expected, rtol=1e-6, atol=1e-6 * expected.abs().max().item()
            )
        assert isinstance(mine.engine, Gh200Engine)
        assert mine.engine._shadow is not None
        assert torch.equal(mine.engine._shadow, mine.arena.weights.bfloat16())
        if workers > 1:
            found, expected = map(
                torch.cat, (r.engine.consensus_distance() for r in (mine, oracle))
            )
            torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)


def test_weights_that_somebody_sets_are_used() -> None:
    run, rows = engine_run("gh200", 3), token_rows(3, 2, 4)
    for batch in rows[:3]:
        run.update([batch], 1e-3)
    run.arena.weights *= 1.5
    with torch.no_grad():
        run.llama.embed_tokens.weight[:, 7] = 0.25
    other = engine_run("gh200", 3)
    other.arena.weights.copy_(run.arena.weights)
    losses = [r.engine.accumulate(rows[3]) for r in (run, other)]
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)


def test_a_failure_is_sticky_and_nothing_is_written() -> None:
    run, rows = engine_run("gh200", 4), token_rows(4, 2, 6)
    options: Any = {"topology": make_topology("complete", 4), "scheme": "atc", "clip": 1.0}
    for batch in rows[:3]:
        run.update([batch], 1e-3, **options)
    arena = run.arena
    before = [t.clone() for t in (arena.weights, arena.exp_avg, arena.exp_avg_sq)]
    for number, batch in enumerate(rows[3:]):
        run.engine.accumulate(batch)
        arena.gradients[2 - number, 5] = torch.nan
        run.update([], 1e-3, **options)
    for kept, now in zip(before, (arena.weights, arena.exp_avg, arena.exp_avg_sq), strict=True):
        assert torch.equal(kept, now)
    with pytest.raises(NonFiniteError) as error:
        run.engine.raise_if_failed()
    assert (error.value.update, error.value.workers, run.engine.updates) == (3, [2], 3)


# --- capture and memory ---------------------------------------------------------------------------


def test_capturing_changes_no_state_and_no_generator() -> None:
    run = engine_run("gh200", 3, micro=2)
    run.update(token_rows(3, 5, 1), 1e-3, topology=make_topology("ring", 3))
    engine, arena = run.engine, run.arena
    assert isinstance(engine, Gh200Engine)

    def everything() -> list[Tensor]:
        tensors = [arena.weights, arena.gradients, arena.exp_avg, arena.exp_avg_sq]
        tensors += [*engine._totals, engine._step, engine.failed, engine._results, engine._squares]
        return [t.clone() for t in tensors] + [torch.cuda.get_rng_state(), torch.get_rng_state()]

    before = everything()
    assert len(engine._calls) == 4  # 2 rows, 2 more, 1 more, the update
    for call in engine._calls.values():
        call._graph = call._capture()
    assert all(map(torch.equal, before, everything()))


def test_memory_is_flat_over_2000_updates() -> None:
    run, rows = engine_run("gh200", 4, micro=2), token_rows(4, 3, 4)
    topology = make_topology("one_peer_exponential", 4)

    def train(updates: int) -> list[int]:
        for t in range(updates):
            run.update(rows[t % 4 : t % 4 + 1], 1e-3, 1.0, topology)
        torch.cuda.synchronize()
        stats = torch.cuda.memory_stats()
        names = ("allocated_bytes.all.current", "reserved_bytes.all.current", "num_device_alloc")
        return [stats[name] for name in (*names, "num_alloc_retries")]

    assert train(8) == train(2_000)
    assert run.engine.updates == 2_008
    run.engine.raise_if_failed()
