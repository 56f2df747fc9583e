"""The native engine: autograd, torch.compile, SDPA and fused AdamW over the arena.

The reference that every other engine is held to, and the baseline every speed-up is quoted
against.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim.adamw import adamw

from tinyllm.arena import Arena
from tinyllm.errors import NonFiniteError
from tinyllm.metrics import UpdateMetrics
from tinyllm.strategies.engine import (
    Combine,
    ForwardContext,
    GroupHyperparameters,
    Ranks,
    consensus_distance,
)
from tinyllm.strategies.losses import LossSums

# Fastest first, for small Llamas on Hopper; a backend that cannot run is passed over.
ATTENTION_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


class NativeEngine:
    """Runs updates with plain PyTorch; see :class:`~tinyllm.strategies.engine.Engine`.

    Args:
        arena: State of the local workers; the model's parameters are views of its weights.
        losses: What is differentiated.
        collect_gradients: Moves what autograd left in the parameters' ``.grad`` into the arena's
            gradients; adds to them when it is called with True.
        forward_context: Opens the forward pass's precision.
        ranks: What other ranks hold.
    """

    def __init__(
        self,
        arena: Arena,
        losses: LossSums,
        *,
        collect_gradients: Callable[[bool], None],
        forward_context: ForwardContext,
        ranks: Ranks,
    ) -> None:
        self.arena = arena
        self.pending = False
        self.next_update = 0
        self._losses = losses
        self._collect_gradients = collect_gradients
        self._forward_context = forward_context
        self._ranks = ranks
        workers, device = arena.workers, arena.weights.device
        self.nll = torch.zeros(workers, dtype=arena.weights.dtype, device=device)
        self.targets = torch.zeros(workers, dtype=torch.int64, device=device)
        self._steps = [
            [torch.zeros((), device=device) for _ in range(workers)] for _ in arena.layout.groups
        ]
        # the first update with a loss or gradient that is not finite; after it nothing is written
        self.failed = torch.zeros((), dtype=torch.bool, device=device)
        self._failed_workers = torch.zeros(ranks.num_workers, dtype=torch.bool, device=device)
        self._failed_update = torch.zeros((), dtype=torch.int64, device=device)

    @property
    def updates(self) -> int:
        """Updates applied so far; reading it synchronizes."""
        return int(self._steps[0][0].item())

    @updates.setter
    def updates(self, count: int) -> None:
        self.next_update = count
        for step in (step for group in self._steps for step in group):
            step.fill_(count)

    def accumulate(self, *batch: Any) -> Tensor:
        """Adds the gradients of a batch."""
        if not self.pending:
            self.nll.zero_()
            self.targets.zero_()
        nll_before, targets_before = self.nll.sum(), self.targets.sum()
        micro_batches = self._losses(*batch)
        with sdpa_kernel(ATTENTION_BACKENDS, set_priority=True):
            while True:
                with self._forward_context():  # the forward pass runs in next()
                    micro = next(micro_batches, None)
                if micro is None:
                    break
                nll, targets = micro
                nll.sum().backward()
                self._collect_gradients(self.pending)
                self.pending = True
                self.nll += nll.detach()
                self.targets += targets
        return (self.nll.sum() - nll_before) / (self.targets.sum() - targets_before).clamp_min(1)

    def finish_gradients(self, visible: bool) -> None:
        """Turns accumulated sums into each worker's mean gradient, visible or not."""
        if self._ranks.replicated:
            for tensor in (self.arena.gradients, self.nll, self.targets):
                dist.all_reduce(tensor)
        # a worker without a target divides its zero gradient by 1
        self.arena.gradients /= self.targets.clamp_min(1)[:, None]

    @torch.no_grad()
    def update(
        self,
        groups: list[GroupHyperparameters],
        clip_norm: float | None,
        combine: Combine | None = None,
    ) -> UpdateMetrics:
        """Clips, adapts and combines."""
        loss = self.nll / self.targets.clamp_min(1)
        norm = torch.linalg.vector_norm(self.arena.gradients, dim=1)
        self._note_failures(~(loss.isfinite() & norm.isfinite()))
        if clip_norm is not None:
            self.arena.gradients *= (clip_norm / (norm + 1e-6)).clamp_max(1.0)[:, None]
        if combine is not None and combine.scheme == "awc":
            combine.apply(self.arena.weights, self.failed)
        self._adapt(groups)
        if combine is not None and combine.scheme == "atc":
            combine.apply(self.arena.weights, self.failed)
        self.next_update += 1
        self.pending = False
        return UpdateMetrics(loss, self.targets.clone(), norm, groups[0].lr, self.failed)

    def _adapt(self, groups: list[GroupHyperparameters]) -> None:
        """AdamW on every row: ``x ← (1 − ηλ) x − η u``; writes nothing once an update failed."""
        arena = self.arena
        found_inf = self.failed.float()
        ranges = zip(arena.layout.groups, self._steps, groups, strict=True)
        for (start, stop), steps, group in ranges:
            weights, gradients, exp_avg, exp_avg_sq = (
                list(flat[:, start:stop].unbind())
                for flat in (arena.weights, arena.gradients, arena.exp_avg, arena.exp_avg_sq)
            )
            adamw(
                weights,
                gradients,
                exp_avg,
                exp_avg_sq,
                [],
                steps,
                fused=True,
                found_inf=found_inf,
                amsgrad=False,
                beta1=group.betas[0],
                beta2=group.betas[1],
                lr=group.lr,
                weight_decay=group.weight_decay,
                eps=group.eps,
                maximize=False,
            )

    def _note_failures(self, bad: Tensor) -> None:
        bad = self._ranks.gather(bad)
        first = bad.any() & ~self.failed
        self._failed_workers |= bad & first
        self._failed_update += first * self.next_update
        self.failed |= first

    def losses(self, average: Tensor) -> None:
        """The module is as fast."""

    def consensus_distance(self) -> tuple[Tensor, Tensor]:
        """``‖x_i − x̄‖`` of each local worker ``[W]`` after the last update, and ``‖x̄‖`` ``[1]``."""
        return consensus_distance(self.arena.weights, self._ranks)

    def raise_if_failed(self) -> None:
        """Raises :class:`NonFiniteError` if any update so far met one; synchronizes."""
        if self.failed.item():
            workers = self._failed_workers.nonzero().flatten().tolist()
            raise NonFiniteError(int(self._failed_update.item()), workers)

    def release(self) -> None:
        """Holds nothing but the arena."""
