"""Claims on pieces of work, and on a device: files, locked by the processes that work on them."""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tinyllm.acceptance.environment import environment


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


def device_lock() -> Path:
    """What a user's launchers of one device share, whatever campaigns they work on.

    The device is the first that ``CUDA_VISIBLE_DEVICES`` names. The lock has its UUID, since jobs
    that see one device each call all of them 0, or its name where there is no UUID.
    """
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"
    uuids = [gpu.get("uuid", "") for gpu in environment()["gpus"]]
    if device.isdecimal():
        device = dict(enumerate(uuids)).get(int(device)) or device
    else:  # of a UUID its start will do
        device = next((uuid for uuid in uuids if uuid.startswith(device)), device)
    name = f"tinyllm-timing-{os.getuid()}-{device.replace('/', '-')}.lock"
    return Path(tempfile.gettempdir()) / name


@contextmanager
def held(path: Path, *, alone: bool) -> Iterator[None]:
    """Waits for a lock, and holds it alone or together with others that do not want it alone."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield
