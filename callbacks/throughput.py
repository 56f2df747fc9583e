"""Tokens per second of complete updates, inside any Trainer."""

import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from tinyllm.callbacks.window_meter import WindowMeter
from tinyllm.files import write_csv, write_json
from tinyllm.model import IGNORED

_LOOK_SECONDS = 0.01  # between two looks for the file that ends a wait


class ThroughputWindows(Callback):
    """Measures tokens per second of complete updates in windows of equal update counts.

    After the warm-up, a stretch of at least ``window_seconds`` fixes how many updates a window
    has; it does not count as one. Everything that training does is in a window, loading,
    logging and checkpoints among it; validation is not, since the clock stands still while it
    runs. The host waits for the device at the edges of windows, when the calibration looks at the
    clock (after 1, 2, 4, 8 … updates) and around a validation, and at no other time.

    Tokens are the targets of the global batch, of all workers, ranks and accumulated batches;
    padding (-100) is none. They are counted on the device, beside its update. With many ranks a
    window lasts as long as on the slowest.

    Files, in ``folder``: ``throughput.csv`` with a row for each window (``updates``, ``tokens``,
    ``seconds``, ``tokens_per_second``), and ``timing.json`` with

    - ``startup_seconds``: from the making of this callback (or, in a later fit, from its set-up)
      to the end of the warm-up: set-up, compilation or capture, and the warm-up itself;
    - ``training_seconds``: the sum of the windows;
    - ``elapsed_seconds``: everything, to the end of the fit;
    - ``calibration_seconds``, and ``validation_seconds`` until the last window, which are in
      neither of the first two;
    - ``warmup_updates``, ``updates_per_window``, ``window_seconds`` as asked for, and
      ``median_tokens_per_second`` of the windows;
    - ``short_windows``: numbers of windows that drifted below ``window_seconds``, from 0;
    - ``complete``: whether the run was long enough for all windows.

    Args:
        folder: Where the files go; null takes the Trainer's ``default_root_dir``.
        warmup_updates: Updates before anything is measured.
        windows: How many windows.
        window_seconds: Least length of a window.
        updates_per_window: Fixes the length in updates, to compare runs at equal counts; null
            lets the calibration decide.
        stop: Ends the run after the last window, whatever its least epochs and steps are.
        hold: Waits after the first update, the one that compiles or captures, until there is a file
            ``go`` in ``folder``, having put ``ready`` there. So several runs can be set up on a
            device beside each other and be timed one by one. The wait is in no figure.

    Raises:
        ValueError: If a number is out of range.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        warmup_updates: int = 20,
        windows: int = 5,
        window_seconds: float = 1.0,
        updates_per_window: int | None = None,
        stop: bool = False,
        hold: bool = False,
    ) -> None:
        self._folder = folder
        self._plan = (warmup_updates, windows, window_seconds, updates_per_window)
        self._stop = stop
        self._hold = hold
        self._started: float | None = time.perf_counter()
        self._updates = self._first_update = 0
        self._tokens: Tensor | None = None
        self._counting: torch.cuda.Stream | None = None
        self._uncounted: Any = None
        self.meter = WindowMeter(*self._plan)

    def count_tokens(self, batch: Any) -> Tensor:
        """Number of targets in this rank's part of a batch, left on the device.

        Override it where a batch is not ``[rows, T+1]`` token ids.

        Raises:
            ValueError: If it is not.
        """
        if not isinstance(batch, Tensor) or batch.ndim != 2 or batch.is_floating_point():
            found = f"{list(batch.shape)}" if isinstance(batch, Tensor) else type(batch).__name__
            raise ValueError(
                f"ThroughputWindows counts tokens in batches of rows [rows, T+1], and got {found}; "
                "override count_tokens for other batches"
            )
        return (batch[:, 1:] != IGNORED).sum()

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self.meter = WindowMeter(*self._plan)
        if self._started is None:
            self._started = time.perf_counter()
        self.meter.begin(self._started)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._updates = self._first_update = trainer.global_step
        device = trainer.strategy.root_device
        self._tokens = torch.zeros((), dtype=torch.int64, device=device)
        self._counting = torch.cuda.Stream(device) if device.type == "cuda" else None

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._uncounted = batch if self.meter.warm and not self.meter.done else None

    @override
    def on_before_zero_grad(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        # The batch has been used, and the update that follows hides what would be a hundredth of a
        # small one. The other stream is waited for before anybody can write into the batch.
        if self._counting is not None and self._uncounted is not None:
            self._counting.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._counting):
                self._count()

    def _count(self) -> None:
        if self._uncounted is not None:
            assert self._tokens is not None
            self._tokens += self.count_tokens(self._uncounted)
            self._uncounted = None

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        meter = self.meter
        if meter.done:
            return
        if self._counting is not None:
            torch.cuda.current_stream().wait_stream(self._counting)
        self._count()  # where no gradients were zeroed
        if trainer.global_step == self._updates:
            return  # the batch is a part of an update
        if self._hold and self._updates == self._first_update:
            self._wait_for_go(trainer)
        self._updates = trainer.global_step
        if meter.add_update():
            self._end_stretch(trainer)

    def _wait_for_go(self, trainer: Trainer) -> None:
        assert self._started is not None
        folder, began = Path(self._folder or trainer.default_root_dir), _now(trainer)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "ready").touch()
        while not (folder / "go").exists():
            time.sleep(_LOOK_SECONDS)
        waited = time.perf_counter() - began
        self.meter.leave_out(waited)
        self._started += waited

    def _end_stretch(self, trainer: Trainer) -> None:
        meter, strategy, tokens = self.meter, trainer.strategy, self._tokens
        assert tokens is not None
        seconds = torch.tensor(
            meter.elapsed(_now(trainer)), dtype=torch.float64, device=tokens.device
        )
        # the slowest rank's time, and the tokens of all
        slowest = float(strategy.reduce(seconds, reduce_op="max"))
        total = int(strategy.reduce(tokens.clone(), reduce_op="sum"))
        if not meter.end(slowest, total):
            return
        tokens.zero_()
        if meter.done:
            self._write(trainer)
            if self._stop:
                # should_stop alone waits for these
                trainer.fit_loop.min_epochs = 0
                trainer.fit_loop.epoch_loop.min_steps = None
                trainer.should_stop = True
        meter.begin(_now(trainer))

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not self.meter.done:
            self.meter.pause(_now(trainer))

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not self.meter.done:
            self.meter.resume(_now(trainer))

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        meter = self.meter
        if self._tokens is None:
            return  # nothing was trained: the files of the run that is complete stay
        if not meter.done:
            rank_zero_warn(
                f"the run ended with {len(meter.windows)} of {self._plan[1]} throughput windows "
                "complete; give it more updates, or ask for fewer or shorter windows"
            )
        elif short := meter.summary()["short_windows"]:
            rank_zero_warn(
                f"throughput windows {short} took less than the {self._plan[2]} s asked for, since "
                "updates became faster after the calibration; timing.json says so, too"
            )
        self._write(trainer)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._tokens = self._started = self._counting = self._uncounted = None

    def _write(self, trainer: Trainer) -> None:
        if not trainer.is_global_zero:
            return
        assert self._started is not None
        folder = Path(self._folder or trainer.default_root_dir)
        write_csv(
            folder / "throughput.csv",
            ["updates", "tokens", "seconds", "tokens_per_second"],
            [[w.updates, w.tokens, w.seconds, w.tokens_per_second] for w in self.meter.windows],
        )
        elapsed = _now(trainer) - self._started
        write_json(folder / "timing.json", self.meter.summary() | {"elapsed_seconds": elapsed})


def _now(trainer: Trainer) -> float:
    """The time at which the device is done with what it was given."""
    device = trainer.strategy.root_device
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()
