"""Runs pieces of work as child processes: each is done whole, kept apart as failed, or not there.

::

    work/NAME/          an attempt under way
    results/NAME/       a finished one, with result.json; never changed again
    failed/NAME-K/      attempts that failed or were interrupted
    locks/NAME.lock     who is at it
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tinyllm.acceptance.evidence import EvidenceError, keep_failed
from tinyllm.acceptance.locks import claimed

_PR_SET_PDEATHSIG = 1
_LOG_LINES = 5
_LIBC = ctypes.CDLL(None)  # loaded here: little may be done between fork and exec


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
        id: What ``--select`` looks at.
        work: Does it in a folder; gives the content of ``result.json``.
    """

    name: str
    id: str
    work: Callable[[Path], Mapping[str, Any]]


@dataclass
class Summary:
    """Names of jobs by what became of them."""

    done: list[str] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)

    def __add__(self, other: "Summary") -> "Summary":
        return Summary(
            self.done + other.done,
            self.before + other.before,
            self.failed + other.failed,
            self.elsewhere + other.elsewhere,
        )

    def __str__(self) -> str:
        return (
            f"{len(self.done)} done, {len(self.before)} done before, {len(self.failed)} failed, "
            f"{len(self.elsewhere)} under way in another process"
        )


def selected(job_id: str, patterns: Sequence[str]) -> bool:
    """Whether an id fits one of the patterns, or there are none."""
    return not patterns or any(fnmatchcase(job_id, pattern) for pattern in patterns)


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
    with claimed(root / "locks", job.name) as mine:
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
        EvidenceError: If the file is damaged.
    """
    path = root / "results" / name / "result.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise EvidenceError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise EvidenceError(f"{path} is damaged")
    return content


def failures(root: Path, name: str, kind: str) -> int:
    """How many attempts of a job failed in this way."""
    notes = (root / "failed").glob(f"{name}-*/{name}/failure.json")
    return sum(json.loads(note.read_text(encoding="utf-8"))["kind"] == kind for note in notes)


def _attempt(root: Path, job: Job) -> str | None:
    """Tries a job; what went wrong, or None."""
    place, final = root / "work" / job.name, root / "results" / job.name
    if place.exists():  # whoever was at it was killed
        _note(place, "interrupted", "the process that worked on it is gone")
        keep_failed(root, place)
    place.mkdir(parents=True)
    try:
        result = job.work(place)
        _write(place / "result.json", result)
    except (RunError, OSError, ValueError) as error:
        _note(place, getattr(error, "kind", "failed"), str(error))
        return f"{error}; kept in {keep_failed(root, place)}"
    final.parent.mkdir(exist_ok=True)
    place.rename(final)  # appears whole
    for folder in (final, final.parent):
        _sync(folder)
    return None


def run_fit(source: Path, config: Mapping[str, Any], folder: Path) -> None:
    """Trains in a folder, from a frozen source and in a process of its own.

    Args:
        source: Folder that holds the package.
        config: Of ``tinyllm fit``.
        folder: Where to run; gets ``given.json``, ``log.txt`` and what training writes.

    Raises:
        RunError: If it ends with another exit code than 0.
    """
    folder.mkdir(parents=True)
    _write(folder / "given.json", config)
    command = "from tinyllm.cli import main; main()"
    environment = os.environ | {
        "PYTHONPATH": str(source.resolve()),
        "PYTHONDONTWRITEBYTECODE": "1",  # frozen folders stay as they are
        "PYTHONUNBUFFERED": "1",
    }
    with (folder / "log.txt").open("wb") as log:
        done = subprocess.run(
            [sys.executable, "-P", "-c", command, "fit", "--config", "given.json"],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            check=False,
        )
    if done.returncode:
        lines = (folder / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()
        tail = " / ".join(line for line in lines[-_LOG_LINES:] if line.strip())
        raise RunError(f"{folder.name} ended with exit code {done.returncode}: {tail}")


def _die_with_parent() -> None:
    """In the child: a killed campaign leaves nothing that still trains."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _note(place: Path, kind: str, message: str) -> None:
    _write(place / "failure.json", {"kind": kind, "message": message})


def _write(path: Path, content: Mapping[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=1, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
