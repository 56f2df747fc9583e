"""The gh200 engine: fused Triton kernels for Hopper GPUs, whole updates as CUDA graphs.

Everything that changes from one update to the next lies on the device: token rows, learning rates,
mixing weights, counters, the failure flag. On a CPU the same calls run over the references.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tinyllm.arena import Arena
from tinyllm.errors import NonFiniteError
from tinyllm.kernels.adamw import (
    NUM_HYPERPARAMETERS,
    Mixing,
    adamw,
    column_blocks,
    gradient_squares,
    hyperparameter_row,
    prepare,
    spread_norms,
)
from tinyllm.kernels.graph import CapturedCall
from tinyllm.kernels.llama import LlamaStep, Totals
from tinyllm.kernels.stage import Stage
from tinyllm.metrics import UpdateMetrics
from tinyllm.model import Llama, check_length
from tinyllm.strategies.engine import Combine, GroupHyperparameters, Ranks, consensus_distance
from tinyllm.strategies.gh200_evaluation import Gh200Evaluation
from tinyllm.strategies.llama_tensors import llama_tensors
from tinyllm.strategies.losses import check_rows

SQUARES_PER_WORKER = 1_024
"""Partial sums behind a gradient norm, at most."""


class Gh200Engine:
    """Runs updates with the kernels; see :class:`~tinyllm.strategies.engine.Engine`.

    Args:
        arena: State of the local workers; the model's parameters are views of its weights.
        llama: The model that they belong to.
        micro_batch_size: Sequences per worker in one forward and backward; None takes all at once.
        ranks: What other ranks hold.
    """

    def __init__(
        self, arena: Arena, llama: Llama, *, micro_batch_size: int | None, ranks: Ranks
    ) -> None:
        self.arena = arena
        self.pending = False
        self._micro_batch_size = micro_batch_size
        self._ranks = ranks
        workers, device, dtype = arena.workers, arena.weights.device, arena.weights.dtype
        self._device = device
        self._parameters = list(llama.parameters())
        self._shadowed: tuple[int, ...] | None = None
        # matrices in the compute dtype, written by every update
        self._shadow = (
            torch.empty_like(arena.weights, dtype=torch.bfloat16) if device.type == "cuda" else None
        )
        matrices = arena.weights if self._shadow is None else self._shadow
        self._model = llama
        self._llama = llama_tensors(llama, arena.layout, arena.weights, matrices, arena.gradients)

        self._results = torch.zeros(2, workers, dtype=dtype, device=device)  # loss and norm
        self._totals = Totals(
            torch.zeros(workers, dtype=dtype, device=device),
            torch.zeros(workers, dtype=torch.int64, device=device),
            torch.zeros(1, dtype=dtype, device=device),
        )
        self.nll, self.targets, _ = self._totals
        self._scale = torch.zeros(workers, dtype=dtype, device=device)
        self._step = torch.zeros((), dtype=torch.int64, device=device)
        self.failed = torch.zeros((), dtype=torch.int32, device=device)
        self._failed_workers = torch.zeros(workers, dtype=torch.int32, device=device)
        self._all_failed_workers = self._failed_workers
        blocks = column_blocks(arena.layout.groups, workers)
        self._blocks = torch.tensor(blocks, dtype=torch.int64, device=device)
        self._spread = torch.zeros(len(blocks), workers + 1, dtype=dtype, device=device)
        parts = min(SQUARES_PER_WORKER, -(-arena.layout.row_numel // 4_096))
        self._squares = torch.zeros(workers, parts, dtype=dtype, device=device)
        groups = len(arena.layout.groups)
        self._stage = Stage(groups * NUM_HYPERPARAMETERS + 1 + workers**2, dtype, device)
        hyperparameters, self._clip_norm, matrix = self._stage.values.split(
            [groups * NUM_HYPERPARAMETERS, 1, workers**2]
        )
        self._hyperparameters = hyperparameters.view(groups, NUM_HYPERPARAMETERS)
        self._matrix = matrix.view(workers, workers)

        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._rows: dict[tuple[int, int], Tensor] = {}
        self._calls: dict[tuple[Any, ...], CapturedCall] = {}
        self._evaluation: Gh200Evaluation | None = None
        self._are_means = False
        self.updates = 0

    # --- counters -----------------------------------------------------------------------------

    @property
    def updates(self) -> int:
        """Updates applied so far; reading it synchronizes."""
        return int(self._step.item())

    @updates.setter
    def updates(self, count: int) -> None:
        self._step.fill_(count)
        self._applied = count  # counted on the host, which is right as long as none failed
        self.next_update = count

    @property
    def next_update(self) -> int:
        """0-based number of the coming update."""
        return self._ahead + self._applied

    @next_update.setter
    def next_update(self, number: int) -> None:
        self._ahead = number - self._applied

    # --- gradients ----------------------------------------------------------------------------

    def accumulate(self, *batch: Any) -> Tensor:
        """Adds the gradients of a batch."""
        rows, workers = batch[0], self.arena.workers
        check_rows(rows, workers)
        check_length(rows.shape[1] - 1, self._model.config)
        self._refresh_shadow()
        before = None if not self.pending else (self.nll.sum(), self.targets.sum())
        rows = rows.unflatten(0, (-1, workers)).transpose(0, 1)  # [W, B, T+1]
        for micro in rows.split(self._micro_batch_size or rows.shape[1], dim=1):
            static, call = self._micro_step(micro.shape[1], micro.shape[2])
            static.copy_(micro)
            call()
            self.pending = True
        if before is None:
            return self._totals.loss[0].clone()
        nll, targets = self.nll.sum() - before[0], self.targets.sum() - before[1]
        return nll / targets.clamp_min(1)

    def _micro_step(self, sequences: int, length: int) -> tuple[Tensor, CapturedCall]:
        shape = (sequences, length)
        if shape not in self._rows:
            self._rows[shape] = torch.zeros(
                self.arena.workers, *shape, dtype=torch.int64, device=self._device
            )
        rows, key = self._rows[shape], ("step", *shape, self.pending)
        if key not in self._calls:
            step = LlamaStep(self._llama, rows, self._totals, self.pending)
            self._calls[key] = CapturedCall(step, self._device, self._pool)
        return rows, self._calls[key]

    def _refresh_shadow(self) -> None:
        """Copies the weights if something other than an update has changed them."""
        versions = (self.arena.weights._version, *(p._version for p in self._parameters))
        if self._shadow is not None and versions != self._shadowed:
            self._shadow.copy_(self.arena.weights)
        self._shadowed = versions

    def finish_gradients(self, visible: bool) -> None:
        """Makes the gradients whole; see the protocol."""
        if self._ranks.replicated:
            for tensor in (self.arena.gradients, self.nll, self.targets):
                dist.all_reduce(tensor)
        if visible:
            self.arena.gradients /= self.targets.clamp_min(1)[:, None]
        self._are_means = visible

    # --- the update ---------------------------------------------------------------------------

    @torch.no_grad()
    def update(
        self,
        groups: list[GroupHyperparameters],
        clip_norm: float | None,
        combine: Combine | None = None,
    ) -> UpdateMetrics:
        """Clips, adapts and combines."""
        if self._are_means:
            self.arena.gradients *= self.targets.clamp_min(1)[:, None]
            self._are_means = False
        local = combine is not None and not self._ranks.spread
        self._stage.send(self._scalars(groups, clip_norm, combine if local else None))
        mixing: Mixing = combine.scheme if combine is not None and local else "none"
        if self._ranks.spread:
            self._update_spread(combine)
        else:
            self._call("update", self._update, mixing)
        self._applied += 1
        self.pending = False
        loss, norm = self._results.clone().unbind()
        return UpdateMetrics(loss, self.targets.clone(), norm, groups[0].lr, self.failed)

    def _scalars(
        self, groups: list[GroupHyperparameters], clip_norm: float | None, combine: Combine | None
    ) -> list[float]:
        """All numbers of an update, in the order of the stage."""
        step = self._applied + 1
        scalars = [
            value
            for group in groups
            for value in hyperparameter_row(
                group.lr, group.betas, group.eps, group.weight_decay, step
            )
        ]
        scalars.append(float("inf") if clip_norm is None else clip_norm)
        if combine is None:
            return scalars + [0.0] * self.arena.workers**2
        matrix: list[float] = combine.matrix.ravel().tolist()
        return scalars + matrix

    def _call(self, name: str, function: Callable[..., None], *args: Any) -> None:
        key = (name, *args)
        if key not in self._calls:
            self._calls[key] = CapturedCall(partial(function, *args), self._device, self._pool)
        self._calls[key]()

    def _update(self, mixing: Mixing) -> None:
        self._prepare()
        self._adamw(mixing)

    def _prepare(self) -> None:
        gradient_squares(self.arena.gradients, self._squares)
        prepare(
            *(self._squares, self.nll, self.targets, self._clip_norm),
            *(self.failed, self._failed_workers, *self._results.unbind(), self._scale),
        )

    def _adamw(self, mixing: Mixing) -> None:
        arena = self.arena
        adamw(
            *(arena.weights, arena.gradients, arena.exp_avg, arena.exp_avg_sq, self._shadow),
            *(self._scale, self.failed, self._step, self._hyperparameters, self._matrix),
            *(self._blocks, self._spread if arena.workers > 1 else None, mixing),
        )

    def _update_spread(self, combine: Combine | None) -> None:
        """An update whose rows mix with those of other ranks, which have to agree on failures."""
        self._call("prepare", self._prepare)
        self._all_failed_workers = self._ranks.gather(self._failed_workers)
        self.failed.copy_(self._all_failed_workers.any())
        if combine is not None and combine.scheme == "awc":
            combine.apply(self.arena.weights, self.failed.bool())
        self._call("adamw", self._adamw, "none")
        if combine is not None and combine.scheme == "atc":
            combine.apply(self.arena.weights, self.failed.bool())
            # the shadow follows at the next batch, since the weights' version has changed

    # --- evaluation ---------------------------------------------------------------------------

    def losses(self, average: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """Evaluates by the kernels."""
        own = average is self.arena.weights
        if own:
            self._refresh_shadow()
        if self._evaluation is None:
            self._evaluation = self._new_evaluation(own)
        self._evaluation.load(average)
        return self._evaluation

    @torch.inference_mode(False)  # whose tensors no graph could write at other times
    def _new_evaluation(self, own: bool) -> Gh200Evaluation:
        weights, matrices = self.arena.weights, self._shadow
        if not own:  # one row, which takes the average
            weights = torch.empty_like(weights[:1])
            matrices = None if matrices is None else torch.empty_like(matrices[:1])
        return Gh200Evaluation(self._model, self.arena.layout, weights, matrices, self._pool)

    # --- what is told -------------------------------------------------------------------------

    def consensus_distance(self) -> tuple[Tensor, Tensor]:
        """``‖x_i − x̄‖`` of each local worker ``[W]`` after the last update, and ``‖x̄‖`` ``[1]``."""
        if self._ranks.spread or self.arena.workers == 1:
            return consensus_distance(self.arena.weights, self._ranks)
        return spread_norms(self._spread)

    def raise_if_failed(self) -> None:
        """Raises :class:`NonFiniteError` if any update so far met one; synchronizes."""
        if self.failed.item():
            workers = self._all_failed_workers.nonzero().flatten().tolist()
            raise NonFiniteError(self._ahead + self.updates, workers)

    def release(self) -> None:
        """Gives back the memory of captured graphs."""
        for call in self._calls.values():
            call.release()
        self._calls.clear()
        if self._evaluation is not None:
            self._evaluation.release()
            self._evaluation = None
        if self._pool is not None:
            torch._C._cuda_clearCublasWorkspaces()  # of streams that nobody uses any more
