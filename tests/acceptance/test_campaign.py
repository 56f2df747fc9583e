"""A campaign, whole: with a pretended trainer killed at any time, and once with the real one."""

import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from fake_checkout import make_cache, make_checkout

from tinyllm.acceptance import PROTOCOL_1
from tinyllm.acceptance.accept import main as accept
from tinyllm.acceptance.campaign import Campaign
from tinyllm.acceptance.configure import Settings
from tinyllm.acceptance.evidence import EvidenceError, verify_manifest
from tinyllm.acceptance.freezing import freeze_native, freeze_new_candidate
from tinyllm.acceptance.locks import claimed

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
TABLES = ("performance", "numerical", "convergence", "validation-curves")


def load_pilot() -> Any:
    spec = importlib.util.spec_from_file_location("pilot", SCRIPTS / "pilot.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PILOT = load_pilot()
TOY = PILOT.toy_protocol()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return make_checkout(tmp_path / "checkout")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return replace(PILOT.toy_settings(make_cache(tmp_path / "cache")), native={"backend": "native"})


@pytest.fixture
def root(tmp_path: Path, checkout: Path, settings: Settings) -> Path:
    """A frozen campaign."""
    freeze_native(tmp_path / "campaign", TOY, settings, checkout=checkout)
    return tmp_path / "campaign"


def candidate_of(root: Path, backend: str = "native") -> str:
    checkout = root.parent / "checkout"
    return freeze_new_candidate(root, {"backend": backend}, checkout=checkout).id


def test_a_manifest_of_version_1_has_a_configuration_for_each_id(
    tmp_path: Path, checkout: Path
) -> None:
    cache = make_cache(tmp_path / "cache")
    freeze_native(tmp_path / "one", PROTOCOL_1, Settings(cache=str(cache)), checkout=checkout)
    manifest = verify_manifest(tmp_path / "one")
    ids = [w.id for w in PROTOCOL_1.workloads] + [r.id for r in PROTOCOL_1.recipes]
    assert list(manifest.configs) == ids
    assert len(manifest.protocol.workloads) == 117
    assert len(manifest.protocol.pairs()) == 351
    assert len(manifest.protocol.convergence_runs()) == 15
    assert manifest.token_cache == "cache-1"
    assert set(manifest.source) == {"tinyllm/__init__.py", "tinyllm/cli.py"}


def test_a_whole_campaign(root: Path, checkout: Path, settings: Settings) -> None:
    assert PILOT.run(root, TOY, settings, checkout) == 0
    performance = pd.read_csv(root / "performance.csv")
    assert len(performance) == len(TOY.pairs()) * 2
    assert set(performance["allocation"]) == {"pilot-1", "pilot-2"}
    assert (performance["peak_allocated_bytes"] == 5).all()
    workers = sum(w.workers for w in TOY.workloads)
    assert len(pd.read_csv(root / "numerical.csv")) == workers * TOY.numerical_updates * 2
    convergence = pd.read_csv(root / "convergence.csv")
    assert len(convergence) == len(TOY.convergence_runs()) * 2
    assert set(convergence["validation_tokens"]) == {100}
    curves = pd.read_csv(root / "validation-curves.csv")
    last = curves.groupby(["recipe", "seed", "side"])["loss"].last().tolist()
    order = ["recipe", "seed", "side"]
    assert last == convergence.sort_values(order)["final_loss"].tolist()
    assert not list((root / "results").glob("*/*/trace/*.safetensors"))


def test_what_is_done_is_not_redone(root: Path) -> None:
    first = Campaign(root).run_baselines()
    again = Campaign(root).run_baselines()
    assert again.before == first.done
    assert not again.done


def test_an_allocation_times_one_repeat_of_a_workload(root: Path) -> None:
    Campaign(root).run_baselines()
    campaign = Campaign(root, candidate_of(root))
    assert len(campaign.run_pairs("job-1").done) == len(TOY.workloads)
    assert campaign.run_pairs("job-1").done == []
    assert all(name.endswith("repeat2") for name in campaign.run_pairs("job-2").done)


def test_select_takes_patterns_and_the_rest_is_incomplete(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Campaign(root).run_baselines()
    campaign = Campaign(root, candidate_of(root), select=["*-sync"])
    assert len(campaign.run_numerical().done) == 1
    campaign.collect()
    assert accept([str(root)]) == 2
    assert "toy-packed4" in capsys.readouterr().out


def test_a_faster_candidate_is_timed_again_with_longer_windows(root: Path) -> None:
    Campaign(root).run_baselines()
    campaign = Campaign(root, candidate_of(root, "quick"), select=["toy-sync"])
    (failed,) = campaign.run_pairs("job-1").failed
    (note,) = (root / "failed").glob(f"{failed}-1/*/failure.json")
    assert json.loads(note.read_text())["kind"] == "short windows"
    assert campaign.run_pairs("job-1").done == [failed]
    campaign.collect()
    rows = pd.read_csv(root / "performance.csv")
    assert rows["window_updates"].nunique() == 1
    assert rows.filter(like="window_").filter(like="_seconds").min().min() >= TOY.window_seconds


def test_a_failed_run_is_kept_apart_and_others_go_on(root: Path) -> None:
    campaign = Campaign(root, candidate_of(root, "broken"))
    summary = campaign.run_numerical()
    assert len(summary.failed) == len(TOY.workloads)
    logs = list((root / "failed").glob("*/*/candidate/log.txt"))
    assert len(logs) == len(TOY.workloads)
    assert "it is broken" in logs[0].read_text()
    assert not list((root / "work").iterdir())


@pytest.mark.parametrize("frozen", ["protocol.json", "native/tinyllm/cli.py", "candidate"])
def test_one_changed_byte_refuses_every_later_command(
    root: Path, frozen: str, capsys: pytest.CaptureFixture[str]
) -> None:
    identity = candidate_of(root)
    campaign = Campaign(root, identity)
    source = root / "candidates" / identity / "source" / "tinyllm" / "cli.py"
    path = source if frozen == "candidate" else root / frozen
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(data)
    commands = [
        campaign.run_numerical,  # one that was begun before the change, too
        campaign.collect,
        lambda: Campaign(root, identity),
        *([] if frozen == "candidate" else [lambda: Campaign(root), lambda: candidate_of(root)]),
    ]
    for command in commands:
        with pytest.raises(EvidenceError, match="changed"):
            command()
    assert accept([str(root)]) == 2
    assert "changed" in capsys.readouterr().err
    script = [sys.executable, str(SCRIPTS / "gh200_compare.py"), str(root), "collect"]
    done = subprocess.run([*script, "--candidate", identity], capture_output=True, text=True)
    assert done.returncode == 2
    assert "refused" in done.stderr


DRIVER = """
import sys, importlib.util
from dataclasses import replace
from pathlib import Path
spec = importlib.util.spec_from_file_location("pilot", sys.argv[1])
pilot = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pilot)
root, checkout, cache = map(Path, sys.argv[2:])
settings = replace(pilot.toy_settings(cache), native={"backend": "native"})
sys.exit(pilot.run(root, pilot.toy_protocol(), settings, checkout))
"""


def test_killed_at_any_time_it_ends_with_the_same_tables(
    tmp_path: Path, checkout: Path, settings: Settings
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert PILOT.run(whole, TOY, settings, checkout) == 0
    places = [str(p) for p in (SCRIPTS / "pilot.py", killed, checkout, settings.cache)]
    chance = random.Random(0)
    for _ in range(4):
        results, deadline = len(_results(killed)), time.monotonic() + 60
        process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, *places], stdout=subprocess.DEVNULL
        )
        while len(_results(killed)) < results + 2 and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "it had ended by itself"
    assert subprocess.run([sys.executable, "-c", DRIVER, *places]).returncode == 0
    for name in TABLES:
        assert (killed / f"{name}.csv").read_bytes() == (whole / f"{name}.csv").read_bytes()
    assert _results(killed) == _results(whole)
    assert not list((killed / "work").iterdir())
    assert not list((killed / "locks").glob("*.lock"))
    notes = list((killed / "failed").glob("*/*/failure.json"))
    assert {json.loads(note.read_text())["kind"] for note in notes} == {"interrupted"}


def _results(root: Path) -> list[str]:
    return sorted(path.parent.name for path in (root / "results").glob("*/result.json"))


def test_a_killed_campaign_leaves_nothing_running(root: Path) -> None:
    identity = candidate_of(root, "slow")
    script = [sys.executable, str(SCRIPTS / "gh200_compare.py"), str(root), "convergence"]
    process = subprocess.Popen([*script, "--candidate", identity], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while not (found := list((root / "work").glob("*/*/pid"))) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.2)
    child = int(found[0].read_text())
    assert Campaign(root, identity, select=["*seed45"]).run_convergence().elsewhere
    process.kill()
    process.wait()
    while _is_running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_running(child)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_claim_is_one_at_a_time_and_of_the_living(tmp_path: Path) -> None:
    with claimed(tmp_path, "a") as first, claimed(tmp_path, "a") as second:
        assert (first, second) == (True, False)
    with claimed(tmp_path, "a") as free:
        assert free
    gone = {"pid": os.getpid(), "started": "1", "boot": "another", "machine": _machine(tmp_path)}
    (tmp_path / "a.lock").write_text(json.dumps(gone))
    with claimed(tmp_path, "a") as taken_over:
        assert taken_over
    (tmp_path / "a.lock").write_text(json.dumps({**gone, "machine": "another"}))
    with claimed(tmp_path, "a") as elsewhere:
        assert not elsewhere


def _machine(folder: Path) -> str:
    with claimed(folder, "machine"):
        return str(json.loads((folder / "machine.lock").read_text())["machine"])


def test_a_real_campaign_on_the_cpu(tmp_path: Path) -> None:
    """Native against native through the real trainer, with the exit code of a pass."""
    from tinyllm.data.prepare import prepare

    for number in range(40):
        text = f"{number} naïve and quick, größer und weiter.\n" * (20 + number % 3)
        (tmp_path / f"{number}.txt").write_text(text, encoding="utf-8")
    cache = tmp_path / "cache"
    texts = [str(path) for path in tmp_path.glob("*.txt")]
    prepare(cache, "text", texts, vocab_size=280, validation_fraction=0.2)
    protocol = PILOT.toy_protocol(packed=False, repeats=1)
    code = PILOT.run(tmp_path / "root", protocol, PILOT.toy_settings(cache, vocab_size=280))
    failed = list((tmp_path / "root" / "failed").glob("*/*/failure.json"))
    assert not failed, failed[0].read_text()
    assert code == 0
    rows = pd.read_csv(tmp_path / "root" / "numerical.csv")
    assert (rows[["gradients", "parameters", "updates"]] == 0).all(axis=None)  # one thread
