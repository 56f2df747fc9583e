"""Files that are replaced whole or not at all, and names that can only mean files."""

import csv
import glob
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tinyllm.errors import naming


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a file to write, and puts it in the place of ``path`` once it is on the disk.

    A reader finds the old content or the new one, and after an error the old one is still there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for left_behind in path.parent.glob(f".{glob.escape(path.name)}.*.partial"):
        left_behind.unlink(missing_ok=True)  # by a run that was killed
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with naming(path):
            yield partial
            sync(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)  # also where both were names of one file: it is kept then
    sync(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file, whole or not at all."""
    with replacing(path) as partial:
        partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_csv(path: Path, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Writes a CSV file, whole or not at all."""
    with replacing(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)


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


def sync(path: Path) -> None:
    """Waits until a file's content, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
