"""The gh200 engine over its references under a Trainer: what native does, also on two ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import engines
import numpy as np
import pytest
import rank_jobs
import torch
from engines import Backend
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from ranks import RanksError, run_on_ranks
from simulation import (
    CONFIG,
    UPDATES,
    batches,
    fit,
    largest_difference,
    tiny,
    token_cache,
)
from torch import Tensor

from tinyllm.errors import NonFiniteError
from tinyllm.strategies import DecentralizedStrategy, SyncStrategy
from tinyllm.strategies.base import ArenaStrategy
from tinyllm.strategies.consensus import AdaptiveConsensus
from tinyllm.strategies.gh200 import Gh200Engine

# Float64 rounding of other orders of summation, grown over 12 updates: differences seen are below
# 1e-13 of the largest element.
TOLERANCE = 1e-10

# --- through the Trainer --------------------------------------------------------------------------


def sync(backend: Backend, **options: Any) -> ArenaStrategy:
    return SyncStrategy(backend=backend, compile=False, **options)


def awc(backend: Backend, **options: Any) -> ArenaStrategy:
    consensus = AdaptiveConsensus(0.25, 1.0)
    options |= {"adaptive_consensus": consensus, "backend": backend, "compile": False}
    return DecentralizedStrategy(4, **options)


def atc(backend: Backend, **options: Any) -> ArenaStrategy:
    options |= {"topology": "base_k", "backend": backend, "compile": False}
    return DecentralizedStrategy(5, scheme="atc", **options)


STRATEGIES: list[tuple[Callable[..., ArenaStrategy], int]] = [(sync, 1), (awc, 4), (atc, 5)]


class Keep(Callback):
    """Keeps what the engine holds after a batch and when a run starts; saves it if asked to."""

    def __init__(self, batch: int = 0, path: Path | None = None) -> None:
        self._batch, self._path = batch, path

    def _held(self, trainer: Any) -> list[Tensor]:
        self.kind = type(trainer.strategy.engine)
        engine, arena = trainer.strategy.engine, trainer.strategy.engine.arena
        tensors = [arena.weights, arena.exp_avg, arena.exp_avg_sq]
        if engine.pending:
            tensors += [arena.gradients, engine.nll, engine.targets]
        counters = torch.tensor([engine.updates, engine.next_update, engine.pending])
        return [tensor.clone() for tensor in (*tensors, counters)]

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        self.at_start = self._held(trainer)

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx + 1 == self._batch:
            assert self._path is not None
            self.when_saved = self._held(trainer)
            trainer.save_checkpoint(self._path)


@pytest.mark.usefixtures("choosable")
@pytest.mark.parametrize(("strategy", "workers"), STRATEGIES)
@pytest.mark.parametrize("accumulated", [False, True])
def test_trains_as_native_does(
    strategy: Callable[..., ArenaStrategy], workers: int, accumulated: bool
) -> None:
    rows = batches(workers, 3, UPDATES * (1 + accumulated))
    options: dict[str, Any] = {"gradient_clip_val": 0.5, "log_every_n_steps": 1}
    if accumulated:
        options["accumulate_grad_batches"] = 2
    keep = Keep()
    mine = fit(tiny(), strategy("gh200", micro_batch_size=2), rows, callbacks=[keep], **options)
    native = fit(tiny(), strategy("native"), rows, **options)
    assert keep.kind is Gh200Engine
    assert len(mine.losses) == UPDATES
    assert largest_difference(mine, native) < TOLERANCE
    assert mine.rates == native.rates
    assert mine.gammas == native.gammas


@pytest.mark.usefixtures("choosable")
def test_trains_in_fp32() -> None:
    mine, native = (
        fit(tiny(), awc(backend), batches(4), precision="32-true")  # type: ignore[arg-type]
        for backend in ("gh200", "native")
    )
    assert mine.weights[0].dtype == torch.float32
    # 12 updates of weights up to about 1
    assert largest_difference(mine, native) < 1e-4


@pytest.mark.usefixtures("choosable")
@pytest.mark.parametrize(("strategy", "workers"), STRATEGIES)
@pytest.mark.parametrize("order", [("native", "gh200", "native"), ("gh200", "native", "gh200")])
@pytest.mark.parametrize("pending", [False, True])
def test_resumes_what_the_other_backend_saved(
    tmp_path: Path,
    strategy: Callable[..., ArenaStrategy],
    workers: int,
    order: tuple[Backend, ...],
    pending: bool,
) -> None:
    """Twice in the middle of an epoch, and between the two batches of an update."""
    rows = batches(workers, 2, 2 * UPDATES)
    options: dict[str, Any] = {
        "gradient_clip_val": 0.5,
        "log_every_n_steps": 1,
        "accumulate_grad_batches": 2,
    }
    whole = fit(tiny(), strategy("native"), rows, **options)
    path: Path | None = None
    keep = Keep()
    for number, backend in enumerate(order):
        earlier, saved = keep, tmp_path / f"{number}.ckpt"
        keep = Keep(8 + 8 * number + pending, saved)
        # the last one saves at the end, where there is nothing pending
        callbacks = [keep] if number < 2 else [keep := Keep()]
        record = fit(
            tiny(seed=number + 1),
            strategy(backend),
            rows,
            callbacks=callbacks,
            ckpt_path=path,
            **options,
        )
        if path is not None:
            assert all(map(torch.equal, earlier.when_saved, keep.at_start))
        for name in ("weights", "losses", "grad_norms"):
            found, expected = getattr(record, name), getattr(whole, name)[-len(record.losses) :]
            for mine, other in zip(found, expected, strict=True):
                torch.testing.assert_close(mine, other, rtol=0, atol=TOLERANCE)
        assert record.gammas == whole.gammas[-len(record.gammas) :]
        path = saved
    assert len(record.losses) == UPDATES - 8


@pytest.mark.usefixtures("choosable")
@pytest.mark.parametrize(("strategy", "workers"), STRATEGIES[1:])
def test_a_failed_run_saves_its_last_good_state(
    tmp_path: Path, strategy: Callable[..., ArenaStrategy], workers: int
) -> None:
    class Poison(Callback):
        def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
            engine = trainer.strategy.engine
            if engine.next_update == 5:
                self.before = engine.arena.weights.clone()
                engine.arena.gradients[2, 3] = torch.nan

        def on_exception(self, trainer: Any, *_: Any) -> None:
            self.after = trainer.strategy.engine.arena.weights.clone()

    rows, poison = batches(workers), Poison()
    saving = ModelCheckpoint(
        tmp_path, filename="failed", save_on_exception=True, every_n_train_steps=100
    )
    callbacks: dict[str, Any] = {"callbacks": [poison, saving], "enable_checkpointing": True}
    with pytest.raises(NonFiniteError, match=r"of worker 2 is not finite at update 5;"):
        fit(tiny(), strategy("gh200"), rows, **callbacks)
    assert torch.equal(poison.before, poison.after)
    keep, path = Keep(), tmp_path / "failed.ckpt"
    record = fit(tiny(seed=9), strategy("gh200"), rows, callbacks=[keep], ckpt_path=path)
    assert torch.equal(keep.at_start[0], poison.before)
    assert keep.at_start[-1].tolist() == [5, 5, 0]
    assert len(record.losses) == UPDATES - 5
    assert torch.stack(record.weights).isfinite().all()


@pytest.mark.usefixtures("choosable")
def test_gradients_of_hooks_are_the_parameters() -> None:
    class Watching(Callback):
        def on_before_optimizer_step(self, trainer: Any, module: Any, *_: Any) -> None:
            views = trainer.strategy.engine.arena.layout.views(
                trainer.strategy.engine.arena.gradients
            )
            for name, parameter in module.named_parameters():
                assert parameter.grad is not None
                assert parameter.grad.data_ptr() == views[name].data_ptr()
            self.norms = trainer.strategy.engine.arena.gradients.norm(dim=1)

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            torch.testing.assert_close(trainer.strategy.update_metrics.grad_norm, self.norms)

    fit(tiny(), awc("gh200"), batches(4), callbacks=[Watching()], gradient_clip_val=0.01)


# --- several ranks --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("gh200")
    rng = np.random.default_rng(0)
    documents = [[*rng.integers(1, CONFIG.vocab_size, 23).tolist(), 0] for _ in range(45)]
    return token_cache(folder, [i for d in documents for i in d])


@pytest.mark.parametrize(
    "strategy",
    [
        None,
        {"workers": 4, "adaptive_consensus": AdaptiveConsensus(0.3, 0.5)},
        {"workers": 4, "scheme": "atc", "topology": "ring"},
        {"workers": 2, "topology": "complete"},  # one on each rank
    ],
    ids=["sync", "awc", "atc", "one each"],
)
def test_two_ranks_train_as_one_process(cache: str, strategy: dict[str, Any] | None) -> None:
    options: dict[str, Any] = {"gradient_clip_val": 0.5, "log_every_n_steps": 1}
    (expected,) = run_on_ranks(rank_jobs.train, 1, cache, strategy, **options)
    results = run_on_ranks(engines.train_gh200, 2, cache, strategy, micro_batch_size=3, **options)
    for result in results:
        for name in ("weights", "losses", "grad_norms"):
            torch.testing.assert_close(
                result[name], expected[name], rtol=0, atol=TOLERANCE, msg=name
            )
        assert result["gammas"] == expected["gammas"]
        assert result["logged"] == pytest.approx(expected["logged"], rel=1e-9)


@pytest.mark.parametrize("scheme", ["awc", "atc"])
def test_ranks_fail_together_and_save_the_last_good_state(
    tmp_path: Path, cache: str, scheme: str
) -> None:
    strategy, saved = {"workers": 4, "scheme": scheme}, str(tmp_path / "failed.ckpt")
    with pytest.raises(RanksError) as error:
        run_on_ranks(engines.train_gh200, 2, cache, strategy, poison=3, save_on_exception=saved)
    lines = str(error.value).splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("NonFiniteError: loss or gradient of worker 3 is not finite")
        assert "at update 5;" in line
    (expected,) = run_on_ranks(rank_jobs.train, 1, cache, strategy)
    state = torch.load(saved, weights_only=True)["optimizer_states"][0]["state"]
    assert state[0]["step"] == 5
    embedding = state[0]["weights"].flatten(1)
    torch.testing.assert_close(
        embedding, expected["weights"][4][:, : embedding.shape[1]], rtol=0, atol=TOLERANCE
    )
