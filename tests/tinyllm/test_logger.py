"""metrics.csv keeps its history when a run resumes and when columns come late (PITFALLS 13)."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

from tinyllm.logger import RunLogger

Rows = list[dict[str, str]]


def log(folder: Path, *rows: tuple[int, dict[str, float]]) -> RunLogger:
    """One run's rows."""
    logger = RunLogger(folder)
    for step, values in rows:
        logger.log_metrics(values, step)
    logger.finalize("success")
    return logger


def read(path: Path) -> Rows:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def train(*steps: int, run: int = 0) -> list[tuple[int, dict[str, float]]]:
    return [(step, {"train/loss": run + step / 10, "epoch": 0}) for step in steps]


def losses(path: Path) -> list[tuple[int, float]]:
    """Steps and losses of updates, free of rounding."""
    rows = [row for row in read(path) if row["train/loss"]]
    return [(int(row["step"]), round(float(row["train/loss"]), 6)) for row in rows]


def test_writes_each_row_at_once(tmp_path: Path) -> None:
    logger = RunLogger(tmp_path)
    for step in range(3):
        logger.log_metrics({"train/loss": torch.tensor(step / 4)}, step)
        assert len(read(tmp_path / "metrics.csv")) == step + 1
    assert read(tmp_path / "metrics.csv")[1] == {"step": "1", "train/loss": "0.25"}
    assert logger.log_dir == str(tmp_path)


def test_an_unused_logger_leaves_the_file_alone(tmp_path: Path) -> None:
    log(tmp_path, *train(0, 1))
    before = (tmp_path / "metrics.csv").read_bytes()
    logger = RunLogger(tmp_path)
    _ = logger.experiment  # as the Trainer does at set-up
    logger.log_hyperparams({"lr": 1})
    logger.finalize("failed")
    assert (tmp_path / "metrics.csv").read_bytes() == before
    assert [path.name for path in tmp_path.glob("*.csv")] == ["metrics.csv"]


def test_a_resumed_run_continues_the_file(tmp_path: Path) -> None:
    log(tmp_path, *train(0, 1, 2))
    log(tmp_path, *train(3, 4, run=10))
    expected = [(0, 0.0), (1, 0.1), (2, 0.2), (3, 10.3), (4, 10.4)]
    assert losses(tmp_path / "metrics.csv") == expected
    assert len(list(tmp_path.glob("*"))) == 1


def test_rows_past_the_checkpoint_are_replaced(tmp_path: Path) -> None:
    log(tmp_path, *train(0, 1, 2, 3, 4))
    log(tmp_path, *train(2, 3, run=10))
    assert losses(tmp_path / "metrics.csv") == [(0, 0.0), (1, 0.1), (2, 10.2), (3, 10.3)]


def test_a_run_that_resumes_with_a_validation_keeps_its_updates_row(tmp_path: Path) -> None:
    validation: dict[str, float] = {"validation/loss": 4.0, "epoch": 0}
    log(tmp_path, *train(0, 1), (1, validation), *train(2))
    log(tmp_path, (1, validation | {"validation/loss": 5.0}), *train(2, run=10))
    rows = read(tmp_path / "metrics.csv")
    assert [(row["step"], row["train/loss"], row["validation/loss"]) for row in rows] == [
        *(("0", "0.0", ""), ("1", "0.1", ""), ("1", "", "5.0"), ("2", "10.2", "")),
    ]


def test_a_run_that_resumes_with_an_update_replaces_its_validation_too(tmp_path: Path) -> None:
    log(tmp_path, *train(0, 1), (1, {"validation/loss": 4.0}))
    log(tmp_path, *train(1, run=10))
    rows = read(tmp_path / "metrics.csv")
    assert [(row["step"], row["train/loss"]) for row in rows] == [("0", "0.0"), ("1", "10.1")]


@pytest.mark.parametrize("resumed", [False, True])
def test_late_columns_keep_earlier_rows(tmp_path: Path, resumed: bool) -> None:
    late: list[tuple[int, dict[str, float]]] = [(2, {"a/late": 7.0, "zz": 8.0})]
    if resumed:
        log(tmp_path, *train(0, 1))
        log(tmp_path, *late, *train(3))
    else:
        log(tmp_path, *train(0, 1), *late, *train(3))
    rows = read(tmp_path / "metrics.csv")
    assert set(rows[0]) == {"step", "epoch", "train/loss", "a/late", "zz"}
    assert [row["train/loss"] for row in rows] == ["0.0", "0.1", "", "0.3"]
    assert [row["a/late"] for row in rows] == ["", "", "7.0", ""]


def test_columns_of_the_earlier_part_stay(tmp_path: Path) -> None:
    log(tmp_path, (0, {"old": 1.0}), (1, {"old": 2.0}))
    log(tmp_path, (2, {"new": 3.0}))
    rows = read(tmp_path / "metrics.csv")
    assert [(row["old"], row["new"]) for row in rows] == [("1.0", ""), ("2.0", ""), ("", "3.0")]


def test_a_new_run_keeps_the_old_file(tmp_path: Path) -> None:
    log(tmp_path, *train(0, 1))
    log(tmp_path, *train(0, run=10))
    log(tmp_path, *train(0, run=20))
    assert losses(tmp_path / "metrics.csv") == [(0, 20.0)]
    assert losses(tmp_path / "metrics-1.csv") == [(0, 0.0), (1, 0.1)]
    assert losses(tmp_path / "metrics-2.csv") == [(0, 10.0)]


@pytest.mark.parametrize("cut", [2, 3, 8])
def test_a_row_that_a_killed_run_left_half_is_dropped(tmp_path: Path, cut: int) -> None:
    log(tmp_path, *train(0, 1, 2))
    path = tmp_path / "metrics.csv"
    path.write_bytes(path.read_bytes()[:-cut])
    log(tmp_path, *train(3, run=10))
    assert losses(path) == [(0, 0.0), (1, 0.1), (3, 10.3)]


def test_an_empty_file_is_no_history(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").touch()
    log(tmp_path, *train(5))
    assert losses(tmp_path / "metrics.csv") == [(5, 0.5)]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]


def test_history_survives_a_failure_while_columns_are_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log(tmp_path, *train(0, 1))
    before = (tmp_path / "metrics.csv").read_bytes()
    logger = RunLogger(tmp_path)
    logger.log_metrics({"train/loss": 0.2, "epoch": 0}, 2)
    whole = (tmp_path / "metrics.csv").read_bytes()
    assert whole.startswith(before)

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(csv.DictWriter, "writerows", fail)
        with pytest.raises(OSError, match="No space left"):
            logger.log_metrics({"late": 1.0}, 3)
    assert (tmp_path / "metrics.csv").read_bytes() == whole


class Counting(LightningModule):
    """Logs the number of batches it has seen, in this run and the ones before."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen = torch.nn.Buffer(torch.zeros(()))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.seen += 1
        self.log("seen", self.seen.clone())
        return self.weight * batch.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_under_a_trainer(tmp_path: Path) -> None:
    """Any module and strategy: stop, train on beyond the checkpoint, resume, start anew."""

    def fit(max_steps: int, ckpt_path: Path | None = None) -> Trainer:
        trainer = Trainer(
            accelerator="cpu",
            max_steps=max_steps,
            log_every_n_steps=1,
            logger=RunLogger(tmp_path),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
        )
        trainer.fit(Counting(), DataLoader(torch.ones(20, 1)), ckpt_path=ckpt_path)
        return trainer

    fit(3).save_checkpoint(tmp_path / "at_3.ckpt")
    fit(6, tmp_path / "at_3.ckpt")
    fit(5, tmp_path / "at_3.ckpt")
    rows = read(tmp_path / "metrics.csv")
    assert [(row["step"], row["seen"]) for row in rows] == [
        (str(i), f"{i + 1}.0") for i in range(5)
    ]
    fit(2)
    assert len(read(tmp_path / "metrics.csv")) == 2
    assert len(read(tmp_path / "metrics-1.csv")) == 5
