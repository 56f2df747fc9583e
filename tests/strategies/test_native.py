"""The native engine: isolated workers, sticky failures, gradients that hooks can see."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from simulation import (
    OPTIMIZER,
    SCHEDULE,
    UPDATES,
    Batches,
    Recorder,
    batches,
    fit,
    learning_rates,
    new_trainer,
    tiny,
)
from torch import Tensor
from torch.utils.data import DataLoader

from tinyllm import TinyLLM
from tinyllm.errors import NonFiniteError
from tinyllm.strategies import DecentralizedStrategy, SyncStrategy
from tinyllm.strategies.base import ArenaStrategy
from tinyllm.strategies.consensus import AdaptiveConsensus


class BeforeUpdate(Callback):
    """Changes an arena's gradients before an update, as a hook of a user may."""

    def __init__(self, change: Callable[[int, Any], None]) -> None:
        self._change = change

    def on_before_optimizer_step(self, trainer: Trainer, *_: Any) -> None:
        engine = trainer.strategy.engine  # type: ignore[attr-defined]
        self._change(engine.next_update, engine.arena)


@pytest.fixture
def no_mixing(tmp_path: Path) -> str:
    path = tmp_path / "identity.csv"
    np.savetxt(path, np.eye(3), delimiter=",", fmt="%d")
    return str(path)


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("scheme", ["awc", "atc"])
def test_a_workers_gradients_do_not_reach_the_others(
    no_mixing: str, clip: float | None, scheme: Any
) -> None:
    def hundredfold(update: int, arena: Any) -> None:
        if update >= 4:
            arena.gradients[1] *= 100

    def run(*callbacks: Callback) -> Any:
        strategy = DecentralizedStrategy(3, scheme=scheme, topology=no_mixing, compile=False)
        return fit(tiny(), strategy, batches(3), gradient_clip_val=clip, callbacks=callbacks)

    plain, changed = run(), run(BeforeUpdate(hundredfold))
    for before, after in zip(plain.weights, changed.weights, strict=True):
        assert torch.equal(before[[0, 2]], after[[0, 2]])
    assert not torch.equal(plain.weights[-1][1], changed.weights[-1][1])
    for before, after in zip(plain.grad_norms, changed.grad_norms, strict=True):
        assert torch.equal(before[[0, 2]], after[[0, 2]])
    assert changed.grad_norms[4][1] == pytest.approx(100 * plain.grad_norms[4][1].item())


def test_clips_each_worker_by_its_own_norm() -> None:
    class Moments(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            self.exp_avg = trainer.strategy.engine.arena.exp_avg.clone()

    gradients: list[Tensor] = []
    moments = Moments()

    def keep(update: int, arena: Any) -> None:
        arena.gradients *= torch.tensor([[1.0], [100.0], [0.01]])
        gradients.append(arena.gradients.clone())

    strategy = DecentralizedStrategy(3, topology="ring", compile=False)
    callbacks = [BeforeUpdate(keep), moments]
    fit(tiny(), strategy, batches(3), callbacks=callbacks, gradient_clip_val=0.5, max_steps=1)
    norms = gradients[0].norm(dim=1, keepdim=True)
    assert norms[2] < 0.5 < norms[0] < norms[1]
    clipped = torch.where(norms > 0.5, gradients[0] * 0.5 / (norms + 1e-6), gradients[0])
    torch.testing.assert_close(moments.exp_avg, (1 - OPTIMIZER.betas[0]) * clipped)


def test_hooks_see_mean_gradients_in_the_parameters() -> None:
    class Watching(TinyLLM):
        seen: list[Tensor]

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.seen.append(self.model.norm.weight.grad.clone())

        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            optimizer.zero_grad(set_to_none=False)  # must not reach what was accumulated

    module = Watching(config=tiny().config, optimizer=OPTIMIZER, schedule=SCHEDULE)
    module.load_state_dict(tiny().state_dict())
    module.seen = []
    rows = batches(2)
    fit(module, DecentralizedStrategy(2, compile=False), rows)
    model = tiny().double()
    logits = model(rows[0][1::2, :-1])
    targets = rows[0][1::2, 1:]
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    torch.testing.assert_close(module.seen[0][1], model.model.norm.weight.grad[0])


# --- a loss or gradient that is not finite --------------------------------------------------------

BAD_UPDATE, BAD_WORKER = 5, 2


def poison_gradient(update: int, arena: Any) -> None:
    """From the bad update on; at later ones, more workers fail."""
    if update >= BAD_UPDATE:
        arena.gradients[BAD_WORKER : BAD_WORKER + 1 + update - BAD_UPDATE, 3] = float("inf")


class PoisonWeight(Callback):
    """Makes one weight of one worker NaN before an update."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        engine = trainer.strategy.engine
        if engine.next_update == BAD_UPDATE:
            engine.arena.weights[BAD_WORKER, 3] = float("nan")


class LastGood(Callback):
    """Keeps the state before the bad update, and what is left of it after the failure."""

    def _state(self, trainer: Any) -> list[Tensor]:
        arena = trainer.strategy.engine.arena
        return [t.clone() for t in (arena.weights, arena.exp_avg, arena.exp_avg_sq)]

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.strategy.engine.next_update == BAD_UPDATE:
            self.before = self._state(trainer)

    def on_exception(self, trainer: Any, *_: Any) -> None:
        self.after = self._state(trainer)


def four_workers(scheme: Any = "awc") -> DecentralizedStrategy:
    return DecentralizedStrategy(
        4,
        scheme=scheme,
        topology="complete",
        adaptive_consensus=AdaptiveConsensus(0),
        compile=False,
    )


@pytest.mark.parametrize("scheme", ["awc", "atc"])
@pytest.mark.parametrize("poison", [PoisonWeight(), BeforeUpdate(poison_gradient)])
def test_a_failure_stops_the_run_before_anything_changes(scheme: Any, poison: Callback) -> None:
    good = LastGood()
    with pytest.raises(NonFiniteError, match=r"of worker 2 is not finite at update 5;") as error:
        fit(tiny(), four_workers(scheme), batches(4), callbacks=[poison, good])
    assert (error.value.update, error.value.workers) == (5, [2])
    for before, after in zip(good.before, good.after, strict=True):
        assert torch.equal(before.nan_to_num(7), after.nan_to_num(7))
    assert good.after[0].isnan().sum() == isinstance(poison, PoisonWeight)


def test_names_every_worker_that_failed() -> None:
    def poison(update: int, arena: Any) -> None:
        if update >= 3:
            arena.gradients[1:, 0] = float("nan")

    strategy = DecentralizedStrategy(3, topology="ring", compile=False)
    with pytest.raises(NonFiniteError, match="of workers 1, 2 is not finite at update 3"):
        fit(tiny(), strategy, batches(3), callbacks=[BeforeUpdate(poison)])


def test_sync_training_fails_in_the_same_way() -> None:
    def poison(update: int, arena: Any) -> None:
        if update == 3:
            arena.gradients[0, 0] = float("nan")

    with pytest.raises(NonFiniteError, match="of worker 0 is not finite at update 3"):
        fit(tiny(), SyncStrategy(compile=False), batches(1), callbacks=[BeforeUpdate(poison)])


@pytest.fixture
def like_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU every update is checked; a device is asked at log points only."""
    check, step = ArenaStrategy._check_for_failure, ArenaStrategy.optimizer_step
    within: list[ArenaStrategy] = []

    def optimizer_step(self: ArenaStrategy, *args: Any, **kwargs: Any) -> Any:
        within.append(self)
        try:
            return step(self, *args, **kwargs)
        finally:
            within.pop()

    def check_for_failure(self: ArenaStrategy) -> None:
        if not within or (self._trainer.global_step + 1) % self._trainer.log_every_n_steps == 0:
            check(self)

    monkeypatch.setattr(ArenaStrategy, "optimizer_step", optimizer_step)
    monkeypatch.setattr(ArenaStrategy, "_check_for_failure", check_for_failure)


@pytest.mark.usefixtures("like_a_device")
def test_between_log_points_a_failed_run_goes_on_without_changing_anything() -> None:
    good = LastGood()
    recorder = Recorder()
    callbacks = [BeforeUpdate(poison_gradient), good, recorder]
    trainer = new_trainer(four_workers("atc"), callbacks=callbacks, log_every_n_steps=4)
    with pytest.raises(NonFiniteError, match="of worker 2 is not finite at update 5;"):
        trainer.fit(tiny(), Batches(batches(4)))
    assert trainer.global_step == 7  # the log point of update 7 has raised
    for before, after in zip(good.before, good.after, strict=True):
        assert torch.equal(before, after)
    for weights in recorder.record.weights[BAD_UPDATE:]:
        assert torch.equal(weights, recorder.record.weights[BAD_UPDATE - 1])


@pytest.mark.usefixtures("like_a_device")
@pytest.mark.parametrize("log_every", [1, 4])
def test_the_last_good_state_is_saved_and_resumes(tmp_path: Path, log_every: int) -> None:
    good = LastGood()
    saving = ModelCheckpoint(
        tmp_path, filename="failed", save_on_exception=True, every_n_train_steps=100
    )
    with pytest.raises(NonFiniteError):
        fit(
            tiny(),
            four_workers(),
            batches(4),
            callbacks=[BeforeUpdate(poison_gradient), good, saving],
            log_every_n_steps=log_every,
            enable_checkpointing=True,
        )
    path = tmp_path / "failed.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    entry = checkpoint["optimizer_states"][0]["state"][0]
    embedding = tiny().model.embed_tokens.weight.numel()
    for name, tensor in zip(("weights", "exp_avg", "exp_avg_sq"), good.before, strict=True):
        assert torch.equal(entry[name].flatten(1), tensor[:, :embedding])
    assert entry["step"] == BAD_UPDATE
    mean = good.before[0][:, :embedding].mean(0)
    assert torch.equal(checkpoint["state_dict"]["model.embed_tokens.weight"].flatten(), mean)
    record = fit(tiny(), four_workers(), batches(4), ckpt_path=path, log_every_n_steps=1)
    assert len(record.losses) == UPDATES - checkpoint["global_step"]
    assert torch.stack(record.weights).isfinite().all()
    # γ goes by the schedule, which goes on from the Trainer's count of updates
    rate = learning_rates()[checkpoint["global_step"]]
    assert record.gammas[0] == pytest.approx(rate / max(learning_rates()), rel=1e-12)


@pytest.mark.usefixtures("like_a_device")
def test_a_checkpoint_that_comes_before_the_next_log_point_is_not_written(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=7, filename="{step}")
    with pytest.raises(NonFiniteError, match="at update 5"):
        fit(
            tiny(),
            four_workers(),
            batches(4),
            callbacks=[BeforeUpdate(poison_gradient), saving],
            log_every_n_steps=100,
            enable_checkpointing=True,
        )
    assert not list(tmp_path.iterdir())


def test_a_trainer_that_failed_once_can_fail_again() -> None:
    trainer = new_trainer(four_workers(), callbacks=[BeforeUpdate(poison_gradient)])
    for _ in range(2):
        with pytest.raises(NonFiniteError):
            trainer.fit(tiny(), Batches(batches(4)))


def test_an_error_in_validation_leaves_the_module_usable(tmp_path: Path) -> None:
    class Broken(TinyLLM):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            raise RuntimeError("no validation today")

    module = Broken(config=tiny().config, optimizer=OPTIMIZER, schedule=SCHEDULE)
    recorder = Recorder()
    trainer = new_trainer(
        four_workers(),
        callbacks=[recorder],
        limit_val_batches=1,
        val_check_interval=3,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
    )
    with pytest.raises(RuntimeError, match="no validation today"):
        trainer.fit(module, Batches(batches(4)), DataLoader(batches(1), batch_size=None))
    assert module.model.workers == 1
    weight = dict(module.named_parameters())["model.embed_tokens.weight"]
    average = recorder.record.weights[-1].mean(0)[: weight.numel()]
    assert torch.equal(weight.detach().flatten(), average)


def test_a_module_in_bf16_trains_as_torchs_adamw_does() -> None:
    class Low(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 2, dtype=torch.bfloat16)

        def training_step(self, batch: Tensor) -> Tensor:
            loss: Tensor = self.linear(batch).square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.AdamW:
            return torch.optim.AdamW(self.parameters(), lr=0.1)  # with its own betas

    rows, weights = torch.randn(6, 3, 4, dtype=torch.bfloat16), []
    for strategy in ("auto", SyncStrategy(compile=False)):
        torch.manual_seed(0)
        module = Low()
        new_trainer(strategy, max_steps=6, gradient_clip_val=None).fit(
            module, DataLoader(list(rows), batch_size=None)
        )
        weights.append(module.linear.weight.detach().clone())
    torch.testing.assert_close(*weights, rtol=0.02, atol=0.01)  # of a few roundings to bf16
