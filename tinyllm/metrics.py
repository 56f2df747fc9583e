"""What an update tells callbacks and loggers, and exact losses over a split."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torchmetrics import Metric


@dataclass
class UpdateMetrics:
    """Results of one update, left on the device until somebody reads them.

    At log points they are complete: they cover all N workers. In between they cover only the W
    workers of this rank, and what is marked as optional is None. A callback that defines
    ``on_log_point(trainer, pl_module, metrics)``, or a LightningModule that defines
    ``on_log_point(metrics)``, is shown them once they have come from the device, and may return
    values to log.

    Attributes:
        loss: ``[N]`` mean loss of each worker over its targets, in nats; 0 where it had none.
        targets: ``[N]`` number of those targets.
        grad_norm: ``[N]`` global gradient norm of each worker, before clipping.
        learning_rate: Of this update.
        failed: ``[]``; not 0 after an update that was not finite, this one or one before.
        step: Optional; number of the update, from 0.
        epoch: Optional; the update's epoch.
        gamma: Optional; how much of the mixing was left, 0 to 1.
        consensus_distance: Optional ``[N]``; ``‖x_i − x̄‖`` of each worker after the update.
        average_norm: Optional ``[1]``; ``‖x̄‖``.
    """

    loss: Tensor
    targets: Tensor
    grad_norm: Tensor
    learning_rate: float
    failed: Tensor
    step: int | None = None
    epoch: int | None = None
    gamma: float | None = None
    consensus_distance: Tensor | None = None
    average_norm: Tensor | None = None
    _sent: "_Sent | None" = field(default=None, init=False, repr=False)
    _scalars: dict[str, float] | None = field(default=None, init=False, repr=False)

    def send(self) -> None:
        """Sends the values to the host, without waiting for the device."""
        self._sent = _Sent(
            (
                *(self.loss, self.targets, self.grad_norm, self.failed),
                *(self.consensus_distance, self.average_norm),
            )
        )

    @property
    def arrived(self) -> bool:
        """Whether :meth:`scalars` would not have to wait for the device."""
        return self._sent is not None and self._sent.arrived

    @property
    def has_failed(self) -> bool:
        """Whether ``failed`` is set; waits for the values."""
        return self._values()[3] != [0.0]

    def scalars(self) -> dict[str, float]:
        """Named values for loggers, read from the device in one transfer, once.

        The loss is over all targets of all workers. A worker without a target counts in neither
        loss nor gradient norm. The consensus distance over all workers is the root of the mean of
        squares.
        """
        if self._scalars is None:
            self._scalars = self._read_scalars()
        return dict(self._scalars)

    def _values(self) -> list[list[float]]:
        if self._sent is None:
            self.send()
        assert self._sent is not None
        return self._sent.values()

    def _read_scalars(self) -> dict[str, float]:
        loss, targets, grad_norm, _, distance, norm = self._values()
        trained = [worker for worker, count in enumerate(targets) if count]
        values = {
            "train/loss": sum(loss[w] * targets[w] for w in trained) / max(1.0, sum(targets)),
            "train/grad_norm": sum(grad_norm[w] for w in trained) / max(1, len(trained)),
            "train/lr": self.learning_rate,
        }
        if self.gamma is not None:
            values["train/gamma"] = self.gamma
        if distance:
            overall = (sum(d * d for d in distance) / len(distance)) ** 0.5
            values["consensus/distance"] = overall
            values["consensus/relative_distance"] = overall / norm[0]
        if len(loss) > 1:
            for worker in trained:
                values[f"worker_loss/{worker}"] = loss[worker]
            for worker, value in enumerate(distance):
                values[f"worker_distance/{worker}"] = value
                values[f"worker_relative_distance/{worker}"] = value / norm[0]
        return values


def shows_log_points(strategy: object) -> bool:
    """Whether a strategy is one of tinyllm's, which calls ``on_log_point``."""
    return hasattr(strategy, "update_metrics")


class _Sent:
    """Values of tensors on their way to the host, all in one transfer; nothing for None."""

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        self._sizes = [0 if t is None else t.numel() for t in tensors]
        flat = torch.cat([t.detach().double().flatten() for t in tensors if t is not None])
        self._flat = flat.to("cpu", non_blocking=True)  # into pinned memory
        self._event: torch.cuda.Event | None = None
        if flat.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def arrived(self) -> bool:
        return self._event is None or self._event.query()

    def values(self) -> list[list[float]]:
        """Those of each tensor; waits for them."""
        if self._event is not None:
            self._event.synchronize()
        return [part.tolist() for part in self._flat.split(self._sizes)]


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
        # not in place: the state may have been made in inference mode, and this may be outside
        self.nll = self.nll + nll.double().sum()
        self.targets = self.targets + targets.sum()

    def compute(self) -> Tensor:
        """Nats per target; NaN when there was no target."""
        return self.nll / self.targets
