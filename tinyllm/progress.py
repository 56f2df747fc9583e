"""A progress bar that never makes the host wait for the device between log points."""

import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from torch import Tensor
from typing_extensions import override

REDRAW_SECONDS = 0.1


class RunProgressBar(TQDMProgressBar):
    """Shows loss, learning rate and tokens per second, renewed at log points.

    Rates are over the updates since the log point before, whose values have just been read and so
    are complete; time spent validating is left out.
    """

    def __init__(self) -> None:
        super().__init__(refresh_rate=1)
        self._shown: dict[str, int | str | float | dict[str, float]] = {}
        self._drawn = 0.0
        self._tokens = 0
        self._started = time.perf_counter()

    @override
    def on_train_start(self, *args: Any) -> None:
        super().on_train_start(*args)
        self._restart()

    def _restart(self) -> None:
        self._tokens, self._started = 0, time.perf_counter()

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if isinstance(batch, Tensor) and batch.ndim == 2:
            self._tokens += batch.shape[0] * (batch.shape[1] - 1) * trainer.world_size
        metrics = getattr(trainer.strategy, "update_metrics", None)
        if metrics is not None and trainer._logger_connector.should_update_logs:
            values = metrics.scalars()
            rate = self._tokens / (time.perf_counter() - self._started)
            self._shown["loss"] = f"{values['train/loss']:.3f}"
            self._shown["lr"] = f"{values['train/lr']:.1e}"
            self._shown["tok/s"] = _short(rate)
            self._restart()
        now = time.perf_counter()
        if now - self._drawn >= REDRAW_SECONDS or trainer.is_last_batch:
            self._drawn = now
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        if not trainer.sanity_checking and "validation/loss" in trainer.callback_metrics:
            self._shown["val"] = f"{trainer.callback_metrics['validation/loss'].item():.3f}"
        self._restart()

    @override
    def get_metrics(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        return self._shown


def _short(rate: float) -> str:
    """``2130000`` as ``2.13M``."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if rate >= size:
            return f"{rate / size:.3g}{unit}"
    return f"{rate:.3g}"
