"""A split's tokens as one stream, and the type they are stored in."""

import hashlib
from typing import Any

import numpy as np


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest little-endian type that holds every id below `vocab_size`."""
    if not 1 <= vocab_size <= 1 << 31:
        raise ValueError(f"vocab_size is {vocab_size}; it must be between 1 and {1 << 31}")
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


class TokenStream:
    """One split as a single stream of token ids over several arrays.

    Args:
        parts: One-dimensional uint16 or uint32 arrays, in stream order; memory maps are not read
            until asked for.
        identity: A hash that tells this stream from others.
    """

    def __init__(self, parts: list[np.ndarray], identity: str) -> None:
        if not parts or parts[0].dtype.newbyteorder("=") not in (np.uint16, np.uint32):
            found = parts[0].dtype if parts else "no array"
            raise TypeError(f"a token stream is made of uint16 or uint32 arrays; given {found}")
        self._parts = parts
        self._ends = np.cumsum([len(part) for part in parts])
        self.identity = identity
        self.dtype: np.dtype[Any] = parts[0].dtype

    @classmethod
    def from_array(cls, tokens: np.ndarray) -> "TokenStream":
        """A stream over an array in memory, for tests and benchmarks."""
        return cls([tokens], hashlib.sha256(tokens.tobytes()).hexdigest())

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, start: int, length: int) -> np.ndarray:
        """The `length` ids from `start`: shape [length], this stream's dtype.

        A view where one shard holds them all, else a copy.

        Raises:
            IndexError: Some of them lie outside the stream.
        """
        if start < 0 or length < 0 or start + length > len(self):
            raise IndexError(
                f"asked for tokens {start} to {start + length} of a stream of {len(self)}"
            )
        index = int(np.searchsorted(self._ends, start, side="right"))
        pieces: list[np.ndarray] = []
        while length > 0:
            part = self._parts[index]
            offset = start - (int(self._ends[index]) - len(part))
            piece = part[offset : offset + length]
            pieces.append(piece)
            start, length, index = start + len(piece), length - len(piece), index + 1
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces) if pieces else np.empty(0, self.dtype)
