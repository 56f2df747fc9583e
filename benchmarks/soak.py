"""Does a long run stay as it was in its first minutes: memory, open files, threads, speed?

    python benchmarks/soak.py RESULTS --updates 20000
    python benchmarks/soak.py RESULTS --device gpu --minutes 20 --window-seconds 60

Trains four packed workers of a tiny model on the CPU, or eight of the 20m recipe (8 x 16 rows of
1,024 tokens) on a GPU, through ``Trainer.fit`` with a validation, a log, callbacks and a checkpoint
in every window. Writes a line for each window to RESULTS.csv and what comes of them to
RESULTS.json. Exits 1 if something is not flat: see ``Limits``.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from setting import random_cache, versions

from tinyllm import LlamaConfig, TinyLLM, TokenDataModule
from tinyllm.callbacks import ConsensusDistance, MemoryMonitor
from tinyllm.files import write_csv, write_json
from tinyllm.logger import RunLogger
from tinyllm.schedule import WarmupCosine
from tinyllm.strategies import DecentralizedStrategy

TINY = LlamaConfig(layers=2, width=32, heads=2, ffn_width=64, vocab_size=256, context=32)


@dataclass(frozen=True)
class Limits:
    """What counts as flat, from the second quarter of the windows to the last one, by medians.

    Attributes:
        memory_growth: Of the resident set and, on a GPU, of what torch has reserved there.
        handle_growth: Of open files, and of threads.
        speed_spread: On a GPU, the largest and the smallest window's distance from the median. A
            CPU is seldom alone.
    """

    memory_growth: float = 0.01
    handle_growth: float = 0.0
    speed_spread: float = 0.02


@dataclass(frozen=True)
class Window:
    """What was seen at the end of one."""

    update: int
    seconds: float
    checkpoint_seconds: float
    tokens_per_second: float
    rss_bytes: int
    open_files: int
    threads: int
    reserved_bytes: int
    allocated_bytes: int


class Watch(Callback):
    """Saves a checkpoint and looks at the process, window after window.

    Args:
        window_seconds: Of each, its checkpoint included.
        total_seconds: After which the run ends; None leaves that to the Trainer.
        update_tokens: In one update.
        folder: For the checkpoint.
    """

    def __init__(
        self, window_seconds: float, total_seconds: float | None, update_tokens: int, folder: Path
    ) -> None:
        self.windows: list[Window] = []
        self._length = window_seconds
        self._total = total_seconds
        self._tokens = update_tokens
        self._path = folder / "last.ckpt"
        self._begun = self._start = 0.0
        self._first_update = 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == 1:  # compiled or captured
            self._begin(trainer)
            self._begun = self._start
        if time.perf_counter() - self._start < self._length:
            return
        saving = _now(trainer)
        trainer.save_checkpoint(self._path, weights_only=False)
        now = _now(trainer)
        seconds, updates = now - self._start, trainer.global_step - self._first_update
        self.windows.append(
            Window(
                update=trainer.global_step,
                seconds=seconds,
                checkpoint_seconds=now - saving,
                tokens_per_second=updates * self._tokens / seconds,
                **seen(),
            )
        )
        line = self.windows[-1]
        print(
            f"update {line.update:>8,}  {line.tokens_per_second:>12,.0f} tokens/s  "
            f"{line.rss_bytes / 2**20:>8,.1f} MiB  {line.open_files} files  {line.threads} threads"
            f"  {line.reserved_bytes / 2**30:.2f} GiB reserved",
            flush=True,
        )
        if self._total is not None and now - self._begun >= self._total:
            trainer.should_stop = True
        self._begin(trainer)

    def _begin(self, trainer: Trainer) -> None:
        self._start, self._first_update = _now(trainer), trainer.global_step


def _now(trainer: Trainer) -> float:
    if trainer.strategy.root_device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def seen() -> dict[str, int]:
    """Memory, open files and threads of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    on_gpu = torch.cuda.is_available()
    return {
        "rss_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "open_files": len(list(Path("/proc/self/fd").iterdir())),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "reserved_bytes": torch.cuda.memory_reserved() if on_gpu else 0,
        "allocated_bytes": torch.cuda.memory_allocated() if on_gpu else 0,
    }


def judge(windows: Sequence[Window], on_gpu: bool, limits: Limits | None = None) -> dict[str, Any]:
    """Growth from the second quarter to the last, and ``problems``: what is not flat.

    Raises:
        ValueError: If there are fewer than eight windows.
    """
    limits = limits or Limits()
    quarter = len(windows) // 4
    if quarter < 2:
        raise ValueError(f"there are {len(windows)} windows; at least 8 are needed to compare them")
    early, late = windows[quarter : 2 * quarter], windows[-quarter:]
    flat: dict[str, dict[str, float]] = {}
    problems = []
    for name, unit, allowed in (
        ("rss_bytes", "MiB", limits.memory_growth),
        ("reserved_bytes", "MiB", limits.memory_growth),
        ("open_files", "", limits.handle_growth),
        ("threads", "", limits.handle_growth),
    ):
        before, after = (median(getattr(w, name) for w in part) for part in (early, late))
        growth = after / before - 1 if before else 0.0
        scale = 2**20 if unit else 1
        label = f"{name.removesuffix('_bytes')}, {unit}" if unit else name
        flat[label] = {"early": before / scale, "late": after / scale, "growth": growth}
        if growth > allowed:
            problems.append(f"{name} grew by {growth:.2%}; allowed: {allowed:.2%}")
    speeds = [window.tokens_per_second for window in windows[quarter:]]
    middle = median(speeds)
    spread = max(max(speeds) / middle - 1, 1 - min(speeds) / middle)
    if on_gpu and spread > limits.speed_spread:
        problems.append(f"a window's speed is {spread:.2%} off; allowed: {limits.speed_spread:.2%}")
    return {
        "updates": windows[-1].update,
        "windows": len(windows),
        "flat": flat,
        "speed": {"median tokens per second": middle, "largest distance from it": spread},
        "checkpoint_seconds": median(window.checkpoint_seconds for window in windows),
        "limits": asdict(limits),
        "problems": problems,
    }


def train(options: argparse.Namespace, folder: Path) -> list[Window]:
    """The run itself."""
    seed_everything(0, verbose=False)
    on_gpu = options.device == "gpu"
    vocab, context, rows = (32_000, 1024, 128) if on_gpu else (TINY.vocab_size, TINY.context, 16)
    cache = random_cache(folder, 40_000_000 if on_gpu else 400_000, vocab)
    total_seconds = None if options.minutes is None else 60 * options.minutes
    watch = Watch(options.window_seconds, total_seconds, rows * context, folder)
    trainer = Trainer(
        accelerator=options.device,
        devices=1,
        precision="bf16-mixed" if on_gpu else "32-true",
        strategy=DecentralizedStrategy(8 if on_gpu else 4, backend=options.backend, compile=on_gpu),
        max_steps=options.updates or 10**9,
        val_check_interval=options.validate_every,
        limit_val_batches=4,
        check_val_every_n_epoch=None,
        gradient_clip_val=1.0,
        log_every_n_steps=10,
        logger=RunLogger(folder),
        # its checkpoint is the last thing in a window
        callbacks=[ConsensusDistance(folder), MemoryMonitor(folder), watch],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    schedule = WarmupCosine(updates=options.updates or 100_000)
    size: dict[str, Any] = {"preset": "20m"} if on_gpu else {"config": TINY}
    data = TokenDataModule(str(cache), context=context, batch_size=rows)
    trainer.fit(TinyLLM(**size, schedule=schedule), data)
    return watch.windows


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, help="Path without suffix.")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--backend", choices=("auto", "native", "gh200"), default="auto")
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--updates", type=int)
    length.add_argument("--minutes", type=float)
    parser.add_argument("--window-seconds", type=float, default=5.0)
    parser.add_argument("--validate-every", type=int, default=500, metavar="UPDATES")
    options = parser.parse_args(args)
    with tempfile.TemporaryDirectory() as folder:
        windows = train(options, Path(folder))
    names = [field.name for field in fields(Window)]
    rows = [[getattr(window, name) for name in names] for window in windows]
    write_csv(options.results.with_suffix(".csv"), names, rows)
    found = judge(windows, options.device == "gpu") | {
        **versions(),
        "device": options.device,
        "window_seconds": options.window_seconds,
    }
    write_json(options.results.with_suffix(".json"), found)
    print(json.dumps(found, indent=2))
    return 1 if found["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
