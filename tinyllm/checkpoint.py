"""Checkpoint files: reading one, and finding a run's newest or best."""

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """What a checkpoint file holds, on the CPU; tensors are read when they are used.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is no checkpoint, or a damaged one.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint at {path}")
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is no checkpoint, or was cut off: torch.save has not written it")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path} is no checkpoint, or a damaged one: {reason}") from error
    if not isinstance(state, dict) or "state_dict" not in state:
        raise ValueError(f"{path} is no checkpoint of a training run: it has no state_dict")
    return state


def find_checkpoint(folder: Path, name: str) -> Path | None:
    """The newest checkpoint in a folder whose file is called ``name``, ``name-v1`` and so on."""
    found = [p for p in folder.glob("*.ckpt") if p.stem == name or p.stem.startswith(f"{name}-v")]
    return max(found, key=lambda path: path.stat().st_mtime_ns, default=None)
