"""The arena: all parameters of all workers in one ``[W, D]`` tensor, a row per worker.

Gradients and both Adam moments are arenas of the same layout, so clipping, AdamW, mixing,
averaging and checkpoints are operations on flat rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

ALIGNMENT = 64
"""Every parameter starts at a multiple of this many elements (256 bytes in fp32)."""


class Slot(NamedTuple):
    """Where one parameter of one worker lies in a row."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements, without padding."""
        return prod(self.shape)


@dataclass(frozen=True)
class ArenaLayout:
    """Offsets of every parameter in a row, and the column range of every optimizer group.

    Attributes:
        slots: The parameters in row order.
        groups: For each optimizer group the half-open column range that its parameters fill, so
            that hyperparameters apply to slices of a row and never to single parameters.
        row_numel: Row length D in elements, padding included.
    """

    slots: tuple[Slot, ...]
    groups: tuple[tuple[int, int], ...]
    row_numel: int

    @classmethod
    def of(cls, groups: Sequence[Mapping[str, Sequence[int]]]) -> "ArenaLayout":
        """Lays parameters out, group after group.

        Args:
            groups: For each optimizer group the one-worker shape of each of its parameters.

        Raises:
            ValueError: If a name stands in two groups or nothing is to be laid out.
        """
        slots: list[Slot] = []
        ranges: list[tuple[int, int]] = []
        offset = 0
        for group in groups:
            start = offset
            for name, shape in group.items():
                slots.append(Slot(name, tuple(shape), offset))
                offset += -(-prod(shape) // ALIGNMENT) * ALIGNMENT
            ranges.append((start, offset))
        names = [slot.name for slot in slots]
        if len(set(names)) != len(names) or not names:
            raise ValueError(f"parameters must be named once each and at least one, got {names}")
        return cls(tuple(slots), tuple(ranges), offset)

    @property
    def num_parameters(self) -> int:
        """Parameters of one worker, padding not counted."""
        return sum(slot.numel for slot in self.slots)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The parameters inside rows.

        Args:
            flat: ``[..., D]``.

        Returns:
            For each name a view ``[..., *shape]`` that shares ``flat``'s memory.
        """
        if flat.shape[-1] != self.row_numel:
            raise ValueError(
                f"rows hold {flat.shape[-1]} elements; this layout needs {self.row_numel}"
            )
        return {
            slot.name: flat[..., slot.offset : slot.offset + slot.numel].view(
                (*flat.shape[:-1], *slot.shape)
            )
            for slot in self.slots
        }


class Arena:
    """Weights, gradients and Adam moments of the workers of one rank.

    Args:
        layout: Where each parameter lies.
        workers: Rows W.
        dtype: Of all four tensors.
        device: Of all four tensors.

    Attributes:
        weights, gradients, exp_avg, exp_avg_sq: ``[W, D]`` each; padding is zero.
    """

    def __init__(
        self, layout: ArenaLayout, workers: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layout = layout
        self.workers = workers
        self.weights, self.gradients, self.exp_avg, self.exp_avg_sq = (
            torch.zeros(workers, layout.row_numel, dtype=dtype, device=device) for _ in range(4)
        )


def bind(parameters: Mapping[str, nn.Parameter], layout: ArenaLayout, flat: Tensor) -> None:
    """Makes parameters views of ``flat``, with a leading worker axis.

    Args:
        parameters: By name; their own storage is released.
        layout: Where each parameter lies.
        flat: ``[W, D]``.
    """
    for name, view in layout.views(flat).items():
        parameters[name].data = view
