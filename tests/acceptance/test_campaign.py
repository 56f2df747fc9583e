"""A campaign, whole: with a pretended trainer killed at any time, and once with the real one."""

import json
import random
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from fake_checkout import TOY, candidate_of, do_all, killed, make_cache

from tinyllm.acceptance import PROTOCOL_1
from tinyllm.acceptance.accept import main as accept
from tinyllm.acceptance.campaign import Campaign
from tinyllm.acceptance.collect import collect
from tinyllm.acceptance.configure import Settings, throughput_config
from tinyllm.acceptance.evidence import EvidenceError, hash_file, verify_manifest
from tinyllm.acceptance.fit import Fit
from tinyllm.acceptance.freezing import freeze_native
from tinyllm.acceptance.launcher import Launchers
from tinyllm.acceptance.locks import claimed
from tinyllm.acceptance.protocol import SIDES
from tinyllm.acceptance.runs import RunError
from tinyllm.acceptance.work import add_work, do_work, refusing

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
TABLES = ("performance", "numerical", "convergence", "validation-curves")


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
    names = {"__init__.py", "cli.py", "trainer_cli.py"}
    assert set(manifest.source) == {f"tinyllm/{name}" for name in names}


@pytest.mark.parametrize("parallel", [1, 3])
def test_a_whole_campaign(root: Path, parallel: int) -> None:
    name = do_all(root, parallel=parallel)
    assert accept([str(root)]) == 0
    tables = root / "qualifications" / name
    performance = pd.read_csv(tables / "performance.csv")
    assert len(performance) == len(TOY.pairs()) * 2
    assert set(performance["allocation"]) == {"job-1", "job-2"}
    assert (performance["peak_allocated_bytes"] == 5).all()
    # what was set up beside others has no figures of its setting up
    assert performance["startup_seconds"].isna().all() == (parallel > 1)
    assert performance["training_seconds"].notna().all()
    workers = sum(w.workers for w in TOY.workloads)
    assert len(pd.read_csv(tables / "numerical.csv")) == workers * TOY.numerical_updates * 2
    convergence = pd.read_csv(tables / "convergence.csv")
    assert convergence["side"].value_counts().to_dict() == dict.fromkeys(
        ("native", "candidate", "control"), len(TOY.convergence_runs())
    )
    assert set(convergence["validation_tokens"]) == {100}
    curves = pd.read_csv(tables / "validation-curves.csv")
    last = curves.groupby(["recipe", "seed", "side"])["loss"].last().tolist()
    order = ["recipe", "seed", "side"]
    assert last == convergence.sort_values(order)["final_loss"].tolist()


@pytest.mark.parametrize(
    ("rows", "targets"),
    [  # 20 updates of 8 rows; less than an update is missing of the first two
        (160, 20 * 8 * 32),
        (101, (101 + 7 * 8) * 32),
        (41, (3 * 41 + 2 * 8) * 32),
    ],
)
def test_a_cache_below_the_budget_is_found_out(
    root: Path, settings: Settings, capsys: pytest.CaptureFixture[str], rows: int, targets: int
) -> None:
    """The last update of each epoch has fewer rows, and the others are no targets."""
    make_cache(Path(settings.cache), train_tokens=rows * 32 + 1)
    name = candidate_of(root)
    for side in (None, name):
        Campaign(root, side).run("convergence")
    collect(root, name)
    tables = root / "qualifications" / name
    assert set(pd.read_csv(tables / "convergence.csv")["train_tokens"]) == {targets}
    capsys.readouterr()
    curves = pd.read_csv(tables / "validation-curves.csv")
    assert curves.groupby(["seed", "side"])["train_tokens"].max().unique() == [targets]
    assert curves["train_tokens"].min() == 2 * 8 * 32
    accept([str(root), "--json"])
    gate = json.loads(capsys.readouterr().out)["gates"]["convergence"]
    assert gate["verdict"] == ("failed" if rows == 41 else "pass")
    places = ", ".join(f"toy-packed4-run seed {s} side {w}" for s, w in product((45, 46), SIDES))
    message = f"not trained on the recipe's budget, to within one update: {places}"
    assert gate["messages"] == ([message] if rows == 41 else [])


def test_what_is_done_is_not_redone(root: Path) -> None:
    first = Campaign(root).run("convergence")
    again = Campaign(root).run("convergence")
    assert again.before == first.done
    assert not again.done


def test_initial_states_and_batches_are_kept_by_content(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = candidate_of(root)
    (done, *_) = Campaign(root, name, select=["toy-sync"]).run("numerical").done
    inputs = json.loads((root / "results" / done / "result.json").read_text())["inputs"]
    assert set(inputs) == {"reference", "control", "candidate"}
    kept = {path.stem: path for path in (root / "retained").iterdir()}
    assert set(kept) == {inputs["candidate"]["initial"], *inputs["candidate"]["rows"]}
    assert all(hash_file(path) == digest for digest, path in kept.items())
    assert len(inputs["reference"]["rows"]) == TOY.numerical_updates
    assert not list((root / "results").glob("*/*/trace/*.safetensors"))
    collect(root, name)
    for folder in ("retained", "qualifications"):
        (root / folder / ".DS_Store").touch()  # by a file manager that showed it
    assert accept([str(root)]) == 2
    assert capsys.readouterr().err == ""  # not refused: most has not been measured
    path = kept[inputs["reference"]["initial"]]
    path.chmod(0o644)
    path.write_bytes(b"another state")
    assert accept([str(root)]) == 2
    assert "changed since it was retained" in capsys.readouterr().err
    path.unlink()
    with pytest.raises(EvidenceError, match="is not there any more"):
        collect(root, name)


def test_an_allocation_times_one_repeat_of_a_workload(root: Path) -> None:
    campaign = Campaign(root, candidate_of(root))
    campaign.run("windows")
    assert len(campaign.run("pairs", "job-1").done) == len(TOY.workloads)
    assert campaign.run("pairs", "job-1").done == []
    assert all(name.endswith("repeat2") for name in campaign.run("pairs", "job-2").done)
    with pytest.raises(ValueError, match="need the name of the allocation"):
        campaign.run("pairs")
    with pytest.raises(ValueError, match="'job-3 ' has spaces around its name"):
        campaign.run("pairs", "job-3 ")


def test_pairs_come_after_windows(root: Path) -> None:
    campaign = Campaign(root, candidate_of(root))
    assert len(campaign.run("pairs", "job-1").failed) == len(TOY.workloads)
    (note, *_) = (root / "failed").glob("*/*/failure.json")
    assert "run its windows first" in json.loads(note.read_text())["message"]


def test_each_side_has_its_own_work(root: Path) -> None:
    with pytest.raises(ValueError, match="no pairs of native alone; choose from windows, conv"):
        Campaign(root).run("pairs", "job-1")
    with pytest.raises(ValueError, match="no controls of a candidate; choose from windows, pairs"):
        Campaign(root, candidate_of(root)).run("controls")


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("toy-sync", ["toy-sync-repeat1", "toy-sync-repeat2"]),
        ("*-repeat2", ["toy-sync-repeat2", "toy-packed4-repeat2"]),
    ],
)
def test_select_takes_patterns_of_whole_and_part(
    root: Path, pattern: str, names: list[str]
) -> None:
    campaign = Campaign(root, candidate_of(root), select=[pattern])
    assert [name.rpartition(".")[2] for name in campaign.names("pairs")] == names


def test_a_pattern_that_selects_nothing_is_refused(root: Path) -> None:
    with pytest.raises(ValueError, match=r"'toy-snyc' selects none of the 3 .* such as toy-sync"):
        Campaign(root, candidate_of(root), select=["toy-sync", "toy-snyc"])


@pytest.mark.parametrize(
    ("select", "error"),
    [
        ("20n-*", "refused: '20n-*' selects none of the 3 workloads and recipes"),
        (
            "toy-sync-repeat1",
            "refused: numerical has nothing that is called toy-sync-repeat1; it is of 2 ids, such "
            "as toy-sync, toy-packed4",
        ),
    ],
)
def test_a_command_that_selects_nothing_fails(
    root: Path, capsys: pytest.CaptureFixture[str], select: str, error: str
) -> None:
    parser = ArgumentParser()
    add_work(parser)
    options = parser.parse_args(["--select", select])
    options.root, options.candidate = root, candidate_of(root)
    assert refusing(lambda: do_work(options, "numerical")) == 2
    assert error in capsys.readouterr().err


def test_what_is_not_selected_is_incomplete(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = candidate_of(root)
    assert len(Campaign(root, name, select=["*-sync"]).run("numerical").done) == 1
    collect(root, name)
    assert accept([str(root)]) == 2
    assert "toy-packed4" in capsys.readouterr().out


def test_a_faster_candidate_decides_the_length_of_windows(root: Path) -> None:
    name = candidate_of(root, "quick")
    campaign = Campaign(root, name, select=["toy-sync"])
    campaign.run("windows")
    assert campaign.run("pairs", "job-1").done
    collect(root, name)
    rows = pd.read_csv(root / "qualifications" / name / "performance.csv")
    assert rows["window_updates"].nunique() == 1
    assert rows.filter(regex="window_._seconds").min().min() >= TOY.window_seconds


def test_windows_that_drift_below_their_length_are_longer_the_next_time(root: Path) -> None:
    campaign = Campaign(root, candidate_of(root, "drifting"), select=["toy-sync"])
    campaign.run("windows")
    (failed,) = campaign.run("pairs", "job-1").failed
    (note,) = (root / "failed").glob(f"{failed}-1/*/failure.json")
    assert json.loads(note.read_text())["kind"] == "short windows"
    assert campaign.run("pairs", "job-1").done == [failed]


def test_several_runs_are_set_up_and_one_is_timed(root: Path) -> None:
    campaign = Campaign(root, candidate_of(root), parallel=4)
    campaign.run("windows")
    (done,) = {len(campaign.run("pairs", "job-1").done)}
    assert done == len(TOY.workloads)
    times = sorted(json.loads(path.read_text()) for path in root.glob("results/*/*/timed.json"))
    assert len(times) == 4 * done
    assert all(end <= start for (_, end), (start, _) in pairwise(times))
    for pair in TOY.pairs()[:done]:
        starts = {
            path.parent.name: json.loads(path.read_text())[0]
            for path in root.glob(f"results/*.{pair.id}/*/timed.json")
        }
        assert sorted(starts, key=lambda side: starts[side]) == list(pair.order)


def test_a_pair_that_fails_ends_in_a_turn(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its other side may save and tidy up for seconds, which would disturb who is timed."""
    campaign = Campaign(root, candidate_of(root, "broken"), select=["toy-sync"], parallel=2)
    campaign.run("windows")
    turns, ended = campaign._bench.turns, []

    def leave(self: Fit, *_: Any) -> None:
        ended.append(turns._untimed)
        end(self, *_)

    end = Fit.__exit__
    monkeypatch.setattr(Fit, "__exit__", leave)
    config = campaign._bench.manifest.configs["toy-sync"]
    with Launchers() as launchers, pytest.raises(RunError):
        replace(campaign._bench, launchers=launchers).time(
            ["native", "candidate"], throughput_config(config, TOY, hold=True), root / "here"
        )
    assert ended == [1, 1]


def test_a_failed_run_is_kept_apart_and_others_go_on(root: Path) -> None:
    for parallel in (1, 4):
        campaign = Campaign(root, candidate_of(root, "broken"), parallel=parallel)
        summary = campaign.run("numerical") + campaign.run("windows")
        assert len(summary.failed) == 2 * len(TOY.workloads)
    logs = list((root / "failed").glob("*/*/candidate/log.txt"))
    assert len(logs) == 4 * len(TOY.workloads)
    assert "it is broken" in logs[0].read_text()
    assert not list((root / "work").iterdir())


def test_an_interrupted_convergence_run_goes_on_from_its_checkpoint(root: Path) -> None:
    name = candidate_of(root, "stopped")
    campaign = Campaign(root, name, select=["*seed45"])
    (stopped,) = campaign.run("convergence").failed
    assert (root / "work" / stopped).is_dir()
    assert not (root / "failed").exists()
    assert campaign.run("convergence").done == [stopped]
    result = json.loads((root / "results" / stopped / "result.json").read_text())
    assert result["starts"] == 2
    logs = sorted(path.name for path in (root / "results" / stopped).glob("*/log*"))
    assert logs == ["log-2.txt", "log.txt"]


def test_other_interrupted_work_starts_over(root: Path) -> None:
    campaign = Campaign(root, candidate_of(root, "stopped"), select=["toy-sync"])
    (stopped,) = campaign.run("numerical").failed
    (note,) = (root / "failed").glob(f"{stopped}-1/*/failure.json")
    assert json.loads(note.read_text())["kind"] == "interrupted"


def test_traces_that_do_not_match_are_a_failure(root: Path) -> None:
    campaign = Campaign(root, candidate_of(root, "short"), select=["toy-sync"])
    (name,) = campaign.run("numerical").failed
    (note,) = (root / "failed").glob(f"{name}-1/*/failure.json")
    message = json.loads(note.read_text())["message"]
    assert message.startswith("the traces of candidate/native do not match: ")
    assert message.endswith("1 updates are traced; 2 are needed")


def test_a_comparison_that_is_killed_is_a_failure(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinyllm.acceptance.measure.compare_traces", killed)
    campaign = Campaign(root, candidate_of(root), select=["toy-sync"])
    (name,) = campaign.run("numerical").failed
    (note,) = (root / "failed").glob(f"{name}-1/*/failure.json")
    message = json.loads(note.read_text())["message"]
    assert "was ended from outside" in message
    assert "--parallel" in message


COMPARING = """
import multiprocessing, time
from concurrent.futures import ProcessPoolExecutor
from tinyllm.acceptance.measure import _end_with_parent
spawn = multiprocessing.get_context("spawn")
processes = ProcessPoolExecutor(1, spawn, initializer=_end_with_parent)
processes.submit(time.sleep, 200)
print(next(iter(processes._processes)), flush=True)
time.sleep(200)
"""


def test_comparisons_end_with_who_wants_them() -> None:
    with subprocess.Popen([sys.executable, "-c", COMPARING], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        time.sleep(2)
        assert _is_running(child)
        parent.kill()
        parent.wait()
    for _ in range(200):
        if not _is_running(child):
            return
        time.sleep(0.1)
    pytest.fail("a comparison goes on")


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
        lambda: campaign.run("numerical"),  # one that was begun before the change, too
        lambda: collect(root, identity),
        lambda: Campaign(root, identity),
        lambda: Campaign(root),
        lambda: candidate_of(root, "quick"),
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
import sys
from itertools import pairwise, product
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from fake_checkout import freeze
from fake_checkout import do_all
freeze(Path(sys.argv[2]), *map(Path, sys.argv[3:]))
do_all(Path(sys.argv[2]))
"""


def test_killed_at_any_time_it_ends_with_the_same_tables(
    tmp_path: Path, root: Path, checkout: Path, settings: Settings
) -> None:
    killed, name = tmp_path / "killed", do_all(root)
    here = Path(__file__).parent
    places = [str(p) for p in (here, killed, checkout, settings.cache)]
    chance = random.Random(0)
    for _ in range(4):
        results, deadline = len(_results(killed)), time.monotonic() + 300
        process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, *places], stdout=subprocess.DEVNULL
        )
        while len(_results(killed)) < results + 2 and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "it had ended by itself"
    assert subprocess.run([sys.executable, "-c", DRIVER, *places]).returncode == 0
    for table in TABLES:
        mine, other = (r / "qualifications" / name / f"{table}.csv" for r in (killed, root))
        assert mine.read_bytes() == other.read_bytes()
    assert _results(killed) == _results(root)
    assert not list((killed / "work").iterdir())
    notes = list((killed / "failed").glob("*/*/failure.json"))
    assert {json.loads(note.read_text())["kind"] for note in notes} <= {"interrupted"}


def _results(root: Path) -> list[str]:
    return sorted(path.parent.name for path in (root / "results").glob("*/result.json"))


def test_a_killed_campaign_leaves_nothing_running(root: Path) -> None:
    identity = candidate_of(root, "slow")
    script = [sys.executable, str(SCRIPTS / "gh200_compare.py"), str(root), "convergence"]
    process = subprocess.Popen([*script, "--candidate", identity], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not (found := list((root / "work").glob("*/*/pid"))) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.2)
    child = int(found[0].read_text())
    assert Campaign(root, identity, select=["*seed45"]).run("convergence").elsewhere
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
    code = (
        "import sys, time\nfrom pathlib import Path\n"
        "from tinyllm.acceptance.locks import claimed\n"
        "with claimed(Path(sys.argv[1]), 'a') as mine:\n"
        "    print(mine, flush=True)\n    time.sleep(60)\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "True\n"
    with claimed(tmp_path, "a") as elsewhere:
        assert not elsewhere
    other.kill()
    other.communicate()
    with claimed(tmp_path, "a") as taken_over:
        assert taken_over
