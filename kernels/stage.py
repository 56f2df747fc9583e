"""Numbers that change with every update, on their way from the host to where a graph reads them."""

from collections.abc import Sequence

import torch

SLOTS = 64
"""How many updates the host may be ahead of the device before it waits."""


class Stage:
    """A static tensor on the device, filled in stream order without waiting for the device.

    Args:
        size: Number of values.
        dtype: What they are rounded to.
        device: Where they are wanted.

    Attributes:
        values: ``[size]``, what was sent last; its memory stays where it is.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.values = torch.zeros(size, dtype=dtype, device=device)
        self._on_gpu = device.type == "cuda"
        slots = SLOTS if self._on_gpu else 1
        self._slots = torch.zeros(slots, size, dtype=dtype, pin_memory=self._on_gpu)
        self._host = self._slots.numpy()
        self._read = [torch.cuda.Event() for _ in range(slots)] if self._on_gpu else []
        self._next = 0

    def send(self, values: Sequence[float]) -> None:
        """Puts values in line behind what the current stream was given before."""
        slot = self._next
        self._next = (slot + 1) % len(self._slots)
        if self._on_gpu:
            self._read[slot].synchronize()  # the device has read what was here before
        self._host[slot] = values
        self.values.copy_(self._slots[slot], non_blocking=True)
        if self._on_gpu:
            self._read[slot].record()
