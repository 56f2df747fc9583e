"""Row numbers in, token rows out: from memory-mapped shards or from a stream held on a device.

Row `i` of a stream at context T is `tokens[i*T : i*T + T + 1]`: inputs are its first T ids and
targets its last T, so every target belongs to exactly one row. What a row lacks is IGNORED.
"""

from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

from tinyllm.data.stream import TokenStream
from tinyllm.model import IGNORED

PADDING_ROW = -1
"""The row number of a row that is all IGNORED."""

# Tokens moved to a device at a time: bounds the pinned or pageable staging memory.
_CHUNK_TOKENS = 1 << 24


class HostRows:
    """Rows read from the stream into new int64 host tensors.

    Args:
        stream: The tokens.
        context: T.
        pin_memory: Put the batches in page-locked memory, so that they can be copied to a CUDA
            device while it computes.
    """

    def __init__(self, stream: TokenStream, context: int, pin_memory: bool) -> None:
        self._stream = stream
        self._context = context
        self._pin_memory = pin_memory
        # A new thread starts on device 0; pinning there would open a context on the wrong GPU.
        self._cuda_index = torch.cuda.current_device() if pin_memory else None

    def __call__(self, rows: np.ndarray) -> Tensor:
        """Row numbers [R] int64 → batch [R, T+1] int64."""
        on_device: AbstractContextManager[object] = (
            nullcontext() if self._cuda_index is None else torch.cuda.device(self._cuda_index)
        )
        with on_device:
            batch = torch.empty(
                (len(rows), self._context + 1), dtype=torch.int64, pin_memory=self._pin_memory
            )
        out = batch.numpy()
        for index, row in enumerate(rows.tolist()):
            if row == PADDING_ROW:
                out[index] = IGNORED
                continue
            start = row * self._context
            length = min(self._context + 1, len(self._stream) - start)
            out[index, :length] = self._stream.read(start, length)
            out[index, length:] = IGNORED
        return batch


class DeviceRows:
    """The same rows, gathered on a device that holds the whole stream.

    Ids are kept as int16 or int32 bit patterns, since unsigned types have few device operations.

    Args:
        stream: The tokens; copied to the device here.
        context: T.
        device: Where they are kept and where batches are made.
    """

    def __init__(self, stream: TokenStream, context: int, device: torch.device) -> None:
        wide = stream.dtype.itemsize == 4
        self._tokens = torch.empty(
            len(stream), dtype=torch.int32 if wide else torch.int16, device=device
        )
        signed = np.int32 if wide else np.int16
        for start in range(0, len(stream), _CHUNK_TOKENS):
            length = min(_CHUNK_TOKENS, len(stream) - start)
            chunk = np.array(stream.read(start, length)).view(signed)
            self._tokens[start : start + length] = torch.from_numpy(chunk).to(device)
        # A tensor, with which int16 & int64 is one operation that gives int64.
        self._bit_mask = torch.tensor([0xFFFFFFFF if wide else 0xFFFF], device=device)
        self._context = context
        self._offsets = torch.arange(context + 1, device=device)

    def __call__(self, rows: Tensor, full: bool) -> Tensor:
        """Row numbers [R] int64 on the device → batch [R, T+1] int64 on the device.

        Args:
            rows: Row numbers.
            full: Whether every one is a full row, so that there is nothing to ignore. The host
                knows this without asking the device.
        """
        if full:
            # At small batches each operation on the device takes a hundredth of an update.
            all_rows = self._tokens.unfold(0, self._context + 1, self._context)
            return all_rows.index_select(0, rows) & self._bit_mask
        positions = rows[:, None] * self._context + self._offsets
        last = len(self._tokens) - 1
        is_token = (rows[:, None] != PADDING_ROW) & (positions <= last)
        tokens = self._tokens[positions.clamp(0, last)] & self._bit_mask
        return torch.where(is_token, tokens, IGNORED)
