"""A small packed run that leaves every kind of file, and what a reader may find in its folder."""

import json
import os
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import yaml
from lightning.pytorch.core.saving import load_hparams_from_yaml

from tinyllm.checkpoint import read_checkpoint

_LONGEST_ROW = 4_096  # bytes
EVERY = 3  # updates from one checkpoint to the next
_FILES = {
    *("config.yaml", "hparams.yaml", "metrics.csv", "consensus.csv", "memory.json"),
    *("throughput.csv", "timing.json", "last.ckpt", "best.ckpt"),
}
_CONFIG = """
seed_everything: 1
trainer:
  accelerator: cpu
  max_steps: {updates}
  val_check_interval: 5
  check_val_every_n_epoch: null
  log_every_n_steps: 1
  num_sanity_val_steps: 0
  enable_progress_bar: false
  enable_model_summary: false
  gradient_clip_val: 1.0
  strategy:
    class_path: tinyllm.strategies.DecentralizedStrategy
    init_args: {{workers: 4, compile: false}}
  callbacks:
    - class_path: tinyllm.callbacks.ConsensusDistance
    - class_path: tinyllm.callbacks.MemoryMonitor
    - class_path: tinyllm.callbacks.ThroughputWindows
      init_args: {{warmup_updates: 1, windows: 2, window_seconds: 0.01}}
checkpoint: {{every_n_train_steps: {every}}}
model:
  config: {{layers: 1, width: 16, heads: 2, ffn_width: 32, vocab_size: 64, context: 8}}
  optimizer: {{lr: 0.01}}
data: {{cache: {cache}, context: 8, batch_size: 16, validation_batch_size: 16}}
"""


def write_config(path: Path, cache: Path, updates: int) -> Path:
    """The configuration file of a run."""
    path.write_text(_CONFIG.format(cache=cache, updates=updates, every=EVERY), encoding="utf-8")
    return path


def check_whole(folder: Path) -> int:
    """Reads everything in a run's folder as its readers do; gives the newest checkpoint's update.

    Files under hidden names are nobody's to read.

    Raises:
        AssertionError: If anything is not whole, or no reader knows it.
    """
    saved = 0
    for path in folder.rglob("[!.]*"):
        if path.is_dir():
            assert path.name == "checkpoints" or path.name.startswith("earlier-"), path
            continue
        assert path.name in _FILES, f"nobody reads {path}"
        step = _check_file(path)
        if path == folder / "checkpoints" / "last.ckpt":
            saved = step
    return saved


def _check_file(path: Path) -> int:
    text = "" if path.suffix == ".ckpt" else path.read_text(encoding="utf-8")
    if path.suffix == ".ckpt":
        for tensor in tensors(path).values():
            assert tensor.isfinite().all()
        return int(read_checkpoint(path)["global_step"])
    if path.suffix == ".csv":
        assert text.endswith("\n"), path
        rows = [line.count(",") for line in text.splitlines()]
        assert set(rows) == {rows[0]}, path
        first = text.partition("\n")[0].split(",")
        counter = next((name for name in ("step", "update") if name in first), None)
        if counter is not None:
            assert pd.read_csv(path)[counter].is_monotonic_increasing, path
    elif path.suffix == ".json":
        assert json.loads(text), path
    elif path.name == "hparams.yaml":
        assert load_hparams_from_yaml(path)["preset"] is None, path
    else:
        assert yaml.safe_load(text)["seed_everything"] == 1, path
    return 0


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """All weights and moments of all workers, and generators' states, read to the last byte."""
    state: dict[str, Any] = torch.load(path, weights_only=True)
    found = dict(state["state_dict"])
    for index, entry in state["optimizer_states"][0]["state"].items():
        found |= {f"{index}.{name}": value for name, value in entry.items()}
    return found


def assert_same_run(folder: Path, whole: Path, kills: int = 0) -> int:
    """The same state and log as another run, to the last bit; gives the rows that are missing.

    Lightning logs an update after its checkpoint is saved. A kill between the two takes the row:
    it is in no checkpoint, and its update is not done again.

    Args:
        folder: Of a run.
        whole: Of another one, to which nothing has happened.
        kills: How often the first was killed.
    """
    mine, other = (tensors(place / "checkpoints" / "last.ckpt") for place in (folder, whole))
    assert mine.keys() == other.keys()
    for name, value in other.items():
        assert torch.equal(mine[name], value), name
    one, two = (read_checkpoint(place / "checkpoints" / "last.ckpt") for place in (folder, whole))
    for key in ("global_step", "epoch", "lr_schedulers", "TokenDataModule"):
        assert one[key] == two[key], key
    assert (folder / "consensus.csv").read_text() == (whole / "consensus.csv").read_text()
    rows, expected = (pd.read_csv(place / "metrics.csv") for place in (folder, whole))
    of_update = ~expected["step"].duplicated()  # the second one of a step is its validation's
    due = (expected["step"] + 1) % EVERY == 0
    found = set(rows.loc[~rows["step"].duplicated() & rows["train/loss"].notna(), "step"])
    missing = of_update & due & ~expected["step"].isin(found)
    assert missing.sum() <= kills
    same = [c for c in expected.columns if not c.startswith("memory/")]
    there = expected.loc[~missing, same].reset_index(drop=True)
    pd.testing.assert_frame_equal(rows[same], there, check_exact=True)
    return int(missing.sum())


def last_logged(folder: Path) -> int:
    """The last update in the log, from 0; -1 if there is none."""
    try:
        with (folder / "metrics.csv").open("rb") as file:
            header = file.readline().decode()
            file.seek(max(file.tell(), os.fstat(file.fileno()).st_size - _LONGEST_ROW))
            text = file.read().decode()
    except FileNotFoundError:
        return -1
    if not text.endswith("\n"):  # of no rows, or while one is written
        return -1
    return int(text.splitlines()[-1].split(",")[header.strip().split(",").index("step")])
