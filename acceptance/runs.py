"""Pieces of work that are done whole, kept apart as failed, or not there.

::

    work/NAME/          an attempt under way
    results/NAME/       a finished one, with result.json and its seal; never changed again
    failed/NAME-K/      attempts that failed or were interrupted
    locks/NAME.lock     locked by who is at it
"""

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from tinyllm.acceptance.evidence import EvidenceError, keep_failed
from tinyllm.acceptance.files import replace_file, sync
from tinyllm.acceptance.json_text import parse_json
from tinyllm.acceptance.locks import claimed
from tinyllm.acceptance.seals import holds_seal, sealed_json

LOCKS = "locks"
INTERRUPTED = "interrupted"
"""Kind of an attempt that was stopped from outside."""


class RunError(RuntimeError):
    """An attempt failed.

    Args:
        message: What happened.
        kind: Tells apart what a later attempt can do something about.
    """

    def __init__(self, message: str, kind: str = "failed") -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Job:
    """A piece of work.

    Attributes:
        name: Of its folders: letters, digits, ``.``, ``_`` and ``-``.
        work: Does it in a folder; gives the content of ``result.json``.
        resumes: Whether it goes on in the folder that an interrupted attempt left.
    """

    name: str
    work: Callable[[Path], Mapping[str, Any]]
    resumes: bool = False


@dataclass
class Summary:
    """Names of jobs by what became of them."""

    done: list[str] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)
    queued: list[str] = field(default_factory=list)

    def __add__(self, other: "Summary") -> "Summary":
        names = [each.name for each in fields(self)]
        return Summary(*(getattr(self, name) + getattr(other, name) for name in names))

    def __str__(self) -> str:
        return (
            f"{len(self.done)} done, {len(self.before)} done before, {len(self.failed)} failed, "
            f"{len(self.elsewhere)} under way in another process, {len(self.queued)} queued"
        )


def run_jobs(
    root: Path,
    jobs: Sequence[Job],
    *,
    check: Callable[[], object],
    parallel: int = 1,
    report: Callable[[str], object] = print,
) -> Summary:
    """Does what is not done yet; a failure does not keep the others from being tried.

    Args:
        root: The campaign's folder.
        jobs: What to do, in order.
        check: Verifies frozen evidence before each job, and raises if it has changed.
        parallel: How many to do at a time.
        report: Takes a line for each job.

    Raises:
        EvidenceError: If frozen evidence has changed; jobs under way are finished first.
    """
    summary = Summary()
    if parallel == 1:  # in this thread, where a signal's handler can end it
        for job in jobs:
            _do(root, job, check, report, summary)
        return summary
    with ThreadPoolExecutor(parallel) as threads:
        try:
            for _ in threads.map(lambda job: _do(root, job, check, report, summary), jobs):
                pass
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise
    return summary


def _do(
    root: Path,
    job: Job,
    check: Callable[[], object],
    report: Callable[[str], object],
    summary: Summary,
) -> None:
    if is_done(root, job.name):
        summary.before.append(job.name)
        return
    with claimed(root / LOCKS, job.name) as mine:
        if not mine:
            summary.elsewhere.append(job.name)
            return
        if is_done(root, job.name):  # by whoever had the claim until now
            summary.before.append(job.name)
            return
        check()
        problem = _attempt(root, job)
    if problem is None:
        summary.done.append(job.name)
        report(f"done    {job.name}")
    else:
        summary.failed.append(job.name)
        report(f"failed  {job.name}: {problem}")


def is_done(root: Path, name: str) -> bool:
    """Whether a job is finished."""
    return (root / "results" / name / "result.json").is_file()


def read_result(root: Path, name: str) -> dict[str, Any] | None:
    """What a job gave; None if it is not finished.

    Raises:
        EvidenceError: If the file is not as it was written.
    """
    path = root / "results" / name / "result.json"
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, RecursionError, ValueError) as error:
        raise EvidenceError(f"{path} cannot be read: {error}") from error
    if not holds_seal(content):
        raise EvidenceError(
            f"{path} was changed since it was written; move its folder away to do the work again"
        )
    return {name: value for name, value in content.items() if name != "seal"}


def failures(root: Path, name: str, kind: str) -> int:
    """How many attempts of a job failed in this way."""
    notes = (root / "failed").glob(f"{name}-*/{name}/failure.json")
    return sum(json.loads(note.read_text(encoding="utf-8"))["kind"] == kind for note in notes)


def _attempt(root: Path, job: Job) -> str | None:
    """Tries a job; what went wrong, or None."""
    place, final = root / "work" / job.name, root / "results" / job.name
    if place.exists() and not job.resumes:  # whoever was at it was killed
        _note(place, INTERRUPTED, "the process that worked on it is gone")
        keep_failed(root, place)
    place.mkdir(parents=True, exist_ok=True)
    try:
        result = job.work(place)
        replace_file(place / "result.json", sealed_json(dict(result)))
    except (RunError, OSError, ValueError) as error:
        kind = getattr(error, "kind", "failed")
        if kind == INTERRUPTED and job.resumes:
            return f"{error}; the next attempt goes on from its last checkpoint"
        _note(place, kind, str(error))
        return f"{error}; kept in {keep_failed(root, place)}"
    final.parent.mkdir(exist_ok=True)
    place.rename(final)  # appears whole
    for folder in (final, final.parent):
        sync(folder)
    return None


def _note(place: Path, kind: str, message: str) -> None:
    text = json.dumps({"kind": kind, "message": message}, indent=1) + "\n"
    replace_file(place / "failure.json", text)
