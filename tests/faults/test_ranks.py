"""One of several ranks dies or hangs: the others say which and end; what was saved goes on."""

import os
import random
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from processes import Command, ranks, run
from training import check_whole, last_logged, tensors, write_config

KILLS = int(os.environ.get("TINYLLM_TEST_RANK_KILLS", "1"))  # of four ranks
SEED = int(os.environ.get("TINYLLM_TEST_SEED", "0"))
STOP_SECONDS = 60.0
"""In which all ranks end after one was killed; they take half a second on a machine at rest."""
STRIDE = 8
UPDATES = (KILLS + 1) * 2 * STRIDE + 4 * STRIDE
MOMENT_SECONDS = 0.05


def kill_one(commands: list[Command], folder: Path, moments: random.Random) -> int:
    """Kills a rank at a random moment of the training; the others are to end. Gives the rank."""
    least = last_logged(folder) + moments.randint(1, STRIDE)
    victim = moments.randrange(len(commands))
    commands[victim].wait_until(lambda: last_logged(folder) >= least)
    time.sleep(moments.uniform(0, MOMENT_SECONDS))
    assert commands[victim].kill() == -signal.SIGKILL, commands[victim].said
    assert_the_others_end(commands, victim, "has ended", STOP_SECONDS)
    return victim


def assert_the_others_end(commands: list[Command], victim: int, state: str, seconds: float) -> None:
    """In time, with an exit code and an error that names the rank."""
    started = time.monotonic()
    others = [command for rank, command in enumerate(commands) if rank != victim]
    codes = [command.wait() for command in others]
    assert time.monotonic() - started < seconds
    assert codes == [1] * len(others)
    process = rf"rank {victim} \(process {commands[victim].pid} on \S+\)"
    for command in others:
        assert re.search(rf"error: RuntimeError: .*\n.*{process} {state}", command.said), (
            command.said
        )


def assert_close(folder: Path, whole: Path) -> None:
    """The same state up to another order of summation, in double precision."""
    mine, other = (tensors(place / "checkpoints" / "last.ckpt") for place in (folder, whole))
    for name, value in other.items():
        torch.testing.assert_close(mine[name], value, rtol=0, atol=1e-9, msg=name)


@pytest.mark.timeout(600 + 300 * KILLS)
def test_a_rank_killed_at_a_random_moment_ends_all_and_fewer_go_on(
    cache: Path, tmp_path: Path
) -> None:
    moments = random.Random(SEED)
    config = write_config(tmp_path / "run.yaml", cache, UPDATES)
    folder, whole = tmp_path / "run", tmp_path / "whole"
    fit = ["fit", "--config", config, "--trainer.precision", "64-true"]
    fit += ["--trainer.default_root_dir"]
    alone = run(*fit, whole, log=tmp_path / "whole.log")
    assert alone.wait() == 0, alone.said
    saved = 0
    for number in [4] * KILLS + [2]:
        with ranks(number, *fit, folder, "--ckpt_path", "last", logs=tmp_path) as commands:
            victim = kill_one(commands, folder, moments)
        now = check_whole(folder)
        print(f"rank {victim} of {number} killed; update {now} was saved")
        assert now >= saved, f"update {saved} was saved before"
        saved = now
    last = run(*fit, folder, "--ckpt_path", "last", log=tmp_path / "last.log")
    assert last.wait() == 0, last.said
    assert check_whole(folder) == UPDATES
    assert_close(folder, whole)


def test_a_rank_of_synchronous_training_is_killed(cache: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "run.yaml", cache, 1_000)
    strategy = "{class_path: tinyllm.strategies.SyncStrategy, init_args: {compile: false}}"
    fit = ["fit", "--config", config, "--trainer.default_root_dir", tmp_path / "run"]
    with ranks(3, *fit, "--trainer.strategy", strategy, logs=tmp_path) as commands:
        kill_one(commands, tmp_path / "run", random.Random(SEED))
    assert check_whole(tmp_path / "run") > 0


def test_a_rank_that_does_not_answer_is_waited_for_as_long_as_said(
    cache: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path / "run.yaml", cache, 1_000)
    fit = ["fit", "--config", config, "--trainer.default_root_dir", tmp_path / "run"]
    patience = ["--trainer.strategy.init_args.timeout_seconds", 15]
    with ranks(4, *fit, *patience, logs=tmp_path) as commands:
        commands[0].wait_until(lambda: last_logged(tmp_path / "run") >= 5)
        commands[2].send(signal.SIGSTOP)
        assert_the_others_end(commands, 2, "stands still", 15 + STOP_SECONDS)
    assert check_whole(tmp_path / "run") > 0


def test_a_rank_with_an_error_of_its_own_is_named_by_the_others(
    cache: Path, tmp_path: Path
) -> None:
    """And says itself what it was."""
    config = write_config(tmp_path / "run.yaml", cache, 1_000)
    fit = ["fit", "--config", config, "--trainer.default_root_dir", tmp_path / "run"]
    fails = ["--trainer.callbacks+", "faults.FailOn", "--trainer.callbacks.rank", 1]
    with ranks(2, *fit, *fails, logs=tmp_path) as commands:
        assert_the_others_end(commands, 1, "has ended", STOP_SECONDS)
        assert commands[1].wait() == 1
    assert "error: RuntimeError: rank 1 is on fire" in commands[1].said
    assert "has ended" not in commands[1].said
