"""A whole qualification, in pieces of work that may be done anywhere, killed and repeated.

What is finished is not done again, and nothing is half written. All of it happens in the campaign's
folder (see ``evidence`` and ``runs``); ``freezing`` comes first. The kinds of work:

===============  ================================================================================
``windows``      how many updates of a side fill a window, for each workload; before pairs
``pairs``        both sides of a workload timed one after the other; a repeat in each allocation
``numerical``    the first updates of a workload: native with itself, and with the candidate
``convergence``  a recipe trained to the end with each seed, by a side
``controls``     the same once more, by native
===============  ================================================================================

Then ``collect`` writes the tables.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tinyllm.acceptance import measure
from tinyllm.acceptance.convergence import CONTROL
from tinyllm.acceptance.environment import environment
from tinyllm.acceptance.evidence import verify_all, verify_candidate, write_receipt
from tinyllm.acceptance.launcher import Launchers
from tinyllm.acceptance.measure import CANDIDATE, NATIVE, Bench, job_name
from tinyllm.acceptance.protocol import SIDES, Pair
from tinyllm.acceptance.runs import Job, Summary, is_done, read_result, run_jobs

NATIVE_KINDS = ("windows", "convergence", "controls")
"""What native does alone."""

CANDIDATE_KINDS = ("windows", "pairs", "numerical", "convergence")
"""What is done for a candidate."""


class Campaign:
    """A frozen campaign: native's work, or a candidate's where one is given.

    Args:
        root: Its folder.
        candidate: Id of a frozen candidate.
        select: Patterns of workloads, of recipes, or of single pieces of work such as
            ``sync-production-seed45``; none selects all.
        parallel: How many trainings there may be at a time; a pair is two. Timed ones are then set
            up beside each other and timed one by one.
        report: Takes a line for each piece.
        launchers: To share with others; None starts own ones for each run.

    Raises:
        EvidenceError: If anything frozen has changed.
        ValueError: If a pattern selects nothing of the campaign.
    """

    def __init__(
        self,
        root: Path,
        candidate: str | None = None,
        *,
        select: Sequence[str] = (),
        parallel: int = 1,
        report: Callable[[str], object] = print,
        launchers: Launchers | None = None,
    ) -> None:
        self._launchers = launchers
        self.root, self.candidate = root, candidate
        self.parallel, self.report = parallel, report
        self._select = tuple(select)
        manifest = verify_all(root)
        frozen = None if candidate is None else verify_candidate(root, candidate)
        self._identities = {NATIVE: "", str(candidate): "" if frozen is None else frozen.identity}
        self._bench = Bench(root, manifest, frozen, together=parallel > 1)
        self.protocol = manifest.protocol
        self._require_known()

    @property
    def on_gpu(self) -> bool:
        """Whether its work needs a GPU."""
        configs = self._bench.manifest.configs.values()
        return any(config["trainer"]["accelerator"] == "gpu" for config in configs)

    def verify(self) -> None:
        """Checks every frozen byte.

        Raises:
            EvidenceError: If one has changed.
        """
        verify_all(self.root)

    def names(self, kind: str, allocation: str = "") -> list[str]:
        """Names of all selected work of a kind.

        Args:
            kind: Of ``NATIVE_KINDS``, or of ``CANDIDATE_KINDS`` where there is a candidate.
            allocation: Only those pairs that can be timed in it: the next repeat of each workload
                that has none from it yet.

        Raises:
            ValueError: If the kind is not the side's.
        """
        kinds = NATIVE_KINDS if self.candidate is None else CANDIDATE_KINDS
        if kind not in kinds:
            who = "native alone" if self.candidate is None else "a candidate"
            raise ValueError(f"there is no {kind} of {who}; choose from {', '.join(kinds)}")
        parts = self._parts(kind, allocation)
        owners = [self.candidate or NATIVE]
        if kind == "windows" and self.candidate is not None:
            owners = [NATIVE, self.candidate]
        return [
            job_name(owner, kind, part)
            for part, whole in parts.items()
            for owner in owners
            if not self._select
            or any(fnmatchcase(n, pattern) for pattern in self._select for n in (part, whole))
        ]

    def _parts(self, kind: str, allocation: str = "") -> dict[str, str]:
        """Pieces of work of a kind, and the workload or recipe that each belongs to."""
        if kind in ("convergence", "controls"):
            return {run.id: run.recipe for run in self.protocol.convergence_runs()}
        if kind == "pairs":
            return {pair.id: pair.workload for pair in self._pairs(allocation)}
        return {workload.id: workload.id for workload in self.protocol.workloads}

    def _require_known(self) -> None:
        """Refuses patterns that select nothing of any kind: a slip, after which nothing is done."""
        parts = {**self._parts("pairs"), **self._parts("convergence")}
        names = {*parts, *parts.values()}
        for pattern in self._select:
            if not any(fnmatchcase(name, pattern) for name in names):
                wholes = list(dict.fromkeys(parts.values()))
                raise ValueError(
                    f"{pattern!r} selects none of the {len(wholes)} workloads and recipes, such as "
                    f"{_nearest(pattern, wholes)}; a pattern with * may select several"
                )

    def require_work(self, kind: str) -> None:
        """Checks that patterns, where there are any, select work of a kind.

        Raises:
            ValueError: If none does, or as :meth:`names`.
        """
        if self._select and not self.names(kind):
            wholes = list(dict.fromkeys(self._parts(kind).values()))
            raise ValueError(
                f"{kind} has nothing that is called {' or '.join(self._select)}; it is of "
                f"{len(wholes)} ids, such as {_nearest(self._select[0], wholes)}"
            )

    def run(self, kind: str, allocation: str = "", names: Sequence[str] | None = None) -> Summary:
        """Does work of a kind here.

        Args:
            kind: See ``names``.
            allocation: Names the job, lease or boot that this is; for pairs.
            names: Only this work; None takes all that is selected.

        Raises:
            EvidenceError: If frozen evidence has changed.
            ValueError: If pairs are to be timed and the allocation has no name, or one with spaces
                around it.
        """
        if kind == "pairs" and not allocation:
            raise ValueError("pairs need the name of the allocation that they are timed in")
        if allocation != allocation.strip():
            raise ValueError(
                f"the allocation {allocation!r} has spaces around its name; leave them out"
            )
        chosen = list(self.names(kind, allocation) if names is None else names)
        self.write_receipt(kind=kind, allocation=allocation, jobs=chosen, environment=environment())
        parallel = max(1, self.parallel // 2) if kind == "pairs" else self.parallel
        with ExitStack() as ending:
            launchers = self._launchers or ending.enter_context(Launchers())
            if any(not is_done(self.root, name) for name in chosen):
                for side in self._sides(kind):  # here: in a thread that does not end before them
                    launchers.of(self._bench.source(side))
            bench = replace(self._bench, launchers=launchers)
            return run_jobs(
                self.root,
                [self._job(bench, name, allocation) for name in chosen],
                check=self.verify,
                parallel=parallel,
                report=self.report,
            )

    def _sides(self, kind: str) -> tuple[str, ...]:
        """Whose trainings work of a kind has."""
        if self.candidate is None:
            return (NATIVE,)
        return (CANDIDATE,) if kind == "convergence" else SIDES

    def write_receipt(self, **content: Any) -> None:
        """Notes a submission."""
        whole = {"candidate": self.candidate, "select": list(self._select), **content}
        write_receipt(self.root, f"submission-{time.time_ns()}", whole)

    def _pairs(self, allocation: str) -> list[Pair]:
        """All pairs, or those that may be timed in an allocation."""
        pairs = self.protocol.pairs()
        if not allocation:
            return list(pairs)
        chosen = []
        for workload in self.protocol.workloads:
            mine = [pair for pair in pairs if pair.workload == workload.id]
            names = [job_name(str(self.candidate), "pairs", pair.id) for pair in mine]
            results = [read_result(self.root, name) for name in names]
            if all(result is None or result["allocation"] != allocation for result in results):
                chosen += [p for p, result in zip(mine, results, strict=True) if result is None][:1]
        return chosen

    def _job(self, bench: Bench, name: str, allocation: str) -> Job:
        """A piece of work, ready to be done."""
        owner, kind, part = name.split(".", maxsplit=2)
        protocol = self.protocol
        side = NATIVE if owner == NATIVE else CANDIDATE
        made_of = {"manifest": bench.manifest.identity, "candidate": self._identities[owner]}

        def work(folder: Path) -> Mapping[str, Any]:
            if kind == "windows":
                found = measure.windows(bench, side, protocol.workload(part), folder)
            elif kind == "pairs":
                pair = next(pair for pair in protocol.pairs() if pair.id == part)
                found = measure.pair(bench, pair, allocation, folder)
            elif kind == "numerical":
                found = measure.numerical(bench, protocol.workload(part), folder)
            else:
                run = next(run for run in protocol.convergence_runs() if run.id == part)
                of = CONTROL if kind == "controls" else side
                found = measure.convergence(bench, run, of, folder)
            return made_of | found

        return Job(name, work, resumes=kind in ("convergence", "controls"))


def _nearest(pattern: str, names: Sequence[str]) -> str:
    """Those that may be meant, else the first ones."""
    return ", ".join(get_close_matches(pattern, names, cutoff=0.3) or names[:3])
