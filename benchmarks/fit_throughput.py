"""How many tokens a second does a backend train, inside ``Trainer.fit`` and in a bare loop?

    python benchmarks/fit_throughput.py RESULTS.json --cases 20m-sync-production 20m-sync-b4-c512
    python benchmarks/fit_throughput.py RESULTS.json --backends gh200 --residency host device

Complete updates: loading, transfer, clipping, AdamW, mixing, finite checks and logging are all on.
Tokens are random. Each case warms up for 20 updates (compilation among them), then runs five
windows of at least one second; the figure is the median window. On one GPU the same engine then
makes as many updates again of its last batch, without the Trainer and its loader. A case on two
GPUs is measured alone.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import Strategy
from setting import random_cache, versions

from tinyllm import TinyLLM, TokenDataModule
from tinyllm.callbacks import MemoryMonitor, ThroughputWindows
from tinyllm.logger import RunLogger
from tinyllm.progress import RunProgressBar
from tinyllm.strategies import DecentralizedStrategy, SyncStrategy
from tinyllm.strategies.engine import GroupHyperparameters


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


class BareLoop(Callback):
    """Once training has ended, times the engine alone, in stretches of a window's updates.

    Args:
        windows: Those of the training.
    """

    def __init__(self, windows: ThroughputWindows) -> None:
        self._windows = windows
        self._batch: torch.Tensor | None = None
        self.seconds: list[float] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        self._batch = batch

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy: Any = trainer.strategy
        if strategy.ranks.world_size > 1:
            return
        engine = strategy.engine
        groups = [
            GroupHyperparameters.of(group, engine.arena.weights.dtype)
            for group in trainer.optimizers[0].param_groups
        ]
        for _ in self._windows.meter.windows:
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(self._windows.meter.windows[0].updates):
                engine.accumulate(self._batch)
                engine.finish_gradients(False)
                engine.update(groups, 1.0, strategy._combine())
            torch.cuda.synchronize()
            self.seconds.append(time.perf_counter() - start)


def measure(case: Case, backend: str, residency: Any, cache: Path, folder: Path) -> dict[str, Any]:
    """Tokens per second of one case, with what it took."""
    seed_everything(0, verbose=False)
    windows = ThroughputWindows(folder, warmup_updates=20, windows=5, window_seconds=1.0, stop=True)
    loop = BareLoop(windows)
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
        callbacks=[windows, MemoryMonitor(folder), RunProgressBar(), loop],
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    module: LightningModule = TinyLLM(preset=case.preset)
    data = TokenDataModule(
        str(cache), context=case.context, batch_size=case.rows, residency=residency
    )
    trainer.fit(module, data)
    if not trainer.is_global_zero:
        sys.exit()  # a rank that Lightning's launcher has started
    timing = json.loads((folder / "timing.json").read_text())
    memory = json.loads((folder / "memory.json").read_text())
    rate = timing["median_tokens_per_second"]
    bare = [windows.meter.windows[0].tokens / seconds for seconds in loop.seconds]
    return {
        "tokens_per_second": rate,
        "bare_loop_tokens_per_second": median(bare) if bare else None,
        "share_of_bare_loop": rate / median(bare) if bare else None,
        "windows_tokens_per_second": [w.tokens_per_second for w in windows.meter.windows],
        **{name: timing[name] for name in ("updates_per_window", "startup_seconds")},
        "peak_allocated_gib": memory["peak_allocated_bytes"] / 2**30,
        "peak_reserved_gib": memory["peak_reserved_bytes"] / 2**30,
    }


def main() -> None:
    one_gpu = [name for name, case in CASES.items() if case.devices == 1]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=one_gpu, metavar="CASE")
    parser.add_argument(
        "--backends", nargs="+", choices=("native", "gh200"), default=["native", "gh200"]
    )
    parser.add_argument(
        "--residency", nargs="+", choices=("auto", "host", "device"), default=["auto"]
    )
    options = parser.parse_args()
    runs = list(product(options.cases, options.backends, options.residency))
    if len(runs) > 1 and not set(options.cases) <= set(one_gpu):
        parser.error(
            "a case on several GPUs is measured alone, since its other ranks run this again"
        )
    results: dict[str, Any] = {
        **versions(),
        "method": __doc__,
        "cases": {},
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cache = random_cache(folder, 40_000_000)
        for name, backend, residency in runs:
            place = folder / name / backend / residency
            result = measure(CASES[name], backend, residency, cache, place)
            label = backend if residency == "auto" else f"{backend}, tokens on the {residency}"
            results["cases"].setdefault(name, {})[label] = result
            share = result["share_of_bare_loop"]
            print(
                f"\n{name} {label}: {result['tokens_per_second'] / 1e6:.3f} M tokens/s"
                + (f", {share:.3f} of the bare loop" if share else "")
                + f", {result['peak_reserved_gib']:.2f} GiB reserved"
            )
            options.results.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
