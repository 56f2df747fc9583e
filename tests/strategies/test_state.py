"""Checkpoints: all workers' state, exact resumption, ordinary names; evaluation at the average."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from simulation import (
    CONFIG,
    OPTIMIZER,
    SCHEDULE,
    UPDATES,
    Batches,
    Record,
    batches,
    fit,
    gammas,
    learning_rates,
    new_trainer,
    tiny,
)
from torch import Tensor
from torch.utils.data import DataLoader

from tinyllm import LlamaConfig, TinyLLM
from tinyllm.strategies import DecentralizedStrategy, SyncStrategy
from tinyllm.strategies.base import ArenaStrategy
from tinyllm.strategies.consensus import AdaptiveConsensus


class SaveAfterBatch(Callback):
    """Saves a checkpoint after so many batches, wherever that is in an update."""

    def __init__(self, batch: int, path: Path) -> None:
        self._batch, self._path = batch, path

    def on_train_batch_end(
        self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx + 1 == self._batch:
            trainer.save_checkpoint(self._path)


def packed(workers: int, scheme: Any = "awc", **options: Any) -> DecentralizedStrategy:
    return DecentralizedStrategy(workers, scheme=scheme, compile=False, **options)


def adaptive() -> AdaptiveConsensus:
    return AdaptiveConsensus(0.25, 1.0)


STRATEGIES: dict[str, tuple[Callable[[], ArenaStrategy], int]] = {
    "sync": (lambda: SyncStrategy(compile=False), 1),
    "one worker": (lambda: packed(1), 1),
    "awc": (lambda: packed(4, "awc", adaptive_consensus=adaptive()), 4),
    "atc": (lambda: packed(5, "atc", topology="base_k", adaptive_consensus=adaptive()), 5),
}


def assert_same(resumed: Record, uninterrupted: Record) -> None:
    """The resumed run is the end of the other, to the last bit."""
    for name in ("weights", "losses", "grad_norms"):
        tail = getattr(uninterrupted, name)[-len(getattr(resumed, name)) :]
        assert all(map(torch.equal, getattr(resumed, name), tail)), name
    assert resumed.gammas == uninterrupted.gammas[-len(resumed.gammas) :]
    assert resumed.rates == uninterrupted.rates[-len(resumed.rates) :]


@pytest.mark.parametrize("name", STRATEGIES)
def test_resumes_bit_for_bit(tmp_path: Path, name: str) -> None:
    # after update 5, in the middle of a topology's period and of the window in which γ falls
    path = tmp_path / "saved.ckpt"
    strategy, workers = STRATEGIES[name]
    rows, saving = batches(workers), SaveAfterBatch(5, path)
    options: dict[str, Any] = {"gradient_clip_val": 0.5, "log_every_n_steps": 1}
    uninterrupted = fit(tiny(), strategy(), rows, callbacks=[saving], **options)
    resumed = fit(tiny(seed=99), strategy(), rows, ckpt_path=path, **options)
    assert len(resumed.losses) == UPDATES - 5
    assert_same(resumed, uninterrupted)
    if workers > 1:
        assert resumed.gammas == pytest.approx(gammas(learning_rates(), 0.25, 1.0)[5:])


@pytest.mark.parametrize("name", STRATEGIES)
def test_resumes_between_two_batches_of_an_update(tmp_path: Path, name: str) -> None:
    path = tmp_path / "saved.ckpt"
    strategy, workers = STRATEGIES[name]
    small = batches(workers, rows_per_worker=2, updates=3 * UPDATES)
    options: dict[str, Any] = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5}
    uninterrupted = fit(tiny(), strategy(), small, callbacks=[SaveAfterBatch(17, path)], **options)
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["global_step"] == 5
    pending = checkpoint["optimizer_states"][0]["pending"]
    assert pending["targets"].tolist() == [2 * 2 * CONFIG.context] * workers
    resumed = fit(tiny(seed=99), strategy(), small, ckpt_path=path, **options)
    assert len(resumed.losses) == UPDATES - 5
    assert_same(resumed, uninterrupted)


def save(
    tmp_path: Path, strategy: Any, updates: int = 4, module: Any = None, workers: int = 4
) -> tuple[Path, Record]:
    path = tmp_path / "saved.ckpt"
    saving = SaveAfterBatch(updates, path)
    return path, fit(module or tiny(), strategy, batches(workers), callbacks=[saving])


def test_holds_every_workers_weights_and_moments(tmp_path: Path) -> None:
    class Arenas(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 4:
                arena = trainer.strategy.engine.arena
                names = ("weights", "exp_avg", "exp_avg_sq")
                self.views = {n: arena.layout.views(getattr(arena, n).clone()) for n in names}
                self.names = [slot.name for slot in arena.layout.slots]

    arenas, path = Arenas(), tmp_path / "saved.ckpt"
    fit(tiny(), packed(4), batches(4), callbacks=[arenas, SaveAfterBatch(4, path)])
    (state,) = torch.load(path, weights_only=True)["optimizer_states"]
    assert len(state["state"]) == len(list(tiny().parameters())) == len(arenas.names)
    for index, name in enumerate(arenas.names):
        entry = state["state"][index]
        assert entry["step"] == 4
        for kind, views in arenas.views.items():
            assert entry[kind].shape[0] == 4
            assert torch.equal(entry[kind], views[name])
            if kind != "exp_avg_sq" or "norm" not in name:
                assert not torch.equal(entry[kind][0], entry[kind][1])


def test_speaks_the_names_of_an_ordinary_model(tmp_path: Path) -> None:
    path, record = save(tmp_path, packed(4))
    checkpoint = torch.load(path, weights_only=True)
    ordinary = tiny().state_dict()
    assert checkpoint["state_dict"].keys() == ordinary.keys()
    assert {k: v.shape for k, v in checkpoint["state_dict"].items()} == {
        k: v.shape for k, v in ordinary.items()
    }
    assert not any("lm_head" in key for key in ordinary)  # tied
    model = TinyLLM.load_from_checkpoint(path, weights_only=True)
    assert model.config == CONFIG
    assert model.optimizer_config == OPTIMIZER
    assert model.schedule == SCHEDULE
    average = record.weights[3].mean(0).float()
    flat = torch.nn.utils.parameters_to_vector(model.parameters())
    torch.testing.assert_close(flat.float(), average, rtol=0, atol=1e-7)


def test_counts_the_tied_embedding_once(tmp_path: Path) -> None:
    class Layout(Callback):
        def on_train_start(self, trainer: Any, *_: Any) -> None:
            self.layout = trainer.strategy.engine.arena.layout

    layout = Layout()
    fit(tiny(), packed(2), batches(2), callbacks=[layout])
    assert layout.layout.num_parameters == CONFIG.num_parameters == 912
    embeddings = [s for s in layout.layout.slots if CONFIG.vocab_size in s.shape]
    assert [s.name for s in embeddings] == ["model.embed_tokens.weight"]


def test_one_workers_state_is_that_of_plain_adamw(tmp_path: Path) -> None:
    path, _ = save(tmp_path, SyncStrategy(compile=False), workers=1)
    checkpoint = torch.load(path, weights_only=True)
    model = tiny().double()
    model.load_state_dict(checkpoint["state_dict"])
    matrices = [p for n, p in model.named_parameters() if "norm" not in n]
    scales = [p for n, p in model.named_parameters() if "norm" in n]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": scales}], lr=OPTIMIZER.lr)
    optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    rows = batches(1)
    for group in optimizer.param_groups:
        group["lr"] = learning_rates()[4]
    logits = model(rows[4][:, :-1])
    F.cross_entropy(logits.flatten(0, 1), rows[4][:, 1:].flatten()).backward()
    optimizer.step()
    next_update = fit(tiny(), SyncStrategy(compile=False), rows, ckpt_path=path).weights[0]
    flat = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.testing.assert_close(next_update[0], flat, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("saved", "resumed", "message"),
    [
        (4, 2, "holds 4 workers and this run has 2; resume with 4"),
        (1, 2, "holds 1 workers and this run has 2; resume with 1"),
        (2, 1, "holds 2 workers and this run has 1; resume with 2"),
    ],
)
def test_another_number_of_workers_is_refused(
    tmp_path: Path, saved: int, resumed: int, message: str
) -> None:
    path, _ = save(tmp_path, packed(saved))
    with pytest.raises(ValueError, match=message):
        fit(tiny(), packed(resumed), batches(4), ckpt_path=path)


def test_the_state_of_another_model_is_refused(tmp_path: Path) -> None:
    path, _ = save(tmp_path, packed(2))
    checkpoint = torch.load(path, weights_only=True)
    deeper = TinyLLM(
        config=LlamaConfig(**{**CONFIG.to_dict(), "layers": 2}),
        optimizer=OPTIMIZER,
        schedule=SCHEDULE,
    )
    with pytest.raises(ValueError, match="is of another model: layers 1, not 2"):
        fit(deeper, packed(2), batches(2), ckpt_path=path)
    checkpoint["state_dict"] = deeper.state_dict()
    del checkpoint["hyper_parameters"]  # another module's: it says nothing of its sizes
    torch.save(checkpoint, path)
    with pytest.raises(ValueError, match="state of 8 parameters in 2 groups and this model has 14"):
        fit(deeper, packed(2), batches(2), ckpt_path=path)


# --- evaluation ----------------------------------------------------------------------------------


def test_evaluates_the_average_and_touches_nothing(tmp_path: Path) -> None:
    class Watch(Callback):
        def _state(self, trainer: Any, module: Any) -> list[Tensor]:
            arena = trainer.strategy.engine.arena
            assert module.model.workers == 4
            embedding = module.model.embed_tokens.weight
            assert embedding.data_ptr() == arena.weights.data_ptr()
            tensors = (arena.weights, arena.gradients, arena.exp_avg, arena.exp_avg_sq)
            return [t.clone() for t in tensors]

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            self.before = self._state(trainer, module)

        def on_validation_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
            assert module.model.workers == 1

        def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
            if trainer.global_step == 6:  # validation came in between
                self.compared = True
                assert all(map(torch.equal, self._state(trainer, module), self.before))

    watch = Watch()
    best = ModelCheckpoint(tmp_path, filename="best", monitor="validation/loss", mode="max")
    rows = batches(1, rows_per_worker=3, updates=4)
    rows[3][1:] = -100  # a partial batch at the end
    trainer = new_trainer(
        packed(4),
        callbacks=[watch, best],
        enable_checkpointing=True,
        limit_val_batches=4,
        val_check_interval=6,
        check_val_every_n_epoch=None,
        max_steps=7,
    )
    trainer.fit(tiny(), Batches(batches(4)), DataLoader(rows, batch_size=None))
    assert watch.compared
    model = tiny().double()
    model.load_state_dict(torch.load(tmp_path / "best.ckpt", weights_only=True)["state_dict"])
    losses, targets = 0.0, 0
    for batch in rows:
        logits, target = model(batch[:, :-1].clamp_min(0)), batch[:, 1:]
        losses += F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum").item()
        targets += int((target != -100).sum())
    assert targets == (3 * 3 + 1) * CONFIG.context
    assert trainer.callback_metrics["validation/loss"].item() == pytest.approx(
        losses / targets, rel=1e-12
    )


def test_validation_in_the_middle_of_an_update_changes_nothing() -> None:
    small = batches(4, updates=2 * UPDATES)
    plain = fit(tiny(), packed(4), small, accumulate_grad_batches=2)

    class Validating(Callback):
        pending = False

        def on_validation_end(self, trainer: Any, *_: Any) -> None:
            self.pending |= trainer.strategy.engine.pending

    validating = Validating()
    validated = fit(
        tiny(),
        packed(4),
        small,
        accumulate_grad_batches=2,
        val_batches=batches(1),
        callbacks=[validating],
        limit_val_batches=1.0,
        val_check_interval=3,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
    )
    assert validating.pending
    assert all(map(torch.equal, plain.weights, validated.weights))


def test_leaves_the_average_behind() -> None:
    module = tiny()
    record = fit(module, packed(4), batches(4))
    flat = torch.nn.utils.parameters_to_vector(module.parameters())
    assert torch.equal(flat.detach(), record.weights[-1].mean(0))
    assert all(p.shape[0] == 1 and p.grad is None for p in module.parameters())
