"""Disks that a command has for itself: small ones, and some that become read-only."""

import ctypes
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNS = 0x00020000
_MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18


@contextmanager
def small_disk(folder: Path, size_bytes: int, kept: Path) -> Iterator[None]:
    """Within it a folder is a small disk that only this process sees; its end is copied away."""
    _check(_LIBC.unshare(_CLONE_NEWNS), "unshare")
    _mount(Path("/"), "none", _MS_REC | _MS_PRIVATE, "")
    folder.mkdir(parents=True, exist_ok=True)
    _mount(folder, "tmpfs", 0, f"size={size_bytes}")
    try:
        yield
    finally:
        shutil.copytree(folder, kept, dirs_exist_ok=True)


def make_read_only(folder: Path) -> None:
    """Takes away the right to write to a disk, as a system does that has seen it fail.

    The disk is mounted once more over itself: one with files open for writing, such as a lock's,
    could not be changed.
    """
    _mount(folder, "none", _MS_BIND, "", source=folder)
    _mount(folder, "none", _MS_REMOUNT | _MS_BIND | _MS_RDONLY, "")


def _mount(folder: Path, kind: str, flags: int, data: str, source: Path = Path("none")) -> None:
    code = _LIBC.mount(
        os.fsencode(source),
        os.fsencode(folder),
        kind.encode(),
        ctypes.c_ulong(flags),
        data.encode(),
    )
    _check(code, "mount")


def _check(code: int, what: str) -> None:
    if code != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
