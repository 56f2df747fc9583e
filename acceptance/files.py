"""Files that appear whole or not at all, whenever a process is killed."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def replace_file(path: Path, content: bytes | str) -> None:
    """Writes a file; a reader finds the old content or the new one, never a part."""
    with written_beside(path, content, mode=0o644) as partial:
        partial.replace(path)
    sync(path.parent)


@contextmanager
def written_beside(path: Path, content: bytes | str, *, mode: int) -> Iterator[Path]:
    """A file with the content, on the disk, beside ``path``; gone afterwards."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    partial = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        partial.chmod(mode)
        yield partial
    finally:
        partial.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Waits until a file's content, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
