"""The native engine: autograd, torch.compile, SDPA and fused AdamW over the arena.

The reference that every other engine is held to, and the baseline every speed-up is quoted
against.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim.adamw import adamw

from tinyllm.arena import Arena, bind_gradients
from tinyllm.metrics import UpdateMetrics
from tinyllm.model import Llama, split_rows
from tinyllm.strategies.engine import (
    ForwardContext,
    GroupHyperparameters,
    NonFiniteError,
    check_rows,
)

# In order of speed for the shapes of small Llamas on Hopper; a backend that cannot run is passed over.
ATTENTION_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


class NativeEngine:
    """Runs updates with plain PyTorch.

    Args:
        model: Its parameters are views of ``arena.weights``.
        parameters: The model's parameters under the arena's names.
        arena: State of the local workers.
        micro_batch_size: Sequences per worker in one forward and backward; None takes all.
        forward_context: Opens the forward pass's precision.
        data_parallel: Whether ranks hold the same one worker and sum their gradients.
    """

    def __init__(
        self,
        model: Llama,
        parameters: Mapping[str, nn.Parameter],
        arena: Arena,
        *,
        micro_batch_size: int | None,
        forward_context: ForwardContext,
        data_parallel: bool,
    ) -> None:
        self.arena = arena
        self._model = model
        self._parameters = parameters
        self._micro_batch_size = micro_batch_size
        self._forward_context = forward_context
        self._data_parallel = data_parallel
        workers, device = arena.workers, arena.weights.device
        # per worker, over the batches accumulated for the coming update
        self.nll = torch.zeros(workers, dtype=arena.weights.dtype, device=device)
        self.targets = torch.zeros(workers, dtype=torch.int64, device=device)
        self.pending = False
        # updates really applied: they stop counting at the first non-finite one
        self._steps = [
            [torch.zeros((), device=device) for _ in range(workers)] for _ in arena.layout.groups
        ]
        self._failed = torch.zeros((), dtype=torch.bool, device=device)
        self._failed_workers = torch.zeros(workers, dtype=torch.bool, device=device)
        self._failed_update = torch.zeros((), dtype=torch.int64, device=device)
        self._attempts = 0

    @property
    def updates(self) -> int:
        """Updates applied so far; synchronizes."""
        return int(self._steps[0][0].item())

    @updates.setter
    def updates(self, count: int) -> None:
        self._attempts = count
        for step in (step for group in self._steps for step in group):
            step.fill_(count)

    def accumulate(self, rows: Tensor) -> Tensor:
        """See :class:`~tinyllm.strategies.engine.Engine`."""
        workers = self.arena.workers
        check_rows(rows, workers)
        if not self.pending:
            self.arena.gradients.zero_()
            self.nll.zero_()
            self.targets.zero_()
            self.pending = True
        # a user's zero_grad may have taken them away
        bind_gradients(self._parameters, self.arena.layout, self.arena.gradients)
        rows = rows.unflatten(0, (-1, workers)).transpose(0, 1)  # [W, B, T+1]
        before = self.nll.sum(), self.targets.sum()
        for micro in rows.split(self._micro_batch_size or rows.shape[1], dim=1):
            inputs, targets = split_rows(micro)
            with self._forward_context(), sdpa_kernel(ATTENTION_BACKENDS, set_priority=True):
                nll, scored = self._model(inputs, targets)
                nll.sum().backward()
            self.nll += nll.detach()
            self.targets += scored
        nll, scored = self.nll.sum() - before[0], self.targets.sum() - before[1]
        return nll / scored.clamp_min(1)

    def finish_gradients(self) -> None:
        """See :class:`~tinyllm.strategies.engine.Engine`."""
        if self._data_parallel:
            for tensor in (self.arena.gradients, self.nll, self.targets):
                dist.all_reduce(tensor)
        # 1 where a worker had no target: its gradient is zero, and stays so
        self.arena.gradients /= self.targets.clamp_min(1)[:, None]

    @torch.no_grad()
    def update(
        self, groups: list[GroupHyperparameters], clip_norm: float | None
    ) -> UpdateMetrics:
        """See :class:`~tinyllm.strategies.engine.Engine`."""
        loss = self.nll / self.targets.clamp_min(1)
        norm = torch.linalg.vector_norm(self.arena.gradients, dim=1)
        self._note_failures(~(loss.isfinite() & norm.isfinite()))
        if clip_norm is not None:
            self.arena.gradients *= (clip_norm / (norm + 1e-6)).clamp_max(1.0)[:, None]
        self._adamw(groups)
        self._attempts += 1
        self.pending = False
        return UpdateMetrics(loss=loss, grad_norm=norm, learning_rate=groups[0].lr)

    def _adamw(self, groups: list[GroupHyperparameters]) -> None:
        arena = self.arena
        found_inf = self._failed.float()
        for (start, stop), steps, group in zip(
            arena.layout.groups, self._steps, groups, strict=True
        ):
            for worker, step in enumerate(steps):
                adamw(
                    [arena.weights[worker, start:stop]],
                    [arena.gradients[worker, start:stop]],
                    [arena.exp_avg[worker, start:stop]],
                    [arena.exp_avg_sq[worker, start:stop]],
                    [],
                    [step],
                    fused=True,
                    found_inf=found_inf,  # nothing is written where it is 1
                    amsgrad=False,
                    beta1=group.betas[0],
                    beta2=group.betas[1],
                    lr=group.lr,
                    weight_decay=group.weight_decay,
                    eps=group.eps,
                    maximize=False,
                )

    def _note_failures(self, bad: Tensor) -> None:
        first = bad.any() & ~self._failed
        self._failed_workers |= bad & first
        self._failed_update += first * self._attempts
        self._failed |= first

    def raise_if_failed(self) -> None:
        """See :class:`~tinyllm.strategies.engine.Engine`."""
        if self._failed.item():
            raise NonFiniteError(
                int(self._failed_update.item()), self._failed_workers.nonzero().flatten().tolist()
            )
