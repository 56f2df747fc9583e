"""Writing a split's shards so that a killed run can go on where its last record stands."""

import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tinyllm.data.manifest import Shard, SplitManifest, sha256_of_file
from tinyllm.data.stream import token_dtype
from tinyllm.errors import naming


class SplitWriter:
    """Appends documents to the shards of one split.

    The stream is cut into files of `shard_tokens` ids, wherever documents end, so its number of
    tokens alone says which files there are and how long each is. Going on after a kill means
    cutting the files back to the recorded number.

    Args:
        folder: Where the shards are written.
        split: Name of the split, the start of the file names.
        vocab_size: Every id must be below it; it decides between uint16 and uint32.
        boundary_id: Written after each document.
        shard_tokens: Ids in a full shard.
        tokens: Where to go on: ids already written, as a record says.
        documents: Documents already written, as a record says.

    Raises:
        FileNotFoundError: A file that the record counts on is missing.
        ValueError: Such a file is shorter than recorded.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        *,
        vocab_size: int,
        boundary_id: int,
        shard_tokens: int,
        tokens: int = 0,
        documents: int = 0,
    ) -> None:
        self.tokens = tokens
        self.documents = documents
        self._folder = folder
        self._split = split
        self._vocab_size = vocab_size
        self._dtype = token_dtype(vocab_size)
        self._boundary = np.array([boundary_id], self._dtype)
        self._shard_tokens = shard_tokens
        self._file: BinaryIO | None = None
        self._cut_back()

    def _path(self, index: int) -> Path:
        return self._folder / f"{self._split}-{index:05d}.bin"

    def _lengths(self) -> list[int]:
        """Tokens of each shard, in order."""
        full, rest = divmod(self.tokens, self._shard_tokens)
        return [self._shard_tokens] * full + ([rest] if rest else [])

    def _cut_back(self) -> None:
        lengths = self._lengths()
        for index, length in enumerate(lengths):
            path, recorded = self._path(index), length * self._dtype.itemsize
            if path.stat().st_size < recorded:
                raise ValueError(f"{path} is shorter than the {recorded} bytes on record")
            os.truncate(path, recorded)
        kept = {self._path(index) for index in range(len(lengths))}
        for path in self._folder.glob(f"{self._split}-*.bin"):
            if path not in kept:
                path.unlink()

    def append(self, ids: np.ndarray, place: str) -> None:
        """Write one document and its boundary.

        Args:
            ids: Token ids of the document, any integer type, shape [tokens], no boundary.
            place: Where the document is from, for errors.

        Raises:
            ValueError: An id is outside the vocabulary, so it might not fit the shard's type.
        """
        low, high = (int(ids.min()), int(ids.max())) if len(ids) else (0, 0)
        if low < 0 or high >= self._vocab_size:
            raise ValueError(
                f"{place}: token id {low if low < 0 else high} is outside the vocabulary of "
                f"{self._vocab_size} ids (0 to {self._vocab_size - 1}, stored as "
                f"{self._dtype.name}); give the right --vocab_size or --tokenizer"
            )
        self._write(np.concatenate([ids.astype(self._dtype), self._boundary]))
        self.documents += 1

    def _write(self, ids: np.ndarray) -> None:
        while len(ids):
            index, used = divmod(self.tokens, self._shard_tokens)
            if self._file is None:
                self._file = self._path(index).open("ab")
            piece = ids[: self._shard_tokens - used]
            with naming(self._path(index)):
                self._file.write(piece.tobytes())
            self.tokens += len(piece)
            ids = ids[len(piece) :]
            if self.tokens % self._shard_tokens == 0:
                self.sync()

    def sync(self) -> None:
        """Put on disk what was appended; a record written after this may count on it."""
        if self._file is not None:
            with naming(self._file.name):
                self._file.flush()
                os.fsync(self._file.fileno())
            self._file.close()
            self._file = None

    def progress(self) -> dict[str, Any]:
        """What a record holds of this split: the arguments to go on with."""
        return {"tokens": self.tokens, "documents": self.documents}

    def finish(self) -> SplitManifest:
        """Close the split and hash its shards."""
        self.sync()
        shards = tuple(
            Shard(self._path(index).name, length, sha256_of_file(self._path(index)))
            for index, length in enumerate(self._lengths())
        )
        return SplitManifest(self.tokens, self.documents, shards)
