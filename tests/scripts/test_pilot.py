"""The pilot: once with the real trainer, and on all its protocols with a pretended one."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from fake_checkout import PILOT, make_cache, make_checkout, toy_settings

from tinyllm.acceptance import PROTOCOL_1, Protocol, report
from tinyllm.acceptance.accept import main as accept
from tinyllm.acceptance.configure import Settings
from tinyllm.acceptance.report import OUTPUTS

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "pilot.py"
TABLES = ("performance.csv", "numerical.csv", "convergence.csv", "validation-curves.csv")


def run(folder: Path, protocol: Protocol, settings: Settings, **options: Any) -> int:
    """With the pretended trainer."""
    checkout = folder / "checkout"
    if not checkout.exists():
        make_checkout(checkout)
    code: int = PILOT["run"](folder / "root", protocol, settings, checkout=checkout, **options)
    return code


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return toy_settings(make_cache(tmp_path / "cache"))


@pytest.fixture
def plain_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pilot draws after each step, which takes seconds; how is tested with the report."""
    monkeypatch.setattr(report, "qualification_figure", lambda *_: None)
    monkeypatch.setattr(report, "svg", lambda _: "<svg/>")


def test_the_real_thing_on_the_cpu(tmp_path: Path) -> None:
    """Native against native, the pass and its exit code, and all files."""
    root = tmp_path / "root"
    command = [sys.executable, str(SCRIPT), "--root", str(root), "--workloads", "1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "verdict: pass" in done.stdout
    (place,) = (root / "qualifications").iterdir()
    assert {path.name for path in place.iterdir()} == {*TABLES, *OUTPUTS, "protocol.json"}
    rows = pd.read_csv(place / "numerical.csv")
    assert (rows[["gradients", "parameters", "updates"]] == 0).all(axis=None)  # one thread
    assert f"`{place.name}`" in (place / "qualification.md").read_text()
    assert accept([str(root)]) == 0


def test_partial_results_are_there_as_it_goes(tmp_path: Path, settings: Settings) -> None:
    """A candidate that cannot be trained leaves what was measured before."""
    output = tmp_path / "output"
    protocol = replace(PILOT["toy_protocol"](), repeats=1)
    code = run(tmp_path, protocol, settings, candidate={"backend": "broken"}, output=output)
    assert code == 2
    page = (output / "qualification.md").read_text()
    assert page.startswith("# Qualification: incomplete (PARTIAL)")
    assert len(pd.read_csv(output / "convergence.csv")) == len(protocol.convergence_runs())


KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from fake_checkout import PILOT, toy_settings
root, output, checkout, cache = map(Path, sys.argv[2:])
protocol = PILOT["toy_protocol"](repeats=3)
PILOT["run"](root, protocol, toy_settings(cache), output=output, checkout=checkout)
"""


def test_a_time_limit_leaves_what_was_measured(tmp_path: Path, settings: Settings) -> None:
    folders = [tmp_path / "root", tmp_path / "output", make_checkout(tmp_path / "checkout")]
    helper = Path(__file__).parents[1] / "acceptance"
    command = [sys.executable, "-c", KILLED, str(helper), *map(str, folders), settings.cache]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if "repeat2" in line:
            break
    process.kill()
    process.communicate()
    rows = pd.read_csv(tmp_path / "output" / "performance.csv")
    assert len(rows) >= 2 * 2
    page = (tmp_path / "output" / "qualification.md").read_text()
    assert "| toy-packed4 | 1.000 | - | - | incomplete |" in page


@pytest.mark.usefixtures("plain_figure")
@pytest.mark.parametrize("candidate", ["native", "gh200"])
def test_the_protocol_for_a_gpu(tmp_path: Path, candidate: str) -> None:
    protocol = PILOT["gpu_protocol"](6, 3)
    settings = Settings(cache=str(make_cache(tmp_path / "cache")))
    options: dict[str, Any] = {"candidate": {"backend": candidate}, "converge": False}
    output = tmp_path / "output"
    assert run(tmp_path, protocol, settings, **options, output=output, parallel=6) == 2
    assert {path.name for path in output.iterdir()} == {*TABLES, *OUTPUTS, "protocol.json"}
    judged = json.loads((output / "qualification.json").read_text())
    assert judged["missing"]["performance"] == judged["missing"]["numerical"] == []
    assert len(judged["missing"]["convergence"]) == 3
    assert len(pd.read_csv(output / "performance.csv")) == 6 * 3 * 2
    ratios = judged["gates"]["performance"]["tables"]["ratios"]
    assert [row["ratio"] for row in ratios] == pytest.approx([1.0] * 18)
    given = json.loads(next(tmp_path.glob("root/results/*numerical*/*/given.json")).read_text())
    assert given["trainer"]["precision"] == "bf16-mixed"
    strategy = json.loads(next(tmp_path.glob("root/candidates/*/candidate.json")).read_text())
    assert strategy["details"]["strategy"] == {"backend": candidate}


def test_a_gpu_pilot_is_version_1_for_a_shorter_time() -> None:
    protocol = PILOT["gpu_protocol"](25, 3)
    production = {w.id for w in PROTOCOL_1.workloads if w.kind == "production"}
    assert production <= {w.id for w in protocol.workloads[:12]}
    for mode in ("sync", "packed4", "packed8"):
        small = [w for w in protocol.workloads if w.kind == "small-batch" and w.mode == mode]
        assert len(small) == 6
        for axis in ("preset", "local_batch", "context", "clip"):
            whole = {getattr(w, axis) for w in PROTOCOL_1.workloads if w.kind == "small-batch"}
            assert {getattr(w, axis) for w in small} == whole
    shorter = ("version", "workloads", "recipes", "warmup_updates", "windows", "window_seconds")
    same = {name: getattr(PROTOCOL_1, name) for name in (*shorter, "numerical_updates")}
    assert replace(protocol, **same) == PROTOCOL_1


@pytest.mark.usefixtures("plain_figure")
def test_two_pilots_share_a_folder(tmp_path: Path) -> None:
    """One for each GPU, with workloads of its own; the later one's report has both."""
    protocol = PILOT["gpu_protocol"](4, 1)
    settings = Settings(cache=str(make_cache(tmp_path / "cache")))
    for select in (["*-production"], ["*-b*"]):
        run(tmp_path, protocol, settings, select=select, converge=False)
    (place,) = (tmp_path / "root" / "qualifications").iterdir()
    judged = json.loads((place / "qualification.json").read_text())
    assert judged["missing"]["performance"] == judged["missing"]["numerical"] == []


def test_tokens_are_made_once(tmp_path: Path) -> None:
    cache = PILOT["make_tokens"](tmp_path, 300, 20_000)
    before = (cache / "manifest.json").read_bytes()
    content = json.loads(before)
    assert sum(split["tokens"] for split in content["splits"].values()) == 20_000
    os.utime(cache / "manifest.json", (0, 0))
    assert PILOT["make_tokens"](tmp_path, 300, 20_000) == cache
    assert (cache / "manifest.json").stat().st_mtime == 0
