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


def assert_same_run(folder: str | Path, finished: Path) -> None:
    """The same log and state as the uninterrupted run, to the last bit."""
    pd.testing.assert_frame_equal(metrics(folder), metrics(finished), check_exact=True)
    assert_same_state(folder, finished)


def assert_same_state(folder: str | Path, finished: Path) -> None:
    """The same weights, moments, counters and position in the data."""
    state, expected = (load(Path(f) / "checkpoints/last.ckpt") for f in (folder, finished))
    assert state["global_step"] == expected["global_step"]
    for name, tensor in expected["state_dict"].items():
        assert torch.equal(state["state_dict"][name], tensor), name
    mine, other = (s["optimizer_states"][0]["state"] for s in (state, expected))
    for index, entry in other.items():
        for name, tensor in entry.items():
            assert torch.equal(mine[index][name], tensor), name
    assert state["TokenDataModule"]["train"] == expected["TokenDataModule"]["train"]
