"""What ``tinyllm predict`` leaves behind: the loss of every token of the split, in a file."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from typing_extensions import override

from tinyllm.files import replacing
from tinyllm.model import IGNORED


class TokenLossWriter(BasePredictionWriter):
    """Writes ``predictions.npy`` into the run's folder.

    It holds float32 losses in nats in the split's order: number ``i`` is that of the split's token
    ``i + 1``, given the tokens before it in its row. The first token has none.
    """

    def __init__(self) -> None:
        super().__init__("batch")
        self._losses: list[Tensor] = []

    @override
    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        prediction: Tensor,
        batch_indices: Any,
        batch: Tensor,
        *args: Any,
    ) -> None:
        losses, scored = prediction.float(), batch[:, 1:] != IGNORED
        if trainer.world_size > 1:
            # [ranks, rows, T] to [rows, T]: row r of a batch is on rank `r mod ranks`
            gather = trainer.strategy.all_gather
            losses = gather(losses).transpose(0, 1).flatten(0, 1)
            scored = gather(scored).transpose(0, 1).flatten(0, 1)
        if trainer.is_global_zero:
            self._losses.append(losses[scored].cpu())

    @override
    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        losses = torch.cat(self._losses).numpy()
        self._losses.clear()
        path = Path(trainer.default_root_dir) / "predictions.npy"
        with replacing(path) as partial, partial.open("wb") as file:
            np.save(file, losses)
        mean = losses.mean(dtype=np.float64)
        rank_zero_info(f"{path}: losses of {losses.size:,} tokens, {mean:.4f} nats on average")
