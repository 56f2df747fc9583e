"""What a run says before it starts and when it is done, where that is not plain."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tinyllm.data.cache import TokenCache

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


def test_an_epoch_ends_an_update(fit: Run) -> None:
    """Three batches, two in an update: the second one of each epoch has one."""
    options = ["--trainer.overfit_batches", 3, "--trainer.accumulate_grad_batches", 2]
    plan = line(fit("run", "--trainer.max_steps", 4, *options), "plan")
    assert plan is not None
    assert plan.startswith("4 updates = 768 tokens, ")
    assert plan.endswith(", 2 epochs")


def test_an_epoch_of_fewer_batches_than_accumulated(fit: Run) -> None:
    options = ["--trainer.overfit_batches", 2, "--trainer.accumulate_grad_batches", 4]
    done = fit("run", "--trainer.max_steps", 200, "--trainer.limit_val_batches", 0, *options)
    plan = line(done, "plan")
    assert line(done, "batch") == "2 x 8 rows of 16 tokens = 256 tokens"
    assert plan is not None
    assert plan.startswith("200 updates = 51,200 tokens, ")
    assert plan.endswith(", 200 epochs")


def test_a_plan_counts_the_smaller_last_updates(fit: Run, text_cache: Path) -> None:
    tokens = len(TokenCache.open(text_cache).split("train"))
    targets = (tokens - 1) // 16 * 16  # of whole rows, each once in an epoch
    plan = line(fit("run", "--trainer.max_steps", -1, "--trainer.max_epochs", 2), "plan")
    assert targets % (8 * 16)
    assert plan is not None
    assert f" = {2 * targets:,} tokens, " in plan
