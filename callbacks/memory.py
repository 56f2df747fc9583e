"""Peak memory in each phase of a run."""

import resource
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from tinyllm.callbacks.files import write_json

Peaks = dict[str, int]
"""Bytes by name."""


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

    Args:
        folder: Where the file goes; null takes the Trainer's ``default_root_dir``.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self._folder = folder
        self._peaks: PhasePeaks | None = None
        self._updates = 0
        self._interrupted = ""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            device = trainer.strategy.root_device
            self._peaks = PhasePeaks(lambda: _read(device), lambda: _reset(device), "startup")

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._updates = trainer.global_step

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
        if logs:
            peaks = self._peaks.look()
            pl_module.log_dict(
                {
                    f"memory/{name.replace('bytes', 'gib')}": value / 2**30
                    for name, value in peaks.items()
                }
            )
        if self._peaks.phase == "startup":
            self._peaks.enter("training")

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING and self._peaks is not None:
            self._interrupted = self._peaks.phase
            self._peaks.enter("validation")

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING and self._peaks is not None:
            self._peaks.enter(self._interrupted)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._peaks is not None
        self._peaks.look()
        phases = _largest(trainer, self._peaks.of_phases)
        if trainer.is_global_zero:
            names = next(iter(phases.values()))
            overall = {name: max(peaks[name] for peaks in phases.values()) for name in names}
            path = Path(self._folder or trainer.default_root_dir) / "memory.json"
            write_json(path, {**overall, "phases": phases})

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._peaks = None


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
