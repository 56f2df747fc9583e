"""Submits a campaign's work through submitit: a job for each piece of it.

On Slurm all jobs are queued at once, as an array, and this process may end. A job that is preempted
or runs into its time limit is queued again, and a convergence run in it goes on from its last
checkpoint. Without Slurm submitit's local executor starts processes here, some at a time, and they
are waited for.
"""

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinyllm.acceptance.campaign import Campaign
from tinyllm.acceptance.evidence import EvidenceError
from tinyllm.acceptance.locks import claimed
from tinyllm.acceptance.runs import LOCKS, RunError, Summary, is_done

_SLURM = "slurm"
_FOLDER = "submitted"  # submitit's own files and logs
_DAY_MINUTES = 24 * 60


@dataclass(frozen=True)
class Unit:
    """One piece of work, as it runs in a job; submitit pickles it.

    Attributes:
        root: The campaign's folder.
        candidate: Id of the candidate, or None for native's work.
        kind: See ``campaign``.
        name: Of the piece.
        allocation: Names the allocation; empty where the job is one.
    """

    root: Path
    candidate: str | None
    kind: str
    name: str
    allocation: str

    def __call__(self) -> None:
        """Does it.

        Raises:
            RunError: If it failed, so that the job counts as failed, too.
        """
        from submitit import JobEnvironment

        job = JobEnvironment()
        campaign = Campaign(self.root, self.candidate)
        allocation = self.allocation or f"{job.cluster}-{job.job_id}"
        summary = campaign.run(self.kind, allocation, [self.name])
        if summary.failed:
            raise RunError(f"{self.name} failed")

    def checkpoint(self) -> Any:
        """What submitit queues in the place of a job that was preempted."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def submit(
    campaign: Campaign, kind: str, parameters: Mapping[str, Any], allocation: str = ""
) -> Summary:
    """Submits all selected work of a kind that is neither done nor queued.

    Args:
        campaign: Whose work.
        kind: See ``campaign``.
        parameters: Of submitit's AutoExecutor, such as ``timeout_min`` (default: a day),
            ``gpus_per_node`` (default: 1 where the campaign needs a GPU) and ``slurm_partition``.
        allocation: For pairs without Slurm: names the job, lease or boot that this is. On Slurm
            each job is an allocation of its own, and all repeats are queued.

    Returns:
        What is queued, on Slurm, or what became of it.

    Raises:
        EvidenceError: If another process is submitting.
        ModuleNotFoundError: If submitit is missing.
        ValueError: If a parameter is unknown, or pairs lack an allocation.
    """
    try:
        from submitit import AutoExecutor
    except ImportError as error:
        raise ModuleNotFoundError(
            "submitting needs submitit, which is missing: pip install 'tinyllm[slurm]'"
        ) from error
    executor = AutoExecutor(campaign.root / _FOLDER)
    defaults = {"name": "tinyllm", "timeout_min": _DAY_MINUTES}
    gpu = {"gpus_per_node": 1} if campaign.on_gpu else {}
    try:
        executor.update_parameters(**(defaults | gpu | dict(parameters)))
    except (AssertionError, NameError) as error:  # what submitit raises for those
        raise ValueError(f"submitit: {error}") from error
    own_allocations = executor.cluster == _SLURM
    if own_allocations and allocation:
        raise ValueError(f"on Slurm each job is an allocation of its own; leave {allocation!r} out")
    if kind == "pairs" and not own_allocations and not allocation:
        raise ValueError("without Slurm pairs need the name of the allocation they are timed in")
    with claimed(campaign.root / LOCKS, "submission") as mine:
        if not mine:
            raise EvidenceError(f"another process is submitting work of {campaign.root}; wait")
        names = campaign.names(kind, allocation)
        before = [name for name in names if is_done(campaign.root, name)]
        waiting = _queued(campaign.root)
        todo = [name for name in names if name not in before and name not in waiting]
        root = campaign.root.resolve()
        units = [Unit(root, campaign.candidate, kind, name, allocation) for name in todo]
        if not own_allocations:
            return Summary(before=before) + _run_locally(campaign, executor, units)
        if units:
            with executor.batch():
                jobs = [executor.submit(unit) for unit in units]
            ids = {name: job.job_id for name, job in zip(todo, jobs, strict=True)}
            campaign.write_receipt(kind=kind, cluster=executor.cluster, queued=ids)
        elsewhere = [name for name in names if name in waiting and name not in before]
        return Summary(before=before, elsewhere=elsewhere, queued=todo)


def _run_locally(campaign: Campaign, executor: Any, units: Sequence[Unit]) -> Summary:
    """There is no queue: some run at a time, and timed ones alone."""
    summary = Summary()

    def run(unit: Unit) -> None:
        problem = executor.submit(unit).exception()
        if is_done(campaign.root, unit.name):
            summary.done.append(unit.name)
            campaign.report(f"done    {unit.name}")
        elif problem is None:  # the job left it to the process that is at it
            summary.elsewhere.append(unit.name)
        else:
            summary.failed.append(unit.name)
            campaign.report(f"failed  {unit.name}")

    timed = any(unit.kind in ("windows", "pairs") for unit in units)
    with ThreadPoolExecutor(1 if timed else campaign.parallel) as threads:
        for _ in threads.map(run, units):
            pass
    return summary


def _queued(root: Path) -> set[str]:
    """Names of all work that waits or runs on Slurm."""
    from submitit import SlurmJob

    jobs: dict[str, str] = {}
    for path in sorted((root / "receipts").glob("submission-*.json")):
        receipt = json.loads(path.read_text(encoding="utf-8"))
        jobs |= receipt.get("queued", {})
    open_jobs = {name: job for name, job in jobs.items() if not is_done(root, name)}
    return {name for name, job in open_jobs.items() if not SlurmJob(root / _FOLDER, job).done()}
