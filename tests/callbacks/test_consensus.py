"""The table of consensus distances, against distances computed from the weights themselves."""

import csv
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from simulation import Batches, batches, fit, new_trainer, tiny
from torch import Tensor

from tinyllm.callbacks import ConsensusDistance
from tinyllm.strategies import DecentralizedStrategy, SyncStrategy


def read(folder: Path) -> list[dict[str, float]]:
    with (folder / "consensus.csv").open(newline="") as file:
        return [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]


def expected(update: int, weights: Tensor) -> dict[str, float]:
    """A row of the table from weights ``[N, parameters]``."""
    mean = weights.mean(0)
    distance, norm = (weights - mean).norm(dim=1), mean.norm()
    overall = distance.square().mean().sqrt()
    row = {"update": update, "distance": overall, "relative_distance": overall / norm}
    for worker, own in enumerate(distance):
        row |= {f"distance/{worker}": own, f"relative_distance/{worker}": own / norm}
    return {name: float(value) for name, value in row.items()}


@pytest.mark.parametrize("workers", [2, 3])
def test_the_table_is_that_of_the_weights(tmp_path: Path, workers: int) -> None:
    record = fit(
        tiny(),
        DecentralizedStrategy(workers, topology="ring", compile=False),
        batches(workers),
        callbacks=[ConsensusDistance(tmp_path)],
    )
    table = read(tmp_path)
    assert [row["update"] for row in table] == [3, 7, 11]  # log points
    for row in table:
        wanted = expected(int(row["update"]), record.weights[int(row["update"])])
        assert list(row) == list(wanted)
        assert row == pytest.approx(wanted, rel=1e-9)


def test_accumulated_batches_give_one_row(tmp_path: Path) -> None:
    fit(
        tiny(),
        DecentralizedStrategy(2, compile=False),
        batches(2),
        callbacks=[ConsensusDistance(tmp_path)],
        accumulate_grad_batches=3,
        log_every_n_steps=1,
        max_steps=4,
    )
    assert [row["update"] for row in read(tmp_path)] == [0, 1, 2, 3]


def test_a_resumed_run_continues_the_table(tmp_path: Path) -> None:
    """Rows that were written after the checkpoint, and half a row, are replaced."""
    (tmp_path / "whole").mkdir()
    whole = DecentralizedStrategy(2, compile=False)
    options: dict[str, Any] = {"log_every_n_steps": 2, "enable_checkpointing": True}
    save = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=5, save_top_k=-1)
    fit(tiny(), whole, batches(2), callbacks=[save, ConsensusDistance(tmp_path)], **options)
    before = read(tmp_path)
    assert [row["update"] for row in before] == [1, 3, 5, 7, 9, 11]
    with (tmp_path / "consensus.csv").open("a") as file:
        file.write("12,0.5")
    fit(
        tiny(),
        DecentralizedStrategy(2, compile=False),
        batches(2),
        callbacks=[ConsensusDistance(tmp_path)],
        ckpt_path=tmp_path / "step=5.ckpt",
        log_every_n_steps=2,
    )
    assert read(tmp_path) == before


def test_a_new_run_starts_a_new_table(tmp_path: Path) -> None:
    for _ in range(2):
        strategy = DecentralizedStrategy(2, compile=False)
        fit(tiny(), strategy, batches(2), callbacks=[ConsensusDistance(tmp_path)])
    assert len(read(tmp_path)) == 3


@pytest.mark.parametrize("strategy", [SyncStrategy, "auto"])
def test_one_worker_is_said_once(
    tmp_path: Path, strategy: Any, capture_rank_zero_info: list[str]
) -> None:
    chosen = strategy if isinstance(strategy, str) else strategy(compile=False)
    trainer = new_trainer(
        chosen,
        callbacks=[ConsensusDistance(tmp_path)],
        log_every_n_steps=1,
    )
    trainer.fit(tiny(), Batches(batches(1)))
    assert [m for m in capture_rank_zero_info if "ConsensusDistance" in m] == [
        "ConsensusDistance: there is one worker, so there is no distance"
    ]
    assert not (tmp_path / "consensus.csv").exists()


@pytest.fixture
def capture_rank_zero_info(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr("tinyllm.callbacks.consensus.rank_zero_info", said.append)
    return said


class StopAt(Callback):
    """Ends the run at an update between log points, before the other callbacks run."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.global_step == 6


def test_a_run_that_is_stopped_between_log_points(tmp_path: Path) -> None:
    fit(
        tiny(),
        DecentralizedStrategy(2, compile=False),
        batches(2),
        callbacks=[StopAt(), ConsensusDistance(tmp_path)],
    )
    assert [row["update"] for row in read(tmp_path)] == [3]
