"""Throughput windows: exact values by a fake clock, and real runs on the CPU."""

import csv
import json
import threading
import time
import warnings
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from simulation import CONFIG, Batches, new_trainer, tiny
from torch import Tensor
from torch.utils.data import DataLoader

from tinyllm.callbacks import ThroughputWindows
from tinyllm.callbacks.window_meter import Window, WindowMeter
from tinyllm.model import IGNORED
from tinyllm.strategies import DecentralizedStrategy, SyncStrategy

T = CONFIG.context


class Run:
    """Drives a meter: updates of given seconds and 10 tokens, and nothing takes time beside."""

    def __init__(self, meter: WindowMeter) -> None:
        self.meter, self.now, self.tokens = meter, 100.0, 0
        meter.begin(self.now)

    def update(self, seconds: float) -> None:
        self.now += seconds
        self.tokens += 10 if self.meter.warm else 0
        if self.meter.add_update() and self.meter.end(self.meter.elapsed(self.now), self.tokens):
            self.tokens = 0
            self.meter.begin(self.now)


def test_windows_of_the_meter_are_exact() -> None:
    run = Run(WindowMeter(warmup_updates=2, windows=3, window_seconds=1.0))
    run.update(8.0)
    assert not run.meter.warm
    run.update(0.5)
    # calibration: looked at after 1, 2, 4 updates, which have taken 0.25, 0.5 and 1 s
    for _ in range(4):
        run.update(0.25)
    # 4 a second with a margin of a tenth
    assert run.meter.updates_per_window == 5
    for seconds in (0.25, 0.5, 0.125):
        for _ in range(5):
            assert not run.meter.done
            run.update(seconds)
    assert run.meter.windows == [
        Window(updates=5, tokens=50, seconds=1.25),
        Window(updates=5, tokens=50, seconds=2.5),
        Window(updates=5, tokens=50, seconds=0.625),
    ]
    assert run.meter.summary() == {
        "complete": True,
        "startup_seconds": 8.5,
        "calibration_seconds": 1.0,
        "training_seconds": 4.375,
        "validation_seconds": 0.0,
        "warmup_updates": 2,
        "updates_per_window": 5,
        "window_seconds": 1.0,
        "short_windows": [2],
        "median_tokens_per_second": 40.0,
    }


def test_a_slow_update_is_a_calibration_by_itself() -> None:
    run = Run(WindowMeter(warmup_updates=1, windows=1, window_seconds=1.0))
    for _ in range(2):
        run.update(3.0)
    assert run.meter.updates_per_window == 1
    run.update(3.0)
    assert run.meter.windows == [Window(1, 10, 3.0)]


def test_given_updates_need_no_calibration() -> None:
    meter = WindowMeter(warmup_updates=1, windows=2, window_seconds=1.0, updates_per_window=3)
    run = Run(meter)
    for _ in range(7):
        run.update(0.5)
    assert meter.windows == [Window(3, 30, 1.5)] * 2
    assert meter.calibration_seconds == 0


def test_pauses_are_in_no_window() -> None:
    meter = WindowMeter(warmup_updates=1, windows=1, window_seconds=1.0, updates_per_window=2)
    run = Run(meter)
    run.update(1.0)
    run.update(2.0)
    meter.pause(run.now)
    run.now += 64.0
    meter.resume(run.now)
    meter.resume(run.now + 1)  # was not stopped
    run.update(2.0)
    assert meter.windows == [Window(2, 20, 4.0)]
    assert meter.summary()["validation_seconds"] == 64.0


def test_an_unfinished_meter_says_so() -> None:
    run = Run(WindowMeter(warmup_updates=3, windows=5, window_seconds=1.0))
    run.update(1.0)
    summary = run.meter.summary()
    assert (summary["complete"], summary["startup_seconds"]) == (False, None)
    assert summary["median_tokens_per_second"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warmup_updates": 0}, "warmup_updates is 0; it must be at least 1"),
        ({"windows": 0}, "windows is 0; it must be at least 1"),
        ({"window_seconds": 0.0}, "window_seconds is 0.0; it must be above 0"),
        ({"window_seconds": float("nan")}, "window_seconds is nan; it must be above 0"),
        ({"updates_per_window": 0}, "updates_per_window is 0; it must be at least 1"),
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ThroughputWindows(**options)


# In real runs


def rows(count: int, padded: int = 0) -> Tensor:
    """Token rows, of which the last few are padding."""
    tokens = torch.randint(CONFIG.vocab_size, (count, T + 1))
    tokens[count - padded :] = IGNORED
    return tokens


def read(folder: Path) -> tuple[list[dict[str, float]], dict[str, Any]]:
    with (folder / "throughput.csv").open(newline="") as file:
        windows = [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]
    return windows, json.loads((folder / "timing.json").read_text())


def run(
    windows: ThroughputWindows, batches: list[Tensor], strategy: Any = None, **options: Any
) -> Trainer:
    callbacks = [windows, *options.pop("callbacks", [])]
    trainer = new_trainer(
        strategy or SyncStrategy(compile=False),
        callbacks=callbacks,
        **{"max_steps": -1, "max_epochs": 10_000} | options,
    )
    trainer.fit(tiny(), Batches(batches), options.pop("val", None))
    return trainer


def test_tokens_a_second_times_seconds_is_tokens(tmp_path: Path) -> None:
    """On a real run, whose wall clock also bounds the figures."""
    started = time.perf_counter()
    windows = ThroughputWindows(
        tmp_path, warmup_updates=3, windows=3, window_seconds=0.1, stop=True
    )
    trainer = run(windows, [rows(4)] * 10)
    wall = time.perf_counter() - started
    table, timing = read(tmp_path)
    assert list(table[0]) == ["updates", "tokens", "seconds", "tokens_per_second"]
    assert len(table) == 3
    for row in table:
        assert row["tokens_per_second"] * row["seconds"] == pytest.approx(row["tokens"])
        assert row["tokens"] == row["updates"] * 4 * T
        assert row["updates"] == timing["updates_per_window"]
    assert timing["complete"]
    assert timing["training_seconds"] == pytest.approx(sum(row["seconds"] for row in table))
    parts = ("startup_seconds", "calibration_seconds", "training_seconds")
    assert sum(timing[part] for part in parts) < timing["elapsed_seconds"] < wall
    rates = sorted(row["tokens_per_second"] for row in table)
    assert timing["median_tokens_per_second"] == rates[1]
    # warm-up, calibration (a power of two) and windows, and the run ended there
    calibration = trainer.global_step - 3 - 3 * timing["updates_per_window"]
    assert calibration > 0
    assert calibration & (calibration - 1) == 0
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    "strategy",
    [
        lambda: SyncStrategy(compile=False, micro_batch_size=2),
        lambda: DecentralizedStrategy(4, compile=False),
        lambda: SingleDeviceStrategy(torch.device("cpu")),
    ],
)
@pytest.mark.parametrize("k", [1, 2])
def test_tokens_are_those_of_the_global_batch(tmp_path: Path, strategy: Any, k: int) -> None:
    """PITFALL: not per worker or micro-batch, no padding, all accumulated batches."""
    windows = ThroughputWindows(
        tmp_path, warmup_updates=1, windows=2, updates_per_window=3, window_seconds=1e-9
    )
    run(
        windows,
        [rows(8, padded=3)] * (7 * k),
        strategy(),
        accumulate_grad_batches=k,
        max_steps=7,
        max_epochs=-1,
    )
    assert [(w.updates, w.tokens) for w in windows.meter.windows] == [(3, 3 * k * 5 * T)] * 2
    assert read(tmp_path)[1]["short_windows"] == []


class SlowValidation(Callback):
    def on_validation_batch_end(self, *_: Any) -> None:
        time.sleep(1)


def test_validation_is_in_no_window(tmp_path: Path) -> None:
    windows = ThroughputWindows(
        tmp_path, warmup_updates=1, windows=2, updates_per_window=4, window_seconds=1e-9
    )
    trainer = new_trainer(
        SyncStrategy(compile=False),
        callbacks=[windows, SlowValidation()],
        max_steps=9,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        val_check_interval=3,
    )
    trainer.fit(tiny(), Batches([rows(4)] * 9), DataLoader([rows(4)], batch_size=None))
    table, timing = read(tmp_path)
    assert all(row["seconds"] < 1 for row in table)
    assert timing["validation_seconds"] > 2  # after updates 3 and 6; the third is after the end
    assert timing["elapsed_seconds"] > 3


def test_a_wait_for_others_is_in_no_figure(tmp_path: Path) -> None:
    """It comes after the first update, whatever the warm-up."""
    windows = ThroughputWindows(
        tmp_path / "run",
        warmup_updates=3,
        windows=1,
        updates_per_window=4,
        window_seconds=1e-9,
        stop=True,
        hold=True,
    )
    steps: list[int] = []

    class Count(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            steps.append(trainer.global_step)

    def let_go() -> None:
        while not (tmp_path / "run" / "ready").exists():
            time.sleep(0.01)
        time.sleep(2.0)
        held.extend(steps)
        (tmp_path / "run" / "go").touch()

    held: list[int] = []
    other = threading.Thread(target=let_go, daemon=True)
    other.start()
    run(windows, [rows(4)] * 10, callbacks=[Count()])
    other.join()
    assert held == []  # the hook of the second callback comes after the first one's wait
    assert steps == list(range(1, 8))
    _, timing = read(tmp_path / "run")
    assert timing["complete"]
    assert timing["startup_seconds"] < timing["elapsed_seconds"] < 2.0


def test_two_interleaved_runs_differ_by_less_than_their_spread(tmp_path: Path) -> None:
    rates: dict[str, list[float]] = {"a": [], "b": []}
    for repeat in range(7):
        for name in ("ab", "ba")[repeat % 2]:
            folder = tmp_path / f"{name}{repeat}"
            windows = ThroughputWindows(
                folder, warmup_updates=3, windows=3, updates_per_window=20, stop=True
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the windows are short
                run(windows, [rows(4)] * 10)
            rates[name].append(read(folder)[1]["median_tokens_per_second"])
    spreads = [max(values) - min(values) for values in rates.values()]
    # by chance one run in a thousand is beyond one spread
    assert abs(median(rates["a"]) - median(rates["b"])) < 2 * max(spreads)


@pytest.mark.parametrize("least", [{"min_epochs": 500}, {"min_steps": 5_000}])
def test_stop_ends_a_run_whatever_its_least_length(tmp_path: Path, least: dict[str, Any]) -> None:
    windows = ThroughputWindows(
        tmp_path, warmup_updates=1, windows=1, updates_per_window=4, window_seconds=1e-9, stop=True
    )
    trainer = run(windows, [rows(4)] * 100, **least)
    assert trainer.global_step == 5


def test_without_stop_the_run_goes_on(tmp_path: Path) -> None:
    windows = ThroughputWindows(
        tmp_path, warmup_updates=1, windows=1, updates_per_window=2, window_seconds=1e-9
    )
    trainer = run(windows, [rows(4)] * 10, max_epochs=1)
    assert trainer.global_step == 10
    assert len(read(tmp_path)[0]) == 1


def test_a_short_run_says_that_windows_are_missing(tmp_path: Path) -> None:
    windows = ThroughputWindows(warmup_updates=1, updates_per_window=3, window_seconds=1e-9)
    with pytest.warns(UserWarning, match="2 of 5 throughput windows complete"):
        run(windows, [rows(4)] * 8, max_epochs=1, default_root_dir=tmp_path)
    table, timing = read(tmp_path)
    assert len(table) == 2
    assert not timing["complete"]


def test_short_windows_are_named(tmp_path: Path) -> None:
    windows = ThroughputWindows(
        tmp_path, warmup_updates=1, windows=2, updates_per_window=1, window_seconds=100.0
    )
    with pytest.warns(UserWarning, match=r"\[0, 1\] took less than the 100.0 s"):
        run(windows, [rows(4)] * 3, max_epochs=1)
    assert read(tmp_path)[1]["short_windows"] == [0, 1]


def test_a_fit_with_nothing_to_do_leaves_the_files(tmp_path: Path) -> None:
    options = {"warmup_updates": 1, "windows": 1, "updates_per_window": 2, "window_seconds": 1e-9}
    path = tmp_path / "done.ckpt"
    trainer = run(ThroughputWindows(tmp_path, **options), [rows(4)] * 3, max_epochs=1)
    trainer.save_checkpoint(path)
    before = [file.read_text() for file in sorted(tmp_path.glob("t*.*"))]
    assert len(before) == 2
    again = new_trainer(
        SyncStrategy(compile=False),
        callbacks=[ThroughputWindows(tmp_path, **options)],
        max_epochs=1,
        max_steps=-1,
    )
    again.fit(tiny(), Batches([rows(4)] * 3), ckpt_path=path)
    assert again.global_step == 3
    assert [file.read_text() for file in sorted(tmp_path.glob("t*.*"))] == before


def test_a_second_fit_starts_afresh(tmp_path: Path) -> None:
    windows = ThroughputWindows(
        tmp_path, warmup_updates=1, windows=1, updates_per_window=2, window_seconds=1e-9
    )
    run(windows, [rows(4)] * 3, max_epochs=1)
    run(windows, [rows(8)] * 3, max_epochs=1)
    assert [w.tokens for w in windows.meter.windows] == [2 * 8 * T]


def test_other_batches_need_a_count_of_their_own() -> None:
    with pytest.raises(ValueError, match=r"got \[3\]; override count_tokens"):
        ThroughputWindows().count_tokens(torch.zeros(3))


@pytest.fixture
def synchronized(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Updates after which the callback waited for the device or read from it."""
    seen: list[int] = []

    def note(trainer: Trainer) -> float:
        seen.append(trainer.global_step)
        return time.perf_counter()

    def refuse(*_: Any) -> Any:
        raise AssertionError("read from the device")

    monkeypatch.setattr("tinyllm.callbacks.throughput._now", note)
    count = ThroughputWindows.count_tokens

    def counting(self: ThroughputWindows, batch: Tensor) -> Tensor:
        with monkeypatch.context() as patch:
            for name in ("item", "tolist", "cpu", "__int__", "__float__", "__bool__"):
                patch.setattr(Tensor, name, refuse)
            return count(self, batch)

    monkeypatch.setattr(ThroughputWindows, "count_tokens", counting)
    return seen


def test_waits_for_the_device_at_edges_only(tmp_path: Path, synchronized: list[int]) -> None:
    windows = ThroughputWindows(
        tmp_path, warmup_updates=3, windows=2, updates_per_window=10, window_seconds=1e-9
    )
    run(windows, [rows(4)] * 40, max_epochs=1)
    assert sorted(set(synchronized)) == [3, 13, 23, 40]  # the last writes elapsed_seconds


def seconds_per_call(callback: Callback, trainer: Any, module: LightningModule) -> float:
    """Of on_train_batch_end, the fastest of several stretches."""
    batch, fastest = rows(4), float("inf")
    for _ in range(20):
        started = time.perf_counter()
        for number in range(100):
            trainer.global_step += 1
            callback.on_train_batch_end(trainer, module, None, batch, number)
        fastest = min(fastest, (time.perf_counter() - started) / 100)
    return fastest


class IdleTrainer:
    """As much of a Trainer as a callback asks when there is nothing to do."""

    global_step = 0

    def __init__(self) -> None:
        self.strategy = SingleDeviceStrategy(torch.device("cpu"))


def test_a_call_costs_little() -> None:
    """An update takes 1.3 ms at least, and half a percent of that is 6.5 µs on the GPU.

    The host has time to spare, so these are generous: 60 µs within a window, 3 µs afterwards.
    """
    module, trainer = tiny(), IdleTrainer()
    windows = ThroughputWindows(windows=1, warmup_updates=1, updates_per_window=10**9)
    windows.on_train_start(trainer, module)  # type: ignore[arg-type]
    windows.meter.add_update()
    windows.meter.end(1.0, 0)
    assert seconds_per_call(windows, trainer, module) < 60e-6
    windows.meter.end(1.0, 0)
    assert windows.meter.done
    assert seconds_per_call(windows, trainer, module) < 3e-6
