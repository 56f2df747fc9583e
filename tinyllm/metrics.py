"""What an update tells callbacks and loggers, and exact losses over a split."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torchmetrics import Metric


@dataclass
class UpdateMetrics:
    """Results of one update, left on the device until somebody reads them.

    At log points they cover all N workers; in between only the W workers of this rank, and what is
    marked as optional is None.

    Attributes:
        loss: ``[N]`` mean loss of each worker over its targets, in nats.
        grad_norm: ``[N]`` global gradient norm of each worker, before clipping.
        learning_rate: Of this update.
        gamma: Optional; how much of the mixing was left, 0 to 1.
        consensus_distance: Optional ``[N]``; ``‖x_i − x̄‖`` of each worker after the update.
        average_norm: Optional ``[1]``; ``‖x̄‖``.
    """

    loss: Tensor
    grad_norm: Tensor
    learning_rate: float
    gamma: float | None = None
    consensus_distance: Tensor | None = None
    average_norm: Tensor | None = None

    def scalars(self) -> dict[str, float]:
        """Named values for loggers, read from the device in one transfer.

        The consensus distance over all workers is the root of the mean of squares.
        """
        loss, grad_norm, distance, norm = _read(
            self.loss, self.grad_norm, self.consensus_distance, self.average_norm
        )
        values = {
            "train/loss": sum(loss) / len(loss),
            "train/grad_norm": sum(grad_norm) / len(grad_norm),
            "train/lr": self.learning_rate,
        }
        if self.gamma is not None:
            values["train/gamma"] = self.gamma
        if distance:
            overall = (sum(d * d for d in distance) / len(distance)) ** 0.5
            values["consensus/distance"] = overall
            values["consensus/relative_distance"] = overall / norm[0]
        if len(loss) > 1:
            for worker, value in enumerate(loss):
                values[f"worker_loss/{worker}"] = value
            for worker, value in enumerate(distance):
                values[f"worker_distance/{worker}"] = value
        return values


def _read(*tensors: Tensor | None) -> list[list[float]]:
    """The values of all tensors, with one wait for the device; nothing for None."""
    given = [t.detach().double().flatten() for t in tensors if t is not None]
    flat = torch.cat(given).cpu()
    parts = iter(flat.split([t.numel() for t in given]))
    return [[] if t is None else next(parts).tolist() for t in tensors]


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
