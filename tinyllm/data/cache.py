"""The token cache on disk: a manifest over memory-mapped shards, checked when opened.

Layout of a cache folder::

    manifest.json            what is below, with counts, sizes and SHA-256
    train-00000.bin …        little-endian uint16 or uint32 token ids, nothing else
    validation-00000.bin …
    test-00000.bin …         (only when a test fraction was asked for)
    tokenizer.json | .model  (only when the tokens have a tokenizer)

A split is one logical stream of tokens: each document's ids, then one boundary id.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from tinyllm.data.tokenizer import Tokenizer, TokenizerIdentity

FORMAT_VERSION = 1
MANIFEST = "manifest.json"

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)


class CacheError(ValueError):
    """A token cache that is missing, damaged or of another format."""


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest little-endian type that holds every id below `vocab_size`."""
    if not 1 <= vocab_size <= 1 << 31:
        raise ValueError(f"vocab_size is {vocab_size}; it must be between 1 and {1 << 31}")
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def sha256_of_file(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of_json(value: Any) -> str:
    """SHA-256 of a JSON value, whatever the order of its keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Shard:
    """One file of token ids."""

    file: str
    """File name inside the cache folder."""
    tokens: int
    """Ids in the file."""
    sha256: str
    """SHA-256 of the file's bytes."""


@dataclass(frozen=True)
class SplitManifest:
    """One split's shards, in stream order, and its counts."""

    tokens: int
    """Ids in the split, boundaries included."""
    documents: int
    """Documents in the split; each ends with one boundary id."""
    shards: tuple[Shard, ...]
    """The files that hold the stream, in order."""


@dataclass(frozen=True)
class Manifest:
    """Everything a cache says about itself."""

    tokenizer: TokenizerIdentity
    """Which ids these are."""
    dtype: Literal["uint16", "uint32"]
    """Type of an id in a shard, little-endian."""
    splits: dict[str, SplitManifest]
    """By split name."""
    request: dict[str, Any]
    """The arguments of `tinyllm prepare` that decide the content."""
    skipped: dict[str, int]
    """Unusable inputs that were left out, counted by problem."""

    @property
    def identity(self) -> str:
        """One SHA-256 over the content: tokenizer, type, and every shard's name, size and hash.

        Where the text came from and what was skipped are left out, so that the same tokens have
        the same identity on every machine.
        """
        content = {"version": FORMAT_VERSION, "dtype": self.dtype, **self._content()}
        return sha256_of_json(content)

    def _content(self) -> dict[str, Any]:
        return {
            "tokenizer": asdict(self.tokenizer),
            "splits": {name: asdict(split) for name, split in self.splits.items()},
        }

    def to_json(self) -> dict[str, Any]:
        """The manifest as it stands in `manifest.json`."""
        return {
            "format": "tinyllm token cache",
            "version": FORMAT_VERSION,
            "dtype": self.dtype,
            **self._content(),
            "request": self.request,
            "skipped": self.skipped,
            "identity": self.identity,
        }

    def _types(self) -> Iterator[tuple[str, bool]]:
        """Each value that came from a file, by name, and whether it is of its type."""
        ids = self.tokenizer
        yield "request", isinstance(self.request, dict)
        yield "skipped", isinstance(self.skipped, dict)
        yield "tokenizer.kind", isinstance(ids.kind, str)
        yield "tokenizer.file", ids.file is None or isinstance(ids.file, str)
        yield "tokenizer.sha256", ids.sha256 is None or isinstance(ids.sha256, str)
        yield "tokenizer.vocab_size", _is_count(ids.vocab_size) and ids.vocab_size >= 1
        yield "tokenizer.boundary_id", _is_count(ids.boundary_id)
        for name, split in self.splits.items():
            yield f"tokens of {name}", _is_count(split.tokens)
            yield f"documents of {name}", _is_count(split.documents)
            for number, shard in enumerate(split.shards):
                fits = isinstance(shard.file, str) and isinstance(shard.sha256, str)
                yield f"shard {number} of {name}", fits and _is_count(shard.tokens)

    @classmethod
    def from_json(cls, value: dict[str, Any], path: Path) -> "Manifest":
        """Read `manifest.json`; `path` is named in errors.

        Raises:
            CacheError: Another format or version, a missing key, a file name that leaves the
                folder, or an identity that does not match the content.
        """
        version = value.get("version")
        if version != FORMAT_VERSION:
            raise CacheError(
                f"{path} has format version {version!r}; this tinyllm reads version "
                f"{FORMAT_VERSION}. Run `tinyllm prepare` again."
            )
        try:
            manifest = cls(
                tokenizer=TokenizerIdentity(**value["tokenizer"]),
                dtype=value["dtype"],
                splits={name: _split_from_json(split) for name, split in value["splits"].items()},
                request=value["request"],
                skipped=value["skipped"],
            )
            recorded = value["identity"]
        except (KeyError, TypeError, AttributeError) as error:
            raise CacheError(f"{path} is not a token cache's manifest: {error!r}") from error
        if manifest.dtype not in ("uint16", "uint32"):
            raise CacheError(f"{path}: dtype is {manifest.dtype!r}; allowed: uint16, uint32")
        if wrong := [what for what, fits in manifest._types() if not fits]:
            raise CacheError(
                f"{path} is not a token cache's manifest: {', '.join(wrong[:4])} cannot be used. "
                f"Run `tinyllm prepare` again."
            )
        names = [shard.file for split in manifest.splits.values() for shard in split.shards]
        names += [manifest.tokenizer.file] if manifest.tokenizer.file else []
        for name in names:
            if not is_plain_name(name):
                raise CacheError(
                    f"{path} names the file {name!r}; it must be a plain name inside the folder"
                )
        if manifest.identity != recorded:
            raise CacheError(
                f"{path} was changed after it was written: its identity is recorded as {recorded} "
                f"and its content gives {manifest.identity}. Run `tinyllm prepare` again."
            )
        return manifest


def is_plain_name(name: str) -> bool:
    """Whether a name from a file can only mean a file in the folder that it is looked up in."""
    try:
        length = len(name.encode())
    except UnicodeEncodeError:  # half a character
        return False
    return (
        Path(name).name == name
        and name not in ("", ".", "..")
        and "\0" not in name
        and length < 256
    )


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _split_from_json(value: dict[str, Any]) -> SplitManifest:
    shards = tuple(Shard(**shard) for shard in value["shards"])
    return SplitManifest(tokens=value["tokens"], documents=value["documents"], shards=shards)


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
                f"no token cache at {path}: the folder {what}. Make one first, for example from "
                f"the running Python's own library:\n  tinyllm prepare --output {path} "
                f"--source stdlib --vocab_size 2048"
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
