"""Files that are replaced whole or not at all."""

import glob
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
            _sync(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)  # also where both were names of one file: it is kept then
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
