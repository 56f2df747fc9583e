"""Loggers of Lightning's beside the run's own: one line each, and the same numbers in both."""

from pathlib import Path
from typing import Any

import pytest
from lightning_utilities.core.imports import RequirementCache
from run_files import Run, metrics, printed
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

PACKED = (
    "{class_path: tinyllm.strategies.DecentralizedStrategy, "
    "init_args: {workers: 2, topology: ring, compile: false}}"
)
TENSORBOARD = ["--trainer.logger+=TensorBoardLogger", "--trainer.logger.save_dir=run"]
WANDB = ["--trainer.logger+=WandbLogger", "--trainer.logger.project=tinyllm"]
MLFLOW = ["--trainer.logger+=MLFlowLogger", "--trainer.logger.tracking_uri=sqlite:///mlflow.db"]


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """What a TensorBoard log holds: name -> step -> value."""
    events = EventAccumulator(str(folder)).Reload()
    return {
        name: {event.step: event.value for event in events.Scalars(name)}
        for name in events.Tags()["scalars"]
    }


def test_tensorboard_gets_what_the_runs_own_log_gets(fit: Run) -> None:
    fit("run", *TENSORBOARD, "--trainer.strategy", PACKED)
    shown, table = scalars(Path("run/lightning_logs/version_0")), metrics("run")
    names = set(table.columns) - {"step", "epoch"}
    assert names <= set(shown)
    workers = [f"worker_loss/{worker}" for worker in (0, 1)]  # a group with a curve for each
    assert {"train/loss", "train/lr", "validation/loss", *workers} <= names
    for name in names:
        rows = table[table[name].notna()]
        expected = dict(zip(rows["step"], rows[name], strict=True))
        assert shown[name] == pytest.approx(expected, rel=1e-6)


def test_a_runs_files_stay_where_they_are(fit: Run) -> None:
    """So that --ckpt_path last finds them, whatever loggers a run has."""
    fit("run", *TENSORBOARD, "--trainer.max_steps", 4)
    for name in ("metrics.csv", "config.yaml", "checkpoints/last.ckpt", "checkpoints/best.ckpt"):
        assert Path("run", name).is_file()
    fit("run", *TENSORBOARD, "--ckpt_path", "last")
    assert metrics("run")["train/loss"].count() == 12


def test_several_loggers_are_added_one_by_one(command: Any, tiny: Path) -> None:
    done = command("fit", "--config", tiny, *TENSORBOARD, *WANDB, *MLFLOW, "--print_config")
    loggers = printed(done)["trainer"]["logger"]
    module = "lightning.pytorch.loggers"
    names = [f"{module}.{name}Logger" for name in ("TensorBoard", "Wandb", "MLFlow")]
    assert [logger["class_path"] for logger in loggers] == names
    given = [logger["init_args"] for logger in loggers]
    assert given[0]["save_dir"] == "run"
    assert given[1]["project"] == "tinyllm"
    assert given[2]["tracking_uri"] == "sqlite:///mlflow.db"


@pytest.mark.parametrize("options", [WANDB, MLFLOW])
def test_a_missing_package_is_a_line(
    fit: Run, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    missing = RequirementCache("not-there-at-all")
    monkeypatch.setattr("lightning.pytorch.loggers.wandb._WANDB_AVAILABLE", missing)
    monkeypatch.setattr("lightning.pytorch.loggers.mlflow._MLFLOW_AVAILABLE", missing)
    error = [line for line in fit("run", *options, code=1).err.splitlines() if "error" in line]
    assert len(error) == 1
    assert error[0].startswith("tinyllm fit: error: Requirement 'not-there-at-all' not met")
    assert "pip install" in error[0]


@pytest.mark.parametrize(("given", "logs"), [("true", True), ("false", False), ("null", True)])
def test_the_usual_log_and_none(fit: Run, given: str, logs: bool) -> None:
    fit("run", "--trainer.max_steps", 2, "--trainer.logger", given)
    assert Path("run/metrics.csv").exists() == logs
    assert not list(Path("run").rglob("events.*"))


def test_the_runs_own_log_is_not_written_twice(fit: Run) -> None:
    options = ["--trainer.logger=tinyllm.logger.RunLogger", "--trainer.logger.save_dir=run"]
    fit("run", *options)
    assert metrics("run")["train/loss"].count() == 12
