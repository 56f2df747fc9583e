"""A LightningModule that knows nothing of this library, and plain PyTorch that trains the same."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

FEATURES, CLASSES, UPDATES = 6, 3, 8
DECAYED = {"lr": 0.03, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.2}
OTHERS = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}

Batch = tuple[Tensor, Tensor]


class Classifier(LightningModule):
    """Convolution, batch norm, a scalar parameter, a frozen layer; two groups in AdamW."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(FEATURES, FEATURES).requires_grad_(False)
        self.conv = nn.Conv1d(1, 4, 3, bias=False)  # batch norm would undo a bias
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4 * (FEATURES - 2), CLASSES)
        self.log_scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.norm(self.conv(self.frozen(x)[:, None])))
        return self.head(hidden.flatten(1)) * self.log_scale.exp()

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.log("train/loss", loss)
        return {"loss": loss, "hits": (logits.argmax(1) == y).sum()}

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        x, y = batch
        self.log("validation/loss", F.cross_entropy(self(x), y), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.groups())

    def groups(self) -> list[dict[str, Any]]:
        """The frozen layer is given to the optimizer, which leaves it alone."""
        return [
            {"params": [*self.frozen.parameters(), self.conv.weight, self.head.weight], **DECAYED},
            {"params": [*self.norm.parameters(), self.head.bias, self.log_scale], **OTHERS},
        ]


def classifier(seed: int = 1) -> Classifier:
    torch.manual_seed(seed)
    return Classifier()


def examples(rows: int, count: int = UPDATES) -> list[Batch]:
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(rows, FEATURES, generator=generator, dtype=torch.float64),
            torch.randint(CLASSES, (rows,), generator=generator),
        )
        for _ in range(count)
    ]


def simulate(
    batches: Sequence[Sequence[Batch]], matrices: Sequence[Tensor], clip: float | None = None
) -> list[Classifier]:
    """Adapt-while-combine of copies of :func:`classifier`.

    Args:
        batches: For each update one batch for each worker.
        matrices: For each update the mixing matrix ``[N, N]``.
        clip: Largest gradient norm of each worker.
    """
    models = [classifier().double() for _ in batches[0]]
    optimizers = [model.configure_optimizers() for model in models]
    for shares, W in zip(batches, matrices, strict=True):
        for model, optimizer, (x, y) in zip(models, optimizers, shares, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
        with torch.no_grad():
            trained = [[p for p in model.parameters() if p.requires_grad] for model in models]
            for same in zip(*trained, strict=True):
                mixed = torch.einsum("ij,j...->i...", W, torch.stack(same))
                for parameter, value in zip(same, mixed, strict=True):
                    parameter.copy_(value)
        for optimizer in optimizers:
            optimizer.step()
    return models
