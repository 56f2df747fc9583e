"""Shows what log points tell once it has come from the device, so that nothing waits for it."""

from collections import deque
from collections.abc import Callable
from typing import Any, cast

import torch
from lightning.pytorch import Callback, Trainer
from typing_extensions import override

from tinyllm.metrics import UpdateMetrics


class LogPoints(Callback):
    """The log points whose values nobody has seen yet.

    The host gives the device the next updates while values are on their way. They are shown to
    callbacks, module and loggers in order, and before anything but an update happens.

    Args:
        trainer: Whose callbacks and loggers are told; this becomes the first of its callbacks.
        check_for_failure: Called in place of showing an update that was not finite.
    """

    def __init__(self, trainer: Trainer, check_for_failure: Callable[[], None]) -> None:
        self._trainer = cast(Any, trainer)  # it sets some of its attributes where mypy cannot see
        self._check_for_failure = check_for_failure
        self._waiting: deque[UpdateMetrics] = deque()
        self._trainer.callbacks.insert(0, self)

    def end(self) -> None:
        """Leaves the Trainer's callbacks."""
        if self in self._trainer.callbacks:  # LearningRateFinder puts a list of its own there
            self._trainer.callbacks.remove(self)

    def add(self, metrics: UpdateMetrics) -> None:
        """Takes a log point, whose values have been sent."""
        self._waiting.append(metrics)

    def show(self, wait: bool) -> None:
        """Shows those whose values are there, or all."""
        while self._waiting and (wait or self._waiting[0].arrived):
            metrics = self._waiting.popleft()
            if metrics.has_failed:
                self._waiting.clear()
                self._check_for_failure()
                return
            module = self._trainer.lightning_module
            values: dict[str, float] = {}
            for callback in self._trainer.callbacks:
                if hasattr(callback, "on_log_point"):
                    values |= callback.on_log_point(self._trainer, module, metrics) or {}
            if hasattr(module, "on_log_point"):
                values |= module.on_log_point(metrics) or {}
            self._log(values, metrics)

    def _log(self, values: dict[str, float], metrics: UpdateMetrics) -> None:
        # LightningModule.log would take the update that is running when the values arrive, and
        # half a millisecond for each
        tensors = {name: torch.tensor(value) for name, value in values.items()}
        for known in (self._trainer.logged_metrics, self._trainer.callback_metrics):
            known.update(tensors)
        if "train/loss" in values:  # in whatever progress bar there is
            self._trainer.progress_bar_metrics["train/loss"] = values["train/loss"]
        if values and self._trainer.log_every_n_steps:  # 0 keeps loggers silent
            for logger in self._trainer.loggers:
                logger.log_metrics({**values, "epoch": metrics.epoch}, step=metrics.step)
                logger.save()

    @override
    def on_train_epoch_end(self, *_: Any) -> None:
        self.show(wait=True)

    @override
    def on_train_end(self, *_: Any) -> None:
        self.show(wait=True)
