"""The folder a cache is built in: locked, resumable from a record, and moved in place at the end.

`<output>.partial/` holds the shards so far and `progress.json`, the record. `<output>` itself is
only ever replaced by a rename of a finished folder, so a failure leaves an earlier cache as it was.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tinyllm.data.cache import TokenCache
from tinyllm.data.manifest import MANIFEST, CacheError
from tinyllm.files import sync, write_json
from tinyllm.folder_lock import locked

_RECORD = "progress.json"


def partial_folder(output: Path) -> Path:
    """Where the cache at `output` is built."""
    return output.with_name(output.name + ".partial")


def _old_folder(output: Path) -> Path:
    return output.with_name(output.name + ".old")


@contextmanager
def building(output: Path) -> Iterator[Path]:
    """Make and lock the folder for building; what is in it stays for the next call on any failure.

    Raises:
        CacheError: Another process is building the same cache.
    """
    folder = partial_folder(output)
    descriptor = _lock(folder)
    try:
        _take_back(output)
        yield folder
    finally:
        with suppress(OSError):  # it holds something, or it has become the cache
            folder.rmdir()
        os.close(descriptor)  # this also unlocks


def _lock(folder: Path) -> int:
    """A descriptor of the folder that keeps others out until it is closed."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            return locked(folder, os.O_RDONLY)
        except FileNotFoundError:
            continue  # another process has just moved it away, as its finished cache
        except BlockingIOError as error:
            raise CacheError(
                f"another `tinyllm prepare` is writing {folder}; wait for it or choose another "
                f"--output"
            ) from error


def clear_up(output: Path) -> None:
    """Delete a replaced cache that a kill has left beside a finished one."""
    if _old_folder(output).is_dir():
        with suppress(CacheError), building(output):  # not while another process is at work
            pass


def _take_back(output: Path) -> None:
    """Repairs a kill between the two renames of `install`, or before the old cache was deleted."""
    old = _old_folder(output)
    if not old.is_dir():
        return
    if output.exists():
        shutil.rmtree(old)
    else:
        old.rename(output)


def read_record(folder: Path, request: dict[str, Any]) -> dict[str, Any] | None:
    """The record of an unfinished build with the same arguments, or None after clearing the rest.

    A build with other arguments is no use to this one, so it is deleted, with a line that says so.
    """
    path = folder / _RECORD
    record: dict[str, Any] | None = None
    if path.is_file():
        record = json.loads(path.read_text(encoding="utf-8"))
        if record is not None and record["request"] != request:
            print(f"Starting afresh: {folder} is an unfinished cache made with other arguments.")
            record = None
    if record is None:
        clear(folder)
    return record


def clear(folder: Path) -> None:
    """Delete what an earlier build left in its folder."""
    for path in folder.iterdir():
        path.unlink()


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Record how far a build is; everything it counts on must be on disk before."""
    write_json(folder / _RECORD, record)


def existing_cache(output: Path, request: dict[str, Any], overwrite: bool) -> TokenCache | None:
    """The finished cache at `output` if it is what `request` asks for; None to build one.

    Only within `building` is that the last word: until then another process may finish it.

    Raises:
        CacheError: There is something else, or a damaged cache, and `overwrite` is false; or
            there is a folder that is no token cache, which is never overwritten.
    """
    if not output.exists():
        return None
    if not (output / MANIFEST).is_file():
        if output.is_dir() and not any(output.iterdir()):
            return None
        raise CacheError(
            f"{output} exists and is no token cache; choose another --output or delete it yourself"
        )
    if overwrite:
        return None
    cache = TokenCache.open(output)
    if cache.manifest.request == request:
        return cache
    changed = [
        f"{name} was {cache.manifest.request.get(name)!r} and is now {request.get(name)!r}"
        for name in sorted({*cache.manifest.request, *request})
        if cache.manifest.request.get(name) != request.get(name)
    ]
    raise CacheError(
        f"{output} holds a cache made with other arguments: {'; '.join(changed)}. Choose another "
        f"--output, or pass --overwrite true to replace it."
    )


def install(folder: Path, output: Path, manifest: dict[str, Any]) -> None:
    """Turn a built folder into the cache at `output`: manifest, flush, rename."""
    write_json(folder / MANIFEST, manifest)
    (folder / _RECORD).unlink(missing_ok=True)
    sync(folder)
    old = _old_folder(output)
    if output.exists():
        output.rename(old)
    folder.rename(output)
    sync(output.parent)
    if old.is_dir():
        shutil.rmtree(old)
