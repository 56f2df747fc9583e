"""One process at a time in a folder: locks that the system gives back when a process ends."""

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LOCK = ".lock"
_NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class FolderInUseError(RuntimeError):
    """Another run writes to the folder."""


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Within it no other run, on this machine or another that shares the folder, enters it.

    Args:
        folder: Of a run; made if it is not there. The lock's file is in it meanwhile. What a
            killed run leaves of it means nothing: only a locked one does.

    Raises:
        FolderInUseError: If another run is in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _LOCK
    try:
        descriptor = locked(path, os.O_RDWR | os.O_CREAT)
    except BlockingIOError:
        owner = ""
        with suppress(FileNotFoundError):  # it has just ended
            owner = path.read_text(encoding="utf-8").strip()
        owner = owner or "another process"
        raise FolderInUseError(
            f"{folder} is in use by another run ({owner}); wait until it has ended, or choose "
            "another folder with --trainer.default_root_dir"
        ) from None
    try:
        os.truncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        yield
    finally:
        with suppress(OSError):  # the disk may have gone, and another error is on its way
            path.unlink()
        os.close(descriptor)  # this also unlocks


def locked(path: Path, flags: int) -> int:
    """A locked descriptor of the file or folder that has a name now; closing it unlocks.

    A file system that knows no locks, as some of clusters do, lets everybody in.

    Args:
        path: Who had it locked may have renamed or removed it; then it is opened once more.
        flags: For ``os.open``.

    Raises:
        BlockingIOError: If another process has it locked.
        FileNotFoundError: If it is not there, or not any more.
    """
    while True:
        descriptor = os.open(path, flags, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS_HERE:
                os.close(descriptor)
                raise
        with suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(descriptor)):
                return descriptor
        os.close(descriptor)
