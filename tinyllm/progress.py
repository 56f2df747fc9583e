"""A progress bar that never makes the host wait for the device between log points."""

import math
import sys
import time
from collections import deque
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from torch import Tensor
from typing_extensions import override

from tinyllm.metrics import UpdateMetrics, shows_log_points

REDRAW_SECONDS = 0.1
LINE_SECONDS = 5.0
_BAR = "{{l_bar}}{{bar}}| {{n_fmt}}/{{total_fmt}} updates [{{elapsed}}<{left}{{postfix}}]"


class RunProgressBar(TQDMProgressBar):
    """One bar for the whole run, with time left, loss, learning rate and tokens per second.

    Values are renewed at log points, once they have come from the device. The rate
    is over the updates since the log point before, without validation and the first update, which
    may have been compiled; the time left goes by all updates but the first, with validation. Each
    validation leaves a line above the bar. Where the output is no
    terminal, a line now and then takes the bar's place.
    """

    def __init__(self) -> None:
        super().__init__(refresh_rate=1)
        self._shown: dict[str, int | str | float | dict[str, float]] = {}
        self._drawn = -math.inf
        self._updates = 0
        self._planned: int | None = None
        self._arrived: UpdateMetrics | None = None
        self._batches: deque[tuple[int, int]] = deque()  # update, tokens; not yet in a rate
        self._started: float | None = None
        self._first: tuple[int, float] | None = None  # update, and when it was done
        self._in_lines = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if self.is_enabled and not sys.stdout.isatty():
            self._in_lines = True
            self.disable()

    @override
    def enable(self) -> None:
        if not self._in_lines:  # where Lightning's tuner, having switched it off, switches it on
            super().enable()

    @override
    def init_train_tqdm(self) -> Tqdm:
        bar = super().init_train_tqdm()
        bar.bar_format = _BAR.format(left="?")
        return bar

    @override
    def on_train_start(self, trainer: Trainer, *args: Any) -> None:
        super().on_train_start(trainer, *args)
        planned = trainer.estimated_stepping_batches
        self._planned = None if math.isinf(planned) else int(planned)
        self._updates, self._first = trainer.global_step, None
        bar = self.train_progress_bar
        bar.total, bar.initial, bar.n = self._planned, self._updates, self._updates
        bar.refresh()
        self._restart()

    def _restart(self) -> None:
        self._batches.clear()
        self._started = None

    @override
    def on_train_epoch_start(self, trainer: Trainer, *args: Any) -> None:
        """The bar goes on through all epochs."""

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if not (self.is_enabled or self._in_lines):
            return  # another rank shows it
        if self._started is None:
            self._started = time.perf_counter()
        elif isinstance(batch, Tensor) and batch.ndim == 2:
            tokens = batch.shape[0] * (batch.shape[1] - 1) * trainer.world_size
            self._batches.append((trainer.global_step, tokens))
        if trainer.global_step == self._updates:
            return  # the batch is a part of an update
        self._updates = trainer.global_step
        if self._first is None:
            self._first = (self._updates, time.perf_counter())
        if self._arrived is not None:
            assert self._arrived.step is not None
            values = self._arrived.scalars()
            self._renew(self._arrived.step + 1, values["train/loss"], values["train/lr"])
            self._arrived = None
        elif trainer._logger_connector.should_update_logs and not shows_log_points(
            trainer.strategy
        ):
            groups = trainer.optimizers[0].param_groups if trainer.optimizers else [{}]
            loss = trainer.callback_metrics.get("train/loss")
            self._renew(self._updates, loss, groups[0].get("lr"))
        if self._is_due(self._updates, self._planned):
            self._draw()

    def _draw(self) -> None:
        if self._in_lines and self._shown:
            values = ", ".join(f"{name} {value}" for name, value in self._shown.items())
            of_all = f" of {self._planned}" if self._planned is not None else ""
            print(f"update {self._updates}{of_all}: {values}, left {self._left()}", flush=True)
        elif self.is_enabled:
            self.train_progress_bar.bar_format = _BAR.format(left=self._left())
            self.train_progress_bar.n = self._updates
            self.train_progress_bar.set_postfix(self._shown)

    def _left(self) -> str:
        """Time until the last planned update; a question mark while nothing can be said."""
        if self._planned is None or self._first is None or self._updates == self._first[0]:
            return "?"
        update, then = self._first
        per_update = (time.perf_counter() - then) / (self._updates - update)
        left: str = Tqdm.format_interval(per_update * (self._planned - self._updates))
        return left

    def on_log_point(
        self, trainer: Trainer, pl_module: LightningModule, metrics: UpdateMetrics
    ) -> None:
        """Takes the values of an update when they have come from the device."""
        self._arrived = metrics

    def _renew(self, updates: int, loss: Tensor | float | None, lr: float | None) -> None:
        """Shows the values of an update, and the rate since those shown before."""
        if loss is not None:
            self._shown["loss"] = f"{float(loss):.3f}"
        if lr is not None:
            self._shown["lr"] = f"{float(lr):.1e}"
        tokens = 0
        while self._batches and self._batches[0][0] <= updates:
            tokens += self._batches.popleft()[1]
        now = time.perf_counter()
        if tokens and self._started is not None and now > self._started:
            self._shown["tok/s"] = _short(tokens / (now - self._started))
        self._started = now

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        loss = trainer.callback_metrics.get("validation/loss")
        if loss is None or trainer.sanity_checking or trainer.state.fn != "fit":
            return
        value = float(loss)
        self._shown["val"] = f"{value:.3f}"
        self._restart()
        perplexity = math.exp(min(value, 700.0))  # beyond that a float overflows
        line = f"update {trainer.global_step}: validation loss {value:.4f}"
        self.print(f"{line}, perplexity {perplexity:.4g}")

    @override
    def on_exception(self, *_: Any) -> None:
        for bar in (self._val_progress_bar, self._train_progress_bar):
            if bar is not None:
                bar.close()  # what is said about it begins on a line of its own

    @override
    def print(self, *args: Any, **kwargs: Any) -> None:
        if self._in_lines:
            print(*args, flush=True, **kwargs)
        else:
            super().print(*args, **kwargs)

    @override
    def get_metrics(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        return self._shown

    @override
    def _should_update(self, current: int, total: int | float | None) -> bool:
        """For the bars of evaluation: not more often than a reader can follow."""
        return self.is_enabled and self._is_due(current, total)

    def _is_due(self, current: int, total: int | float | None) -> bool:
        now = time.perf_counter()
        pause = LINE_SECONDS if self._in_lines else REDRAW_SECONDS
        if now - self._drawn < pause and current != total:
            return False
        self._drawn = now
        return True


def _short(rate: float) -> str:
    """``2130000`` as ``2.13M``."""
    for size, unit in ((1, ""), (1e3, "k"), (1e6, "M")):
        if float(f"{rate / size:.3g}") < 1_000:  # as it is shown: 999.7 is 1k
            return f"{rate / size:.3g}{unit}"
    return f"{rate / 1e9:.3g}G"
