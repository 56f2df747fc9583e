"""Checkpoint files: reading one, and finding a run's newest or best."""

import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tinyllm.data.tokenizer import Tokenizer


def load_checked(path: Path, map_location: Any = "cpu", mmap: bool = False) -> Any:
    """What ``torch.save`` wrote: tensors and plain values, after every byte was checked.

    Args:
        path: A file.
        map_location: As ``torch.load`` takes it.
        mmap: Read tensors when they are used.

    Raises:
        FileNotFoundError: There is no such file.
        OSError: It cannot be opened.
        ValueError: Something else wrote the file, it was damaged, or it holds other objects.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint at {path}")
    path.open("rb").close()  # what cannot be opened says so itself
    try:
        _check_bytes(path)
        return torch.load(path, map_location=map_location, weights_only=True, mmap=mmap)
    except Exception as error:  # of zipfile, pickle and torch, which fail in many ways
        reason = (str(error).splitlines() or [repr(error)])[0]
        raise ValueError(f"{path} is no checkpoint, or was cut off or damaged: {reason}") from error


_FOLDER = 0x10
"""The attribute of folders in a zip file."""


def _check_bytes(path: Path) -> None:
    """Compares every record with its checksum, which ``torch.load`` does not."""
    if not zipfile.is_zipfile(path):
        raise ValueError("torch.save has not written it")
    with zipfile.ZipFile(path) as archive:
        for record in archive.infolist():
            if record.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{record.filename} is compressed, which torch.save does not do")
            if record.external_attr & _FOLDER:  # of which torch reads nothing, into new memory
                raise ValueError(f"{record.filename} is marked as a folder")
        if (changed := archive.testzip()) is not None:
            raise ValueError(f"{changed} has changed since it was written")


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """What a checkpoint file holds, on the CPU; tensors are read when they are used.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is no checkpoint, or a damaged one.
    """
    path = Path(path)
    state = load_checked(path, mmap=True)
    if not isinstance(state, dict) or "state_dict" not in state:
        raise ValueError(f"{path} is no checkpoint of a training run: it has no state_dict")
    for name in ("state_dict", "hyper_parameters", "TokenDataModule"):
        if not isinstance(state.get(name, {}), dict):
            raise ValueError(f"{path} is damaged: its {name} is a {type(state[name]).__name__}")
    return state


def tokenizer_of(state: Mapping[str, Any]) -> Tokenizer | None:
    """The tokenizer that a checkpoint carries; None where its data had none.

    Args:
        state: What :func:`read_checkpoint` gave.
    """
    carried = state.get("TokenDataModule", {}).get("tokenizer")
    return None if carried is None else Tokenizer.from_state(carried)


def find_checkpoint(folder: Path, name: str) -> Path | None:
    """The newest checkpoint in a folder whose file is called ``name``, ``name-v1`` and so on."""
    versions = re.compile(rf"{re.escape(name)}(-v\d+)?")
    found = [path for path in folder.glob("*.ckpt") if versions.fullmatch(path.stem)]
    return max(found, key=lambda path: path.stat().st_mtime_ns, default=None)
