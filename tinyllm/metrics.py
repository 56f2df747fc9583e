"""What an update tells callbacks and loggers, and exact losses over a split."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torchmetrics import Metric


@dataclass
class UpdateMetrics:
    """Results of one update, left on the device until somebody reads them.

    Attributes:
        loss: ``[W]`` mean loss of each local worker over its targets, in nats.
        grad_norm: ``[W]`` global gradient norm of each local worker, before clipping.
        learning_rate: Of this update.
    """

    loss: Tensor
    grad_norm: Tensor
    learning_rate: float

    def read(self) -> dict[str, list[float]]:
        """All device values on the host, in one transfer."""
        tensors = {f.name: v for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor)}
        flat = torch.cat([tensor.detach().double().flatten() for tensor in tensors.values()])
        values = iter(flat.tolist())
        return {name: [next(values) for _ in range(t.numel())] for name, t in tensors.items()}


class TokenLoss(Metric):
    """Σ loss / Σ targets over everything seen, on all ranks; never a mean of means."""

    full_state_update = False
    nll: Tensor
    targets: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("nll", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("targets", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, nll: Tensor, targets: Tensor) -> None:
        """Adds summed negative log-likelihoods in nats and the number of targets behind them."""
        self.nll += nll.double().sum()
        self.targets += targets.sum()

    def compute(self) -> Tensor:
        """Nats per target; NaN when there was no target."""
        return self.nll / self.targets
