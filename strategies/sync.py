"""Synchronous training: one model, its gradients summed over all ranks."""

from typing import Any

from tinyllm.strategies.backends import Backend
from tinyllm.strategies.base import ArenaStrategy


class SyncStrategy(ArenaStrategy):
    """Trains one model; with several ranks each takes its share of every batch.

    Args:
        backend: ``gh200`` runs fused kernels on Hopper GPUs, ``native`` plain PyTorch anywhere;
            ``auto`` takes gh200 where it can run.
        micro_batch_size: Sequences in one forward and backward; null takes all at once.
        compile: Whether ``torch.compile`` builds the native backend's model.
        timeout_seconds: How long a collective may wait for another rank before the run fails.
    """

    def __init__(
        self,
        *,
        backend: Backend = "auto",
        micro_batch_size: int | None = None,
        compile: bool = True,
        timeout_seconds: float = 1_800.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            num_workers=None,
            backend=backend,
            micro_batch_size=micro_batch_size,
            compile=compile,
            buffers="local",
            timeout_seconds=timeout_seconds,
            **kwargs,
        )
