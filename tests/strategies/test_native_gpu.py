"""The native backend on a GPU: nothing waits between log points, and bf16 stays near fp32."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from waiting import ForbidWaiting

from tinyllm import LlamaConfig, TinyLLM, TokenDataModule
from tinyllm.data.prepare import prepare
from tinyllm.strategies import DecentralizedStrategy, SyncStrategy

pytestmark = pytest.mark.gpu

CONFIG = LlamaConfig(layers=2, width=128, heads=2, ffn_width=256, vocab_size=512, context=128)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    tokens = np.random.default_rng(0).zipf(1.5, 400_000).clip(1, 511).astype(np.uint16)
    tokens[99::100] = 0  # the boundary: documents of 99 tokens
    tokens.tofile(folder / "tokens.bin")
    prepare(folder / "cache", "tokens", str(folder / "tokens.bin"), vocab_size=512, boundary_id=0)
    return folder / "cache"


def fit(cache: Path, strategy: Any, *callbacks: Callback, **options: Any) -> TinyLLM:
    seed_everything(0, verbose=False)
    residency = options.pop("residency", "auto")
    module = TinyLLM(config=CONFIG)
    settings: dict[str, Any] = {"max_steps": 24, "precision": "bf16-mixed", "log_every_n_steps": 8}
    trainer = Trainer(
        accelerator="gpu",
        devices=1,
        strategy=strategy,
        gradient_clip_val=1.0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        callbacks=list(callbacks),
        **settings | options,
    )
    data = TokenDataModule(str(cache), context=128, batch_size=16, residency=residency)
    trainer.fit(module, data)
    return module


@pytest.mark.parametrize("residency", ["host", "device"])
@pytest.mark.parametrize("packed", [False, True])
def test_no_wait_between_log_points(cache: Path, packed: bool, residency: str) -> None:
    """PITFALL 10: logging and bars force no device sync between log points."""
    strategy = DecentralizedStrategy(4) if packed else SyncStrategy()
    fit(cache, strategy, ForbidWaiting(), residency=residency)


class Losses(Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        self.values.append(trainer.strategy.update_metrics.loss.mean().item())


@pytest.mark.parametrize("packed", [False, True])
def test_bf16_stays_near_fp32(cache: Path, packed: bool) -> None:
    curves = []
    for precision in ("bf16-mixed", "32-true"):
        strategy = DecentralizedStrategy(4) if packed else SyncStrategy()
        losses = Losses()
        fit(cache, strategy, losses, precision=precision, log_every_n_steps=1)
        curves.append(np.array(losses.values))
    bf16, fp32 = curves
    assert fp32[-1] < fp32[0] - 0.5  # it trains
    assert np.abs(bf16 - fp32).max() < 0.02  # eight bits of mantissa, averaged over 2,048 targets
