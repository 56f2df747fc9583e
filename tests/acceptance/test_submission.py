"""Work submitted through submitit: its local executor, and a Slurm of a few lines of Python."""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fake_checkout import TOY, candidate_of

from tinyllm.acceptance.campaign import Campaign
from tinyllm.acceptance.evidence import EvidenceError
from tinyllm.acceptance.locks import claimed
from tinyllm.acceptance.submission import submit
from tinyllm.acceptance.work import add_work

SLURM = {
    # hands out numbers, and keeps the scripts for `work_off`
    "sbatch": """
import shutil, sys
from pathlib import Path
here = Path(__file__).parent
number = 1 + len(list(here.glob("*.sh")))
shutil.copy(sys.argv[1], here / f"{number}.sh")
print("Submitted batch job", number)
""",
    "srun": f"""
import os, sys
os.execv(sys.executable, sys.argv[sys.argv.index({sys.executable!r}):])
""",
    "sacct": """
from pathlib import Path
print((Path(__file__).parent / "states").read_text())
""",
}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the pretended commands, which the queue is in, too."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    for name, code in SLURM.items():
        (folder / name).write_text(f"#!{sys.executable}{code}")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    say(folder, {})
    return folder


def say(slurm: Path, states: dict[str, str]) -> None:
    """What sacct will answer."""
    lines = ["JobID|State|NodeList", *(f"{job}|{state}|" for job, state in states.items())]
    (slurm / "states").write_text("\n".join(lines))


def work_off(slurm: Path, job: int, tasks: int = 1) -> None:
    """Runs what is queued."""
    for task in range(tasks):
        numbers = {"JOB_ID": job, "PROCID": 0}
        if tasks > 1:
            numbers |= {"JOB_ID": 100 + task, "ARRAY_JOB_ID": job, "ARRAY_TASK_ID": task}
        own = {f"SLURM_{name}": str(value) for name, value in numbers.items()}
        subprocess.run(["bash", slurm / f"{job}.sh"], env=os.environ | own, capture_output=True)


def receipts(root: Path) -> list[dict[str, object]]:
    paths = sorted((root / "receipts").glob("submission-*"))
    return [json.loads(path.read_text()) for path in paths]


def test_without_slurm_jobs_are_processes_here(root: Path) -> None:
    campaign = Campaign(root, candidate_of(root), select=["toy-sync"])
    assert len(submit(campaign, "windows", {}).done) == 2
    with pytest.raises(ValueError, match="without Slurm pairs need the name of the allocation"):
        submit(campaign, "pairs", {})
    (done,) = submit(campaign, "pairs", {}, "job-1").done
    assert done.endswith("toy-sync-repeat1")
    result = json.loads((root / "results" / done / "result.json").read_text())
    assert result["allocation"] == "job-1"
    assert receipts(root)[-1]["environment"]
    assert submit(campaign, "pairs", {}, "job-1").done == []  # one repeat in an allocation
    assert submit(campaign, "windows", {}).before


def test_a_job_that_fails_is_kept_apart_and_counts_as_failed(root: Path) -> None:
    lines: list[str] = []
    broken = candidate_of(root, "broken")
    campaign = Campaign(root, broken, select=["toy-sync"], report=lines.append)
    (failed,) = submit(campaign, "numerical", {}).failed
    assert lines == [f"failed  {failed}"]
    assert list((root / "failed").glob(f"{failed}-1/*/failure.json"))
    (log,) = (root / "submitted").glob("*_log.err")
    assert f"{failed} failed" in log.read_text()


def test_a_job_leaves_work_to_the_process_that_is_at_it(root: Path) -> None:
    lines: list[str] = []
    campaign = Campaign(root, candidate_of(root), select=["toy-sync"], report=lines.append)
    (name,) = campaign.names("numerical")
    with claimed(root / "locks", name):
        summary = submit(campaign, "numerical", {})
    assert (summary.done, summary.failed, summary.elsewhere) == ([], [], [name])
    assert not lines  # as where it is done without a job


def test_a_preempted_job_is_queued_again_and_goes_on(root: Path) -> None:
    campaign = Campaign(root, candidate_of(root, "slow"), select=["*seed45"])
    with ThreadPoolExecutor(1) as threads:
        summary = threads.submit(submit, campaign, "convergence", {})
        deadline = time.monotonic() + 300
        while not (found := list(root.glob("work/*/*/pid"))) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.2)
        job = found[0].read_text()
        for _ in range(3):  # the training's keeper, the server that forked it, and the job
            (job,) = re.findall(r"PPid:\s(\d+)", Path(f"/proc/{job}/status").read_text())
        os.kill(int(job), signal.SIGUSR2)  # as Slurm does
        (done,) = summary.result().done
    assert json.loads((root / "results" / done / "result.json").read_text())["starts"] == 2
    assert len(receipts(root)) == 2


def test_on_slurm_each_piece_of_work_is_a_job_and_an_allocation(root: Path, slurm: Path) -> None:
    campaign = Campaign(root, candidate_of(root), select=["toy-sync"])
    campaign.run("windows")
    summary = submit(campaign, "pairs", {"slurm_partition": "hopper", "timeout_min": 7})
    assert len(summary.queued) == TOY.repeats
    script = (slurm / "1.sh").read_text()
    for line in ("--partition=hopper", "--time=7", "--array=0-1%2"):
        assert f"#SBATCH {line}\n" in script
    assert "gpus" not in script  # it is a campaign on a CPU

    work_off(slurm, 1, 2)
    results = [
        json.loads((root / "results" / name / "result.json").read_text()) for name in summary.queued
    ]
    assert [result["allocation"] for result in results] == ["slurm-1_0", "slurm-1_1"]
    assert submit(campaign, "pairs", {}).before == summary.queued


def test_what_is_queued_is_not_queued_again_until_it_is_gone(root: Path, slurm: Path) -> None:
    campaign = Campaign(root, candidate_of(root))
    first = submit(campaign, "numerical", {})
    assert len(first.queued) == 2
    say(slurm, {"1_0": "PENDING", "1_1": "RUNNING"})
    again = submit(Campaign(root, campaign.candidate), "numerical", {})
    assert again.elsewhere == first.queued
    assert not (slurm / "2.sh").exists()
    say(slurm, {"1_0": "PENDING", "1_1": "TIMEOUT"})
    assert submit(campaign, "numerical", {}).queued == first.queued[1:]

    with claimed(root / "locks", "submission"), pytest.raises(EvidenceError, match="submitting"):
        submit(campaign, "numerical", {})


def test_work_of_a_job_is_not_done_twice(root: Path, slurm: Path) -> None:
    """Two jobs for the same work: the lock holds, and what is done stays done."""
    campaign = Campaign(root, candidate_of(root), select=["toy-sync"])
    (name,) = submit(campaign, "numerical", {}).queued
    with claimed(root / "locks", name):
        work_off(slurm, 1)
    assert not (root / "results").exists()
    campaign.run("numerical")
    before = (root / "results" / name / "result.json").stat().st_mtime_ns
    work_off(slurm, 1)
    assert (root / "results" / name / "result.json").stat().st_mtime_ns == before


def test_a_job_asks_for_a_gpu_where_the_campaign_needs_one(
    tmp_path: Path, checkout: Path, slurm: Path
) -> None:
    from fake_checkout import make_cache

    from tinyllm.acceptance.configure import Settings
    from tinyllm.acceptance.freezing import freeze_native

    settings = Settings(cache=str(make_cache(tmp_path / "cache")), planned_updates=10)
    freeze_native(tmp_path / "root", TOY, settings, checkout=checkout)
    submit(Campaign(tmp_path / "root", select=["toy-sync"]), "windows", {})
    assert "#SBATCH --gpus-per-node=1\n" in (slurm / "1.sh").read_text()


@pytest.mark.parametrize("parameters", [{"slurm_colour": "red"}, {"timeout_min": "long"}])
def test_wrong_parameters_are_named(root: Path, parameters: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=f"submitit: .*{next(iter(parameters))}"):
        submit(Campaign(root), "windows", parameters)


@pytest.mark.parametrize(
    ("text", "message"), [("5", "'5' is no JSON object"), ("{", "'{' is no JSON: ")]
)
def test_options_that_are_no_json_object_are_refused(
    text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    add_work(parser)
    assert parser.parse_args(["--submit", '{"timeout_min": 5}']).submit == {"timeout_min": 5}
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(["--submit", text])
    assert message in capsys.readouterr().err


def test_on_slurm_allocations_name_themselves(root: Path, slurm: Path) -> None:
    with pytest.raises(ValueError, match="'mine' out"):
        submit(Campaign(root, candidate_of(root)), "pairs", {}, "mine")


def test_a_missing_submitit_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'tinyllm\[slurm\]'"):
        submit(Campaign(root), "windows", {})
