"""Where documents come from: files of text, JSONL, Parquet, raw ids, or a Hugging Face dataset.

Every source yields its documents in a fixed order, and a :class:`BadInput` in the place of each
input that cannot be used, so that the caller decides whether to stop or to count it.
"""

import codecs
import json
import platform
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tinyllm.arguments import check_choice
from tinyllm.data.manifest import sha256_of_json
from tinyllm.extras import require

SourceKind = Literal["stdlib", "text", "jsonl", "parquet", "huggingface", "tokens"]

# The files a folder stands for, by kind of source.
_PATTERNS: dict[str, tuple[str, ...]] = {
    "text": ("*",),
    "jsonl": ("*.jsonl",),
    "parquet": ("*.parquet",),
    "tokens": ("*.u16", "*.bin"),
}
_NOT_LIBRARY = frozenset(
    ["test", "tests", "idle_test", "encodings", "site-packages", "dist-packages", "__pycache__"]
)


@dataclass(frozen=True)
class Document:
    """One document: its text, or its token ids (uint16, shape [tokens], no boundary)."""

    content: str | np.ndarray
    place: str


@dataclass(frozen=True)
class BadInput:
    """An input that cannot be used."""

    place: str
    """The file, and the line or row in it."""
    problem: str
    """What is wrong; the same words for the same kind of fault, so that skips can be counted."""
    detail: str = ""
    """More about this one case."""

    def __str__(self) -> str:
        return f"{self.place}: {self.problem}{f' ({self.detail})' if self.detail else ''}"


Item = Document | BadInput


@dataclass(frozen=True)
class Source:
    """Documents that can be read as often as needed, always in the same order."""

    kind: SourceKind
    description: dict[str, Any]
    """What decides the documents, for the manifest: a JSON object."""
    read: Callable[[], Iterator[Item]]
    """Starts a new pass."""


def open_source(
    kind: SourceKind,
    inputs: Sequence[str] = (),
    *,
    text_field: str = "text",
    dataset_config: str | None = None,
    dataset_split: str = "train",
    boundary_id: int | None = None,
) -> Source:
    """Find a source's files and check that they are there; nothing is read yet.

    Args:
        kind: The kind of source.
        inputs: Files or folders, or one dataset name or folder for `huggingface`; none for
            `stdlib`.
        text_field: The field (JSONL) or column (Parquet, datasets) that holds the text.
        dataset_config: Configuration name of a Hugging Face dataset.
        dataset_split: Split of a Hugging Face dataset.
        boundary_id: The id that ends a document in raw token files.

    Raises:
        FileNotFoundError: An input does not exist, or a folder has no file of the kind.
        ValueError: Too many or too few inputs for the kind.
    """
    check_choice("source", kind, SourceKind)
    if kind == "stdlib":
        return _open_library(inputs)
    if kind == "huggingface":
        return _open_dataset(inputs, dataset_config, dataset_split, text_field)
    if not inputs:
        raise ValueError(f"the source {kind} needs --input: one or more files or folders")
    files = [file for name in inputs for file in _find_files(Path(name), kind)]
    about = {"kind": kind, "inputs": list(inputs), **_listing(files, None)}
    if kind == "text":
        return Source(kind, about, lambda: _text(files))
    if kind == "jsonl":
        return Source(kind, about | {"text_field": text_field}, lambda: _jsonl(files, text_field))
    if kind == "parquet":
        return Source(kind, about | {"text_field": text_field}, lambda: _parquet(files, text_field))
    if boundary_id is None:
        raise ValueError(
            "the source tokens needs --boundary_id, the id that ends each document, or a "
            "--tokenizer that has one"
        )
    about["boundary_id"] = boundary_id
    return Source(kind, about, lambda: _tokens(files, boundary_id))


def _open_library(inputs: Sequence[str]) -> Source:
    if inputs:
        raise ValueError(f"the source stdlib takes no input; given {list(inputs)}")
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = _library_files(folder)
    about = {"kind": "stdlib", "python": platform.python_version(), **_listing(files, folder)}
    return Source("stdlib", about, lambda: _text(files))


def _open_dataset(inputs: Sequence[str], config: str | None, split: str, field: str) -> Source:
    if len(inputs) != 1:
        raise ValueError(
            f"the source huggingface takes one input, a dataset's name or folder; "
            f"given {list(inputs)}"
        )
    name = inputs[0]
    about = {
        "kind": "huggingface",
        "dataset": name,
        "config": config,
        "split": split,
        "text_field": field,
    }
    return Source("huggingface", about, lambda: _huggingface(name, config, split, field))


def _library_files(folder: Path) -> list[Path]:
    """The library's own source: no tests, no code pages, and none of its few empty files."""
    files = []
    for file in sorted(folder.rglob("*.py")):
        inside = file.relative_to(folder).parts[:-1]
        if not _NOT_LIBRARY.intersection(inside) and file.stat().st_size > 0:
            files.append(file)
    return files


def _find_files(path: Path, kind: str) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"the input {path} does not exist; give a file or a folder")
    found = {file for pattern in _PATTERNS[kind] for file in path.rglob(pattern)}
    visible = [
        file
        for file in sorted(found)
        if file.is_file() and not any(p.startswith(".") for p in file.relative_to(path).parts)
    ]
    if not visible:
        raise FileNotFoundError(
            f"the folder {path} has no file for the source {kind}; it looks for "
            f"{' and '.join(_PATTERNS[kind])}"
        )
    return visible


def _listing(files: list[Path], base: Path | None) -> dict[str, Any]:
    """Number, bytes and a hash of names and sizes: tells a changed set of files at little cost."""
    listing = [
        [(file.relative_to(base) if base else file).as_posix(), file.stat().st_size]
        for file in files
    ]
    total = sum(file.stat().st_size for file in files)
    return {"files": len(files), "bytes": total, "listing_sha256": sha256_of_json(listing)}


def _text(files: list[Path]) -> Iterator[Item]:
    for file in files:
        data = file.read_bytes().removeprefix(codecs.BOM_UTF8)
        if not data:
            yield BadInput(str(file), "the file is empty")
            continue
        try:
            yield Document(data.decode("utf-8"), str(file))
        except UnicodeDecodeError as error:
            yield BadInput(str(file), "not UTF-8", f"byte {error.start}: {error.reason}")


def _jsonl(files: list[Path], field: str) -> Iterator[Item]:
    for file in files:
        if file.stat().st_size == 0:
            yield BadInput(str(file), "the file is empty")
            continue
        # Lines are split as bytes, so that a wrong byte costs one line and not the file.
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if not line.strip():
                    continue
                place = f"{file}, line {number}"
                try:
                    value = json.loads(line.decode("utf-8"))
                except UnicodeDecodeError as error:
                    yield BadInput(place, "not UTF-8", f"byte {error.start}: {error.reason}")
                except (RecursionError, ValueError) as error:
                    yield BadInput(place, "not JSON", str(error))
                else:
                    yield _field(value, field, place)


def _parquet(files: list[Path], field: str) -> Iterator[Item]:
    parquet = require("pyarrow.parquet", "data")
    for file in files:
        if file.stat().st_size == 0:
            yield BadInput(str(file), "the file is empty")
            continue
        try:
            table = parquet.ParquetFile(file)
        except Exception as error:  # pyarrow's own errors share no base class but this
            yield BadInput(str(file), "not a Parquet file", str(error))
            continue
        with table:
            columns = table.schema_arrow.names
            if field not in columns:
                yield BadInput(
                    str(file),
                    f"no field {field!r}",
                    f"it has {', '.join(columns)}; see --text_field",
                )
                continue
            row = 0
            try:
                for batch in table.iter_batches(columns=[field], batch_size=1024):
                    for value in batch.column(0).to_pylist():
                        row += 1
                        yield _field({field: value}, field, f"{file}, row {row}")
            except Exception as error:  # as above
                yield BadInput(
                    f"{file}, after row {row}", "the rest of the file cannot be read", str(error)
                )


def _huggingface(name: str, config: str | None, split: str, field: str) -> Iterator[Item]:
    datasets = require("datasets", "data")
    try:
        rows = datasets.load_dataset(name, config, split=split, streaming=True)
    except Exception as error:  # datasets, the hub and the file system each have their own
        raise ValueError(
            f"the dataset {name!r} (config {config!r}, split {split!r}) cannot be opened: {error}"
        ) from error
    for number, row in enumerate(rows, start=1):
        yield _field(row, field, f"{name} ({split}), row {number}")


def _field(row: Any, field: str, place: str) -> Item:
    if not isinstance(row, dict):
        return BadInput(place, "not a JSON object")
    if field not in row:
        return BadInput(
            place, f"no field {field!r}", f"it has {', '.join(map(str, row))}; see --text_field"
        )
    text = row[field]
    if not isinstance(text, str):
        return BadInput(place, f"the field {field!r} is not text", f"it is {type(text).__name__}")
    if not text:
        return BadInput(place, "the text is empty")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        return BadInput(place, "not valid Unicode", str(error))
    return Document(text, place)


def _tokens(files: list[Path], boundary_id: int) -> Iterator[Item]:
    for file in files:
        size = file.stat().st_size
        if size == 0:
            yield BadInput(str(file), "the file is empty")
            continue
        if size % 2:
            yield BadInput(str(file), "not a file of 2-byte token ids", f"it has {size} bytes")
            continue
        ids = np.memmap(file, dtype="<u2", mode="r")
        ends = np.flatnonzero(ids == boundary_id).tolist()
        if not ends or ends[-1] != len(ids) - 1:
            ends.append(len(ids))  # the last document came without its boundary
        start = 0
        for end in ends:
            if end > start:
                yield Document(np.asarray(ids[start:end]), f"{file}, token {start}")
            else:
                yield BadInput(f"{file}, token {start}", "two boundaries in a row")
            start = end + 1
