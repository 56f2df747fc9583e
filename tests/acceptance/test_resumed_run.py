"""A convergence run with the real trainer, killed half-way: it ends as one that never stopped."""

import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from fake_checkout import PILOT

from tinyllm.acceptance.campaign import Campaign
from tinyllm.acceptance.configure import LOG_EVERY_UPDATES
from tinyllm.acceptance.freezing import freeze_native
from tinyllm.acceptance.runs import read_result

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gh200_campaign.py"


def test_a_killed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    toy = PILOT["toy_protocol"](workloads=1)
    updates = 300
    recipe = replace(toy.recipes[0], budget_tokens=updates * toy.recipes[0].update_tokens)
    settings = PILOT["toy_settings"](PILOT["make_tokens"](tmp_path, 1024, 50_000))
    root = tmp_path / "root"
    freeze_native(root, replace(toy, recipes=(recipe,)), settings, checkout=SCRIPT.parent.parent)
    step = [sys.executable, str(SCRIPT), str(root), "convergence", "--select", "*seed45"]
    process = subprocess.Popen(step, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 600
    while not list(root.glob("work/*/native/checkpoints/last.ckpt")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (log,) = root.glob("work/*/native/metrics.csv")
    assert len(log.read_text().splitlines()) < updates / LOG_EVERY_UPDATES
    assert subprocess.run(step).returncode == 0

    (name,) = Campaign(root, select=["*seed45"]).names("convergence")
    (again,) = Campaign(root, select=["*seed45"]).run("controls").done
    resumed, whole = read_result(root, name), read_result(root, again)
    assert resumed is not None
    assert whole is not None
    assert (resumed["starts"], whole["starts"]) == (2, 1)
    losses = [[point["loss"] for point in result["curve"]] for result in (resumed, whole)]
    assert losses[0] == losses[1]
    assert len(losses[0]) >= 5
    assert not np.isnan(losses[0]).any()
