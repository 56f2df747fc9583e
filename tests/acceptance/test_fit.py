"""A training in a process of its own: what it is started with, and how it ends."""

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_checkout import make_checkout

from tinyllm.acceptance.fit import Fit
from tinyllm.acceptance.launcher import Launcher, Launchers
from tinyllm.acceptance.runs import RunError

CODE = """
import json, os, signal, sys, time
from pathlib import Path
import beside

def main():
    given = json.loads(Path("given.json").read_text())
    seen = {"program": sys.argv[0], "argv": sys.argv[1:], "beside": beside.__file__}
    signal.signal(signal.SIGTERM, lambda *_: (Path("saved").touch(), sys.exit(143)))
    Path("seen.json").write_text(json.dumps(seen))
    time.sleep(given["seconds"])
    print("the last line")
    sys.exit(given["code"])
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    """Of a package whose trainer sleeps, and of a module that only PYTHONPATH leads to."""
    checkout = make_checkout(tmp_path / "source")
    (checkout / "tinyllm" / "cli.py").write_text(CODE)
    extra = tmp_path / "extra"
    (extra / "tinyllm").mkdir(parents=True)
    (extra / "tinyllm" / "__init__.py").write_text("raise RuntimeError('not the frozen one')")
    (extra / "beside.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "extra")
    with Launchers() as launchers:
        yield launchers.of(checkout)


def test_the_frozen_source_comes_before_the_environments_paths(
    source: Launcher, tmp_path: Path
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
    source: Launcher, tmp_path: Path, code: int, kind: str
) -> None:
    run = Fit(source, {"seconds": 0, "code": code}, tmp_path / "run")
    with pytest.raises(RunError, match=f"exit code {code}: the last line") as raised:
        run.wait()
    assert raised.value.kind == kind


def test_a_second_start_in_a_folder_goes_on(source: Launcher, tmp_path: Path) -> None:
    for starts in (1, 2):
        run = Fit(source, {"seconds": 0, "code": 0}, tmp_path / "run")
        run.wait()
        assert run.starts == starts
    assert '"--ckpt_path", "last"]' in (tmp_path / "run" / "seen.json").read_text()


def test_it_ends_with_its_block_and_may_save(source: Launcher, tmp_path: Path) -> None:
    with Fit(source, {"seconds": 60, "code": 0}, tmp_path / "run") as run:
        while not (tmp_path / "run" / "seen.json").exists():
            time.sleep(0.02)
        time.sleep(0.2)
        run._process.send_signal(signal.SIGSTOP)  # as after its windows
    assert run._process.returncode == 143
    assert (tmp_path / "run" / "saved").exists()


def test_one_that_ends_before_it_is_ready_has_failed(source: Launcher, tmp_path: Path) -> None:
    with (
        Fit(source, {"seconds": 0, "code": 0}, tmp_path / "run") as run,
        pytest.raises(RunError, match="run ended before its first update"),
    ):
        run.wait_until_ready()


def test_a_signal_for_all_reaches_trainings_and_leaves_the_server(
    source: Launcher, tmp_path: Path
) -> None:
    run = Fit(source, {"seconds": 60, "code": 0}, tmp_path / "run")
    while not (tmp_path / "run" / "seen.json").exists():
        time.sleep(0.02)
    time.sleep(0.2)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
        source._server.send_signal(number)
    run._process.send_signal(signal.SIGUSR2)  # Slurm's, for the job alone
    run._process.send_signal(signal.SIGTERM)
    with pytest.raises(RunError, match="exit code 143"):
        run.wait()
    Fit(source, {"seconds": 0, "code": 0}, tmp_path / "next").wait()


@pytest.mark.parametrize(
    ("sent", "kind"), [(signal.SIGKILL, "interrupted"), (signal.SIGABRT, "failed")]
)
def test_a_training_that_is_killed_has_ended(
    source: Launcher, tmp_path: Path, sent: signal.Signals, kind: str
) -> None:
    run = Fit(source, {"seconds": 60, "code": 0}, tmp_path / "run")
    run._process.send_signal(sent)
    with pytest.raises(RunError, match=f"exit code -{int(sent)}") as raised:
        run.wait()
    assert raised.value.kind == kind


def test_trainings_end_with_a_server_that_dies(source: Launcher, tmp_path: Path) -> None:
    run = Fit(source, {"seconds": 60, "code": 0}, tmp_path / "run")
    while not (tmp_path / "run" / "seen.json").exists():
        time.sleep(0.02)
    source._server.kill()
    with pytest.raises(RunError, match="exit code -9"):
        run.wait()


def test_a_server_that_was_killed_is_replaced(source: Launcher, tmp_path: Path) -> None:
    with Launchers() as launchers:
        first = launchers.of(tmp_path / "source")
        first._server.kill()
        first._server.wait()
        with pytest.raises(BrokenPipeError, match="the process that starts trainings was killed"):
            Fit(first, {"seconds": 0, "code": 0}, tmp_path / "lost")
        second = launchers.of(tmp_path / "source")
        assert second is not first
        Fit(second, {"seconds": 0, "code": 0}, tmp_path / "run").wait()
        second._server.kill()


def test_a_keeper_that_dies_early_is_not_waited_for(source: Launcher, tmp_path: Path) -> None:
    """Before the training has said who it is."""
    source._server.send_signal(signal.SIGSTOP)
    run = Fit(source, {"seconds": 60, "code": 0}, tmp_path / "run")
    gone = subprocess.Popen(["true"])
    gone.wait()
    (tmp_path / "run" / ".keeper").write_text(str(gone.pid))
    with pytest.raises(RunError, match="exit code -9"):
        run.wait()
    source._server.send_signal(signal.SIGCONT)


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
@pytest.mark.parametrize(("answer", "program"), [(3, "tinyllm"), (0, "-c")])
def test_where_cuda_is_initialized_trainings_are_not_forked(
    source: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: int, program: str
) -> None:
    """3 says that it is not."""
    (tmp_path / "cuda.c").write_text(f"int cuCtxGetCurrent(void **p) {{ return {answer}; }}")
    library = ["-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", tmp_path / "cuda.c"]
    subprocess.run(["cc", *library], check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    with Launchers() as launchers:
        launcher = launchers.of(tmp_path / "source")
        Fit(launcher, {"seconds": 0, "code": 0}, tmp_path / "run").wait()
    assert json.loads((tmp_path / "run" / "seen.json").read_text())["program"] == program
