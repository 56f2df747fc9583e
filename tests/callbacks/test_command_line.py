"""All callbacks from a configuration file, by class path."""

import json
from pathlib import Path

import numpy as np
import pytest

from tinyllm.data.prepare import prepare

CONFIG = """
trainer:
  accelerator: cpu
  max_steps: 12
  log_every_n_steps: 2
  val_check_interval: 6
  check_val_every_n_epoch: null
  num_sanity_val_steps: 0
  enable_progress_bar: false
  default_root_dir: run
  strategy:
    class_path: tinyllm.strategies.DecentralizedStrategy
    init_args: {workers: 2, compile: false}
  callbacks:
    - class_path: tinyllm.callbacks.ThroughputWindows
      init_args: {warmup_updates: 2, windows: 2, updates_per_window: 3, window_seconds: 1.0e-9}
    - class_path: tinyllm.callbacks.MemoryMonitor
    - class_path: tinyllm.callbacks.ConsensusDistance
    - class_path: tinyllm.callbacks.UpdateTrace
      init_args: {folder: traced, updates: 2}
model:
  config: {layers: 1, width: 16, heads: 2, ffn_width: 32, vocab_size: 64, context: 16}
data: {cache: cache, context: 16, batch_size: 8, validation_batch_size: 16}
"""
WRITTEN = ("throughput.csv", "timing.json", "memory.json", "consensus.csv")


def test_a_run_writes_all_files_and_the_next_one_keeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tinyllm.cli import main

    monkeypatch.chdir(tmp_path)
    ids = np.random.default_rng(0).integers(1, 64, 5_000)
    ids[19::20] = 0  # documents of 19 tokens
    ids.astype("<u2").tofile("ids.u16")
    prepare("cache", "tokens", "ids.u16", vocab_size=64, boundary_id=0, validation_fraction=0.1)
    Path("run.yaml").write_text(CONFIG)
    main(["fit", "--config", "run.yaml"])
    for name in WRITTEN:
        assert (Path("run") / name).is_file(), name
    assert len(json.loads(Path("traced/trace.json").read_text())["updates"]) == 2
    first = {name: (Path("run") / name).read_bytes() for name in WRITTEN}
    main(["fit", "--config", "run.yaml"])
    for name in WRITTEN:
        assert (Path("run/earlier-1") / name).read_bytes() == first[name]
        assert (Path("run") / name).is_file(), name
