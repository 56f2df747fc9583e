"""Losses of token rows by the kernels' forward pass, as CUDA graphs."""

import torch
from torch import Tensor

from tinyllm.arena import ArenaLayout
from tinyllm.kernels.graph import CapturedCall
from tinyllm.kernels.llama import LlamaLosses, Totals
from tinyllm.model import Llama, check_length
from tinyllm.strategies.llama_tensors import llama_tensors
from tinyllm.strategies.losses import check_rows


class Gh200Evaluation:
    """Evaluates one model; called with rows of any shape, for each of which it keeps a graph.

    Args:
        llama: Of its architecture.
        layout: What lies where in a row.
        weights: ``[1, D]``, read anew by every call.
        matrices: ``[1, D]``, the weights in the compute dtype; None if that is theirs.
        pool: Memory of the graphs.
    """

    def __init__(
        self,
        llama: Llama,
        layout: ArenaLayout,
        weights: Tensor,
        matrices: Tensor | None,
        pool: tuple[int, int] | None,
    ) -> None:
        self._weights, self._matrices, self._pool = weights, matrices, pool
        low = weights if matrices is None else matrices
        self._config = llama.config
        self._llama = llama_tensors(llama, layout, weights, low)
        self._totals = Totals(
            weights.new_zeros(1), weights.new_zeros(1, dtype=torch.int64), weights.new_zeros(1)
        )
        self._calls: dict[torch.Size, tuple[Tensor, CapturedCall]] = {}

    def load(self, average: Tensor) -> None:
        """Evaluates ``average`` ``[1, D]`` from now on."""
        if average is not self._weights:
            self._weights.copy_(average)
            if self._matrices is not None:
                self._matrices.copy_(average)

    def __call__(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Summed loss and number of targets of rows ``[B, T+1]``, each ``[1]``."""
        check_rows(rows, 1)
        check_length(rows.shape[1] - 1, self._config)
        static, call = self._call(rows.shape)
        static.copy_(rows[None])
        call()
        return self._totals.nll.clone(), self._totals.targets.clone()

    @torch.inference_mode(False)  # a graph's tensors are written inside and outside of that mode
    def _call(self, shape: torch.Size) -> tuple[Tensor, CapturedCall]:
        if shape not in self._calls:
            rows = self._totals.targets.new_zeros(1, *shape)
            losses = LlamaLosses(self._llama, rows, self._totals, accumulate=False)
            self._calls[shape] = rows, CapturedCall(losses, rows.device, self._pool)
        return self._calls[shape]

    def release(self) -> None:
        """Gives back the memory of captured graphs."""
        for _, call in self._calls.values():
            call.release()
        self._calls.clear()
