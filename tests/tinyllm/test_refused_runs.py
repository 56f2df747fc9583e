"""A run that is refused, or that fails before its first update, leaves its folder as it was."""

from pathlib import Path
from typing import Any

import pytest
from run_files import Run, assert_same_run, copy, metrics

TOO_SELDOM = ["--trainer.check_val_every_n_epoch", 1, "--trainer.val_check_interval", 1_000]
PACKED = "{class_path: tinyllm.strategies.DecentralizedStrategy, init_args: {%s}}"


def packed(workers: int) -> list[object]:
    return ["--trainer.strategy", PACKED % f"workers: {workers}, compile: false"]


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (packed(2), "worker"),
        (["--data.batch_size", 4], "batch_size"),
        (["--data.seed", 7], "seed"),
        (["--model.config.width", 32], "the checkpoint is of another model: width 16, not 32."),
        (TOO_SELDOM, "val_check_interval"),
    ],
)
def test_a_resume_that_is_refused(
    fit: Run, finished: Path, options: list[object], shown: str
) -> None:
    stop = ["--trainer.callbacks", "stopping.SignalAfter", "--trainer.callbacks.updates", 6]
    fit("run", *stop, code=143)
    before = contents(Path("run"))
    done = fit("run", "--ckpt_path", "last", *options, code=1)
    assert shown in done.err
    assert contents(Path("run")) == before
    fit("run", "--ckpt_path", "last")
    assert_same_run("run", finished)


@pytest.mark.parametrize("options", [TOO_SELDOM, ["--data.cache", "nowhere"], packed(3)])
def test_a_new_run_that_is_refused(
    fit: Run, finished: Path, options: list[object], tmp_path: Path
) -> None:
    folder = copy(finished, "run")
    before = contents(folder)
    other = copy(finished, "other") / "checkpoints" / "last.ckpt"
    start = ["--ckpt_path", other] if options == packed(3) else []  # its checkpoint has one worker
    fit(folder, *options, *start, code=1)
    assert contents(folder) == before


def test_weights_alone_are_no_start(fit: Run) -> None:
    fit("run", "--checkpoint.save_weights_only", "true")
    before = contents(Path("run"))
    done = fit("run", "--ckpt_path", "last", code=1)
    assert "last.ckpt holds weights alone, and no run can go on from it" in done.err
    assert contents(Path("run")) == before


def test_what_would_go_wrong_later_is_refused_at_once(command: Any, tiny: Path) -> None:
    for option, value, shown in (
        ("--trainer.accumulate_grad_batches", 0, "trainer.accumulate_grad_batches is 0"),
        (
            "--trainer.strategy",
            "tinyllm.strategies.DecentralizedStrategy",
            "a class without its options; give them, as in --trainer.strategy.micro_batch_size 4, "
            "or take a registered name: packed2_a",
        ),
        (
            "--trainer.strategy",
            "tinyllm.strategies.SyncStrategy",
            "micro_batch_size 4, or take a registered name: sync\n",
        ),
        ("--trainer.val_check_interval", 0, "trainer.val_check_interval is 0; it must be above 0"),
        ("--trainer.default_root_dir", "null", "trainer.default_root_dir is null; give the run's"),
        ("--best_checkpoint.save_top_k", 3, "all have the one file name 'best'"),
    ):
        done = command("fit", "--config", tiny, option, value)
        assert done.code == 2
        assert shown in done.err


def test_several_best_states_have_files_of_their_own(fit: Run) -> None:
    names = ["--best_checkpoint.save_top_k", 2, "--best_checkpoint.filename", "best-{step}"]
    fit("run", *names)
    assert len(list(Path("run/checkpoints").glob("best-*.ckpt"))) == 2


def test_a_run_without_planned_updates_ends_by_the_clock(fit: Run) -> None:
    endless = ["--trainer.max_steps", -1, "--trainer.max_time", "00:00:00:02"]
    done = fit("run", *endless, "--model.schedule.updates", 100)
    assert "plan:    updates until the run is stopped" in done.err
    assert metrics("run")["train/loss"].count() > 0
