"""Anybody's LightningModule, with a worker on each of two ranks that mix their weights."""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from tinyllm.strategies import DecentralizedStrategy


class Line(LightningModule):
    """Fits y = 3x + 1."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.mse_loss(self.layer(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)


x = torch.linspace(-1, 1, 256)[:, None]
module = Line()
trainer = Trainer(
    strategy=DecentralizedStrategy(workers=2, topology="complete"), devices=2, max_epochs=10
)
trainer.fit(module, DataLoader(TensorDataset(x, 3 * x + 1), batch_size=16, shuffle=True))
if trainer.is_global_zero:  # the other rank runs this file, too
    print(f"y = {module.layer.weight.item():.2f}x + {module.layer.bias.item():.2f}")
