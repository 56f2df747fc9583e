"""What an engine differentiates: losses as sums, one micro-batch at a time."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from tinyllm.model import Llama, split_rows

LossSums = Callable[..., Iterator[tuple[Tensor, Tensor]]]
"""Maps a batch to the micro-batches' loss sums ``[W]`` and the weights behind them ``[W]``."""


def llama_losses(model: Llama, workers: int, micro_batch_size: int | None) -> LossSums:
    """Losses of packed Llamas on token rows, weighted by targets.

    Args:
        model: Holds the workers' weights.
        workers: Local workers W.
        micro_batch_size: Sequences per worker in a micro-batch; the last one may be smaller.
    """

    def losses(rows: Tensor, *_: Any) -> Iterator[tuple[Tensor, Tensor]]:
        check_rows(rows, workers)
        rows = rows.unflatten(0, (-1, workers)).transpose(0, 1)  # [W, B, T+1]
        for micro in rows.split(micro_batch_size or rows.shape[1], dim=1):
            inputs, targets = split_rows(micro)
            yield model(inputs, targets)

    return losses


def module_losses(module: LightningModule, extras: dict[str, Any]) -> LossSums:
    """Losses of any LightningModule's own ``training_step``, each batch weighted alike.

    Args:
        module: Its loss is differentiated.
        extras: Filled with what else a step returns, which is meant for hooks.
    """

    def losses(*batch: Any) -> Iterator[tuple[Tensor, Tensor]]:
        loss = module.training_step(*batch)
        extras.clear()
        if isinstance(loss, dict):
            extras.update(loss)
            loss = extras.pop("loss", None)
        if not isinstance(loss, Tensor):
            raise TypeError(
                f"training_step returned {type(loss).__name__}; this strategy needs a loss tensor "
                "or a dictionary with one under 'loss' for every batch"
            )
        yield loss.reshape(1), torch.ones(1, dtype=torch.int64, device=loss.device)

    return losses


def check_rows(rows: Tensor, workers: int) -> None:
    """Refuses batches that cannot be shared out among the workers.

    Raises:
        ValueError: If rows are not ``[B·W, T+1]`` int64.
    """
    if not isinstance(rows, Tensor) or rows.ndim != 2 or rows.dtype != torch.int64:
        found = f"{list(rows.shape)} {rows.dtype}" if isinstance(rows, Tensor) else type(rows)
        raise ValueError(f"a batch of token rows is [rows, T+1] int64, got {found}")
    if rows.shape[0] == 0 or rows.shape[0] % workers:
        raise ValueError(
            f"a batch of {rows.shape[0]} rows cannot be shared out among {workers} workers; "
            "pad it with rows of -100 to a multiple"
        )
