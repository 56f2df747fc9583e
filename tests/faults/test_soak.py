"""The soak runs, and notices what is not flat."""

import json
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

SOAK: Any = runpy.run_path(
    str(Path(__file__).resolve().parents[2] / "benchmarks" / "soak.py"), run_name="soak"
)
FLAT = SOAK["Window"](
    update=100,
    seconds=60.0,
    checkpoint_seconds=1.0,
    tokens_per_second=1000.0,
    rss_bytes=500_000_000,
    open_files=8,
    threads=3,
    reserved_bytes=10_000_000,
    allocated_bytes=5_000_000,
)


def test_a_short_one_writes_its_windows_and_what_comes_of_them(tmp_path: Path) -> None:
    results = tmp_path / "soak"
    arguments = [str(results), "--updates", "120", "--window-seconds", "0.02"]
    code = SOAK["main"]([*arguments, "--validate-every", "20"])
    windows = pd.read_csv(results.with_suffix(".csv"))
    found = json.loads(results.with_suffix(".json").read_text())
    assert code == bool(found["problems"])  # so few updates may still be warming up
    assert len(windows) == found["windows"] >= 8
    assert windows["update"].is_monotonic_increasing
    assert windows["update"].iloc[-1] <= 120
    assert (windows["rss_bytes"] > 10_000_000).all()
    assert (windows["checkpoint_seconds"] < windows["seconds"]).all()


@pytest.mark.parametrize(
    ("name", "growth"),
    [("rss_bytes", 10**6), ("reserved_bytes", 10**5), ("open_files", 1), ("threads", 1)],
)
def test_what_grows_is_noticed(name: str, growth: int) -> None:
    start = getattr(FLAT, name)
    windows = [replace(FLAT, **{name: start + number * growth}) for number in range(20)]
    (problem,) = SOAK["judge"](windows, on_gpu=False)["problems"]
    assert problem.startswith(f"{name} grew")
    assert SOAK["judge"]([FLAT] * 20, on_gpu=True)["problems"] == []


def test_a_slow_window_is_noticed_on_a_gpu_and_not_while_warming_up() -> None:
    slow = replace(FLAT, tokens_per_second=970.0)
    (problem,) = SOAK["judge"]([*[FLAT] * 15, slow, *[FLAT] * 4], on_gpu=True)["problems"]
    assert problem == "a window's speed is 3.00% off; allowed: 2.00%"
    assert SOAK["judge"]([*[FLAT] * 15, slow, *[FLAT] * 4], on_gpu=False)["problems"] == []
    assert SOAK["judge"]([slow, *[FLAT] * 19], on_gpu=True)["problems"] == []


def test_too_few_windows_say_nothing() -> None:
    with pytest.raises(ValueError, match="there are 7 windows; at least 8"):
        SOAK["judge"]([FLAT] * 7, on_gpu=False)
