"""One run at a time in a folder: a lock that the system gives back when its process ends."""

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

_LOCK = ".lock"
_NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class FolderInUseError(RuntimeError):
    """Another run writes to the folder."""


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Within it no other run, on this machine or another that shares the folder, enters it.

    A file system that knows no locks, as some of clusters do, lets everybody in.

    Args:
        folder: Of a run; made if it is not there. The lock's file is in it meanwhile. What a
            killed run leaves of it means nothing: only a locked one does.

    Raises:
        FolderInUseError: If another run is in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _LOCK
    with _locked(path) as file:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        try:
            yield
        finally:
            with suppress(OSError):  # the disk may have gone, and another error is on its way
                path.unlink()


def _locked(path: Path) -> TextIO:
    """The lock's file, locked, and still the one of that name: a run that ended has removed its."""
    while True:
        file = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip() or "another process"
            file.close()
            raise FolderInUseError(
                f"{path.parent} is in use by another run ({owner}); wait until it has ended, or "
                "choose another folder with --trainer.default_root_dir"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS_HERE:
                file.close()
                raise
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
        file.close()
