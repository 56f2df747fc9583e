"""Documents in, a token cache out: what `tinyllm prepare` runs."""

import hashlib
import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tqdm import tqdm  # type: ignore[import-untyped]

from tinyllm.arguments import check_choice
from tinyllm.data import build
from tinyllm.data.cache import TokenCache, load_tokenizer
from tinyllm.data.manifest import Manifest, Split
from tinyllm.data.sources import BadInput, Document, Item, Source, SourceKind, open_source
from tinyllm.data.stream import token_dtype
from tinyllm.data.tokenizer import Tokenizer, TokenizerIdentity
from tinyllm.data.writer import SplitWriter

OnBadInput = Literal["error", "skip"]

_DEFAULT_VOCAB_SIZE = 32_000  # the model presets' vocabulary

# Text that a tokenizer is trained on, and text or documents tokenized in one call: enough for
# either to be worth it, little enough to hold in memory.
_TRAINING_CHARACTERS = 100_000_000
_BATCH_CHARACTERS = 2_000_000
_BATCH_DOCUMENTS = 1_000


def prepare(
    output: Path,
    source: SourceKind,
    input: list[str] | str | None = None,
    tokenizer: str | None = None,
    vocab_size: int | None = None,
    boundary_id: int | None = None,
    text_field: str = "text",
    dataset_config: str | None = None,
    dataset_split: str = "train",
    validation_fraction: float = 0.02,
    test_fraction: float = 0.0,
    max_documents: int | None = None,
    shard_tokens: int = 1 << 24,
    on_bad_input: OnBadInput = "error",
    overwrite: bool = False,
) -> TokenCache:
    """Turn text into a token cache for training.

    Documents are split by a hash of their content, so the same document never stands in two
    splits, and every document is followed by exactly one boundary token. A run that was killed is
    continued by calling it again with the same arguments; a finished cache with the same
    arguments is left as it is.

    Args:
        output: Folder of the new cache. It is built in `<output>.partial` and renamed when done.
        source: Where documents come from. `stdlib`: the running Python's own standard library
            (10.7 MB of source, nothing to download). `text`: files or folders of UTF-8 text, a
            document per file. `jsonl`: a JSON object per line. `parquet`: Parquet files.
            `huggingface`: a dataset, streamed by the datasets library. `tokens`: files of raw
            uint16 little-endian token ids, each document ending in the boundary id.
        input: A file or folder, or a list of them; for `huggingface`, the dataset's name or
            folder; nothing for `stdlib`.
        tokenizer: A `tokenizer.json` file, a SentencePiece `.model` file, or a folder with one:
            another cache, say. Null trains a byte-level BPE on the training documents; with
            `tokens`, null stores no tokenizer, and then nothing can turn the ids back into text.
        vocab_size: Size of the BPE to train (null: 32000), or of the vocabulary that raw `tokens`
            without a tokenizer are from. A given tokenizer has its own size.
        boundary_id: Id of the token that ends a document. Null: the given cache's, or the
            tokenizer's end-of-text token. Raw `tokens` without a tokenizer need it.
        text_field: Field or column that holds the text, in `jsonl`, `parquet` and `huggingface`.
        dataset_config: Configuration name of a `huggingface` dataset.
        dataset_split: Split of a `huggingface` dataset to read.
        validation_fraction: Share of the documents that go to the validation split.
        test_fraction: Share of the documents that go to a test split; 0 makes none.
        max_documents: Read no more documents than this; null reads all.
        shard_tokens: Tokens in one file of the cache. Progress is recorded as often.
        on_bad_input: What to do about an input that cannot be used (not UTF-8, empty, no such
            field): stop with an error that names it, or skip and count it.
        overwrite: Replace a cache that is already at `output`.

    Returns:
        The finished cache.

    Raises:
        ValueError: An argument is out of range, an input is unusable, an id does not fit the
            vocabulary, or a split would be empty.
        FileNotFoundError: An input or the tokenizer does not exist.
        CacheError: `output` holds something else, or another process is writing it.
    """
    started = time.monotonic()
    check_choice("on_bad_input", on_bad_input, OnBadInput)
    _check_fractions(validation_fraction, test_fraction)
    for name, value in (("shard_tokens", shard_tokens), ("max_documents", max_documents)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    given = None if tokenizer is None else load_tokenizer(tokenizer, boundary_id)
    identity = _known_identity(source, given, vocab_size, boundary_id)
    documents = open_source(
        source,
        [input] if isinstance(input, str) else input or [],
        text_field=text_field,
        dataset_config=dataset_config,
        dataset_split=dataset_split,
        boundary_id=None if identity is None else identity.boundary_id,
    )
    request = _request(
        documents,
        given,
        _DEFAULT_VOCAB_SIZE if identity is None and vocab_size is None else vocab_size,
        boundary_id,
        validation_fraction=validation_fraction,
        test_fraction=test_fraction,
        max_documents=max_documents,
        shard_tokens=shard_tokens,
        on_bad_input=on_bad_input,
    )
    output = Path(output)
    finished = build.existing_cache(output, request, overwrite)
    if finished is None:
        with build.building(output) as folder:
            finished = build.existing_cache(output, request, overwrite)
            if finished is None:
                _Preparation(documents, request, folder, given, identity).run(output)
    if finished is not None:
        build.clear_up(output)
        print(f"{output} is up to date ({finished.identity[:12]}).")
        return finished
    cache = TokenCache.open(output)
    _print_summary(cache, time.monotonic() - started)
    return cache


def _check_fractions(validation: float, test: float) -> None:
    if not 0 < validation < 1:
        raise ValueError(f"validation_fraction is {validation}; it must lie between 0 and 1")
    if not 0 <= test < 1 - validation:
        raise ValueError(
            f"test_fraction is {test}; it must be at least 0 and leave something to train on "
            f"beside validation_fraction={validation}"
        )


def _known_identity(
    source: SourceKind, given: Tokenizer | None, vocab_size: int | None, boundary_id: int | None
) -> TokenizerIdentity | None:
    """The tokenizer's identity where it is known before reading; None for one to be trained."""
    size = vocab_size if given is None else given.vocab_size
    if source == "tokens" and size is not None and size > 1 << 16:
        raise ValueError(
            f"the vocabulary has {size} ids, and raw token files hold 2-byte ids, up to 65,536 of "
            "them; prepare from text, or with a smaller vocabulary"
        )
    if given is not None:
        if vocab_size not in (None, given.vocab_size):
            raise ValueError(
                f"vocab_size is {vocab_size} and the tokenizer has {given.vocab_size} ids; leave "
                f"out --vocab_size"
            )
        return given.identity
    if source != "tokens":
        if boundary_id is not None:
            raise ValueError(
                "boundary_id needs a --tokenizer; a tokenizer that is trained here has its own"
            )
        return None
    if vocab_size is None or boundary_id is None:
        raise ValueError(
            "raw tokens need a --tokenizer, or both --vocab_size and --boundary_id; given "
            f"vocab_size={vocab_size}, boundary_id={boundary_id}"
        )
    token_dtype(vocab_size)  # refuses a vocabulary that no cache can hold
    if not 0 <= boundary_id < vocab_size:
        raise ValueError(f"boundary_id is {boundary_id}; it must lie in 0 to {vocab_size - 1}")
    return TokenizerIdentity("none", None, None, vocab_size, boundary_id)


def _request(
    source: Source,
    given: Tokenizer | None,
    vocab_size: int | None,
    boundary_id: int | None,
    **others: Any,
) -> dict[str, Any]:
    """What a cache is made of and how: two equal ones give the same cache."""
    return {
        "source": source.description,
        "tokenizer": None if given is None else given.sha256,
        "vocab_size": vocab_size,
        "boundary_id": boundary_id if given is None else given.boundary_id,
        **others,
    }


class _Preparation:
    """One build, from its first document or from its record to the finished cache."""

    def __init__(
        self,
        source: Source,
        request: dict[str, Any],
        folder: Path,
        tokenizer: Tokenizer | None,
        identity: TokenizerIdentity | None,
    ) -> None:
        self._source = source
        self._request = request
        self._folder = folder
        self._position = 0
        self._skipped: Counter[str] = Counter()
        record = build.read_record(folder, request) or {}
        if tokenizer is None and identity is None:
            tokenizer = Tokenizer.load(folder) if record else self._train_tokenizer()
        self._tokenizer = tokenizer
        self._identity = identity if tokenizer is None else tokenizer.identity
        assert self._identity is not None
        if tokenizer is not None:
            tokenizer.save(folder)
        self._position = record.get("position", 0)
        # Training has read the documents once and counted what it skipped; only writing counts.
        self._skipped = Counter(record.get("skipped", {}))
        names: list[Split] = ["train", "validation"]
        if request["test_fraction"] > 0:
            names.append("test")
        self._writers = {
            name: SplitWriter(
                folder,
                name,
                vocab_size=self._identity.vocab_size,
                boundary_id=self._identity.boundary_id,
                shard_tokens=request["shard_tokens"],
                **record.get("splits", {}).get(name, {}),
            )
            for name in names
        }
        if record:
            print(f"Continuing {folder} after {self._position} documents.")

    def run(self, output: Path) -> None:
        """Read, tokenize and write what is left; then move the cache to `output`."""
        self._record()
        recorded_tokens = self._tokens()
        with tqdm(desc="tokens", unit="tok", unit_scale=True, disable=None) as bar:
            bar.update(recorded_tokens)
            for batch in self._batches():
                before = self._tokens()
                self._write(batch)
                self._position += len(batch)
                bar.update(self._tokens() - before)
                if self._tokens() - recorded_tokens >= self._request["shard_tokens"]:
                    self._record()
                    recorded_tokens = self._tokens()
        self._check_splits()
        assert self._identity is not None
        manifest = Manifest(
            tokenizer=self._identity,
            dtype="uint16" if token_dtype(self._identity.vocab_size).itemsize == 2 else "uint32",
            splits={name: writer.finish() for name, writer in self._writers.items()},
            request=self._request,
            skipped=dict(sorted(self._skipped.items())),
        )
        build.install(self._folder, output, manifest.to_json())

    def _tokens(self) -> int:
        return sum(writer.tokens for writer in self._writers.values())

    def _record(self) -> None:
        for writer in self._writers.values():
            writer.sync()
        record = {
            "request": self._request,
            "position": self._position,
            "skipped": dict(self._skipped),
            "splits": {name: writer.progress() for name, writer in self._writers.items()},
        }
        build.write_record(self._folder, record)

    def _batches(self) -> Iterator[list[Item]]:
        """Items in batches that bound both their number and their text."""
        batch: list[Item] = []
        size = 0
        for item in islice(self._source.read(), self._position, self._request["max_documents"]):
            batch.append(item)
            size += len(item.content) if isinstance(item, Document) else 0
            if size >= _BATCH_CHARACTERS or len(batch) >= _BATCH_DOCUMENTS:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def _usable(self, batch: list[Item]) -> list[Document]:
        documents = []
        for item in batch:
            if isinstance(item, Document):
                documents.append(item)
            else:
                self._refuse(item)
        return documents

    def _refuse(self, bad: BadInput) -> None:
        if self._request["on_bad_input"] == "error":
            raise ValueError(f"{bad}. Correct it, or pass --on_bad_input skip to leave it out.")
        self._skipped[bad.problem] += 1

    def _write(self, batch: list[Item]) -> None:
        documents = self._usable(batch)
        texts = [d.content for d in documents if isinstance(d.content, str)]
        encoded = iter(self._tokenizer.encode_batch(texts) if self._tokenizer and texts else [])
        assert self._identity is not None
        for document in documents:
            content = document.content
            ids = content if isinstance(content, np.ndarray) else next(encoded)
            if (ids == self._identity.boundary_id).any():
                # Only a tokenizer that treats the boundary as ordinary text can do this.
                self._refuse(
                    BadInput(
                        document.place,
                        "the text contains the boundary token",
                        f"id {self._identity.boundary_id}; choose another --boundary_id",
                    )
                )
                continue
            self._writers[self._split_of(document)].append(ids, document.place)

    def _split_of(self, document: Document) -> Split:
        """A split by the document's content alone: the first 8 bytes of its SHA-256 as a number."""
        content = document.content
        data = content.encode("utf-8") if isinstance(content, str) else content.tobytes()
        point = int.from_bytes(hashlib.sha256(data).digest()[:8], "big") / 2**64
        if point < self._request["validation_fraction"]:
            return "validation"
        if point < self._request["validation_fraction"] + self._request["test_fraction"]:
            return "test"
        return "train"

    def _train_tokenizer(self) -> Tokenizer:
        vocab_size = self._request["vocab_size"]
        print(f"Training a byte-level BPE of {vocab_size} ids on the training documents …")
        return Tokenizer.train(self._training_texts(), vocab_size)

    def _training_texts(self) -> Iterator[str]:
        characters = 0
        for batch in self._batches():
            for document in self._usable(batch):
                if isinstance(document.content, str) and self._split_of(document) == "train":
                    yield document.content
                    characters += len(document.content)
                    if characters >= _TRAINING_CHARACTERS:
                        return

    def _check_splits(self) -> None:
        total = sum(writer.documents for writer in self._writers.values())
        if total == 0:
            skipped = "; ".join(f"{name}: {count:,}" for name, count in self._skipped.items())
            why = f"all inputs were skipped ({skipped})" if skipped else "the inputs hold none"
            raise ValueError(
                f"the source {self._source.kind} gave no document: {why}. Correct the inputs, or "
                "give others."
            )
        fractions = {
            "validation": f"validation_fraction={self._request['validation_fraction']}",
            "test": f"test_fraction={self._request['test_fraction']}",
            "train": f"validation_fraction={self._request['validation_fraction']} and "
            f"test_fraction={self._request['test_fraction']}",
        }
        for name, writer in self._writers.items():
            if writer.documents == 0:
                raise ValueError(
                    f"the {name} split is empty: none of {total} documents fell into it at "
                    f"{fractions[name]}. Documents are dealt out whole, and a text file is one: "
                    "change the fraction, or give more documents, as files or lines of JSON."
                )


def _print_summary(cache: TokenCache, seconds: float) -> None:
    manifest = cache.manifest
    for name, split in manifest.splits.items():
        print(f"{name:<11}{split.documents:>10,} documents {split.tokens:>14,} tokens")
    kind = manifest.tokenizer.kind
    tokenizer = "raw ids, no tokenizer" if kind == "none" else f"tokenizer of kind {kind}"
    print(f"{'vocabulary':<11}{cache.vocab_size:>10,} ids, {manifest.dtype}, {tokenizer}")
    for problem, count in manifest.skipped.items():
        print(f"{'skipped':<11}{count:>10,} inputs: {problem}")
    print(f"{cache.path} is ready ({manifest.identity[:12]}) after {seconds:.1f} s.")
