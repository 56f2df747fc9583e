"""validate, test and predict."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_on_ranks
from run_files import copy, load, metrics
from stopping import tinyllm_on_this_rank

from tinyllm.data.cache import TokenCache
from tinyllm.module import TinyLLM


def evaluate(command: Any, name: str, finished: Path, *args: object) -> Any:
    done = command(name, "--config", finished / "config.yaml", *args)
    assert done.code == 0, done.err
    return done


def loss_of(done: Any, split: str = "validation") -> float:
    found = re.search(rf"{split}/loss\W+([\d.]+)", done.out)
    assert found, done.out
    return float(found[1])


def direct_losses(path: Path, text_cache: Path, split: Any) -> np.ndarray:
    """The loss of every token, from the model itself, row by row."""
    state = load(path)
    module = TinyLLM(**state["hyper_parameters"])
    module.load_state_dict(state["state_dict"])
    stream = TokenCache.open(text_cache).split(split)
    losses = []
    for start in range(0, len(stream) - 1, 16):
        row = torch.from_numpy(stream.read(start, min(17, len(stream) - start)).astype(np.int64))
        with torch.no_grad():
            logits = module(row[None, :-1])[0]
        losses.append(torch.nn.functional.cross_entropy(logits, row[1:], reduction="none"))
    return torch.cat(losses).numpy()


@pytest.mark.parametrize("which", [None, "last", "best", "file"])
def test_validate_takes_the_last_checkpoint_or_a_named_one(
    command: Any, finished: Path, text_cache: Path, which: str | None
) -> None:
    last, best = (finished / f"checkpoints/{name}.ckpt" for name in ("last", "best"))
    given = [] if which is None else ["--ckpt_path", best if which == "file" else which]
    loss = loss_of(evaluate(command, "validate", finished, *given))
    path = last if which in (None, "last") else best
    expected = direct_losses(path, text_cache, "validation").mean(dtype=np.float64)
    assert loss == pytest.approx(expected, rel=1e-6)  # sums of float32 losses in another order


def test_validate_needs_no_model_beside_the_checkpoint(
    command: Any, finished: Path, text_cache: Path
) -> None:
    path = finished / "checkpoints/last.ckpt"
    done = command("validate", "--ckpt_path", path, "--data.cache", text_cache,
                   "--data.context", 16, "--trainer.default_root_dir", "elsewhere",
                   "--trainer.strategy.compile", "false")  # fmt: skip
    assert done.code == 0, done.err
    assert loss_of(done) == pytest.approx(loss_of(evaluate(command, "validate", finished)))


@pytest.mark.parametrize("name", ["validate", "test", "predict"])
def test_evaluating_without_a_checkpoint_is_refused(command: Any, tiny: Path, name: str) -> None:
    done = command(name, "--config", tiny, "--trainer.default_root_dir", "empty")
    assert done.code == 1
    assert "there is no last.ckpt of a run in empty" in done.err
    assert "--ckpt_path" in done.err


def test_pitfall_13_evaluating_leaves_the_runs_files_alone(command: Any, finished: Path) -> None:
    folder = copy(finished, "run")
    names = ("metrics.csv", "config.yaml", "hparams.yaml")
    before = [(folder / name).read_bytes() for name in names]
    root = ["--trainer.default_root_dir", "run"]
    evaluate(command, "validate", finished, *root)
    evaluate(command, "predict", finished, *root)
    assert [(folder / name).read_bytes() for name in names] == before
    assert {path.name for path in folder.iterdir()} == {*names, "checkpoints", "predictions.npy"}


def test_test_says_when_there_is_no_test_split(command: Any, finished: Path) -> None:
    done = command("test", "--config", finished / "config.yaml")
    assert done.code == 1
    assert "no split 'test'" in done.err


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_predict_writes_the_loss_of_every_token(
    command: Any, finished: Path, text_cache: Path, batch_size: int
) -> None:
    copy(finished, "run")
    options = ["--data.validation_batch_size", batch_size, "--trainer.default_root_dir", "run"]
    done = evaluate(command, "predict", finished, *options)
    losses = np.load("run/predictions.npy")
    assert losses.dtype == np.float32
    assert len(losses) == len(TokenCache.open(text_cache).split("validation")) - 1
    expected = direct_losses(finished / "checkpoints/last.ckpt", text_cache, "validation")
    np.testing.assert_allclose(losses, expected, rtol=1e-5)  # float32, in another batch size
    mean = losses.mean(dtype=np.float64)
    assert f"run/predictions.npy: losses of {len(losses):,} tokens, {mean:.4f} nats" in done.err


def test_two_ranks_write_one_run_and_one_file_of_losses(
    command: Any, tiny: Path, tmp_path: Path, text_cache: Path
) -> None:
    two = ["--trainer.devices", "2", "--trainer.default_root_dir", str(tmp_path / "run")]
    options = ["--config", str(tiny), *two, "--trainer.max_steps", "4"]
    odd = ["--data.validation_batch_size", "3"]  # does not divide evenly
    for args in (["fit", *options], ["predict", *options, *odd]):
        run_on_ranks(tinyllm_on_this_rank, 2, args)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        *("checkpoints", "config.yaml", "hparams.yaml", "metrics.csv", "predictions.npy")
    ]
    assert metrics(tmp_path / "run")["train/loss"].count() == 4
    expected = direct_losses(tmp_path / "run/checkpoints/last.ckpt", text_cache, "validation")
    losses = np.load(tmp_path / "run/predictions.npy")
    np.testing.assert_allclose(losses, expected, rtol=1e-5)  # float32, in another batch size


def test_a_path_may_have_a_colon(command: Any, finished: Path, text_cache: Path) -> None:
    path = copy(finished, "12:30") / "checkpoints/last.ckpt"
    done = command("validate", "--ckpt_path", path, "--data.cache", text_cache,
                   "--data.context", 16, "--trainer.default_root_dir", "elsewhere",
                   "--trainer.strategy.compile", "false")  # fmt: skip
    assert done.code == 0, done.err
    assert loss_of(done) == pytest.approx(loss_of(evaluate(command, "validate", finished)))


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "there is no last.ckpt of a run in empty"),
        (["--ckpt_path", "best"], "there is no best.ckpt of a run in empty"),
        (
            ["--ckpt_path", "best", "--best_checkpoint.filename", "best-{step}"],
            "the best checkpoints of the run in empty are called best-{step}.ckpt; name one",
        ),
        (
            ["--ckpt_path", "best", "--best_checkpoint.filename", "null"],
            "the best checkpoints of the run in empty are called {epoch}-{step}.ckpt; name one",
        ),
    ],
)
def test_what_is_missing_is_said_before_a_model_is_asked_for(
    command: Any, text_cache: Path, args: list[str], said: str
) -> None:
    root = ["--trainer.default_root_dir", "empty", "--data.cache", text_cache]
    done = command("validate", *root, *args)
    assert done.code == 1
    assert said in done.err
    shown = command("validate", *root, *args, "--model.preset", "20m", "--print_config")
    assert shown.code == 0, shown.err
