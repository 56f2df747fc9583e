"""A long run is divided into its parts, and its losses are told."""

import json
import runpy
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinyllm.data.prepare import prepare

LONG_RUN: Any = runpy.run_path(
    str(Path(__file__).resolve().parents[2] / "benchmarks" / "long_run.py"), run_name="long_run"
)
SMALL = [
    *("--model.preset", "null", "--model.config.layers", "1", "--model.config.width", "16"),
    *("--model.config.heads", "2", "--model.config.ffn_width", "16"),
    *("--model.config.vocab_size", "64", "--model.config.context", "8"),
    *("--data.context", "8", "--data.batch_size", "4", "--data.residency", "host"),
    *("--trainer.accelerator", "cpu", "--trainer.precision", "32-true"),
    *("--trainer.strategy.compile", "false", "--trainer.log_every_n_steps", "2"),
]


@pytest.mark.parametrize("cold", [False, True])
def test_a_short_one_adds_up(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    cold: bool,
) -> None:
    runs: list[tuple[int, bool]] = []  # updates, and whether it has caches of its own
    run_process = subprocess.run

    def noting(command: list[str], **kwargs: Any) -> Any:
        env = kwargs.get("env", {})
        own = {"TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"} & env.keys()
        steps = [value for flag, value in pairwise(command) if flag == "--trainer.max_steps"]
        if steps:  # a training
            runs.append((int(steps[-1]), len(own) == 2))
        return run_process(command, **kwargs)

    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(subprocess, "run", noting)
    ids = np.random.default_rng(0).integers(3, 64, 4_000, "<u2")
    ids[19::20] = 2
    ids.tofile(tmp_path / "ids.u16")
    cache, results = tmp_path / "cache", tmp_path / "results.json"
    prepare(cache, "tokens", str(tmp_path / "ids.u16"), vocab_size=64, boundary_id=2)
    capsys.readouterr()
    LONG_RUN["main"](
        [
            *(*map(str, (cache, results)), "--backends", "native", "--updates", "12"),
            *(["--cold"] if cold else []),
            *("--", *SMALL),
        ]
    )
    assert runs == ([(12, True)] if cold else [(4, False), (12, False)])
    found = json.loads(results.read_text())
    run = found["cases"]["seed 0"]["native"]
    parts = {name: value for name, value in run.items() if name.endswith("_seconds")}
    wall = parts.pop("wall_seconds")
    assert sum(parts.values()) == pytest.approx(wall, abs=1e-3)
    assert min(parts.values()) > 0
    assert run["targets"] == 12 * 4 * 8
    assert len(run["validation_losses"]) == 6
    assert run["final_validation_loss"] == run["validation_losses"][-1]
    assert len(run["last_train_losses"]) == 6
    assert capsys.readouterr().out.startswith(f"native, seed 0: {wall:.1f} s (imports ")


@pytest.mark.parametrize(
    ("more", "message"),
    [([], "tinyllm prepare --output"), (["--updates", "10"], "give a multiple of 6")],
)
def test_what_cannot_be_run_is_an_error_before_it_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        LONG_RUN["main"]([str(tmp_path / "none"), str(tmp_path / "results.json"), *more])
    assert message in capsys.readouterr().err
