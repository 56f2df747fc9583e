"""What the tests run on several ranks."""

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from classifier import classifier
from classifier import examples as classifier_examples
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from simulation import CONFIG, Batches, Recorder, new_trainer, tiny
from torch import Tensor
from torch.utils.data import DataLoader

from tinyllm import TokenDataModule
from tinyllm.model import Llama
from tinyllm.strategies import DecentralizedStrategy, SyncStrategy
from tinyllm.strategies.gossip import Gossip
from tinyllm.strategies.native import NativeEngine
from tinyllm.strategies.topology import make_topology

# --- Gossip by itself -----------------------------------------------------------------------------


def _join(world_size: int) -> int:
    rank = int(os.environ["RANK"])  # as torchrun tells it
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    return rank


def gossip(world_size: int) -> dict[str, Any]:
    """Differences between rows combined on several ranks and on one."""
    rank, workers = _join(world_size), 8
    local = slice(rank * workers // world_size, (rank + 1) * workers // world_size)
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    alone = torch.randn(workers, 33, generator=generator)
    rows = alone[local].clone()
    one, many = Gossip(workers, 0, alone), Gossip(workers, rank, rows)
    differences = []
    for t in range(12):
        shares = rng.dirichlet(np.ones(3))
        matrix = sum(s * np.eye(workers)[rng.permutation(workers)] for s in shares)
        if t % 2:
            many.start(rows, matrix)
        one.combine(alone, torch.tensor(False), matrix)
        many.combine(rows, torch.tensor(False), matrix)
        differences.append(float((rows - alone[local]).abs().max()))
    before = rows.clone()
    many.combine(rows, torch.tensor(True), np.full((workers, workers), 1 / workers))
    return {"differences": differences, "unchanged": torch.equal(rows, before)}


def exchanged_rows() -> list[int]:
    """Sends and receives of each phase of the one-peer exponential graph over 8 workers."""
    rank = _join(2)
    topology = make_topology("one_peer_exponential", 8)
    counts = []
    exchange = dist.batch_isend_irecv

    def counting(operations: Any) -> Any:
        counts[-1] += len(operations)
        return exchange(operations)

    dist.batch_isend_irecv = counting
    rows = torch.randn(4, 5)
    gossip = Gossip(8, rank, rows)
    for t in range(topology.period):
        counts.append(0)
        gossip.combine(rows, torch.tensor(False), topology.matrix(t))
    return counts


# --- whole runs -----------------------------------------------------------------------------------


class Poison(Callback):
    """Makes a gradient of one worker NaN at update 5, on the rank that has it."""

    def __init__(self, worker: int) -> None:
        self._worker = worker

    def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
        engine = trainer.strategy.engine
        rank, row = divmod(self._worker, engine.arena.workers)
        if engine.next_update == 5 and rank == trainer.global_rank:
            engine.arena.gradients[row, 0] = float("nan")


class SaveAfterBatch(Callback):
    """Saves a checkpoint after so many batches of the first epoch."""

    def __init__(self, batch: int, path: str) -> None:
        self._batch, self._path = batch, path

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx + 1 == self._batch and trainer.current_epoch == 0:
            trainer.save_checkpoint(self._path)


def train(
    cache: str,
    decentralized: dict[str, Any] | None,
    *,
    batch_size: int = 16,
    micro_batch_size: int | None = None,
    devices: int | None = None,
    save: tuple[int, str] | None = None,
    save_on_exception: str | None = None,
    resume: str | None = None,
    poison: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Trains on a token cache, on all ranks, and returns what happened at each update.

    Args:
        cache: Folder of the cache.
        decentralized: Arguments of DecentralizedStrategy; None for sync training.
        batch_size: Global.
        micro_batch_size: Of either strategy.
        devices: Number of ranks, where the environment does not tell it.
        save: After which batch, and where.
        save_on_exception: Where a failed run saves its last good state.
        resume: Checkpoint to start from.
        poison: Worker to poison.
        options: Of the Trainer.
    """
    recorder = Recorder()
    callbacks: list[Any] = [recorder]
    if poison is not None:
        callbacks.append(Poison(poison))
    if save is not None:
        callbacks.append(SaveAfterBatch(*save))
    if save_on_exception is not None:
        path = Path(save_on_exception)
        callbacks.append(
            ModelCheckpoint(
                path.parent, path.stem, save_on_exception=True, every_n_train_steps=1_000
            )
        )
        options |= {"enable_checkpointing": True}
    common: dict[str, Any] = {"compile": False, "micro_batch_size": micro_batch_size}
    strategy: Any = (
        SyncStrategy(**common)
        if decentralized is None
        else DecentralizedStrategy(**decentralized, **common)
    )
    trainer = new_trainer(
        strategy,
        devices=devices or int(os.environ["LOCAL_WORLD_SIZE"]),
        callbacks=callbacks,
        **options,
    )
    data = TokenDataModule(cache, CONFIG.context, batch_size, validation_batch_size=3)
    # rank 0's weights are those that count
    trainer.fit(tiny(seed=1 + trainer.global_rank), data, ckpt_path=resume)
    record = recorder.record
    return {
        "weights": torch.stack(record.weights),
        "losses": torch.stack(record.losses),
        "grad_norms": torch.stack(record.grad_norms),
        "gammas": record.gammas,
        "logged": {k: float(v) for k, v in trainer.callback_metrics.items()},
    }


def fail_on_rank_1(cache: str) -> None:
    """An error in the fourth forward pass, while rows are under way."""
    forward, calls = Llama.forward, iter(range(100))

    def failing(self: Llama, *args: Any) -> Any:
        if next(calls) == 3 and os.environ["RANK"] == "1":
            raise RuntimeError("no fourth forward")
        return forward(self, *args)

    Llama.forward = failing  # type: ignore[method-assign]
    train(cache, {"workers": 4, "timeout_seconds": 20.0})


def order_of_events(cache: str, scheme: str) -> list[str]:
    """What happens during an update on this rank, in order."""
    events: list[str] = []

    def noting(event: str, function: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            events.append(event)
            return function(*args, **kwargs)

        return noted

    Gossip.start = noting("exchange", Gossip.start)  # type: ignore[method-assign]
    Llama.forward = noting("forward", Llama.forward)  # type: ignore[method-assign]
    Gossip.combine = noting("combine", Gossip.combine)  # type: ignore[method-assign]
    NativeEngine._adapt = noting("adapt", NativeEngine._adapt)  # type: ignore[method-assign]
    train(cache, {"workers": 4, "scheme": scheme}, micro_batch_size=2, max_steps=1)
    return events


class Examples(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """A batch of the classifier's examples, one by one."""

    def __init__(self, batch: tuple[Tensor, Tensor]) -> None:
        self._x, self._y = batch

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._x[index], self._y[index]


def train_classifier(
    workers: int, buffers: Any, path: str, save_at: int = 0, resume: str | None = None
) -> dict[str, Any]:
    """Trains one classifier per rank; returns its state dict while evaluating and at the end."""

    class AtAverage(Callback):
        def on_validation_end(self, trainer: Any, module: Any) -> None:
            self.seen = {k: v.clone() for k, v in module.state_dict().items()}

        def on_train_end(self, trainer: Any, module: Any) -> None:
            self.own = {k: v.clone() for k, v in module.state_dict().items()}

    average = AtAverage()
    trainer = new_trainer(
        DecentralizedStrategy(workers, topology="ring", buffers=buffers, compile=False),
        devices=workers,
        max_epochs=1,
        max_steps=-1,
        limit_val_batches=1.0,
        num_sanity_val_steps=0,
        gradient_clip_val=0.5,
        callbacks=[average, *([SaveAfterBatch(save_at, path)] if save_at else [])],
    )
    batches = classifier_examples(5 * workers)
    module = classifier(seed=1 + trainer.global_rank)
    with torch.no_grad():  # as after loading other weights: rank 0's buffers are those that count
        module.norm.running_mean.add_(trainer.global_rank)
    rank = trainer.global_rank
    loader = Batches([(x[rank::workers], y[rank::workers]) for x, y in batches])
    validation = DataLoader(Examples(batches[0]), batch_size=5)  # Lightning deals it to the ranks
    trainer.fit(module, loader, validation, ckpt_path=resume)
    return {
        "average": average.seen,
        "own": average.own,
        "left": dict(module.state_dict()),
        "validated_rows": len(trainer.val_dataloaders.sampler),
    }


def train_under_ddp(global_batches: list[Tensor]) -> list[Tensor]:
    """Weights of a model that Lightning's own DDP trains, each rank on every other row."""
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    rank = int(os.environ["RANK"])
    trainer = new_trainer("ddp", devices=ranks, use_distributed_sampler=False)
    module = tiny()
    trainer.fit(module, Batches([batch[rank::ranks] for batch in global_batches]))
    return [parameter.detach() for parameter in module.parameters()]


class TerminateOneRank(Callback):
    """Sends SIGTERM to the last rank alone when an update is done."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 5 and trainer.global_rank == trainer.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)


def terminate_one_rank(cache: str, folder: str) -> int:
    """How many updates a rank had done when it stopped."""
    saving = ModelCheckpoint(folder, "stopped", save_on_exception=True, every_n_train_steps=1_000)
    trainer = new_trainer(
        DecentralizedStrategy(4, compile=False),
        devices=2,
        callbacks=[saving, TerminateOneRank()],
        enable_checkpointing=True,
    )
    data = TokenDataModule(cache, CONFIG.context, 16)
    with contextlib.suppress(SIGTERMException):
        trainer.fit(tiny(), data)
    return trainer.global_step


def save_after_fit(cache: str, folder: str) -> str:
    """Saves weights alone after a fit, and what happens to everything."""
    trainer = new_trainer(DecentralizedStrategy(2, compile=False), devices=2, max_steps=1)
    data = TokenDataModule(cache, CONFIG.context, 16, validation_batch_size=3)
    trainer.fit(tiny(), data)
    trainer.save_checkpoint(Path(folder) / "weights.ckpt", weights_only=True)
    try:
        trainer.save_checkpoint(Path(folder) / "all.ckpt")
    except RuntimeError as error:
        return str(error)
    return ""
