"""What ``tinyllm predict`` leaves behind: the loss of every token of the split, in a file."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
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
            losses = _gathered(losses, trainer.world_size)
            scored = _gathered(scored.byte(), trainer.world_size).bool()
        self._losses.append(losses[scored].cpu())

    @override
    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        losses = torch.cat(self._losses).numpy()
        self._losses.clear()
        if not trainer.is_global_zero:
            return
        path = Path(trainer.default_root_dir) / "predictions.npy"
        with replacing(path) as partial, partial.open("wb") as file:
            np.save(file, losses)
        mean = losses.mean(dtype=np.float64)
        rank_zero_info(f"{path}: losses of {losses.size:,} tokens, {mean:.4f} nats on average")


def _gathered(rows: Tensor, world_size: int) -> Tensor:
    """A global batch ``[B, T]``, whose row r is on rank ``r mod ranks``."""
    parts = [torch.empty_like(rows) for _ in range(world_size)]
    dist.all_gather(parts, rows.contiguous())
    return torch.stack(parts, 1).flatten(0, 1)
