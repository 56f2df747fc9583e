"""What the tests of this folder run on several ranks."""

import os
import signal
from pathlib import Path
from typing import Any

from classifier import classifier, examples
from lightning.pytorch import Callback, Trainer
from simulation import CONFIG, Batches, batches, new_trainer, tiny
from torch.utils.data import DataLoader

from tinyllm import TokenDataModule
from tinyllm.callbacks import ConsensusDistance, MemoryMonitor, ThroughputWindows, UpdateTrace
from tinyllm.strategies import DecentralizedStrategy, SyncStrategy


def observe(cache: str, folder: str, workers: int | None) -> dict[str, Any]:
    """Trains for 12 updates of 16 rows with every callback; the files are rank 0's."""
    path = Path(folder)
    windows = ThroughputWindows(
        path, warmup_updates=2, windows=2, updates_per_window=4, window_seconds=1e-9
    )
    strategy: Any = (
        SyncStrategy(compile=False)
        if workers is None
        else DecentralizedStrategy(workers, topology="ring", compile=False)
    )
    trainer = new_trainer(
        strategy,
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        callbacks=[
            windows,
            MemoryMonitor(path),
            UpdateTrace(path / "trace"),
            ConsensusDistance(path),
        ],
    )
    data = TokenDataModule(cache, CONFIG.context, 16, validation_batch_size=3)
    trainer.fit(tiny(), data)
    return {"windows": [(w.updates, w.tokens, w.seconds) for w in windows.meter.windows]}


def calibrate(cache: str, folder: str) -> int | None:
    """Updates per window, after a calibration by the clock."""
    windows = ThroughputWindows(folder, warmup_updates=1, windows=1, window_seconds=0.1, stop=True)
    trainer = new_trainer(
        SyncStrategy(compile=False),
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        callbacks=[windows],
        max_steps=100_000,
    )
    trainer.fit(tiny(), TokenDataModule(cache, CONFIG.context, 16))
    assert windows.meter.done
    return windows.meter.updates_per_window


class KillItself(Callback):
    """Kills its process after seven updates."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 7:
            os.kill(os.getpid(), signal.SIGKILL)


def be_killed(folder: str) -> None:
    """Trains with a validation every six updates, and is killed after the seventh."""
    trainer = new_trainer(
        SyncStrategy(compile=False),
        callbacks=[MemoryMonitor(folder), KillItself()],
        val_check_interval=6,
        limit_val_batches=1,
    )
    data = batches(1)
    trainer.fit(tiny(), Batches(data), DataLoader(data[:1], batch_size=None))


def observe_classifier(folder: str) -> dict[str, float]:
    """What is logged for a module that knows nothing of workers."""
    trainer = new_trainer(
        DecentralizedStrategy(2, compile=False),
        devices=2,
        max_steps=4,
        callbacks=[ConsensusDistance(folder)],
    )
    loader = Batches(
        [(x[trainer.global_rank :: 2], y[trainer.global_rank :: 2]) for x, y in examples(10)]
    )
    trainer.fit(classifier(), loader)
    return {k: float(v) for k, v in trainer.callback_metrics.items()}


def trace_under_ddp(folder: str) -> None:
    """Lightning's own DDP, which a trace refuses."""
    trainer = new_trainer("ddp", devices=2, callbacks=[UpdateTrace(folder)])
    trainer.fit(tiny(), Batches([]))
