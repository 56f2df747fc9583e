"""A run killed at random moments and resumed each time ends as if nothing had happened.

``TINYLLM_TEST_KILLS=50`` kills it as often; ``TINYLLM_TEST_SEED`` chooses other moments.
"""

import os
import random
import signal
import time
from pathlib import Path

import pytest
from processes import Command, run
from training import EVERY, assert_same_run, check_whole, last_logged, write_config

KILLS = int(os.environ.get("TINYLLM_TEST_KILLS", "5"))
SEED = int(os.environ.get("TINYLLM_TEST_SEED", "0"))
STRIDE = 8  # updates between two kills, at most, and not counting those that come too late
UPDATES = KILLS * 6 * STRIDE + 5 * STRIDE  # more than are done meanwhile
MOMENT_SECONDS = 0.03  # an update of this model with its checkpoint


@pytest.mark.timeout(600 + 120 * KILLS)
def test_killed_at_random_moments_it_ends_as_if_it_were_not(cache: Path, tmp_path: Path) -> None:
    moments = random.Random(SEED)
    config = write_config(tmp_path / "run.yaml", cache, UPDATES)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    started = time.monotonic()
    with Command(*fit(config, whole), log=tmp_path / "whole.log") as command:
        command.wait_until(lambda: last_logged(whole) >= 0)
        startup_seconds = time.monotonic() - started
        assert command.wait() == 0, command.said
    check_whole(whole)

    resume = [*fit(config, killed), "--ckpt_path", "last"]
    saved, while_writing = 0, 0
    for number in range(KILLS):
        before = last_logged(killed)
        with Command(*resume, log=tmp_path / f"{number}.log") as command:
            kind = moments.choice(("starting", "training", "training", "saving"))
            if kind == "starting":
                time.sleep(moments.uniform(0, startup_seconds))
            else:
                least = before + moments.randint(1, STRIDE)
                command.wait_until(lambda least=least: last_logged(killed) >= least)  # type: ignore[misc]
            if kind == "training":
                time.sleep(moments.uniform(0, MOMENT_SECONDS))
            elif kind == "saving":
                command.wait_until(lambda command=command: written(killed, command), pause=0)  # type: ignore[misc]
            assert command.kill() == -signal.SIGKILL, f"it ended before:\n{command.said}"
        now = check_whole(killed)
        assert now >= saved, f"kill {number} of seed {SEED}: update {saved} was saved before"
        assert last_logged(killed) - now <= EVERY, "a checkpoint that was due is not there"
        saved = now
        while_writing += written(killed, command)
    last = run(*resume, log=tmp_path / "last.log")
    assert last.wait() == 0, last.said
    assert check_whole(killed) == UPDATES
    missing = assert_same_run(killed, whole, KILLS)
    hidden = {path.name for path in killed.rglob(".*") if ".best.ckpt." not in path.name}
    assert not hidden, "what killed runs have left is cleared up"
    print(
        f"seed {SEED}: {KILLS} kills, {while_writing} of them while a checkpoint was written; "
        f"{missing} rows of the log are missing"
    )


def written(folder: Path, command: Command) -> bool:
    """Whether there is a part of a checkpoint that a process writes or has written."""
    return any((folder / "checkpoints").glob(f".*.{command.pid}.partial"))


def fit(config: Path, folder: Path) -> list[object]:
    return ["fit", "--config", config, "--trainer.default_root_dir", folder]
