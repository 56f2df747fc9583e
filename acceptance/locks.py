"""Claims on pieces of work: a file per piece, locked by the process that works on it."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def claimed(folder: Path, name: str) -> Iterator[bool]:
    """Claims a piece of work; gives False, at once, where another process has it.

    The system gives a claim back when its process ends, however it ends. Where several machines
    share the folder, its file system must pass locks on, as NFS does, and Lustre when mounted with
    ``flock``.

    Args:
        folder: Where claims are; their files stay, and only a locked one is a claim.
        name: Of the piece; names the file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
