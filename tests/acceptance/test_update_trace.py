"""Traces that the ``UpdateTrace`` callback writes are traces that the gate's side reads."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from tinyllm import LlamaConfig, TinyLLM
from tinyllm.acceptance import PROTOCOL_1, compare_traces
from tinyllm.callbacks.trace import UpdateTrace
from tinyllm.strategies import DecentralizedStrategy

CONFIG = LlamaConfig(layers=1, width=16, heads=2, ffn_width=24, vocab_size=50, context=12)
WORKERS = 2


def traced(folder: Path, micro_batch_size: int | None, first_row: int = 0) -> Path:
    torch.manual_seed(0)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=DecentralizedStrategy(
            workers=WORKERS,
            scheme="awc",
            topology="one_peer_exponential",
            micro_batch_size=micro_batch_size,
        ),
        max_steps=5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[UpdateTrace(folder)],
    )
    rows = torch.randint(50, (100, 13), generator=torch.Generator().manual_seed(1))[first_row:]
    trainer.fit(TinyLLM(config=CONFIG), DataLoader(rows.split(8)[:5], batch_size=None))
    return folder


def test_two_ways_to_make_the_same_updates_agree(tmp_path: Path) -> None:
    whole, split = traced(tmp_path / "whole", None), traced(tmp_path / "split", 1)
    found = compare_traces(whole, split)
    assert len(found.rows) == 5 * WORKERS
    # float32 sums in another order: a few roundings of 6e-8, which Adam's division magnifies
    assert found.rows[["gradients", "parameters", "exp_avg", "exp_avg_sq"]].max().max() < 1e-5
    assert found.rows["updates"].max() < 1e-3
    assert found.rows["before"][0] < PROTOCOL_1.initial_state_limit
    assert found.rows["loss"].to_numpy() == pytest.approx(found.rows["reference_loss"], abs=1e-5)


def test_runs_on_other_rows_are_not_compared(tmp_path: Path) -> None:
    found = compare_traces(traced(tmp_path / "a", None), traced(tmp_path / "b", None, 8))
    assert found.rows["gradients"].isna().all()
