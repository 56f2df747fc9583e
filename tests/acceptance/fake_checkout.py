"""A checkout whose ``tinyllm fit`` only pretends: at once, and with the same numbers each time."""

import json
import multiprocessing
import os
import runpy
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tinyllm.acceptance import measure
from tinyllm.acceptance.campaign import Campaign
from tinyllm.acceptance.collect import collect
from tinyllm.acceptance.configure import Settings
from tinyllm.acceptance.freezing import freeze_native, freeze_new_candidate

PILOT: Any = runpy.run_path(str(Path(__file__).resolve().parents[2] / "scripts" / "pilot.py"))
TOY = PILOT["toy_protocol"](repeats=2)

CLI = '''
"""Writes what training would."""

import json
import math
import os
import sys
import time
from pathlib import Path

SECONDS_PER_UPDATE = {"native": 0.01, "quick": 0.002}


def main():
    config = json.loads(Path(sys.argv[sys.argv.index("--config") + 1]).read_text())
    Path("pid").write_text(str(os.getpid()))
    backend = config["trainer"]["strategy"]["init_args"]["backend"]
    goes_on = "--ckpt_path" in sys.argv
    if backend == "slow" and not goes_on:
        time.sleep(60)
    if backend == "broken":
        sys.exit("it is broken")
    if backend == "stopped" and not goes_on:
        sys.exit(143)
    rate = SECONDS_PER_UPDATE.get(backend, 0.01)
    for callback in config["trainer"]["callbacks"]:
        globals()[callback["class_path"].rpartition(".")[2]](rate, config, **callback["init_args"])


def MemoryMonitor(rate, config):
    Path("memory.json").write_text('{"peak_rss_bytes": 7, "peak_allocated_bytes": 5}')
    if "val_check_interval" in config["trainer"]:
        steps, every = config["trainer"]["max_steps"], config["trainer"]["val_check_interval"]
        rows = [f"{step},{3 + 1 / step}" for step in range(every, steps + 1, every)]
        lines = [f"{int(row.split(',')[0]) - 1},{row.split(',')[1]}" for row in rows]
        Path("metrics.csv").write_text("\\n".join(["step,validation/loss", *lines]) + "\\n")


def ThroughputWindows(rate, config, warmup_updates, windows, window_seconds, updates_per_window,
                      stop, hold):
    if hold:
        Path("ready").touch()
        while not Path("go").exists():
            time.sleep(0.001)
    started = time.monotonic()
    time.sleep(0.02 * hold)
    if updates_per_window and config["trainer"]["strategy"]["init_args"]["backend"] == "drifting":
        rate = 0.006
    updates = updates_per_window or math.ceil(window_seconds / rate)
    timing = {
        "complete": True, "startup_seconds": 1.0, "training_seconds": 2.0, "elapsed_seconds": 3.0,
        "warmup_updates": warmup_updates, "updates_per_window": updates,
    }
    lines = [f"{updates},1,{updates * rate},1"] * windows
    Path("throughput.csv").write_text(
        "\\n".join(["updates,tokens,seconds,tokens_per_second", *lines]) + "\\n"
    )
    Path("timed.json").write_text(json.dumps([started, time.monotonic()]))
    Path("timing.json").write_text(json.dumps(timing))


def UpdateTrace(rate, config, updates):
    import numpy as np
    from safetensors.numpy import save_file

    strategy = config["trainer"]["strategy"]["init_args"]
    workers = strategy.get("workers", 1)
    updates -= strategy["backend"] == "short"
    Path("trace").mkdir()
    kinds = ("gradients", "parameters", "updates", "exp_avg", "exp_avg_sq")
    tensors = {f"{kind}/weight": np.ones((workers, 3), np.float32) for kind in kinds}
    entries = []
    ones = {"parameters/weight": np.ones((1, 3), np.float32)}
    save_file(ones, "trace/initial.safetensors")
    for update in range(updates):
        save_file(tensors, f"trace/update-{update:05d}.safetensors")
        rows = {"rows": np.full((4, 5), update)}
        save_file(rows, f"trace/rows-{update:05d}.safetensors")
        entries.append({"update": update, "loss": [3.0] * workers, "learning_rate": 0.1,
                        "rows_sha256": f"rows {update}"})
    Path("trace/trace.json").write_text(json.dumps({"format": 1, "updates": entries}))
'''


PRELOADED = '''
"""What the process that forks trainings imports once."""

import numpy as np
from safetensors.numpy import save_file
'''


def fork_comparisons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets comparisons run in forks of a process that has imported pandas, not in new ones.

    Those that tests start through a script are new ones, as in a campaign.
    """
    context = multiprocessing.get_context("forkserver")
    monkeypatch.setattr(measure, "multiprocessing", SimpleNamespace(get_context=lambda _: context))


def killed(*_: Any, **__: Any) -> None:
    """In place of a comparison that the system ends."""
    os.kill(os.getpid(), signal.SIGKILL)


def make_checkout(folder: Path) -> Path:
    """A folder that ``freeze_native`` takes."""
    (folder / "tinyllm").mkdir(parents=True)
    (folder / "setup.cfg").write_text("[options]\npackage_dir =\n    tinyllm = tinyllm\n")
    (folder / "requirements.lock").write_text("")
    (folder / "tinyllm" / "__init__.py").write_text("")
    (folder / "tinyllm" / "cli.py").write_text(CLI)
    (folder / "tinyllm" / "trainer_cli.py").write_text(PRELOADED)
    return folder


def make_cache(folder: Path, train_tokens: int = 5121) -> Path:
    """As much of a token cache as a campaign looks at; the toy recipe's budget is one epoch."""
    folder.mkdir(exist_ok=True)
    splits = {"train": {"tokens": train_tokens}, "validation": {"tokens": 101}}
    content = {"identity": "cache-1", "splits": splits}
    (folder / "manifest.json").write_text(json.dumps(content))
    return folder


def toy_settings(cache: Path) -> Settings:
    """The pilot's, for the pretended trainer."""
    settings: Settings = replace(PILOT["toy_settings"](cache), native={"backend": "native"})
    return settings


def freeze(root: Path, checkout: Path, cache: Path) -> None:
    """Freezes native on the toy protocol."""
    freeze_native(root, TOY, toy_settings(cache), checkout=checkout)


def candidate_of(root: Path, backend: str = "native") -> str:
    """Freezes a candidate from ``checkout`` beside the campaign; gives its id."""
    checkout = root.parent / "checkout"
    return freeze_new_candidate(root, {"backend": backend}, checkout=checkout).id


def do_all(root: Path, backend: str = "native", parallel: int = 1) -> str:
    """Every step; the candidate's id."""
    native = Campaign(root, parallel=parallel)
    native.run("convergence")
    native.run("controls")
    name = candidate_of(root, backend)
    campaign = Campaign(root, name, parallel=parallel)
    campaign.run("windows")
    for repeat in range(1, TOY.repeats + 1):
        campaign.run("pairs", f"job-{repeat}")
    campaign.run("numerical")
    campaign.run("convergence")
    collect(root, name)
    return name
