"""Several ranks stop at the same update when one of them is told to."""

import signal
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer


class CommonStop:
    """Takes the place of Lightning's handling of SIGTERM where there are several ranks.

    Lightning broadcasts inside its signal handler and before every batch. The one can fall between
    this library's collectives, the other makes the host wait for the device each time. Here a
    signal is only noted, and at log points all ranks hear of it together.

    Args:
        trainer: Whose handling is replaced until :meth:`end`.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._told = False
        # Lightning looks both up when it needs them, and so finds them on the instances
        self._connector: Any = trainer._signal_connector
        self._epoch_loop: Any = trainer.fit_loop.epoch_loop
        vars(self._connector)["_sigterm_notifier_fn"] = self._note
        vars(self._epoch_loop)["_broadcast_sigterm_tensor"] = _nothing

    def _note(self, signum: int, _: FrameType | None) -> None:
        self.tell(signal.Signals(signum))

    def tell(self, signum: signal.Signals = signal.SIGTERM) -> None:
        """Stops all ranks at the next log point; those that this one has started are signalled."""
        launcher: Any = self._trainer.strategy.launcher
        if not self._told and launcher is not None:
            launcher.kill(signum)
        self._told = True

    def agree(self, device: torch.device) -> None:
        """Lets Lightning stop all ranks after this update if any was told to; synchronizes."""
        told = torch.tensor(self._told, dtype=torch.int32, device=device)
        dist.all_reduce(told, dist.ReduceOp.MAX)
        if told.item():
            self._connector.received_sigterm = True

    def end(self) -> None:
        """Gives both back to Lightning."""
        del vars(self._connector)["_sigterm_notifier_fn"]
        del vars(self._epoch_loop)["_broadcast_sigterm_tensor"]


def _nothing() -> None:
    pass
