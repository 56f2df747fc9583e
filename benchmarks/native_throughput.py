"""How many tokens a second does the native backend train, inside ``Trainer.fit``?

Usage: python benchmarks/native_throughput.py RESULTS.json [CASE ...]

Complete updates: loading, transfer, clipping, AdamW, mixing, finite checks and logging are all on.
Tokens are random. Each case warms up for 20 updates (compilation among them), then runs five
windows of at least one second; the figure is the median window.
"""

import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import Strategy

from tinyllm import TinyLLM, TokenDataModule
from tinyllm.data.prepare import prepare
from tinyllm.logger import RunLogger
from tinyllm.progress import RunProgressBar
from tinyllm.strategies import DecentralizedStrategy, SyncStrategy

WARMUP_UPDATES = 20
WINDOWS = 5
WINDOW_SECONDS = 1.0


@dataclass(frozen=True)
class Case:
    """A workload: global batch in rows, and how it is trained."""

    preset: str
    rows: int
    context: int
    strategy: Callable[[], Strategy]


CASES = {
    "20m-sync-production": Case("20m", 128, 1024, SyncStrategy),
    "20m-packed4-production": Case("20m", 128, 1024, lambda: DecentralizedStrategy(4)),
    "20m-packed8-production": Case("20m", 128, 1024, lambda: DecentralizedStrategy(8)),
    "20m-sync-b4-c512": Case("20m", 4, 512, SyncStrategy),
    "20m-packed4-b8-c512": Case("20m", 32, 512, lambda: DecentralizedStrategy(4)),
    "20m-packed8-b8-c1024": Case("20m", 64, 1024, lambda: DecentralizedStrategy(8)),
    "50m-sync-production": Case("50m", 32, 1024, SyncStrategy),
    "90m-sync-production": Case("90m", 32, 1024, SyncStrategy),
}


class Windows(Callback):
    """Times windows of equal update counts; waits for the device at their edges only.

    The first stretch after warm-up lasts until its seconds are over, and its number of updates is
    that of every window, which it does not count as.
    """

    def __init__(self) -> None:
        self.updates_per_window: int | None = None
        self.seconds: list[float] = []
        self.first_update_seconds = 0.0
        self._created = time.perf_counter()
        self._updates = -WARMUP_UPDATES
        self._started = 0.0

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._updates += 1
        if self._updates == 1 - WARMUP_UPDATES:
            self.first_update_seconds = self._elapsed_since(self._created)
        elif self._updates == 0:
            self._restart()
        elif self._updates > 0 and self.updates_per_window is None:
            if self._elapsed_since(self._started) >= WINDOW_SECONDS:
                self.updates_per_window = self._updates
                self._restart()
        elif self._updates == self.updates_per_window:
            self.seconds.append(self._elapsed_since(self._started))
            trainer.should_stop = len(self.seconds) >= WINDOWS
            self._restart()

    def _elapsed_since(self, start: float) -> float:
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def _restart(self) -> None:
        self._updates = 0
        self._started = time.perf_counter()


def measure(case: Case, cache: Path, folder: Path) -> dict[str, Any]:
    """Tokens per second of one case, with what it took."""
    seed_everything(0, verbose=False)
    torch.cuda.reset_peak_memory_stats()
    windows = Windows()
    trainer = Trainer(
        accelerator="gpu",
        devices=1,
        precision="bf16-mixed",
        strategy=case.strategy(),
        max_steps=1_000_000,
        min_epochs=0,
        limit_val_batches=0,
        gradient_clip_val=1.0,
        log_every_n_steps=10,
        logger=RunLogger(folder),
        callbacks=[windows, RunProgressBar()],
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    module: LightningModule = TinyLLM(preset=case.preset)
    data = TokenDataModule(str(cache), context=case.context, batch_size=case.rows)
    trainer.fit(module, data)
    assert windows.updates_per_window is not None
    tokens = windows.updates_per_window * case.rows * case.context
    rates = [tokens / seconds for seconds in windows.seconds]
    return {
        "tokens_per_second": statistics.median(rates),
        "windows_tokens_per_second": rates,
        "updates_per_window": windows.updates_per_window,
        "first_update_seconds": windows.first_update_seconds,
        "peak_allocated_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def main() -> None:
    results_file, chosen = Path(sys.argv[1]), sys.argv[2:] or list(CASES)
    results: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "method": __doc__,
        "cases": {},
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.random.default_rng(0).integers(0, 32_000, 40_000_000, dtype=np.uint16).tofile(
            folder / "random.bin"
        )
        prepare(
            folder / "cache", "tokens", str(folder / "random.bin"), vocab_size=32_000, boundary_id=2
        )
        for name in chosen:
            results["cases"][name] = measure(CASES[name], folder / "cache", folder / name)
            print(f"\n{name}: {results['cases'][name]['tokens_per_second'] / 1e6:.3f} M tokens/s")
            results_file.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
