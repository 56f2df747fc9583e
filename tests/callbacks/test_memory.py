"""Peak memory by phase: exact with a fake counter, and real runs on the CPU."""

import json
import multiprocessing
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from callback_jobs import be_killed
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from simulation import Batches, batches, new_trainer, tiny
from torch.utils.data import DataLoader

from tinyllm.callbacks import MemoryMonitor, memory
from tinyllm.callbacks.memory import PhasePeaks
from tinyllm.logger import RunLogger
from tinyllm.strategies import SyncStrategy


class Counter:
    """Counts as torch's allocator does."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def allocate(self, count: int) -> None:
        self.now += count
        self.peak = max(self.now, self.peak)

    def read(self) -> dict[str, int]:
        return {"bytes": self.peak}

    def reset(self) -> None:
        self.peak = self.now


def test_each_phase_has_its_own_peak() -> None:
    counter = Counter()
    counter.allocate(1_000)
    counter.allocate(-1_000)  # before it all: not counted
    peaks = PhasePeaks(counter.read, counter.reset, "startup")
    counter.allocate(50)
    counter.allocate(-40)
    peaks.enter("training")
    counter.allocate(20)
    counter.allocate(-20)
    assert peaks.look() == {"bytes": 30}
    peaks.enter("validation")
    counter.allocate(5)
    counter.allocate(-5)
    peaks.enter("training")
    counter.allocate(1)
    counter.allocate(-1)
    assert peaks.look() == {"bytes": 30}  # of both its times
    assert peaks.of_phases == {
        "startup": {"bytes": 50},
        "training": {"bytes": 30},
        "validation": {"bytes": 15},
    }


def fit(folder: Path, *callbacks: Callback, **options: Any) -> Trainer:
    trainer = new_trainer(
        SyncStrategy(compile=False),
        callbacks=list(callbacks),
        default_root_dir=folder,
        **{"limit_val_batches": 1, "val_check_interval": 6, "num_sanity_val_steps": 1} | options,
    )
    data = batches(1)
    trainer.fit(tiny(), Batches(data), DataLoader(data[:1], batch_size=None))
    return trainer


def test_a_run_on_the_cpu_writes_its_resident_set(tmp_path: Path) -> None:
    fit(tmp_path, MemoryMonitor(), logger=RunLogger(tmp_path))
    written = json.loads((tmp_path / "memory.json").read_text())
    assert set(written["phases"]) == {"startup", "validation", "training"}
    values = [phase["peak_rss_bytes"] for phase in written["phases"].values()]
    assert written["peak_rss_bytes"] == max(values)
    assert all(50e6 < value < 50e9 for value in values)  # in bytes, and neither KiB nor pages
    header, *rows = (tmp_path / "metrics.csv").read_text().splitlines()
    assert "memory/peak_rss_gib" in header.split(",")
    logged = rows[0].split(",")[header.split(",").index("memory/peak_rss_gib")]
    assert float(logged) == pytest.approx(written["peak_rss_bytes"] / 2**30, rel=0.5)


def test_nothing_is_written_before_training_begins(tmp_path: Path) -> None:
    """An earlier run's file may lie there: a run that is refused leaves it, and a new one keeps it
    aside first."""
    (tmp_path / "memory.json").write_text("earlier")

    class Look(Callback):
        def on_train_start(self, *_: Any) -> None:
            assert (tmp_path / "memory.json").read_text() == "earlier"
            raise RuntimeError("seen")

    class Refuse(Callback):
        def on_sanity_check_end(self, *_: Any) -> None:
            raise RuntimeError("refused")

    with pytest.raises(RuntimeError, match="refused"):
        fit(tmp_path, MemoryMonitor(), Refuse())
    with pytest.raises(RuntimeError, match="seen"):
        fit(tmp_path, Look(), MemoryMonitor())
    assert (tmp_path / "memory.json").read_text() == "earlier"


def test_phases_change_where_they_should(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Startup ends with the first update, however many batches that has."""
    entered: list[tuple[str, int]] = []
    enter, trainers = PhasePeaks.enter, []

    def noting(self: PhasePeaks, phase: str) -> None:
        entered.append((phase, trainers[-1].global_step))
        enter(self, phase)

    class Remember(Callback):
        def on_fit_start(self, trainer: Trainer, *_: Any) -> None:
            trainers.append(trainer)

    monkeypatch.setattr(PhasePeaks, "enter", noting)
    fit(tmp_path, Remember(), MemoryMonitor(), accumulate_grad_batches=3, max_steps=4)
    assert entered == [
        *(("validation", 0), ("startup", 0)),  # the sanity check
        ("training", 1),
        *(("validation", 2), ("training", 2), ("validation", 4), ("training", 4)),
    ]


def stop_at(update: int, how: Any) -> Callback:
    class Stop(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == update:
                how()

    return Stop()


def fail() -> None:
    raise RuntimeError("stopped")


def test_a_run_that_fails_leaves_its_peaks(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="stopped"):
        fit(tmp_path, MemoryMonitor(), stop_at(3, fail), limit_val_batches=0)
    written = json.loads((tmp_path / "memory.json").read_text())
    assert set(written["phases"]) == {"startup", "training"}
    assert not written["complete"]


def test_a_killed_run_leaves_its_peaks(tmp_path: Path) -> None:
    """As of its last validation; nothing can be written at the kill itself."""
    # a new one: after a fork autograd may have no threads
    run = multiprocessing.get_context("spawn").Process(target=be_killed, args=(str(tmp_path),))
    run.start()
    run.join()
    assert run.exitcode == -signal.SIGKILL
    written = json.loads((tmp_path / "memory.json").read_text())
    assert set(written["phases"]) == {"startup", "validation", "training"}
    assert not written["complete"]


def test_a_checkpoint_after_training_leaves_the_complete_file(tmp_path: Path) -> None:
    fit(tmp_path, MemoryMonitor(), ModelCheckpoint(tmp_path), enable_checkpointing=True)
    assert json.loads((tmp_path / "memory.json").read_text())["complete"]


def test_log_points_write_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    trainers: list[Trainer] = []
    monkeypatch.setattr(memory, "write_json", lambda *_: written.append(trainers[-1].global_step))
    now = iter(range(0, 1_000, 11))  # seconds, one look at the clock after the other
    monkeypatch.setattr(memory, "time", SimpleNamespace(monotonic=lambda: next(now)))

    class Remember(Callback):
        def on_fit_start(self, trainer: Trainer, *_: Any) -> None:
            trainers.append(trainer)

    every = {"log_every_n_steps": 1, "limit_val_batches": 0}
    fit(tmp_path, Remember(), MemoryMonitor(), logger=RunLogger(tmp_path), **every)
    assert written == [0, 3, 6, 9, 12]  # within an update, before it is counted; and at the end


def test_counters_of_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    calls = []
    monkeypatch.setattr(torch.cuda, "init", lambda: calls.append("init"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda d: calls.append(str(d)))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda d: 5)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda d: 7)
    memory._reset(device)
    assert calls == ["init", "cuda:0"]
    peaks = memory._read(device)
    assert (peaks["peak_allocated_bytes"], peaks["peak_reserved_bytes"]) == (5, 7)
    assert peaks["peak_rss_bytes"] > 0


def test_validating_alone_writes_nothing(tmp_path: Path) -> None:
    trainer = new_trainer(
        SyncStrategy(compile=False),
        callbacks=[MemoryMonitor()],
        default_root_dir=tmp_path,
        limit_val_batches=1,
    )
    trainer.validate(tiny(), DataLoader(batches(1)[:1], batch_size=None), verbose=False)
    assert not (tmp_path / "memory.json").exists()
