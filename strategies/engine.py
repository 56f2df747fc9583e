"""What an engine promises: it runs updates over an arena and knows nothing of Lightning."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from tinyllm.arena import Arena
from tinyllm.arguments import check_choice
from tinyllm.metrics import UpdateMetrics

Scheme = Literal["awc", "atc"]
"""Adapt while combine, or adapt then combine: the mixing comes before or after AdamW."""

ForwardContext = Callable[[], AbstractContextManager[Any]]
"""Opens the precision under which the forward pass runs."""


@dataclass(frozen=True)
class GroupHyperparameters:
    """AdamW's hyperparameters for one column range of the arena, at one update.

    Attributes:
        lr: η.
        betas: β1 and β2, numbers of the dtype that updates are computed in. torch's fused kernel
            takes 1 − β2 in fp32 and its bias correction in fp64, which disagree by 1.3% at a β2 of
            0.999999 that is not rounded before.
        eps: ε.
        weight_decay: λ.
    """

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float

    @classmethod
    def of(cls, group: Mapping[str, Any], dtype: torch.dtype) -> "GroupHyperparameters":
        """Reads a parameter group of ``torch.optim.AdamW``, for an arena of ``dtype``."""
        betas = _rounded(tuple(group["betas"]), dtype)
        return cls(float(group["lr"]), betas, group["eps"], group["weight_decay"])


@lru_cache  # they are asked for at every update
def _rounded(betas: tuple[float, float], dtype: torch.dtype) -> tuple[float, float]:
    computed_in = torch.promote_types(dtype, torch.float32)  # bf16 would make 1 of 0.999
    beta1, beta2 = torch.tensor(betas, dtype=computed_in).tolist()
    return beta1, beta2


@dataclass(frozen=True)
class Ranks:
    """What the ranks hold together.

    Attributes:
        num_workers: Workers N on all ranks.
        local_workers: Workers W on this one.
        world_size: Number of ranks.
    """

    num_workers: int
    local_workers: int
    world_size: int

    @property
    def replicated(self) -> bool:
        """Whether every rank holds a copy of the same workers and sees a part of their batch."""
        return self.world_size > 1 and self.num_workers == self.local_workers

    @property
    def spread(self) -> bool:
        """Whether every rank holds workers of its own."""
        return self.world_size > 1 and not self.replicated

    def gather(self, rows: Tensor) -> Tensor:
        """``[W, …]`` of every rank as ``[N, …]``, on every rank; copies hold the same already."""
        if not self.spread:
            return rows
        gathered = rows.new_empty(self.num_workers, *rows.shape[1:])
        dist.all_gather(list(gathered.chunk(self.world_size)), rows.contiguous())
        return gathered

    def stack(self, own: Tensor) -> Tensor:
        """A tensor of each rank ``[…]`` as ``[world_size, …]``, on every rank."""
        if self.world_size == 1:
            return own[None]
        stacked = own.new_empty(self.world_size, *own.shape)
        dist.all_gather(list(stacked.unbind()), own.contiguous())
        return stacked

    def mean(self, rows: Tensor) -> Tensor:
        """Mean ``[1, …]`` over all N workers of ``[W, …]``, on every rank."""
        if self.num_workers == 1:
            return rows
        total = rows.sum(0, keepdim=True)
        if self.spread:
            dist.all_reduce(total)
        return total / self.num_workers


@dataclass(frozen=True)
class Combine:
    """One update's mixing step.

    Attributes:
        scheme: Before or after adapting.
        matrix: ``[N, N]``; row i holds the weights with which worker i combines.
        apply: Replaces rows ``[W, D]`` by their combinations, unless the flag given with them is
            set; called once on every rank.

    Raises:
        ValueError: If there is no such scheme, which engines would take for no mixing.
    """

    scheme: Scheme
    matrix: NDArray[np.float64]
    apply: Callable[[Tensor, Tensor], None]

    def __post_init__(self) -> None:
        check_choice("scheme", self.scheme, Scheme)


class Engine(Protocol):
    """Accumulates gradients over batches and applies one update to all local workers.

    Gradients are sums over targets until :meth:`finish_gradients` divides them by the number of
    targets of the whole update, so micro-batches and accumulated batches of any size weigh right.

    Attributes:
        arena: State of the local workers.
        next_update: 0-based number of the coming update.
        updates: Updates really applied, fewer once one failed; reading it synchronizes.
        pending: Whether batches have been accumulated for an update that is not applied yet.
        nll: ``[W]`` summed loss of those batches.
        targets: ``[W]`` number of targets in those batches.
        failed: ``[]`` on the device, not 0 once an update was not finite; nothing is written then.
    """

    arena: Arena
    next_update: int
    updates: int
    pending: bool
    nll: Tensor
    targets: Tensor
    failed: Tensor

    def accumulate(self, *batch: Any) -> Tensor:
        """Adds the gradients of a batch.

        Args:
            batch: What the losses take; for Llamas token rows ``[B·W, T+1]`` int64, of which row r
                belongs to local worker ``r mod W``.

        Returns:
            Mean loss of this batch over all local workers, a detached scalar.
        """
        ...

    def finish_gradients(self, visible: bool) -> None:
        """Brings the sums of all ranks together where they belong to the same workers.

        Args:
            visible: Whether somebody is to look at the arena's gradients before the update; then
                they are each worker's mean gradient, and may be sums otherwise.
        """
        ...

    def update(
        self,
        groups: list[GroupHyperparameters],
        clip_norm: float | None,
        combine: Combine | None = None,
    ) -> UpdateMetrics:
        """Clips, adapts and combines; then the next :meth:`accumulate` starts afresh.

        Args:
            groups: Hyperparameters of each column range of the arena.
            clip_norm: Largest global gradient norm of each worker; None leaves gradients alone.
            combine: How rows are mixed; None for no mixing.
        """
        ...

    def losses(self, average: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]] | None:
        """What evaluates rows faster than the module does.

        Args:
            average: ``[1, D]``, the model to evaluate, which stays as it is meanwhile.

        Returns:
            Takes token rows ``[B, T+1]``; gives their summed loss and number of targets, each
            ``[1]``. None leaves it to the module.
        """
        ...

    def consensus_distance(self) -> tuple[Tensor, Tensor]:
        """``‖x_i − x̄‖`` of each local worker ``[W]`` after the last update, and ``‖x̄‖`` ``[1]``."""
        ...

    def raise_if_failed(self) -> None:
        """Raises :class:`NonFiniteError` if any update so far met one; synchronizes."""
        ...

    def release(self) -> None:
        """Gives back the memory that is not the arena's."""
        ...


def consensus_distance(rows: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """How far workers are from their mean x̄.

    Returns:
        ``‖x_i − x̄‖`` of each local worker ``[W]``, and ``‖x̄‖`` ``[1]``.
    """
    mean = ranks.mean(rows)
    distance = torch.stack([torch.linalg.vector_norm(row - mean[0]) for row in rows])
    return distance, torch.linalg.vector_norm(mean, dim=1)
