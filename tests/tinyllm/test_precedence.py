"""Which value wins: defaults, checkpoint, configuration files, command line."""

from pathlib import Path
from typing import Any

import pytest
import torch
from run_files import Run, copy, load, lrs, printed


def test_print_config_shows_overrides(command: Any, tiny: Path) -> None:
    options = ["--trainer.max_steps", "20", "--model.optimizer.lr", "1e-3", "--print_config"]
    config = printed(command("fit", "--config", tiny, *options))
    assert config["trainer"]["max_steps"] == 20
    assert config["model"]["optimizer"]["lr"] == 1e-3
    assert config["model"]["optimizer"]["weight_decay"] == 0.1  # a default
    assert config["data"]["batch_size"] == 8  # the file's


def test_files_overlay_left_to_right(command: Any, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("model: {optimizer: {lr: 1, eps: 0.5}}\ndata: {seed: 1}\n")
    (tmp_path / "b.yaml").write_text("model: {optimizer: {lr: 2}}\n")
    config = printed(command("fit", "-c", tiny, "-c", "a.yaml", "-c", "b.yaml", "--print_config"))
    assert config["model"]["optimizer"] | {"betas": 0} == {
        **{"lr": 2.0, "eps": 0.5, "weight_decay": 0.1, "betas": 0}
    }
    assert config["data"]["seed"] == 1
    config = printed(command("fit", "-c", tiny, "-c", "b.yaml", "-c", "a.yaml", "--print_config"))
    assert config["model"]["optimizer"]["lr"] == 1.0


@pytest.mark.parametrize("last", [True, False])
def test_pitfall_9_the_command_line_wins_wherever_files_stand(
    command: Any, tiny: Path, tmp_path: Path, last: bool
) -> None:
    (tmp_path / "a.yaml").write_text("model: {optimizer: {lr: 7}}\ntrainer: {max_steps: 7}\n")
    (tmp_path / "model.yaml").write_text("optimizer: {lr: 8, eps: 0.5}\n")
    values = ["--model.optimizer.lr=5", "--trainer.max_steps", "6"]
    files = ["--config", "a.yaml", "--model", "model.yaml"]
    options = [*files, *values] if last else [*values, *files]
    config = printed(command("fit", "--config", tiny, *options, "--print_config"))
    assert config["model"]["optimizer"]["lr"] == 5
    assert config["model"]["optimizer"]["eps"] == 0.5
    assert config["trainer"]["max_steps"] == 6


def test_a_strategys_options_overlay_too(command: Any, tiny: Path, tmp_path: Path) -> None:
    strategy = "{class_path: tinyllm.strategies.DecentralizedStrategy, init_args: {workers: 2}}"
    (tmp_path / "a.yaml").write_text(f"trainer: {{strategy: {strategy}}}\n")
    options = ["--trainer.strategy.scheme", "atc", "--trainer.strategy.workers", "4"]
    config = printed(command("fit", "-c", tiny, "-c", "a.yaml", *options, "--print_config"))
    chosen = config["trainer"]["strategy"]
    assert chosen["class_path"] == "tinyllm.strategies.DecentralizedStrategy"
    assert (chosen["init_args"]["workers"], chosen["init_args"]["scheme"]) == (4, "atc")


def test_pitfall_9_a_checkpoint_is_over_defaults_and_under_files(
    command: Any, finished: Path, tmp_path: Path, text_cache: Path
) -> None:
    start = ["--data.cache", text_cache, "--ckpt_path", finished / "checkpoints/last.ckpt"]
    config = printed(command("fit", *start, "--print_config"))
    assert config["model"]["config"]["width"] == 16  # the checkpoint's
    assert config["model"]["optimizer"]["lr"] == 0.01
    assert config["model"]["optimizer"]["weight_decay"] == 0.1
    (tmp_path / "a.yaml").write_text("model: {optimizer: {lr: 7, eps: 0.5}}\n")
    config = printed(command("fit", *start, "--config", "a.yaml", "--print_config"))
    assert config["model"]["optimizer"]["lr"] == 7  # the file's
    assert config["model"]["config"]["width"] == 16
    values = ["--model.optimizer.lr", "5"]
    config = printed(command("fit", *values, *start, "--config", "a.yaml", "--print_config"))
    assert config["model"]["optimizer"]["lr"] == 5  # the command line's
    assert config["model"]["optimizer"]["eps"] == 0.5


def test_pitfall_9_a_checkpoint_may_be_named_in_a_file_or_by_last(
    command: Any, finished: Path, tmp_path: Path, text_cache: Path
) -> None:
    path = finished / "checkpoints/last.ckpt"
    (tmp_path / "a.yaml").write_text(f"ckpt_path: {path}\ndata: {{cache: {text_cache}}}\n")
    config = printed(command("fit", "--config", "a.yaml", "--print_config"))
    assert config["model"]["config"]["width"] == 16
    last = ["--data.cache", text_cache, "--ckpt_path", "last"]
    folder = ["--trainer.default_root_dir", finished]
    config = printed(command("fit", *last, *folder, "--print_config"))
    assert config["model"]["config"]["width"] == 16


def test_pitfall_9_a_resumed_run_trains_with_the_new_learning_rate(
    fit: Run, finished: Path
) -> None:
    fit("before", "--trainer.callbacks", "stopping.SignalAfter", "--trainer.callbacks.updates", 6,
        code=143)  # fmt: skip
    resumed = copy(Path("before"), "resumed")
    fit("resumed", "--ckpt_path", resumed / "checkpoints/last.ckpt", "--model.optimizer.lr", 0.001)
    expected = [lr if update < 6 else lr / 10 for update, lr in enumerate(lrs(finished))]
    assert lrs("resumed") == pytest.approx(expected)
    with_the_old = copy(Path("before"), "with_the_old")
    fit("with_the_old", "--ckpt_path", with_the_old / "checkpoints/last.ckpt")
    moved = load(Path("with_the_old/checkpoints/last.ckpt"))["state_dict"]
    other = load(Path("resumed/checkpoints/last.ckpt"))["state_dict"]
    assert not torch.equal(moved["model.norm.weight"], other["model.norm.weight"])
