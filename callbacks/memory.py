"""Peak memory in each phase of a run."""

import math
import resource
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from tinyllm.files import write_json
from tinyllm.metrics import UpdateMetrics, shows_log_points

Peaks = dict[str, int]
"""Bytes by name."""

_LOG_POINT_SECONDS = 30.0  # a file is synced to the disk, which is too slow for every log point


class PhasePeaks:
    """Peaks of each phase, from a counter that only knows the peak since its last reset.

    Args:
        read: The counter's peaks.
        reset: Starts it anew.
        phase: The first one.

    Attributes:
        phase: The present one.
        of_phases: What was seen in each phase so far, all its times together.
    """

    def __init__(
        self, read: Callable[[], Mapping[str, int]], reset: Callable[[], None], phase: str
    ) -> None:
        self._read, self._reset = read, reset
        self.phase = phase
        self.of_phases: dict[str, Peaks] = {}
        reset()

    def look(self) -> Peaks:
        """Peaks of the present phase so far."""
        before = self.of_phases.setdefault(self.phase, {})
        for name, value in self._read().items():
            before[name] = max(value, before.get(name, 0))
        return before

    def enter(self, phase: str) -> None:
        """Ends the present phase and starts, or continues, another."""
        self.look()
        self._reset()
        self.phase = phase


class MemoryMonitor(Callback):
    """Writes the peak memory of each phase to ``memory.json``, and logs it at log points.

    Phases are ``startup`` (set-up up to and including the first update, which compiles or
    captures), ``training`` and ``validation``. On a CUDA GPU each has

    - ``peak_allocated_bytes``: tensors, as torch's caching allocator counts them;
    - ``peak_reserved_bytes``: what the allocator holds of the GPU's memory. This is the figure for
      backends that replay CUDA graphs: a graph keeps its memory in a private pool, which stays
      reserved, but what its replays write there is no allocation and is missing in the first
      figure. Neither holds the CUDA context or what libraries allocate by themselves.

    Both are counters on the host, so nothing waits for the GPU. They are reset where a phase
    begins, so ``torch.cuda.max_memory_allocated`` does not cover the whole run any more; the
    maximum over the phases is in the file, too. Everywhere, ``peak_rss_bytes`` is the process's
    resident set in main memory; the system cannot reset its peak, so a phase's is that of
    everything up to its end. With many ranks the file has the largest of each; loggers get rank
    0's own, of the present phase, in GiB.

    The file is written when training ends, and before that with each checkpoint, after each
    validation, at log points 30 seconds apart and at an error, so that a run which is killed leaves
    one, too. Until training has ended its ``complete`` is false and it has rank 0's own figures:
    nothing is exchanged in the middle of a run.

    Args:
        folder: Where the file goes; null takes the Trainer's ``default_root_dir``.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self._folder = folder
        self._peaks: PhasePeaks | None = None
        self._updates = 0
        self._begun = False
        self._interrupted = ""
        self._written = -math.inf

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            device = trainer.strategy.root_device
            self._peaks = PhasePeaks(lambda: _read(device), lambda: _reset(device), "startup")
            self._written = -math.inf
            self._begun = False

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._updates = trainer.global_step
        self._begun = True

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        assert self._peaks is not None
        logs = trainer._logger_connector.should_update_logs
        if not logs and self._peaks.phase == "training":
            return
        if trainer.global_step == self._updates:
            return  # the batch is a part of an update
        self._updates = trainer.global_step
        if logs and not shows_log_points(trainer.strategy):
            pl_module.log_dict(self._look(trainer))
        if self._peaks.phase == "startup":
            self._peaks.enter("training")

    def on_log_point(
        self, trainer: Trainer, pl_module: LightningModule, metrics: UpdateMetrics
    ) -> dict[str, float]:
        """The peaks so far, for tinyllm's strategies to log with the update's other values."""
        return self._look(trainer)

    def _look(self, trainer: Trainer) -> dict[str, float]:
        assert self._peaks is not None
        peaks = self._peaks.look()
        if time.monotonic() - self._written >= _LOG_POINT_SECONDS:
            self._write(trainer)
        return {
            f"memory/{name.replace('bytes', 'gib')}": value / 2**30 for name, value in peaks.items()
        }

    @override
    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._write(trainer)

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._write(trainer)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING and self._peaks is not None:
            self._interrupted = self._peaks.phase
            self._peaks.enter("validation")

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING and self._peaks is not None:
            self._peaks.enter(self._interrupted)
            self._write(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._peaks is not None
        self._peaks.look()
        self._write(trainer, _largest(trainer, self._peaks.of_phases))
        self._peaks = None  # a checkpoint that follows must not put this rank's figures there

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._peaks = None

    def _write(self, trainer: Trainer, of_all_ranks: Mapping[str, Peaks] | None = None) -> None:
        """Writes the peaks of all ranks, or this one's where training goes on."""
        # before training begins, an earlier run's file may lie there, and the run be refused
        if self._peaks is None or not self._begun or not trainer.is_global_zero:
            return
        self._written = time.monotonic()
        self._peaks.look()
        phases = self._peaks.of_phases if of_all_ranks is None else of_all_ranks
        names = next(iter(phases.values()))
        overall = {name: max(peaks[name] for peaks in phases.values()) for name in names}
        path = Path(self._folder or trainer.default_root_dir) / "memory.json"
        write_json(path, {**overall, "complete": of_all_ranks is not None, "phases": phases})


def _read(device: torch.device) -> Peaks:
    peaks = {}
    if device.type == "cuda":
        peaks["peak_allocated_bytes"] = torch.cuda.max_memory_allocated(device)
        peaks["peak_reserved_bytes"] = torch.cuda.max_memory_reserved(device)
    unit = 1 if sys.platform == "darwin" else 1024
    peaks["peak_rss_bytes"] = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peaks


def _reset(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.init()  # there are no counters before
        torch.cuda.reset_peak_memory_stats(device)


def _largest(trainer: Trainer, phases: Mapping[str, Peaks]) -> dict[str, Peaks]:
    """The largest of all ranks."""
    values = torch.tensor(
        [list(peaks.values()) for peaks in phases.values()], device=trainer.strategy.root_device
    )
    largest = trainer.strategy.reduce(values, reduce_op="max")
    assert isinstance(largest, torch.Tensor)
    rows = largest.tolist()
    return {
        phase: dict(zip(peaks, row, strict=True))
        for (phase, peaks), row in zip(phases.items(), rows, strict=True)
    }
