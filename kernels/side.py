"""Work that runs beside the main stream until it is joined."""

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor


class SideStream:
    """A second CUDA stream for launches whose results are wanted later.

    Args:
        enabled: Otherwise everything runs in order, as on a CPU.
    """

    def __init__(self, enabled: bool) -> None:
        self._stream = torch.cuda.Stream() if enabled else None
        self._read: list[Tensor] = []

    @contextmanager
    def __call__(self, *read: Tensor) -> Generator[None, None, None]:
        """Within it launches go to the side, after all that the main stream was given so far.

        Args:
            read: What they read; its memory is not used again before :meth:`join`.
        """
        if self._stream is None:
            yield
            return
        self._read += read
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Lets the main stream wait for all of it."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
            self._read.clear()
