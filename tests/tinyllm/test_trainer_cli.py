"""fit, validate, test, predict: which value wins, what a run leaves, how it stops and resumes."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from lightning.pytorch import Trainer
from ranks import run_on_ranks
from stopping import tinyllm_on_this_rank

from tinyllm.cli import main
from tinyllm.data.cache import TokenCache
from tinyllm.module import TinyLLM

Run = Callable[..., Any]


@pytest.fixture
def fit(command: Any, tiny: Path) -> Run:
    """Trains in a folder and expects success, unless another exit code is given."""

    def run(folder: str, *args: object, code: int = 0) -> Any:
        done = command("fit", "--config", tiny, "--trainer.default_root_dir", folder, *args)
        assert done.code == code, done.err
        return done

    return run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    """The folder of a run of 12 updates that was never interrupted."""
    folder = tmp_path_factory.mktemp("finished")
    main(["fit", "--config", str(tiny), "--trainer.default_root_dir", str(folder)])
    return folder


def copy(finished: Path, name: str) -> Path:
    """A copy to try things with, below the present folder."""
    return Path(shutil.copytree(finished, name))


def load(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(path, weights_only=True)
    return state


def metrics(folder: Path | str) -> pd.DataFrame:
    return pd.read_csv(Path(folder) / "metrics.csv")


def lrs(folder: Path | str) -> list[float]:
    return metrics(folder)["train/lr"].dropna().tolist()


def printed(done: Any) -> dict[str, Any]:
    assert done.code == 0, done.err
    config: dict[str, Any] = yaml.safe_load(done.out)
    return config


# Which value wins


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


# What a run leaves


def test_a_run_leaves_its_configuration_log_and_checkpoints(finished: Path, tiny: Path) -> None:
    config = yaml.safe_load((finished / "config.yaml").read_text())
    assert config["model"]["optimizer"]["lr"] == 0.01
    assert config["trainer"]["default_root_dir"] == str(finished)
    assert {path.name for path in (finished / "checkpoints").iterdir()} == {
        *("last.ckpt", "best.ckpt"),
    }
    assert load(finished / "checkpoints/last.ckpt")["global_step"] == 12
    rows = metrics(finished)
    assert rows["train/loss"].count() == 12
    assert rows[rows["validation/loss"].notna()]["step"].tolist() == [3, 7, 11]


def test_a_runs_configuration_starts_the_same_run(
    command: Any, finished: Path, tmp_path: Path
) -> None:
    options = ["--config", finished / "config.yaml", "--trainer.default_root_dir", "again"]
    assert command("fit", *options).code == 0
    pd.testing.assert_frame_equal(metrics("again"), metrics(finished))


@pytest.mark.parametrize("interval", [None, 4, 5])
def test_last_holds_the_newest_state(fit: Run, interval: int | None) -> None:
    saved: list[int] = []

    save = Trainer.save_checkpoint

    def spying(self: Any, path: Any, *args: Any) -> None:
        if Path(path).name == "last.ckpt":
            saved.append(self.global_step)
        save(self, path, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "save_checkpoint", spying)
        options = [] if interval is None else ["--checkpoint.every_n_train_steps", interval]
        fit("run", "--trainer.max_steps", 11, *options)
    expected = {None: [4, 8, 11], 5: [5, 10, 11], 4: [4, 8, 11]}
    assert saved == expected[interval]
    assert load(Path("run/checkpoints/last.ckpt"))["global_step"] == 11


def test_a_checkpoint_for_each_epoch(fit: Run, tmp_path: Path) -> None:
    epochs = "trainer: {max_steps: -1, max_epochs: 2, check_val_every_n_epoch: 1, "
    (tmp_path / "epochs.yaml").write_text(epochs + "val_check_interval: 1.0}\n")
    fit("run", "--config", "epochs.yaml", "--trainer.limit_train_batches", 3)
    state = load(Path("run/checkpoints/last.ckpt"))
    assert (state["global_step"], state["epoch"]) == (6, 1)
    fit("other", "--config", "epochs.yaml", "--trainer.limit_train_batches", 3,
        "--trainer.limit_val_batches", 0)  # fmt: skip
    assert load(Path("other/checkpoints/last.ckpt"))["global_step"] == 6


def test_pitfall_13_a_new_run_keeps_an_earlier_one_aside(fit: Run, finished: Path) -> None:
    used = copy(finished, "used")
    before = {path.name: path.read_bytes() for path in used.rglob("*") if path.is_file()}
    done = fit("used", "--trainer.max_steps", 2, "--trainer.log_every_n_steps", 2)
    assert "used holds an earlier run; it is kept in used/earlier-1" in done.err
    aside = {path.name: path.read_bytes() for path in Path("used/earlier-1").rglob("*.*")}
    aside.pop("checkpoints", None)
    assert aside == before
    assert metrics("used")["step"].tolist() == [1]
    assert load(Path("used/checkpoints/last.ckpt"))["global_step"] == 2
    fit("used", "--trainer.max_steps", 2)
    assert Path("used/earlier-2/metrics.csv").exists()
    assert metrics("used/earlier-1")["train/loss"].count() == 12


def test_nothing_is_kept_aside_when_a_run_is_refused(fit: Run, finished: Path) -> None:
    copy(finished, "used")
    fit("used", "--trainer.gradient_clip_algorithm", "value", code=1)
    fit("used", "--ckpt_path", "nowhere.ckpt", code=1)
    fit("used", "--data.cache", "nowhere", code=1)
    assert not Path("used/earlier-1").exists()
    assert (Path("used/config.yaml").read_bytes()) == (finished / "config.yaml").read_bytes()


def test_a_run_from_another_runs_checkpoint_is_a_new_one(fit: Run, finished: Path) -> None:
    copy(finished, "used")
    start = finished / "checkpoints/last.ckpt"
    fit("used", "--ckpt_path", start, "--trainer.max_steps", 14)
    assert metrics("used")["step"].tolist() == [12, 13]
    assert metrics("used/earlier-1")["train/loss"].count() == 12


def test_an_earlier_run_goes_on_as_a_new_one(fit: Run, finished: Path) -> None:
    """Its checkpoint lies below the run's folder, whose own run must not be lost."""
    copy(finished, "used")
    fit("used", "--trainer.max_steps", 2)
    fit("used", "--ckpt_path", "used/earlier-1/checkpoints/last.ckpt", "--trainer.max_steps", 14)
    assert metrics("used/earlier-2")["train/loss"].count() == 2
    assert metrics("used")["step"].tolist() == [12, 13]


def test_fast_dev_run_leaves_an_earlier_run_alone(fit: Run, finished: Path) -> None:
    copy(finished, "used")
    fit("used", "--trainer.fast_dev_run", "true")
    assert not Path("used/earlier-1").exists()
    pd.testing.assert_frame_equal(metrics("used"), metrics(finished))


@pytest.mark.parametrize(
    "options",
    [
        ["--trainer.enable_checkpointing", "false"],
        ["--trainer.barebones", "true"],
        ["--trainer.logger", "false"],
        ["--trainer.limit_val_batches", "0"],
        ["--trainer.strategy", "auto"],
        ["--trainer.enable_progress_bar", "true"],
        ["--trainer.enable_model_summary", "true"],
    ],
)
def test_lightnings_switches_work(fit: Run, options: list[str]) -> None:
    if "--trainer.barebones" in options:
        options = [*options, "--trainer.log_every_n_steps", "0"]
    fit("run", "--trainer.max_steps", "2", *options)
    has_checkpoint = Path("run/checkpoints/last.ckpt").exists()
    assert has_checkpoint == ("checkpointing" not in options[0] and "barebones" not in options[0])
    assert Path("run/metrics.csv").exists() == (options[0][10:] not in ("barebones", "logger"))


# How a run stops and resumes


def assert_same_run(folder: str, finished: Path) -> None:
    """The same log and state as the uninterrupted run, to the last bit."""
    pd.testing.assert_frame_equal(metrics(folder), metrics(finished), check_exact=True)
    assert_same_state(folder, finished)


def assert_same_state(folder: str, finished: Path) -> None:
    """The same weights, moments, counters and position in the data."""
    state, expected = (load(Path(f) / "checkpoints/last.ckpt") for f in (folder, finished))
    assert state["global_step"] == expected["global_step"]
    for name, tensor in expected["state_dict"].items():
        assert torch.equal(state["state_dict"][name], tensor), name
    mine, other = (s["optimizer_states"][0]["state"] for s in (state, expected))
    for index, entry in other.items():
        for name, tensor in entry.items():
            assert torch.equal(mine[index][name], tensor), name
    assert state["TokenDataModule"]["train"] == expected["TokenDataModule"]["train"]


@pytest.fixture(scope="module")
def finished_in_epochs(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    """The same in epochs of 4 updates, each of which ends with a validation."""
    folder = tmp_path_factory.mktemp("finished_in_epochs")
    options = ["--trainer.default_root_dir", str(folder), *EPOCHS]
    main(["fit", "--config", str(tiny), *options])
    return folder


EPOCHS = ["--trainer.limit_train_batches", "4"]
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
    [(4, "last", []), (8, "best", []), (4, "best", EPOCHS), (8, "last", EPOCHS)],
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
    import signal

    stop = ["--trainer.callbacks", "stopping.SignalAfter", "--trainer.callbacks.updates", 6]
    done = fit("run", *stop, "--trainer.callbacks.name", "SIGINT", code=130)
    assert "Stopping after this update" in done.err
    assert "Traceback" not in done.err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    fit("run", "--ckpt_path", "last")
    assert_same_run("run", finished)


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
    assert lrs("run") == pytest.approx([0.01 / 2**update for update in (0, 1, 3, 4, 5)])


def test_best_without_a_checkpoint_is_refused(fit: Run) -> None:
    assert "there is no best.ckpt of a run in run" in fit("run", "--ckpt_path", "best", code=1).err


def test_last_without_a_checkpoint_starts_anew(fit: Run, finished: Path) -> None:
    fit("run", "--ckpt_path", "last")
    assert_same_run("run", finished)


# Evaluating


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


# What a user sees


def test_a_run_introduces_itself_and_says_where_its_files_are(fit: Run) -> None:
    done = fit("run", "--trainer.max_steps", 2)
    words = re.findall(r"^(?:INFO: )?(model|data|training|files|done)  ", done.err, re.MULTILINE)
    assert words == ["model", "data", "training", "files", "done"]
    count = TinyLLM(config={"layers": 1, "width": 16, "heads": 2, "ffn_width": 32,
                            "vocab_size": 280, "context": 16}).config.num_parameters  # fmt: skip
    assert f"{count:,} parameters: 1 layer, width 16, 2 heads" in done.err
    assert "2 updates of 8 rows of 16 tokens = 256 tokens" in done.err
    assert "run/checkpoints/last.ckpt" in done.err
    for noise in ("TPU", "litlogger", "litmodels", "Trainer.fit` stopped", "not empty", "💡"):
        assert noise not in done.err + done.out


def test_a_packed_run_says_how_rows_are_dealt(fit: Run) -> None:
    options = ["class_path: tinyllm.strategies.DecentralizedStrategy", "init_args: {workers: 2, "]
    strategy = f"{{{options[0]}, {options[1]}compile: false}}}}"
    done = fit("run", "--trainer.max_steps", 1, "--trainer.strategy", strategy)
    assert "1 updates of 2 x 4 rows of 16 tokens" in done.err
