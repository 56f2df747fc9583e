"""Callbacks, named by class path, that do something to a run's files while it trains."""

import resource
import shutil
from pathlib import Path

import disks
from lightning.pytorch import Callback, LightningModule, Trainer


class _After(Callback):
    """Does something once, when an update is done."""

    def __init__(self, updates: int, folder: str = "", size_bytes: int = 0) -> None:
        self._updates = updates
        self._folder = Path(folder)
        self._size_bytes = size_bytes

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        if trainer.global_step == self._updates:
            self.act()

    def act(self) -> None:
        raise NotImplementedError


class DeleteAfter(_After):
    """Deletes a folder."""

    def act(self) -> None:
        shutil.rmtree(self._folder)


class ReadOnlyAfter(_After):
    """Makes a small disk read-only."""

    def act(self) -> None:
        disks.make_read_only(self._folder)


class LimitAfter(_After):
    """Lets no file grow beyond a size any more."""

    def act(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (self._size_bytes, self._size_bytes))


class FillAfter(_After):
    """Fills a small disk to the last byte."""

    def act(self) -> None:
        with (self._folder / "filler").open("wb", buffering=0) as file:
            for size in (1 << 16, 1 << 10, 1):
                try:
                    while True:
                        file.write(b"x" * size)
                except OSError:
                    continue


class FailOn(Callback):
    """Raises an error on one rank, in the middle of an update."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def on_before_optimizer_step(self, trainer: Trainer, *_: object) -> None:
        if trainer.global_rank == self._rank and trainer.global_step == 5:
            raise RuntimeError(f"rank {self._rank} is on fire")
