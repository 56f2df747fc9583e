"""How many tokens a second does a backend train, inside ``Trainer.fit``?

Usage: python benchmarks/fit_throughput.py RESULTS.json BACKEND[,BACKEND] [CASE ...]

Backends are native and gh200. Without names, all cases on one GPU; a case on two GPUs is measured
alone.

Complete updates: loading, transfer, clipping, AdamW, mixing, finite checks and logging are all on.
Tokens are random. Each case warms up for 20 updates (compilation among them), then runs five
windows of at least one second; the figure is the median window.
"""

import json
import platform
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import Strategy

from tinyllm import TinyLLM, TokenDataModule
from tinyllm.callbacks import MemoryMonitor, ThroughputWindows
from tinyllm.data.prepare import prepare
from tinyllm.logger import RunLogger
from tinyllm.progress import RunProgressBar
from tinyllm.strategies import DecentralizedStrategy, SyncStrategy


@dataclass(frozen=True)
class Case:
    """A workload: global batch in rows, how it is trained, and on how many GPUs."""

    preset: str
    rows: int
    context: int
    strategy: Callable[..., Strategy]
    devices: int = 1


CASES = {
    "20m-sync-production": Case("20m", 128, 1024, SyncStrategy),
    "20m-packed4-production": Case("20m", 128, 1024, partial(DecentralizedStrategy, 4)),
    "20m-packed8-production": Case("20m", 128, 1024, partial(DecentralizedStrategy, 8)),
    "20m-sync-b4-c512": Case("20m", 4, 512, SyncStrategy),
    "20m-packed4-b8-c512": Case("20m", 32, 512, partial(DecentralizedStrategy, 4)),
    "20m-packed8-b8-c1024": Case("20m", 64, 1024, partial(DecentralizedStrategy, 8)),
    "50m-sync-production": Case("50m", 32, 1024, SyncStrategy),
    "90m-sync-production": Case("90m", 32, 1024, SyncStrategy),
    # the load of one GPU's production cases on each of two
    "20m-sync-x2": Case("20m", 256, 1024, SyncStrategy, devices=2),
    "20m-packed4-x2": Case("20m", 256, 1024, partial(DecentralizedStrategy, 8), devices=2),
}


def measure(case: Case, backend: str, cache: Path, folder: Path) -> dict[str, Any]:
    """Tokens per second of one case, with what it took."""
    seed_everything(0, verbose=False)
    windows = ThroughputWindows(folder, warmup_updates=20, windows=5, window_seconds=1.0, stop=True)
    trainer = Trainer(
        accelerator="gpu",
        devices=case.devices,
        precision="bf16-mixed",
        strategy=case.strategy(backend=backend),
        max_steps=1_000_000,
        limit_val_batches=0,
        gradient_clip_val=1.0,
        log_every_n_steps=50,  # Lightning's default
        logger=RunLogger(folder),
        callbacks=[windows, MemoryMonitor(folder), RunProgressBar()],
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    module: LightningModule = TinyLLM(preset=case.preset)
    data = TokenDataModule(str(cache), context=case.context, batch_size=case.rows)
    trainer.fit(module, data)
    if not trainer.is_global_zero:
        sys.exit()  # a rank that Lightning's launcher has started
    timing = json.loads((folder / "timing.json").read_text())
    memory = json.loads((folder / "memory.json").read_text())
    return {
        "tokens_per_second": timing["median_tokens_per_second"],
        "windows_tokens_per_second": [w.tokens_per_second for w in windows.meter.windows],
        **{name: timing[name] for name in ("updates_per_window", "startup_seconds")},
        "peak_allocated_gib": memory["peak_allocated_bytes"] / 2**30,
        "peak_reserved_gib": memory["peak_reserved_bytes"] / 2**30,
    }


def main() -> None:
    one_gpu = [name for name, case in CASES.items() if case.devices == 1]
    if len(sys.argv) < 3 or not set(backends := sys.argv[2].split(",")) <= {"native", "gh200"}:
        sys.exit(__doc__)
    results_file, chosen = Path(sys.argv[1]), sys.argv[3:] or one_gpu
    if len(chosen) * len(backends) > 1 and not set(chosen) <= set(one_gpu):
        sys.exit("a case on several GPUs is measured alone: its other ranks run this script again")
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
        for name, backend in product(chosen, backends):
            place = folder / name / backend
            result = measure(CASES[name], backend, folder / "cache", place)
            results["cases"].setdefault(name, {})[backend] = result
            print(f"\n{name} {backend}: {result['tokens_per_second'] / 1e6:.3f} M tokens/s")
            results_file.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
