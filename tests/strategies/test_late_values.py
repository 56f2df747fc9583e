"""Values of a log point that come from the device while later updates run, as they do on a GPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from simulation import new_trainer
from torch import Tensor
from torch.utils.data import DataLoader

from tinyllm import LlamaConfig, TinyLLM
from tinyllm import metrics as metrics_module
from tinyllm.callbacks import ConsensusDistance, MemoryMonitor
from tinyllm.errors import NonFiniteError
from tinyllm.logger import RunLogger
from tinyllm.metrics import UpdateMetrics
from tinyllm.schedule import WarmupCosine
from tinyllm.strategies import DecentralizedStrategy
from tinyllm.strategies.base import ArenaStrategy

CONFIG = LlamaConfig(layers=1, width=16, heads=2, ffn_width=32, vocab_size=32, context=8)
Late = Callable[[int], None]


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Late:
    """Makes values arrive so many looks after they were sent, unless they are waited for."""

    def by(looks: int) -> None:
        real = metrics_module._Sent

        class Slow(real):  # type: ignore[misc, valid-type]
            def __init__(self, tensors: tuple[Tensor | None, ...]) -> None:
                super().__init__(tensors)
                self._looks = 0

            @property
            def arrived(self) -> bool:
                self._looks += 1
                return self._looks > looks

        monkeypatch.setattr(metrics_module, "_Sent", Slow)
        monkeypatch.setattr(ArenaStrategy, "_asks_after_every_update", False)  # nor is a GPU

    return by


def fit(folder: Path, *callbacks: Callback, ckpt_path: Path | None = None, **options: Any) -> None:
    torch.manual_seed(0)
    rows = torch.randint(32, (84, 9))  # 7 batches an epoch
    trainer = new_trainer(
        DecentralizedStrategy(4, compile=False),
        **{
            "max_steps": 24,
            "log_every_n_steps": 2,
            "val_check_interval": 5,
            "check_val_every_n_epoch": None,
            "gradient_clip_val": 1.0,
            "limit_val_batches": None,
            "logger": RunLogger(folder),
            "enable_checkpointing": True,
            **options,
        },
        callbacks=[
            *(ConsensusDistance(folder), MemoryMonitor(folder), *callbacks),
            ModelCheckpoint(folder, filename="{step}", every_n_train_steps=3, save_top_k=-1),
        ],
    )
    module = TinyLLM(config=CONFIG, schedule=WarmupCosine(updates=24))
    loaders = DataLoader(rows, batch_size=12), DataLoader(rows[:12], batch_size=12)
    trainer.fit(module, *loaders, ckpt_path=ckpt_path)


def table(folder: Path) -> pd.DataFrame:
    rows = pd.read_csv(folder / "metrics.csv")
    return rows[[name for name in rows.columns if not name.startswith("memory/")]]


@pytest.mark.parametrize("looks", [1, 4, 1_000])
def test_they_are_logged_under_their_own_update(tmp_path: Path, late: Late, looks: int) -> None:
    fit(tmp_path / "at_once")
    late(looks)
    fit(tmp_path / "late")
    expected = table(tmp_path / "at_once")
    pd.testing.assert_frame_equal(table(tmp_path / "late"), expected, check_exact=True)
    assert expected["step"].is_monotonic_increasing
    assert expected["train/loss"].count() == 12
    texts = [(tmp_path / name / "consensus.csv").read_text() for name in ("at_once", "late")]
    assert texts[0] == texts[1]


def test_zero_keeps_loggers_silent(tmp_path: Path) -> None:
    fit(tmp_path, log_every_n_steps=0, max_steps=60)
    rows = pd.read_csv(tmp_path / "metrics.csv")
    assert "train/loss" not in rows  # there are validations


def test_memory_is_in_the_row_of_its_update(tmp_path: Path, late: Late) -> None:
    late(3)
    fit(tmp_path)
    rows = pd.read_csv(tmp_path / "metrics.csv")
    of_updates = rows["train/loss"].notna()
    assert rows["memory/peak_rss_gib"].notna().equals(of_updates)


def test_a_resumed_run_has_every_row(tmp_path: Path, late: Late) -> None:
    late(1_000)
    fit(tmp_path / "whole")
    fit(tmp_path / "parts", max_steps=23)
    fit(tmp_path / "parts", ckpt_path=tmp_path / "parts" / "step=21.ckpt")  # three epochs
    expected = table(tmp_path / "whole")
    pd.testing.assert_frame_equal(table(tmp_path / "parts"), expected, check_exact=True)


class Poison(Callback):
    """Makes a weight infinite before an update."""

    def __init__(self, update: int) -> None:
        self._update = update

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, *_: object
    ) -> None:
        if trainer.global_step == self._update:
            next(pl_module.parameters()).data[2].fill_(float("inf"))


@pytest.mark.parametrize("looks", [0, 2, 1_000])
def test_a_failure_is_found_with_them(tmp_path: Path, late: Late, looks: int) -> None:
    late(looks)
    with pytest.raises(NonFiniteError, match="worker 2 is not finite at update 6"):
        fit(tmp_path, Poison(6))
    logged = table(tmp_path)
    assert logged.loc[logged["train/loss"].notna(), "step"].tolist() == [1, 3, 5]


def test_what_callbacks_and_the_module_return_is_logged_once(tmp_path: Path) -> None:
    seen: list[tuple[int | None, float]] = []

    class Own(Callback):
        def on_log_point(
            self, trainer: Trainer, pl_module: LightningModule, metrics: UpdateMetrics
        ) -> dict[str, float]:
            seen.append((metrics.step, metrics.scalars()["train/loss"]))
            return {"own/loss": 2 * metrics.scalars()["train/loss"]}

    fit(tmp_path, Own())
    rows = pd.read_csv(tmp_path / "metrics.csv").dropna(subset="train/loss")
    assert [step for step, _ in seen] == rows["step"].tolist() == list(range(1, 24, 2))
    np.testing.assert_allclose(rows["own/loss"], 2 * rows["train/loss"])


class AtEpochEnd(Callback):
    """Remembers what callbacks and bars are told at the end of an epoch."""

    def __init__(self) -> None:
        self.told: list[tuple[float, float]] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loss = trainer.callback_metrics["train/loss"].item()
        self.told.append((loss, trainer.progress_bar_metrics["train/loss"]))


def test_the_end_of_an_epoch_knows_the_newest(tmp_path: Path, late: Late) -> None:
    at_once, afterwards = AtEpochEnd(), AtEpochEnd()
    fit(tmp_path / "at_once", at_once)
    late(1_000)
    fit(tmp_path / "late", afterwards)
    assert afterwards.told == at_once.told
    losses = table(tmp_path / "late").dropna(subset="train/loss")["train/loss"].tolist()
    assert [loss for loss, _ in at_once.told] == pytest.approx(
        [losses[2], losses[6], losses[9], losses[11]]
    )
    assert all(shown == pytest.approx(loss) for loss, shown in at_once.told)
