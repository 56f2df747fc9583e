"""A run's report: of a real run, of an interrupted one, and of files as they may be found."""

import json
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger
from simulation import Batches, batches, new_trainer, tiny
from torch.utils.data import DataLoader

from tinyllm.callbacks import MemoryMonitor, RunReport, ThroughputWindows
from tinyllm.callbacks.report import write_run_report
from tinyllm.data.prepare import prepare
from tinyllm.logger import RunLogger
from tinyllm.strategies import SyncStrategy

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
    - class_path: tinyllm.callbacks.RunReport
    - class_path: tinyllm.callbacks.ThroughputWindows
      init_args: {warmup_updates: 2, windows: 3, updates_per_window: 5, window_seconds: 1.0e-9}
    - class_path: tinyllm.callbacks.MemoryMonitor
    - class_path: tinyllm.callbacks.ConsensusDistance
model:
  config: {layers: 1, width: 16, heads: 2, ffn_width: 32, vocab_size: 64, context: 16}
data: {cache: cache, context: 16, batch_size: 8, validation_batch_size: 16}
"""
ALL = ("loss", "learning_rate", "throughput", "memory", "consensus")


class Stop(Callback):
    """Ends a run with an error after some updates."""

    def __init__(self, error: BaseException, updates: int = 6) -> None:
        self.error, self.updates = error, updates

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == self.updates:
            raise self.error


def fit(folder: Path, *callbacks: Callback, **options: Any) -> None:
    trainer = new_trainer(
        SyncStrategy(compile=False),
        callbacks=[RunReport(), *callbacks],
        default_root_dir=folder,
        **{"logger": RunLogger(folder), "log_every_n_steps": 2} | options,
    )
    data = batches(1)
    trainer.fit(tiny(), Batches(data), DataLoader(data[:1], batch_size=None))


def drawn(folder: Path) -> set[str]:
    return {path.stem for path in folder.glob("curves/*.svg")}


def synthetic(folder: Path) -> Path:
    """Files of a run of 2,000 updates with four workers on a GPU."""
    folder.mkdir(exist_ok=True)
    step = np.arange(9, 2_000, 10)
    noise = np.random.default_rng(0).normal(0, 0.05, len(step))
    train = pd.DataFrame(
        {
            "step": step,
            "train/loss": 3.5 + 6 * np.exp(-step / 300) + noise,
            "train/lr": 0.008 * np.minimum(step / 100, 1 - 0.9 * step / 2_000),
        }
    )
    validation = pd.DataFrame({"step": [999, 1_999], "validation/loss": [3.8, 3.6]})
    pd.concat([train, validation]).sort_values("step", kind="stable").to_csv(
        folder / "metrics.csv", index=False
    )
    speeds = [9.9e5, 1.02e6, 1.0e6, 1.01e6, 1.03e6]
    pd.DataFrame({"updates": 40, "tokens_per_second": speeds}).to_csv(
        folder / "throughput.csv", index=False
    )
    peaks = {"peak_allocated_bytes": 3 * 2**30, "peak_reserved_bytes": 2**32, "peak_rss_bytes": 2e9}
    phases = {"startup": peaks, "training": peaks, "validation": peaks}
    (folder / "memory.json").write_text(json.dumps({**peaks, "phases": phases}))
    distance = 0.01 * np.exp(-step / 900)
    workers = {f"relative_distance/{i}": distance * (0.9 + i / 10) for i in range(4)}
    pd.DataFrame({"update": step, "relative_distance": distance, **workers}).to_csv(
        folder / "consensus.csv", index=False
    )
    (folder / "config.yaml").write_text("model:\n  name: <small> & slow\n")
    return folder


def test_a_run_from_the_command_line_has_all_curves_and_the_next_one_keeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tinyllm.cli import main

    monkeypatch.chdir(tmp_path)
    ids = np.random.default_rng(0).integers(1, 64, 5_000)
    ids[19::20] = 0
    ids.astype("<u2").tofile("ids.u16")
    prepare("cache", "tokens", "ids.u16", vocab_size=64, boundary_id=0, validation_fraction=0.1)
    Path("run.yaml").write_text(CONFIG)
    main(["fit", "--config", "run.yaml"])
    # two of three windows: ThroughputWindows, after RunReport in the list, writes them at the end
    assert drawn(Path("run")) == set(ALL)
    page = Path("run/report.html").read_text()
    assert "<td>finished after 12 updates</td>" in page
    assert "class_path: tinyllm.strategies.DecentralizedStrategy" in page
    logged = pd.read_csv("run/metrics.csv")["validation/loss"].dropna()
    assert f"<td>{logged.iloc[-1]:.4f} nats per token</td>" in page

    main(["fit", "--config", "run.yaml"])
    assert Path("run/earlier-1/report.html").read_text() == page
    assert drawn(Path("run/earlier-1")) == set(ALL)
    assert Path("run/report.html").is_file()


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()])
def test_an_interrupted_run_has_a_report(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises((RuntimeError, KeyboardInterrupt, SystemExit)):
        fit(tmp_path, Stop(error))
    page = (tmp_path / "report.html").read_text()
    assert f"stopped by {type(error).__name__} after 6 updates" in page
    assert {"loss", "learning_rate"} <= drawn(tmp_path)


def test_only_the_files_that_are_there_are_drawn(tmp_path: Path) -> None:
    fit(tmp_path, MemoryMonitor())
    assert drawn(tmp_path) == {"loss", "learning_rate", "memory"}


def test_lightnings_own_logger_is_read(tmp_path: Path) -> None:
    fit(tmp_path, logger=CSVLogger(tmp_path, flush_logs_every_n_steps=1_000))
    assert {"loss", "learning_rate"} <= drawn(tmp_path)


def test_a_run_without_any_file_says_so(tmp_path: Path) -> None:
    fit(tmp_path, logger=False)
    page = (tmp_path / "report.html").read_text()
    assert "The run left nothing to draw." in page
    assert drawn(tmp_path) == set()


def test_a_report_that_fails_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "curves").write_text("in the way")
    with pytest.warns(UserWarning, match="there is no report of the run"):
        fit(tmp_path)


def test_validating_alone_writes_nothing(tmp_path: Path) -> None:
    trainer = new_trainer(
        SyncStrategy(compile=False),
        callbacks=[RunReport()],
        default_root_dir=tmp_path,
        limit_val_batches=1,
    )
    trainer.validate(tiny(), DataLoader(batches(1)[:1], batch_size=None), verbose=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("rank_zero", "written"), [(True, True), (False, False)])
def test_rank_zero_writes(tmp_path: Path, rank_zero: bool, written: bool) -> None:
    trainer: Any = SimpleNamespace(
        is_global_zero=rank_zero, default_root_dir=tmp_path, global_step=3, loggers=[]
    )
    report, module = RunReport(), tiny()
    report.on_train_start(trainer, module)
    report.teardown(trainer, module, "fit")
    assert (tmp_path / "report.html").exists() == written


def test_nothing_hooks_into_updates() -> None:
    of_updates = [name for name in vars(RunReport) if "batch" in name or "step" in name]
    assert of_updates == []


def test_a_missing_matplotlib_is_named_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    windows = ThroughputWindows(tmp_path)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'tinyllm\[report\]'"):
        fit(tmp_path, windows)
    assert not (tmp_path / "metrics.csv").exists()


def test_a_report_from_files_alone(tmp_path: Path) -> None:
    folder = synthetic(tmp_path / "old")
    page, *curves = write_run_report(folder, status="killed")
    assert page == folder / "report.html"
    assert [path.stem for path in curves] == list(ALL)
    text = page.read_text()
    for row in (
        "<td>status</td><td>killed</td>",
        "<td>least validation loss</td><td>3.6000 at update 1999</td>",
        "<td>median throughput</td><td>1,010,000 tokens per second</td>",
        "<td>peak reserved</td><td>4 GiB</td>",
        "name: &lt;small&gt; &amp; slow",
    ):
        assert row in text
    for path in curves:
        assert ET.parse(path).getroot().tag.endswith("svg")


def test_the_page_needs_no_other_file(tmp_path: Path) -> None:
    write_run_report(synthetic(tmp_path / "old"))
    text = (tmp_path / "old" / "report.html").read_text()
    assert text.count("<svg") == len(ALL)
    assert "<?xml" not in text
    assert not re.findall(r'(?:src|href)="(?!#)[^"]*"', text)
    assert "<script" not in text
    # a figure's clips are its own, though all are in one page
    clips = re.findall(r'<clipPath id="(\w+)"', text)
    assert len(clips) == len(set(clips))


def test_drawing_again_gives_the_same_and_drops_what_is_gone(tmp_path: Path) -> None:
    folder = synthetic(tmp_path / "old")
    first = {path: path.read_bytes() for path in write_run_report(folder)}
    assert {path: path.read_bytes() for path in write_run_report(folder)} == first
    (folder / "memory.json").unlink()
    write_run_report(folder)
    assert drawn(folder) == set(ALL) - {"memory"}


@pytest.mark.parametrize(
    ("name", "text", "lost"),
    [
        ("metrics.csv", "", {"loss", "learning_rate"}),
        ("metrics.csv", "step,train/loss\n1,nan\n", {"loss", "learning_rate"}),
        ("throughput.csv", "updates,tokens,seconds,tokens_per_second\n", {"throughput"}),
        ("memory.json", "{", {"memory"}),
        ("memory.json", "[]", {"memory"}),
        ("consensus.csv", "update,relative_distance\n", {"consensus"}),
    ],
)
def test_files_without_content_are_left_out(
    tmp_path: Path, name: str, text: str, lost: set[str]
) -> None:
    folder = synthetic(tmp_path / "old")
    (folder / name).write_text(text)
    write_run_report(folder)
    assert drawn(folder) == set(ALL) - lost


def test_distances_from_the_log_and_zero_ones(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,consensus/relative_distance\n1,0.0\n3,0.5\n")
    write_run_report(tmp_path)
    assert drawn(tmp_path) == {"consensus"}


def test_a_learning_rate_monitor_is_read(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,lr-AdamW\n1,0.1\n3,0.2\n")
    write_run_report(tmp_path)
    assert drawn(tmp_path) == {"learning_rate"}


def test_no_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotADirectoryError, match="nowhere is not a folder"):
        write_run_report(tmp_path / "nowhere")
