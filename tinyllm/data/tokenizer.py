"""One face for the tokenizers a cache can be made with: `tokenizers` files and SentencePiece.

Only plain token ids come out: no template, no begin or end tokens, no truncation, and special
tokens spelled out in a text stay text. The boundary between documents is added in one place, when
the cache is written.
"""

import base64
import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tinyllm.extras import require

BOUNDARY_TOKEN = "<|endoftext|>"
"""The boundary token of a tokenizer that is trained here."""

# The names under which well-known tokenizers keep their end-of-document token.
_BOUNDARY_NAMES = (BOUNDARY_TOKEN, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
_FILE_NAMES = {"tokenizers": "tokenizer.json", "sentencepiece": "tokenizer.model"}

# Training takes time quadratic in a word's length, so it gets words in parts of so many characters:
# each alternative is one kind of a byte-level BPE's words.
_LONG_WORD = r"\p{L}{1000}|\p{N}{1000}|[^\s\p{L}\p{N}]{1000}|\s{1000}"


@dataclass(frozen=True)
class TokenizerIdentity:
    """Which tokenizer made the ids of a cache."""

    kind: Literal["tokenizers", "sentencepiece", "none"]
    """The library that reads the file; `none` for raw ids that came without a tokenizer."""
    file: str | None
    """Its file name in the cache folder."""
    sha256: str | None
    """SHA-256 of that file."""
    vocab_size: int
    """Every id is below this."""
    boundary_id: int
    """The id that ends every document."""


class Tokenizer:
    """Text to token ids and back; make one with :meth:`load` or :meth:`train`."""

    def __init__(
        self,
        kind: Literal["tokenizers", "sentencepiece"],
        data: bytes,
        boundary_id: int | None,
        name: str,
    ) -> None:
        self.kind: Literal["tokenizers", "sentencepiece"] = kind
        self._data = data
        self._impl = (
            _read_tokenizers(data, name) if kind == "tokenizers" else _read_model(data, name)
        )
        if kind == "tokenizers":
            vocabulary: dict[str, int] = self._impl.get_vocab(with_added_tokens=True)
            # Ids may have holes, so the largest id decides and not the number of entries.
            self.vocab_size = max(vocabulary.values()) + 1
            found = next((vocabulary[n] for n in _BOUNDARY_NAMES if n in vocabulary), None)
        else:
            self.vocab_size = int(self._impl.vocab_size())
            found = int(self._impl.eos_id()) if self._impl.eos_id() >= 0 else None
        chosen = found if boundary_id is None else boundary_id
        if chosen is None:
            raise ValueError(
                f"{name} has no end-of-document token (looked for {', '.join(_BOUNDARY_NAMES)}); "
                f"name one with --boundary_id"
            )
        if not 0 <= chosen < self.vocab_size:
            raise ValueError(
                f"boundary_id is {chosen}; {name} has ids from 0 to {self.vocab_size - 1}"
            )
        self.boundary_id = chosen
        """The id that ends every document."""

    @classmethod
    def load(cls, path: str | Path, boundary_id: int | None = None) -> "Tokenizer":
        """Read a tokenizer.

        Args:
            path: A `tokenizer.json` of the `tokenizers` library, a SentencePiece `.model` file,
                or a folder with `tokenizer.json` or `tokenizer.model`; of a token cache, see
                :func:`~tinyllm.data.cache.load_tokenizer`.
            boundary_id: The id that ends a document; null for the tokenizer's own end-of-text
                token.

        Raises:
            FileNotFoundError: No such file, or none of the two names in the folder.
            ValueError: The file is of neither kind, or has no end-of-text token.
        """
        path = Path(path)
        if path.is_dir():
            files = [path / name for name in _FILE_NAMES.values() if (path / name).is_file()]
            if not files:
                raise FileNotFoundError(
                    f"no tokenizer in {path}: it has neither tokenizer.json nor tokenizer.model"
                )
            path = files[0]
        if not path.is_file():
            raise FileNotFoundError(
                f"no tokenizer at {path}; give a tokenizer.json or a SentencePiece .model file"
            )
        kind: Literal["tokenizers", "sentencepiece"] = (
            "tokenizers" if path.suffix == ".json" else "sentencepiece"
        )
        return cls(kind, path.read_bytes(), boundary_id, str(path))

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Train a byte-level BPE on `texts`, with :data:`BOUNDARY_TOKEN` as its id 0.

        Every text can be encoded, since all 256 bytes are in the vocabulary. It comes out smaller
        than `vocab_size` when the texts are too small for so many merges.
        """
        smallest = 257
        if vocab_size < smallest:
            raise ValueError(
                f"vocab_size is {vocab_size}; a byte-level BPE needs at least {smallest}: "
                f"256 bytes and the boundary token"
            )
        tokenizers = require("tokenizers", "data")
        models, trainers = (
            require("tokenizers.models", "data"),
            require("tokenizers.trainers", "data"),
        )
        pre_tokenizers = require("tokenizers.pre_tokenizers", "data")
        byte_level = pre_tokenizers.ByteLevel
        words = byte_level(add_prefix_space=False)
        cut = pre_tokenizers.Split(tokenizers.Regex(_LONG_WORD), "isolated")
        impl = tokenizers.Tokenizer(models.BPE())
        impl.pre_tokenizer = pre_tokenizers.Sequence([cut, words])
        impl.decoder = require("tokenizers.decoders", "data").ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[BOUNDARY_TOKEN],
            initial_alphabet=sorted(byte_level.alphabet()),
            show_progress=False,
        )
        impl.train_from_iterator(texts, trainer)
        impl.pre_tokenizer = words  # encoding has no need of cuts
        return cls("tokenizers", impl.to_str(pretty=True).encode(), None, "the trained tokenizer")

    def to_state(self) -> dict[str, str | int]:
        """The whole tokenizer in plain values, so that a checkpoint can carry it."""
        file = base64.b64encode(self._data).decode("ascii")
        return {"kind": self.kind, "boundary_id": self.boundary_id, "file": file}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Tokenizer":
        """The tokenizer that :meth:`to_state` described.

        Raises:
            ValueError: It is no such description.
        """
        if not isinstance(state, Mapping):
            raise ValueError(f"the checkpoint's tokenizer is damaged: {type(state).__name__}")
        try:
            kind, boundary_id = state["kind"], state["boundary_id"]
            data = base64.b64decode(state["file"], validate=True)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the checkpoint's tokenizer is damaged: {error!r}") from error
        if kind not in list(_FILE_NAMES) or type(boundary_id) is not int:
            raise ValueError(
                f"the checkpoint's tokenizer is damaged: kind {kind!r}, boundary_id {boundary_id!r}"
            )
        return cls(kind, data, boundary_id, "the checkpoint's tokenizer")

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text: uint32 arrays of shape [tokens], without any boundary."""
        if self.kind == "tokenizers":
            encodings = self._impl.encode_batch_fast(list(texts), add_special_tokens=False)
            return [np.asarray(encoding.ids, np.uint32) for encoding in encodings]
        rows = self._impl.encode(list(texts), out_type=int, add_bos=False, add_eos=False)
        return [np.asarray(row, np.uint32) for row in rows]

    def encode(self, text: str) -> np.ndarray:
        """Ids of one text: uint32, shape [tokens], without any boundary."""
        return self.encode_batch([text])[0]

    def token(self, id: int) -> str:
        """How a token is written in the tokenizer's file."""
        return str(
            self._impl.id_to_token(id) if self.kind == "tokenizers" else self._impl.id_to_piece(id)
        )

    @property
    def adds_tokens(self) -> bool:
        """Whether the file has a template that other users of it put around a text."""
        return self.kind == "tokenizers" and self._impl.num_special_tokens_to_add(False) > 0

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids; boundary and other control tokens give nothing."""
        ids = [int(i) for i in ids]
        if self.kind == "tokenizers":
            return str(self._impl.decode(ids, skip_special_tokens=True))
        return str(self._impl.decode(ids))

    @property
    def sha256(self) -> str:
        """SHA-256 of the tokenizer's file."""
        return hashlib.sha256(self._data).hexdigest()

    @property
    def identity(self) -> TokenizerIdentity:
        """What a cache's manifest records of it."""
        return TokenizerIdentity(
            kind=self.kind,
            file=_FILE_NAMES[self.kind],
            sha256=self.sha256,
            vocab_size=self.vocab_size,
            boundary_id=self.boundary_id,
        )

    def save(self, folder: str | Path) -> Path:
        """Write `tokenizer.json` or `tokenizer.model`, byte for byte as loaded, into a folder."""
        path = Path(folder) / _FILE_NAMES[self.kind]
        with path.open("wb") as file:
            file.write(self._data)
            file.flush()
            os.fsync(file.fileno())
        return path


def _read_tokenizers(data: bytes, name: str) -> Any:
    tokenizers = require("tokenizers", "data")
    try:
        impl = tokenizers.Tokenizer.from_str(data.decode("utf-8"))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{name} is not a file of the tokenizers library: {error}") from error
    # Files in the wild carry truncation to 512 ids, padding, and special tokens that would be
    # recognized inside a document; none of them belongs in a pre-training stream.
    impl.no_truncation()
    impl.no_padding()
    impl.encode_special_tokens = True
    return impl


def _read_model(data: bytes, name: str) -> Any:
    sentencepiece = require("sentencepiece", "data")
    impl = sentencepiece.SentencePieceProcessor()
    try:
        impl.LoadFromSerializedProto(data)
    except Exception as error:  # the library raises RuntimeError or TypeError
        raise ValueError(f"{name} is not a SentencePiece model: {error}") from error
    return impl
