"""Claims on pieces of work: a file per piece, which exists while a live process works on it."""

import fcntl
import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def claimed(folder: Path, name: str) -> Iterator[bool]:
    """Claims a piece of work; gives False, at once, where another live process has it.

    The claim of a process that died on this machine is taken over, also after the machine was
    started anew. On another machine that cannot be seen: there, remove the file by hand.

    Args:
        folder: Where claims are.
        name: Of the piece; names the file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.lock"
    if not _claim(path):
        yield False
        return
    try:
        yield True
    finally:
        path.unlink(missing_ok=True)


def _claim(path: Path) -> bool:
    # one at a time may judge claims, so that nobody removes one that was just renewed
    with (path.parent / ".taking-over").open("a") as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)
        if path.exists():
            if _is_held(path):
                return False
            path.unlink()
        return _create(path)


def _create(path: Path) -> bool:
    """Makes the file with its content at once, if there is none."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    partial = Path(name)
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(_identity(os.getpid()), file)
        os.link(partial, path)  # fails where there is one, as O_EXCL does
    except FileExistsError:
        return False
    finally:
        partial.unlink()
    return True


def _is_held(path: Path) -> bool:
    try:
        owner = json.loads(path.read_text())
        pid = int(owner["pid"])
    except (OSError, KeyError, TypeError, ValueError):
        return path.exists()  # nobody knows whose it is
    here = _identity(pid)
    if owner.get("machine") != here["machine"]:
        return True
    return here["started"] is not None and owner == here


def _identity(pid: int) -> dict[str, Any]:
    """A process: its number, and when it started, since numbers are used again."""
    node = hashlib.sha256(platform.node().encode()).hexdigest()[:12]
    return {"pid": pid, "started": _started(pid), "boot": _boot(), "machine": node}


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """When a live process started, in the kernel's ticks; None if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        if Path("/proc/self/stat").exists():
            return None
        try:  # a system without /proc
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            pass
        return ""
    state, *rest = text.rpartition(")")[2].split()  # the name before may hold anything
    return None if state in "ZX" else rest[18]
