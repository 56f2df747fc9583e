"""What a run says before it starts and when it is done, where that is not plain."""

import re
from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., Any]
SCHEDULER = "lightning.pytorch.callbacks.GradientAccumulationScheduler"


def line(done: Any, name: str) -> str | None:
    """What is said under a name."""
    found = re.search(rf"^(?:INFO: )?{name}: +(.*)$", done.err, re.MULTILINE)
    return found[1] if found else None


def test_accumulation_that_changes_with_the_epoch_is_not_taken_for_one(fit: Run) -> None:
    scheduler = f"{{class_path: {SCHEDULER}, init_args: {{scheduling: {{0: 2}}}}}}"
    options = ["--trainer.max_steps", -1, "--trainer.max_epochs", 1]
    done = fit("run", "--trainer.callbacks", f"[{scheduler}]", *options)
    said = "8 rows of 16 tokens = 128 tokens, accumulated as GradientAccumulationScheduler says"
    assert line(done, "batch") == said
    assert line(done, "plan") is None
    updates = line(done, "done")
    assert updates is not None
    assert "planned" not in updates


@pytest.mark.parametrize(
    ("rows", "said"), [(9, "3 x 3 rows of 16"), (8, "8 rows, padded to 3 x 3, of 16")]
)
def test_rows_are_dealt_out_whole(fit: Run, rows: int, said: str) -> None:
    strategy = "{class_path: tinyllm.strategies.DecentralizedStrategy, "
    strategy += "init_args: {workers: 3, compile: false}}"
    options = ["--trainer.strategy", strategy, "--trainer.max_steps", 1]
    done = fit("run", *options, "--data.batch_size", rows)
    assert line(done, "batch") == f"{said} tokens = {rows * 16} tokens"


def test_a_run_that_was_complete_says_so(fit: Run) -> None:
    fit("run", "--trainer.max_steps", 4)
    for limit in (4, 3):
        done = fit("run", "--ckpt_path", "last", "--trainer.max_steps", limit)
        said = line(done, "done")
        assert said is not None
        assert said.startswith("4 updates before this run, which has nothing to do")
    done = fit("run", "--ckpt_path", "last", "--trainer.max_steps", 5)
    assert "nothing to do" not in done.err


def test_repeated_batches_are_the_data(fit: Run) -> None:
    done = fit("run", "--trainer.max_steps", 6, "--trainer.overfit_batches", 2)
    data, plan = line(done, "data"), line(done, "plan")
    assert data is not None
    assert plan is not None
    assert re.search(r": 256 of [\d,]+ tokens to train on, ", data)
    assert plan.endswith(", 3 epochs")
