"""What a token cache says about itself, and the checks of it."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from tinyllm.data.tokenizer import TokenizerIdentity
from tinyllm.files import is_plain_name

FORMAT_VERSION = 1
MANIFEST = "manifest.json"

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)


class CacheError(ValueError):
    """A token cache that is missing, damaged or of another format."""


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


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _split_from_json(value: dict[str, Any]) -> SplitManifest:
    shards = tuple(Shard(**shard) for shard in value["shards"])
    return SplitManifest(tokens=value["tokens"], documents=value["documents"], shards=shards)
