"""The token cache on disk: a manifest over memory-mapped shards, checked when opened.

Layout of a cache folder::

    manifest.json            what is below, with counts, sizes and SHA-256
    train-00000.bin …        little-endian uint16 or uint32 token ids, nothing else
    validation-00000.bin …
    test-00000.bin …         (only when a test fraction was asked for)
    tokenizer.json | .model  (only when the tokens have a tokenizer)

A split is one logical stream of tokens: each document's ids, then one boundary id.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from tinyllm.data.manifest import (
    MANIFEST,
    CacheError,
    Manifest,
    Split,
    sha256_of_file,
    sha256_of_json,
)
from tinyllm.data.stream import TokenStream
from tinyllm.data.tokenizer import Tokenizer


class TokenCache:
    """A finished token cache; get one with :meth:`open`."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest

    @classmethod
    def open(cls, path: str | Path) -> "TokenCache":
        """Open a cache folder and check every shard's size against the manifest.

        Raises:
            CacheError: The folder or a file is missing, the manifest is of another format, or a
                shard does not have the size the manifest gives it.
        """
        path = Path(path)
        file = path / MANIFEST
        if not file.is_file():
            what = "has no manifest.json" if path.is_dir() else "does not exist"
            raise CacheError(
                f"no token cache at {path}: the folder {what}. Make one first, of no more "
                f"token ids than the model has, for example from the running Python's own "
                f"library:\n  tinyllm prepare --output {path} --source stdlib --vocab_size 1024"
            )
        try:
            value = json.loads(file.read_text(encoding="utf-8"))
        except (RecursionError, ValueError) as error:
            raise CacheError(
                f"{file} is not JSON: {error}. Run `tinyllm prepare` again."
            ) from error
        if not isinstance(value, dict):
            raise CacheError(f"{file} is not a token cache's manifest: it is not a JSON object")
        cache = cls(path, Manifest.from_json(value, file))
        cache._check_sizes()
        return cache

    def _check_sizes(self) -> None:
        item_bytes = self.dtype.itemsize
        for name, split in self.manifest.splits.items():
            for shard in split.shards:
                file = self.path / shard.file
                expected = shard.tokens * item_bytes
                if not file.is_file():
                    raise CacheError(
                        f"{file} is missing; the manifest gives it {expected} bytes. "
                        f"{self._remedy()}"
                    )
                actual = file.stat().st_size
                if actual != expected:
                    raise CacheError(
                        f"{file} has {actual} bytes; the manifest gives it {expected} "
                        f"({shard.tokens} {self.manifest.dtype} tokens). {self._remedy()}"
                    )
            if sum(shard.tokens for shard in split.shards) != split.tokens:
                raise CacheError(f"{self.path}: split {name!r}: its shards do not hold its tokens")

    def _remedy(self) -> str:
        return "Copy the cache again, or run `tinyllm prepare` with --overwrite true."

    def verify(self) -> None:
        """Hash every file; raises :class:`CacheError` naming one that changed."""
        expected = {
            shard.file: shard.sha256
            for split in self.manifest.splits.values()
            for shard in split.shards
        }
        tokenizer = self.manifest.tokenizer
        if tokenizer.file is not None and tokenizer.sha256 is not None:
            expected[tokenizer.file] = tokenizer.sha256
        for name, sha256 in expected.items():
            file = self.path / name
            if not file.is_file():
                raise CacheError(f"{file} is missing. {self._remedy()}")
            actual = sha256_of_file(file)
            if actual != sha256:
                raise CacheError(
                    f"{file} was changed: its SHA-256 is {actual}, the manifest gives {sha256}. "
                    f"{self._remedy()}"
                )

    def split(self, name: Split) -> TokenStream:
        """A split's tokens; raises :class:`CacheError` when the cache has no such split."""
        if name not in self.manifest.splits:
            raise CacheError(
                f"{self.path} has no split {name!r}; it has {sorted(self.manifest.splits)}. "
                f"For a test split, run `tinyllm prepare` with --test_fraction above 0."
            )
        # an empty file cannot be mapped
        shards = [shard for shard in self.manifest.splits[name].shards if shard.tokens]
        if not shards:
            raise CacheError(f"split {name!r} of {self.path} holds no tokens; prepare more text")
        maps: list[np.ndarray] = [
            np.memmap(self.path / shard.file, dtype=self.dtype, mode="r") for shard in shards
        ]
        hashes = [shard.sha256 for shard in shards]
        return TokenStream(maps, sha256_of_json([self.manifest.dtype, hashes]))

    def tokenizer(self) -> Tokenizer:
        """The tokenizer stored with the tokens; an error when there is none."""
        identity = self.manifest.tokenizer
        if identity.file is None:
            raise CacheError(
                f"{self.path} was made from raw token ids without a tokenizer; run `tinyllm "
                f"prepare` with --tokenizer FILE to store one beside them"
            )
        return Tokenizer.load(self.path / identity.file, boundary_id=identity.boundary_id)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of an id in a shard."""
        return np.dtype(self.manifest.dtype).newbyteorder("<")

    @property
    def vocab_size(self) -> int:
        """Every id is below this."""
        return self.manifest.tokenizer.vocab_size

    @property
    def boundary_id(self) -> int:
        """The id that ends every document."""
        return self.manifest.tokenizer.boundary_id

    @property
    def identity(self) -> str:
        """One hash over the cache's content."""
        return self.manifest.identity


def load_tokenizer(path: str | Path, boundary_id: int | None = None) -> Tokenizer:
    """Read a tokenizer by its file or folder; a token cache's ends documents as the cache does.

    Args:
        path: See :meth:`Tokenizer.load`.
        boundary_id: The id that ends a document; null for the cache's, or the tokenizer's own.

    Raises:
        CacheError: The folder is a token cache that is damaged or has no tokenizer.
        FileNotFoundError: No such file, or no tokenizer in the folder.
        ValueError: The file is no tokenizer, or has no end-of-text token.
    """
    if boundary_id is None and (Path(path) / MANIFEST).is_file():
        return TokenCache.open(path).tokenizer()
    return Tokenizer.load(path, boundary_id)
