"""What one rank of several predicts and keeps."""

import os
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from tinyllm.model import IGNORED
from tinyllm.predictions import TokenLossWriter
from tinyllm.strategies import SyncStrategy


class Losses(LightningModule):
    """Takes a token's id for its loss: 1 to 3, 5 to 7, and so on to 17 of the fifth row."""

    def __init__(self, writer: TokenLossWriter) -> None:
        super().__init__()
        self._writer, self.kept = writer, -1

    def predict_dataloader(self) -> DataLoader[Tensor]:
        batch = torch.arange(6 * 4).view(6, 4)
        batch[4, 2:] = batch[5] = IGNORED
        rows: Any = [batch[int(os.environ["RANK"]) :: 2]]
        return DataLoader(rows, batch_size=None)

    def predict_step(self, rows: Tensor) -> Tensor:
        return rows[:, 1:].float()

    def on_predict_epoch_end(self) -> None:
        self.kept = len(self._writer._losses)


def batches_kept(folder: str) -> int:
    """How many batches of losses this rank holds when all are predicted."""
    module = Losses(writer := TokenLossWriter())
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SyncStrategy(compile=False),
        callbacks=[writer],
        default_root_dir=folder,
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
    )
    trainer.predict(module, return_predictions=False)
    return module.kept
