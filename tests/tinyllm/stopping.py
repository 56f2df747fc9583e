"""What tests name by class path on a command line, and a command as one rank of several."""

import os
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer

from tinyllm.schedule import Schedule


@dataclass(frozen=True)
class Halves(Schedule):
    """Half as much with every update."""

    def factor(self, update: int, total_updates: int) -> float:
        return 0.5**update

    def after_warmup(self, progress: float) -> float:
        raise NotImplementedError


class SignalAfter(Callback):
    """Sends this process a signal while an update or a validation batch is under way."""

    def __init__(self, updates: int, name: str = "SIGTERM", validating: bool = False) -> None:
        self._updates = updates
        self._signal = signal.Signals[name]
        self._validating = validating

    def on_before_optimizer_step(self, trainer: Trainer, *_: Any) -> None:
        if not self._validating and trainer.global_step == self._updates - 1:
            os.kill(os.getpid(), self._signal)

    def on_validation_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if self._validating and trainer.global_step == self._updates:
            os.kill(os.getpid(), self._signal)


class FailAfter(Callback):
    """Raises an error when an update is done."""

    def __init__(self, updates: int) -> None:
        self._updates = updates

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self._updates:
            raise RuntimeError("the machine is on fire")


class FailWithin(Callback):
    """Raises an error when the gradients of an update are there, and the update is not done."""

    def __init__(self, updates: int) -> None:
        self._updates = updates

    def on_before_backward(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self._updates:
            raise RuntimeError("the machine is on fire")


class KeepAside(Callback):
    """Copies the checkpoints as they are before the next update: what a kill would have left."""

    def __init__(self, updates: int) -> None:
        self._updates = updates

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self._updates:
            root = Path(trainer.default_root_dir)
            shutil.copytree(root / "checkpoints", root / "aside")


class Restless(Callback):
    """Has another state whenever it is asked."""

    def __init__(self) -> None:
        self._asked = 0

    def state_dict(self) -> dict[str, int]:
        self._asked += 1
        return {"asked": self._asked}


def _no_links(*_: Any) -> None:
    raise OSError(1, "Operation not permitted")


def tinyllm_on_this_rank(args: list[str], without_links_on: int | None = None) -> None:
    """Runs a command in a process that a launcher has started.

    Args:
        args: The command's.
        without_links_on: A rank that cannot make hard links.
    """
    import sys

    from tinyllm.cli import main

    if without_links_on == int(os.environ["RANK"]):
        Path.hardlink_to = _no_links  # type: ignore[method-assign]
    sys.argv[1:] = []
    main(args)
