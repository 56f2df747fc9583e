"""How a run stops, and that it goes on exactly where it was."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from run_files import Run, assert_same_run, assert_same_state, copy, load, lrs, metrics

from tinyllm.cli import main


@pytest.fixture(scope="module")
def finished_in_epochs(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    """The same in epochs of 4 updates, each of which ends with a validation."""
    folder = tmp_path_factory.mktemp("finished_in_epochs")
    options = ["--trainer.default_root_dir", str(folder), *EPOCHS]
    main(["fit", "--config", str(tiny), *options])
    return folder


EPOCHS = ["--trainer.limit_train_batches", "4"]
# the same validations, counted by epochs
BY_EPOCH = [*EPOCHS, "--trainer.val_check_interval=1.0", "--trainer.check_val_every_n_epoch=1"]
EVERY_4 = ["--checkpoint.every_n_train_steps", "4"]


@pytest.mark.parametrize(
    ("updates", "interval", "epochs"),
    [
        *((3, [], []), (4, [], []), (7, [], EPOCHS), (8, [], EPOCHS)),
        *((4, EVERY_4, []), (8, EVERY_4, EPOCHS)),
    ],
)
def test_sigterm_saves_what_resumes_exactly(
    fit: Run,
    finished: Path,
    finished_in_epochs: Path,
    updates: int,
    interval: list[str],
    epochs: list[str],
) -> None:
    stop = ["--trainer.callbacks", "stopping.SignalAfter", "--trainer.callbacks.updates", updates]
    done = fit("run", *epochs, *interval, *stop, code=143)
    assert "Traceback" not in done.err
    assert f"the state after {updates} updates is saved in run/checkpoints/last.ckpt" in done.err
    assert load(Path("run/checkpoints/last.ckpt"))["global_step"] == updates
    fit("run", *epochs, *interval, "--ckpt_path", "last")
    assert_same_run("run", finished_in_epochs if epochs else finished)


def test_sigterm_before_an_epoch_with_validations_leaves_their_steps(fit: Run) -> None:
    seldom = ["--trainer.val_check_interval", 2, "--trainer.check_val_every_n_epoch", 2]
    stop = ["--trainer.callbacks", "stopping.SignalAfter", "--trainer.callbacks.updates", 4]
    fit("whole", *EPOCHS, *seldom)
    fit("run", *EPOCHS, *seldom, *stop, code=143)
    fit("run", *EPOCHS, *seldom, "--ckpt_path", "last")
    assert_same_run("run", Path("whole"))


def test_each_of_two_checkpoints_has_the_newest_state(fit: Run, finished: Path) -> None:
    other = "{class_path: tinyllm.run_checkpoint.RunCheckpoint, init_args: "
    other += "{dirpath: run/often, save_top_k: 0, save_last: true, save_on_exception: true, "
    other += "every_n_train_steps: 3}}"
    stop = "{class_path: stopping.SignalAfter, init_args: {updates: 7}}"
    fit("run", "--trainer.callbacks", f"[{other}, {stop}]", code=143)
    for path in ("run/checkpoints/last.ckpt", "run/often/last.ckpt"):
        assert load(Path(path))["global_step"] == 7
    fit("run", "--trainer.callbacks", f"[{other}]", "--ckpt_path", "run/often/last.ckpt")
    assert_same_run("run", finished)
    assert load(Path("run/often/last.ckpt"))["global_step"] == 12


def test_two_checkpoints_of_one_interval_are_refused(fit: Run) -> None:
    """Their folders are no part of what Lightning tells them apart by."""
    other = "{class_path: tinyllm.run_checkpoint.RunCheckpoint, init_args: {dirpath: run/other}}"
    done = fit("run", "--trainer.callbacks", f"[{other}]", code=1)
    assert "two callbacks are a RunCheckpoint with the same interval" in done.err
    assert "give the one in trainer.callbacks another, as with every_n_train_steps" in done.err


@pytest.mark.parametrize(("interval", "epochs"), [([], []), (EVERY_4, []), ([], EPOCHS)])
def test_sigterm_while_validating_resumes_exactly(
    fit: Run, finished: Path, finished_in_epochs: Path, interval: list[str], epochs: list[str]
) -> None:
    stop = ["--trainer.callbacks", "stopping.SignalAfter", "--trainer.callbacks.updates", 8]
    stop += ["--trainer.callbacks.validating", "true"]
    fit("run", *epochs, *interval, *stop, code=143)
    fit("run", *epochs, *interval, "--ckpt_path", "last")
    assert_same_run("run", finished_in_epochs if epochs else finished)


@pytest.mark.parametrize(
    ("updates", "name", "epochs"),
    [
        *((4, "last", []), (8, "best", []), (4, "best", EPOCHS), (8, "last", EPOCHS)),
        *((4, "last", BY_EPOCH), (8, "best", BY_EPOCH)),
    ],
)
def test_a_run_killed_later_resumes_exactly(
    fit: Run, finished: Path, finished_in_epochs: Path, updates: int, name: str, epochs: list[str]
) -> None:
    fit("run", *epochs, "--trainer.callbacks", "stopping.KeepAside",
        "--trainer.callbacks.updates", updates)  # fmt: skip
    shutil.rmtree("run/checkpoints")
    Path("run/aside").rename("run/checkpoints")
    fit("run", *epochs, "--ckpt_path", name)
    assert_same_run("run", finished_in_epochs if epochs else finished)


def test_ctrl_c_stops_between_updates_and_resumes_exactly(fit: Run, finished: Path) -> None:
    stop = ["--trainer.callbacks", "stopping.SignalAfter", "--trainer.callbacks.updates", 6]
    done = fit("run", *stop, "--trainer.callbacks.name", "SIGINT", code=130)
    assert "Stopping after this update" in done.err
    assert "Traceback" not in done.err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    fit("run", "--ckpt_path", "last")
    assert_same_run("run", finished)


@pytest.mark.parametrize("whole_group", [True, False])  # a terminal signals all, `kill` one
def test_ctrl_c_stops_several_ranks_at_a_log_point(
    tiny: Path, tmp_path: Path, whole_group: bool
) -> None:
    (tmp_path / "program.py").write_text("from tinyllm.cli import main\nmain()\n")
    command = [sys.executable, "program.py", "fit", "--config", str(tiny)]
    command += ["--trainer.strategy", "packed2_awc", "--trainer.strategy.compile", "false"]
    command += ["--trainer.devices", "2", "--trainer.max_steps", "1000000"]
    command += ["--trainer.default_root_dir", "run", "--trainer.val_check_interval", "1000"]
    log = tmp_path / "log.txt"
    with log.open("w") as file:
        run = subprocess.Popen(
            command, cwd=tmp_path, stdout=file, stderr=file, start_new_session=True
        )
        try:
            while not (tmp_path / "run/metrics.csv").exists() and run.poll() is None:
                time.sleep(0.1)
            (os.killpg if whole_group else os.kill)(run.pid, signal.SIGINT)
            code = run.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
    said = log.read_text()
    assert code == 130, said
    assert "Stopping at the next log point. Ctrl-C again stops at once." in said
    assert "Traceback" not in said
    state = load(tmp_path / "run/checkpoints/last.ckpt")
    assert f"the state after {state['global_step']} updates is saved in" in said


def test_what_is_saved_already_is_named_too(fit: Run) -> None:
    """Ctrl-C in the first batch after a validation, when nothing new is to be saved."""
    stop = ["--trainer.callbacks", "stopping.SignalAfter", "--trainer.callbacks.updates", 4]
    done = fit("run", *stop, "--checkpoint.every_n_train_steps", 1, code=143)
    assert "the state after 4 updates is saved in run/checkpoints/last.ckpt; continue" in done.err


def test_before_the_first_update_nothing_is_said_to_be_saved(fit: Run) -> None:
    stop = ["--trainer.callbacks", "stopping.FailWithin", "--trainer.callbacks.updates", 0]
    done = fit("run", *stop, code=1)
    assert "error: RuntimeError: the machine is on fire" in done.err
    assert "is saved in" not in done.err


def test_an_error_saves_what_resumes_exactly(fit: Run, finished: Path) -> None:
    stop = ["--trainer.callbacks", "stopping.FailAfter", "--trainer.callbacks.updates", 6]
    done = fit("run", *stop, code=1)
    assert "error: RuntimeError: the machine is on fire" in done.err
    fit("run", "--ckpt_path", "last")
    assert_same_state("run", finished)  # its own row was not yet logged


def test_an_error_within_an_update_leaves_the_last_checkpoint(fit: Run, finished: Path) -> None:
    """Half an update's gradients are nothing to go on from."""
    stop = ["--trainer.callbacks", "stopping.FailWithin", "--trainer.callbacks.updates", 6]
    fit("run", *stop, code=1)
    assert load(Path("run/checkpoints/last.ckpt"))["global_step"] == 4  # after a validation
    fit("run", "--ckpt_path", "last")
    assert_same_run("run", finished)


def test_a_run_continues_beyond_its_end(fit: Run, finished: Path) -> None:
    copy(finished, "run")
    fit("run", "--ckpt_path", "last", "--trainer.max_steps", 14)
    assert metrics("run")["train/loss"].count() == 14
    assert load(Path("run/checkpoints/last.ckpt"))["global_step"] == 14


def test_a_run_resumes_with_a_schedule_of_ones_own(fit: Run, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("model: {schedule: {class_path: stopping.Halves}}\n")
    fit("run", "--config", "own.yaml", "--trainer.callbacks", "stopping.FailAfter",
        "--trainer.callbacks.updates", 3, code=1)  # fmt: skip
    fit("run", "--ckpt_path", "last", "--trainer.max_steps", 6)  # the checkpoint names it
    assert lrs("run") == pytest.approx([0.01 / 2**update for update in range(6)])


def test_best_without_a_checkpoint_is_refused(fit: Run) -> None:
    assert "there is no best.ckpt of a run in run" in fit("run", "--ckpt_path", "best", code=1).err


def test_last_without_a_checkpoint_starts_anew(fit: Run, finished: Path) -> None:
    fit("run", "--ckpt_path", "last")
    assert_same_run("run", finished)
