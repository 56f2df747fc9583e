"""Reading what runs of the command line have left."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import yaml

Run = Callable[..., Any]


def copy(finished: Path, name: str) -> Path:
    """A copy to try things with, below the present folder."""
    return Path(shutil.copytree(finished, name))


def load(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(path, weights_only=True)
    return state


def metrics(folder: Path | str) -> pd.DataFrame:
    return pd.read_csv(Path(folder) / "metrics.csv")


def lrs(folder: Path | str) -> list[float]:
    return metrics(folder)["train/lr"].dropna().tolist()


def printed(done: Any) -> dict[str, Any]:
    assert done.code == 0, done.err
    config: dict[str, Any] = yaml.safe_load(done.out)
    return config
