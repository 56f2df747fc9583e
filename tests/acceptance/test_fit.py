"""A training in a process of its own: what it is started with, and how it ends."""

import os
import signal
import time
from pathlib import Path

import pytest
from fake_checkout import make_checkout

from tinyllm.acceptance.fit import Fit
from tinyllm.acceptance.runs import RunError

CODE = """
import json, os, signal, sys, time
from pathlib import Path
import beside

def main():
    given = json.loads(Path("given.json").read_text())
    Path("seen.json").write_text(json.dumps({"argv": sys.argv[1:], "beside": beside.__file__}))
    signal.signal(signal.SIGTERM, lambda *_: (Path("saved").touch(), sys.exit(143)))
    time.sleep(given["seconds"])
    print("the last line")
    sys.exit(given["code"])
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package whose trainer sleeps, and a module that only PYTHONPATH leads to."""
    checkout = make_checkout(tmp_path / "source")
    (checkout / "tinyllm" / "cli.py").write_text(CODE)
    extra = tmp_path / "extra"
    (extra / "tinyllm").mkdir(parents=True)
    (extra / "tinyllm" / "__init__.py").write_text("raise RuntimeError('not the frozen one')")
    (extra / "beside.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "extra")
    return checkout


def test_the_frozen_source_comes_before_the_environments_paths(
    source: Path, tmp_path: Path
) -> None:
    with Fit(source, {"seconds": 0, "code": 0}, tmp_path / "run") as run:
        run.wait()
    seen = (tmp_path / "run" / "seen.json").read_text()
    assert '"argv": ["fit", "--config", "given.json"]' in seen
    assert str(tmp_path / "extra" / "beside.py") in seen  # though the run is in another folder


@pytest.mark.parametrize(
    ("code", "kind"), [(1, "failed"), (2, "failed"), (130, "interrupted"), (143, "interrupted")]
)
def test_how_it_ends_decides_what_kind_of_failure_it_is(
    source: Path, tmp_path: Path, code: int, kind: str
) -> None:
    run = Fit(source, {"seconds": 0, "code": code}, tmp_path / "run")
    with pytest.raises(RunError, match=f"exit code {code}: the last line") as raised:
        run.wait()
    assert raised.value.kind == kind


def test_a_second_start_in_a_folder_goes_on(source: Path, tmp_path: Path) -> None:
    for starts in (1, 2):
        run = Fit(source, {"seconds": 0, "code": 0}, tmp_path / "run")
        run.wait()
        assert run.starts == starts
    assert '"--ckpt_path", "last"]' in (tmp_path / "run" / "seen.json").read_text()


def test_it_ends_with_its_block_and_may_save(source: Path, tmp_path: Path) -> None:
    with Fit(source, {"seconds": 60, "code": 0}, tmp_path / "run") as run:
        while not (tmp_path / "run" / "seen.json").exists():
            time.sleep(0.02)
        time.sleep(0.2)
        os.kill(run._process.pid, signal.SIGSTOP)  # as after its windows
    assert run._process.returncode == 143
    assert (tmp_path / "run" / "saved").exists()


def test_one_that_ends_before_it_is_ready_has_failed(source: Path, tmp_path: Path) -> None:
    with (
        Fit(source, {"seconds": 0, "code": 0}, tmp_path / "run") as run,
        pytest.raises(RunError, match="run ended before its first update"),
    ):
        run.wait_until_ready()
