"""What an engine promises: it runs updates over an arena and knows nothing of Lightning."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tinyllm.arena import Arena
from tinyllm.metrics import UpdateMetrics


@dataclass(frozen=True)
class GroupHyperparameters:
    """AdamW's hyperparameters for one column range of the arena, at one update."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> "GroupHyperparameters":
        """Reads a parameter group of ``torch.optim.AdamW``."""
        return cls(float(group["lr"]), group["betas"], group["eps"], group["weight_decay"])


class NonFiniteError(RuntimeError):
    """A loss or gradient was NaN or infinite; no state has been changed since.

    Args:
        update: 0-based update at which it was first seen.
        workers: Global numbers of the workers it was seen in.
    """

    def __init__(self, update: int, workers: list[int]) -> None:
        self.update, self.workers = update, workers
        named = ", ".join(map(str, workers))
        super().__init__(
            f"loss or gradient of worker {named} is not finite at update {update}; weights and "
            "moments of all workers are as they were before it. Lower the learning rate, clip, or "
            "look at the batch; the state can still be saved and resumed"
        )


class Engine(Protocol):
    """Accumulates gradients over batches and applies one update to all local workers.

    Gradients are sums over targets until :meth:`finish_gradients` divides them by the number of
    targets of the whole update, so micro-batches and accumulated batches of any size weigh right.
    """

    arena: Arena
    updates: int
    """Updates applied so far."""

    def accumulate(self, rows: Tensor) -> Tensor:
        """Adds the gradients of token rows.

        Args:
            rows: ``[B·W, T+1]`` int64; row r belongs to local worker ``r mod W``.

        Returns:
            Mean loss of these rows over all local workers, a detached scalar.
        """
        ...

    def finish_gradients(self) -> None:
        """Turns accumulated sums into each worker's mean gradient, across ranks where needed."""
        ...

    def update(
        self, groups: list[GroupHyperparameters], clip_norm: float | None
    ) -> UpdateMetrics:
        """Clips, adapts and combines; then the next :meth:`accumulate` starts afresh."""
        ...

    def raise_if_failed(self) -> None:
        """Raises :class:`NonFiniteError` if any update so far met one; synchronizes."""
        ...


ForwardContext = Callable[[], AbstractContextManager[Any]]
"""Opens the precision under which the forward pass runs."""


def check_rows(rows: Tensor, workers: int) -> None:
    """Refuses batches that cannot be shared out among the workers.

    Raises:
        ValueError: If rows are not ``[B·W, T+1]`` integers.
    """
    if rows.ndim != 2 or rows.dtype != torch.int64 or rows.shape[1] < 2:
        raise ValueError(
            f"a batch of token rows is [rows, T+1] int64, got {list(rows.shape)} {rows.dtype}"
        )
    if rows.shape[0] == 0 or rows.shape[0] % workers:
        raise ValueError(
            f"a batch of {rows.shape[0]} rows cannot be shared out among {workers} workers; "
            "pad it with rows of -100 to a multiple"
        )
