"""Where Triton keeps compiled kernels."""

import os
import tempfile
from contextlib import suppress
from pathlib import Path
from stat import S_ISDIR


def use_local_kernel_cache() -> None:
    """Keeps compiled kernels on this node's own disk, where jobs of other nodes cannot reach them.

    Triton's own default is the home folder, which nodes often share. ``TRITON_CACHE_DIR`` wins.
    """
    if "TRITON_CACHE_DIR" not in os.environ:
        os.environ["TRITON_CACHE_DIR"] = str(_own_folder())


def _own_folder() -> Path:
    """A folder for compiled code that nobody else can write to."""
    folder = Path(tempfile.gettempdir()) / f"tinyllm_kernels_{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022:
        return folder
    return Path(tempfile.mkdtemp(prefix="tinyllm_kernels_"))  # somebody took the name
