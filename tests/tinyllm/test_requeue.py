"""Under Slurm: a signal at any moment, a checkpoint after the update, one requeue, the same run."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import free_port
from run_files import Run, assert_same_run, load

HERE = Path(__file__).parent
JOB = {
    **{"SLURM_JOB_ID": "17", "SLURM_JOB_NAME": "tinyllm", "SLURM_NODELIST": "localhost"},
    **{"SLURM_NTASKS": "1", "SLURM_NNODES": "1", "SLURM_NTASKS_PER_NODE": "1"},
    **{"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"},
}
STOP = ["--trainer.callbacks", "stopping.SignalAfter", "--trainer.callbacks.name", "SIGUSR1"]


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """A job of Slurm's; returns what its scontrol was called with so far."""
    program = tmp_path / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/called\nexit ${{SCONTROL_FAILS:-0}}\n')
    program.chmod(0o755)
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    called = tmp_path / "called"
    return lambda: called.read_text().splitlines() if called.exists() else []


def test_a_signal_saves_requeues_once_and_the_next_start_goes_on(
    fit: Run, finished: Path, scontrol: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = fit("run", *STOP, "--trainer.callbacks.updates", 6, code=138)
    assert "the state after 6 updates is saved in run/checkpoints/last.ckpt" in done.err
    assert "job 17 is queued again" in done.err
    assert "Traceback" not in done.err
    assert scontrol() == ["requeue 17"]
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    fit("run")
    assert scontrol() == ["requeue 17"]
    assert_same_run("run", finished)


def test_a_signal_while_validating(
    fit: Run, finished: Path, scontrol: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--trainer.callbacks.updates", 8, "--trainer.callbacks.validating", "true"]
    fit("run", *STOP, *options, code=138)
    assert scontrol() == ["requeue 17"]
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    fit("run")
    assert_same_run("run", finished)


def test_a_signal_before_the_first_update(fit: Run, finished: Path, scontrol: Any) -> None:
    """In the validation that Lightning tries out first: there is nothing to save."""
    options = ["--trainer.callbacks.updates", 0, "--trainer.callbacks.validating", "true"]
    sanity = ["--trainer.num_sanity_val_steps", 4, "--data.validation_batch_size", 2]
    done = fit("run", *STOP, *options, *sanity, code=138)
    assert "is saved" not in done.err.replace("this job is saved", "")
    assert scontrol() == ["requeue 17"]
    assert not Path("run/checkpoints").exists()


def test_sigterm_alone_saves_and_requeues_nothing(fit: Run, scontrol: Any) -> None:
    """It is also what scancel sends."""
    options = ["--trainer.callbacks", "stopping.SignalAfter", "--trainer.callbacks.updates", 6]
    done = fit("run", *options, code=143)
    assert "the state after 6 updates is saved" in done.err
    assert scontrol() == []


def test_both_signals_requeue_once(fit: Run, scontrol: Any) -> None:
    first = ["--trainer.callbacks+=stopping.SignalAfter", "--trainer.callbacks.updates=6"]
    second = [*first, "--trainer.callbacks.name=SIGUSR1"]
    fit("run", *first, *second, code=138)
    assert scontrol() == ["requeue 17"]


def test_another_signal_may_be_chosen(fit: Run, scontrol: Any) -> None:
    options = ["--trainer.callbacks", "stopping.SignalAfter", "--trainer.callbacks.updates", 6]
    plugin = ["--trainer.plugins=lightning.pytorch.plugins.environments.SLURMEnvironment"]
    done = fit("run", *options, *plugin, "--trainer.plugins.requeue_signal=SIGTERM", code=143)
    assert "job 17 is queued again" in done.err
    assert scontrol() == ["requeue 17"]


def test_a_task_of_an_array_requeues_itself(
    fit: Run, scontrol: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "12")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    fit("run", *STOP, "--trainer.callbacks.updates", 6, code=138)
    assert scontrol() == ["requeue 12_3"]


@pytest.mark.parametrize("missing", [True, False])
def test_a_requeue_that_fails_says_how_to_go_on(
    fit: Run, scontrol: Any, monkeypatch: pytest.MonkeyPatch, missing: bool
) -> None:
    if missing:
        Path("bin/scontrol").unlink()
    monkeypatch.setenv("SCONTROL_FAILS", "1")
    done = fit("run", *STOP, "--trainer.callbacks.updates", 6, code=138)
    assert "`scontrol requeue 17` failed" in done.err
    assert "--ckpt_path last" in done.err
    assert load(Path("run/checkpoints/last.ckpt"))["global_step"] == 6


@pytest.mark.parametrize(
    "environment", [{"SLURM_JOB_ID": "18", "SLURM_RESTART_COUNT": "1"}, {}], ids=["other", "first"]
)
def test_another_jobs_checkpoint_is_left_alone(
    fit: Run, scontrol: Any, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    """Only a job that was started again goes on by itself, and only with its own state."""
    fit("run", *STOP, "--trainer.callbacks.updates", 6, code=138)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    done = fit("run", "--trainer.max_steps", 2)
    assert "it is kept in run/earlier-1" in done.err
    assert load(Path("run/checkpoints/last.ckpt"))["global_step"] == 2


# In processes of their own, at moments that nobody chose


def start(folder: str, *options: Any, **environment: str) -> subprocess.Popen[str]:
    command = "from tinyllm.cli import main; main()"
    arguments = ["fit", "--trainer.default_root_dir", folder, *map(str, options)]
    return subprocess.Popen(
        [sys.executable, "-c", command, *arguments],
        env=os.environ | environment | {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )


def rows(folder: str) -> int:
    try:
        return len(Path(folder, "metrics.csv").read_text().splitlines()) - 1
    except FileNotFoundError:
        return 0


def wait_for_rows(process: subprocess.Popen[str], folder: str, count: int) -> None:
    deadline = time.monotonic() + 600
    while rows(folder) < count:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.005)


def ended(process: subprocess.Popen[str], code: int) -> str:
    error = process.communicate(timeout=600)[1]
    assert process.returncode == code, error
    return error


LONG = ["--trainer.max_steps", 600, "--trainer.val_check_interval", 40]


def test_signals_at_random_moments(fit: Run, tiny: Path, scontrol: Any) -> None:
    """Stopped twice, each time somewhere in the next third: in an update, a validation, a save."""
    options = ["--config", tiny, *LONG]
    for restart, seen in enumerate((3, 200)):
        process = start("run", *options, SLURM_RESTART_COUNT=str(restart))
        wait_for_rows(process, "run", seen)
        time.sleep(random.uniform(0, 0.3))
        process.send_signal(signal.SIGUSR1)
        assert "job 17 is queued again" in ended(process, 138)
    assert scontrol() == ["requeue 17"] * 2
    assert 3 < load(Path("run/checkpoints/last.ckpt"))["global_step"] < 600
    ended(start("run", *options, SLURM_RESTART_COUNT="2"), 0)
    fit("whole", *LONG)
    assert_same_run("run", Path("whole"))


def test_two_ranks_of_which_one_is_told(
    fit: Run, tiny: Path, scontrol: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = (
        "{class_path: tinyllm.strategies.DecentralizedStrategy, "
        "init_args: {workers: 2, compile: false}}"
    )
    options = ["--trainer.max_steps", 120, "--trainer.strategy", strategy]
    shared = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(free_port())}
    ranks = [
        start("run", "--config", tiny, *options, "--trainer.devices", 2, **(shared | place))
        for place in ({"SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in "01")
    ]
    wait_for_rows(ranks[0], "run", 5)
    ranks[1].send_signal(signal.SIGUSR1)
    for process in ranks:
        ended(process, 138)
    assert scontrol() == ["requeue 17"]
    assert 5 < load(Path("run/checkpoints/last.ckpt"))["global_step"] < 120
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    fit("run", *options)  # on one rank, since a start costs seconds: equal to rounding
    fit("whole", *options)
    run, whole = (load(Path(f, "checkpoints/last.ckpt"))["state_dict"] for f in ("run", "whole"))
    torch.testing.assert_close(run, whole, rtol=1e-3, atol=1e-5)
