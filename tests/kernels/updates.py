"""An update's tensors, and torch.optim.AdamW making the same updates independently."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from tinyllm.kernels.adamw import (
    Mixing,
    adamw,
    column_blocks,
    gradient_squares,
    hyperparameter_row,
    prepare,
)

from .checks import (
    normal,
    poisoned,
)

MIXINGS: tuple[Mixing, ...] = get_args(Mixing)
EPS = 1e-8
DECAYS = (0.1, 0.0)
TARGETS = 7
GROUPS = ((0, 64 * 17), (64 * 17, 64 * 21))
"""Neither range is a multiple of any block, and each has more than one at eight workers."""


def matrix_of(workers: int) -> Tensor:
    """Doubly stochastic, dense and without symmetry, in float64."""
    turns = [torch.eye(workers, dtype=torch.float64).roll(turn, 1) for turn in range(workers)]
    weights = torch.linspace(1, 2, workers, dtype=torch.float64)
    return sum((w * turn for w, turn in zip(weights, turns, strict=True)), 0 * turns[0]) / (
        weights.sum()
    )


def learning_rate(update: int) -> float:
    """Warm-up over ten updates, then some decay; update 0 is the first."""
    return 0.008 * min((update + 1) / 10, 1 / (1 + 0.01 * update))


@dataclass
class Update:
    """The tensors of an update, as an engine holds them."""

    weights: Tensor
    gradients: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    shadow: Tensor | None
    partials: Tensor
    nll: Tensor
    targets: Tensor
    clip_norm: Tensor
    failed: Tensor
    failed_workers: Tensor
    loss: Tensor
    norm: Tensor
    scale: Tensor
    step: Tensor
    hyperparameters: Tensor
    matrix: Tensor
    blocks: Tensor
    spread: Tensor | None
    betas: tuple[float, float] = (0.95, 0.99)

    @classmethod
    def of(
        cls,
        workers: int,
        *,
        groups: Sequence[tuple[int, int]] = GROUPS,
        clip_norm: float = torch.inf,
        dtype: torch.dtype = torch.float32,
        low: torch.dtype | None = None,
        flags: torch.dtype = torch.int32,
        device: str = "cpu",
    ) -> "Update":
        row = groups[-1][1]
        blocks = torch.tensor(column_blocks(groups, workers), device=device)

        def poison(*shape: int) -> Tensor:
            return poisoned(*shape, dtype=dtype, device=device)

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return normal(*shape, dtype=dtype, device=device).zero_()

        return cls(
            weights=normal(workers, row, dtype=dtype, device=device).mul_(0.02),
            gradients=normal(workers, row, dtype=dtype, device=device),
            exp_avg=zeros(workers, row, dtype=dtype),
            exp_avg_sq=zeros(workers, row, dtype=dtype),
            shadow=poisoned(workers, row, dtype=low, device=device) if low else None,
            partials=poison(workers, 5),
            nll=torch.arange(1.0, workers + 1, dtype=dtype, device=device),
            targets=torch.full((workers,), TARGETS, device=device),
            clip_norm=torch.tensor(clip_norm, dtype=dtype, device=device),
            failed=torch.zeros((), dtype=flags, device=device),
            failed_workers=torch.zeros(workers, dtype=flags, device=device),
            loss=poison(workers),
            norm=poison(workers),
            scale=poison(workers),
            step=torch.zeros((), dtype=torch.int64, device=device),
            hyperparameters=poison(len(groups), 6),
            matrix=matrix_of(workers).to(device, dtype),
            blocks=blocks,
            spread=poison(len(blocks), workers + 1) if workers > 1 else None,
        )

    def set_rates(self, update: int) -> None:
        rows = [
            hyperparameter_row(learning_rate(update), self.betas, EPS, decay, update + 1)
            for decay in DECAYS[: len(self.hyperparameters)]
        ]
        self.hyperparameters.copy_(torch.tensor(rows, dtype=torch.float64))

    def set_gradients(self, means: Tensor) -> None:
        """``means``: the gradients of each worker's mean loss ``[W, D]``."""
        self.gradients.copy_(means * TARGETS)

    def prepare_arguments(self) -> list[Any]:
        return [
            *(self.partials, self.nll, self.targets, self.clip_norm, self.failed),
            *(self.failed_workers, self.loss, self.norm, self.scale),
        ]

    def adamw_arguments(self, mixing: Mixing) -> list[Any]:
        return [
            *(self.weights, self.gradients, self.exp_avg, self.exp_avg_sq, self.shadow),
            *(self.scale, self.failed, self.step, self.hyperparameters, self.matrix),
            *(self.blocks, self.spread, mixing),
        ]

    def apply(self, mixing: Mixing, run: str = "__call__") -> None:
        getattr(gradient_squares, run)(self.gradients, self.partials)
        getattr(prepare, run)(*self.prepare_arguments())
        getattr(adamw, run)(*self.adamw_arguments(mixing))

    def written(self) -> dict[str, Tensor]:
        """What a failed update must leave alone."""
        names = ["weights", "exp_avg", "exp_avg_sq", "shadow", "step", "spread"]
        return {n: t.clone() for n in names if (t := getattr(self, n)) is not None}


class Independent:
    """One torch.optim.AdamW per worker, clipped with torch's function, mixed with a product."""

    def __init__(
        self, weights: Tensor, clip_norm: float, betas: tuple[float, float], **options: Any
    ) -> None:
        self.clip_norm = clip_norm
        self.parameters = [
            [row[start:stop].clone() for start, stop in GROUPS] for row in weights.unbind()
        ]
        self.optimizers = [
            torch.optim.AdamW(
                [{"params": [p], "weight_decay": d} for p, d in zip(own, DECAYS, strict=True)],
                betas=betas,
                eps=EPS,
                **options,
            )
            for own in self.parameters
        ]

    def rows(self) -> Tensor:
        return torch.stack([torch.cat(own) for own in self.parameters])

    def moments(self, name: str) -> Tensor:
        return torch.stack(
            [
                torch.cat([optimizer.state[p][name] for p in own])
                for own, optimizer in zip(self.parameters, self.optimizers, strict=True)
            ]
        )

    def mix(self, matrix: Tensor) -> None:
        mixed = matrix @ self.rows()
        for own, row in zip(self.parameters, mixed, strict=True):
            for parameter, (start, stop) in zip(own, GROUPS, strict=True):
                parameter.copy_(row[start:stop])

    def update(self, means: Tensor, lr: float, matrix: Tensor, mixing: Mixing) -> Tensor:
        """Returns the norms ``[W]`` before clipping."""
        norms = []
        if mixing == "awc":
            self.mix(matrix)
        for own, optimizer, row in zip(self.parameters, self.optimizers, means, strict=True):
            for parameter, (start, stop) in zip(own, GROUPS, strict=True):
                parameter.grad = row[start:stop].clone().to(parameter.dtype)
            norms.append(torch.nn.utils.clip_grad_norm_(own, self.clip_norm))
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
        if mixing == "atc":
            self.mix(matrix)
        return torch.stack(norms)


def adamw_results(*arguments: Any) -> dict[str, Tensor]:
    names = {
        **{"weights": arguments[0], "exp_avg": arguments[2], "exp_avg_sq": arguments[3]},
        **{"shadow": arguments[4], "step": arguments[7], "spread": arguments[11]},
    }
    return {name: tensor.double() for name, tensor in names.items() if tensor is not None}


def mid_training(update: Update) -> Update:
    """As after 100 updates, with clipping factors that differ."""
    update.exp_avg.normal_().mul_(1e-3)
    update.exp_avg_sq.uniform_().mul_(1e-5)
    update.scale.copy_(torch.linspace(1e-3, 3e-3, len(update.scale)))
    update.set_rates(99)
    return update
