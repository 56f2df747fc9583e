"""A whole qualification, step by step: freeze, measure, compare, collect.

Every step may be killed and repeated: what is finished is not done again, and nothing is half
written. All of it happens in the campaign's folder (see ``evidence`` and ``runs``).

1. ``freeze_native``: the protocol, each configuration and native's source.
2. ``run_baselines``: native alone; also fixes how many updates a window has, for both sides.
3. ``freeze_new_candidate``: a source and the strategy's arguments that make it the candidate.
4. ``run_pairs``, once in each allocation: the next repeat of every workload.
5. ``run_numerical`` and ``run_convergence``.
6. ``collect``: the tables that ``tinyllm accept`` reads.
"""

import csv
import json
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from tinyllm.acceptance.configure import (
    candidate_config,
    convergence_config,
    numerical_config,
    throughput_config,
)
from tinyllm.acceptance.convergence import CONVERGENCE_COLUMNS
from tinyllm.acceptance.evidence import (
    EvidenceError,
    Manifest,
    environment,
    verify_candidate,
    verify_manifest,
    write_receipt,
)
from tinyllm.acceptance.freezing import cache_manifest
from tinyllm.acceptance.numerical import NUMERICAL_COLUMNS
from tinyllm.acceptance.performance import COSTS, performance_columns
from tinyllm.acceptance.protocol import SIDES, ConvergenceRun, Pair, Protocol, Workload
from tinyllm.acceptance.runs import (
    Job,
    RunError,
    Summary,
    failures,
    read_result,
    run_fit,
    run_jobs,
    selected,
)
from tinyllm.acceptance.traces import TraceError, compare_traces

NATIVE, CANDIDATE = SIDES
HEADROOM = 3.0
"""How much longer than the protocol's a window of native is planned, in seconds over seconds.

Both sides train the same number of updates in a window, so a candidate may be this much faster
before its windows are too short; then the pair fails, and the next attempt takes twice as many.
"""
_SHORT = "short windows"
_COLUMNS = {
    "numerical": NUMERICAL_COLUMNS,
    "convergence": list(CONVERGENCE_COLUMNS),
    "validation-curves": ["recipe", "seed", "side", "update", "train_tokens", "loss", "protocol"],
}


@dataclass(frozen=True)
class _Side:
    """One side of a comparison, ready to run."""

    manifest: Manifest
    source: Path
    strategy: Mapping[str, Any] | None = None  # a candidate's arguments

    def run(self, config: Mapping[str, Any], folder: Path) -> None:
        cache = config["data"]["cache"]
        if cache_manifest(cache)["identity"] != self.manifest.token_cache:
            raise EvidenceError(f"{cache} is not the token cache that was frozen")
        plain = dict(config)
        run_fit(
            self.source,
            plain if self.strategy is None else candidate_config(plain, self.strategy),
            folder,
        )


class Campaign:
    """A frozen campaign: native, and a candidate where one is given.

    Args:
        root: Its folder.
        candidate: Id of a frozen candidate.
        select: Patterns of ids; none selects all.
        parallel: How many untimed runs there may be at a time; timed ones have the machine.

    Raises:
        EvidenceError: If anything frozen has changed.
    """

    def __init__(
        self,
        root: Path,
        candidate: str | None = None,
        select: Sequence[str] = (),
        parallel: int = 1,
    ) -> None:
        self.root, self.candidate_id = root, candidate
        self._select, self._parallel = tuple(select), parallel
        self.manifest = verify_manifest(root)
        self.protocol = self.manifest.protocol
        self._sides = {NATIVE: _Side(self.manifest, root / "native")}
        self._identity = {"manifest": self.manifest.identity, "candidate": ""}
        if candidate is not None:
            frozen = verify_candidate(root, candidate)
            self._sides[CANDIDATE] = _Side(self.manifest, frozen.source, frozen.details["strategy"])
            self._identity["candidate"] = frozen.identity

    def verify(self) -> None:
        """Checks every frozen byte.

        Raises:
            EvidenceError: If one has changed.
        """
        if self.candidate_id is None:
            verify_manifest(self.root)
        else:
            verify_candidate(self.root, self.candidate_id)

    def run_baselines(self) -> Summary:
        """Native alone: the length of each workload's windows, and its convergence runs."""
        jobs = [
            Job(_name(NATIVE, "windows", w.id), w.id, partial(self._windows, w))
            for w in self.protocol.workloads
        ]
        windows = self._run("baseline windows", jobs)
        return windows + self._run(
            "baseline convergence", self._convergence_jobs(NATIVE), parallel=self._parallel
        )

    def run_pairs(self, allocation: str) -> Summary:
        """Times the next repeat of every workload, in this allocation.

        A workload that already has a repeat from it waits for another allocation.
        """
        jobs = []
        for workload in self.protocol.workloads:
            pairs = [pair for pair in self.protocol.pairs() if pair.workload == workload.id]
            results = {
                p.id: read_result(self.root, self._of_candidate("pair", p.id)) for p in pairs
            }
            if any(r is not None and r["allocation"] == allocation for r in results.values()):
                continue
            todo = [pair for pair in pairs if results[pair.id] is None]
            jobs += [
                Job(
                    self._of_candidate("pair", pair.id),
                    workload.id,
                    partial(self._pair, pair, allocation),
                )
                for pair in todo[:1]
            ]
        return self._run("pairs", jobs, allocation=allocation)

    def run_numerical(self) -> Summary:
        """Compares the first updates: native with itself, and with the candidate."""
        jobs = [
            Job(
                self._of_candidate("numerical", w.id),
                w.id,
                partial(self._numerical, w),
            )
            for w in self.protocol.workloads
        ]
        return self._run("numerical", jobs, parallel=self._parallel)

    def run_convergence(self) -> Summary:
        """Trains every recipe with every seed, on the candidate."""
        self._of_candidate("", "")
        return self._run("convergence", self._convergence_jobs(CANDIDATE), parallel=self._parallel)

    def _run(
        self, step: str, jobs: Sequence[Job], *, allocation: str = "", parallel: int = 1
    ) -> Summary:
        chosen = [job for job in jobs if selected(job.id, self._select)]
        write_receipt(
            self.root,
            f"submission-{time.time_ns()}",
            {
                "step": step,
                "allocation": allocation,
                "candidate": self.candidate_id,
                "select": list(self._select),
                "jobs": [job.name for job in chosen],
                "environment": environment(),
            },
        )
        return run_jobs(self.root, chosen, check=self.verify, parallel=parallel)

    def _of_candidate(self, kind: str, part: str) -> str:
        if self.candidate_id is None:
            raise ValueError("this step needs a candidate; freeze one and name it")
        return _name(self.candidate_id, kind, part)

    def _convergence_jobs(self, side: str) -> list[Job]:
        owner = NATIVE if side == NATIVE else str(self.candidate_id)
        return [
            Job(
                _name(owner, "convergence", run.id),
                run.id,
                partial(self._convergence, run, side),
            )
            for run in self.protocol.convergence_runs()
        ]

    def _result(self, side: str | None = None, **content: Any) -> dict[str, Any]:
        identity = self._identity | ({"candidate": ""} if side == NATIVE else {})
        return {**identity, **content}

    def _windows(self, workload: Workload, folder: Path) -> dict[str, Any]:
        config = throughput_config(
            self.manifest.configs[workload.id],
            self.protocol,
            updates_per_window=None,
            window_seconds=HEADROOM * self.protocol.window_seconds,
        )
        self._sides[NATIVE].run(config, folder / NATIVE)
        timing = _complete_timing(folder / NATIVE)
        return self._result(NATIVE, updates_per_window=timing["updates_per_window"])

    def _pair(self, pair: Pair, allocation: str, folder: Path) -> dict[str, Any]:
        baseline = read_result(self.root, _name(NATIVE, "windows", pair.workload))
        if baseline is None:
            raise RunError(f"{pair.workload} has no baseline yet; run the baselines first")
        doublings = failures(self.root, self._of_candidate("pair", pair.id), _SHORT)
        updates = baseline["updates_per_window"] * 2**doublings
        rows = []
        for position, side in enumerate(pair.order, start=1):
            config = throughput_config(
                self.manifest.configs[pair.workload],
                self.protocol,
                updates_per_window=updates,
                window_seconds=self.protocol.window_seconds,
            )
            self._sides[side].run(config, folder / side)
            measured = _timed_row(folder / side, self.protocol)
            key = {"workload": pair.workload, "repeat": pair.repeat, "side": side}
            place = {"allocation": allocation, "position": position}
            rows.append({**key, **place, **measured, "protocol": self.protocol.hash})
        return self._result(allocation=allocation, rows=rows)

    def _numerical(self, workload: Workload, folder: Path) -> dict[str, Any]:
        config = numerical_config(self.manifest.configs[workload.id], self.protocol)
        for name, side in (("reference", NATIVE), ("control", NATIVE), (CANDIDATE, CANDIDATE)):
            self._sides[side].run(config, folder / name)
        rows: list[dict[str, Any]] = []
        for name, comparison in ((CANDIDATE, "candidate/native"), ("control", "native/native")):
            try:
                found = compare_traces(
                    folder / "reference" / "trace",
                    folder / name / "trace",
                    workload=workload.id,
                    comparison=comparison,
                    protocol=self.protocol.hash,
                    updates=self.protocol.numerical_updates,
                )
            except TraceError as error:
                raise RunError(f"the traces of {comparison} do not match: {error}") from error
            found.parameters.to_csv(folder / f"parameters-{name}.csv", index=False)
            # what is not finite goes on as text, for the gate to refuse
            records = found.rows.to_dict("records")
            rows += [{str(k): _plain(v) for k, v in row.items()} for row in records]
        for tensors in folder.glob("*/trace/*.safetensors"):
            tensors.unlink()  # tens of GiB for the largest workloads; they can be made again
        return self._result(rows=rows)

    def _convergence(self, run: ConvergenceRun, side: str, folder: Path) -> dict[str, Any]:
        recipe = next(r for r in self.protocol.recipes if r.id == run.recipe)
        config = convergence_config(self.manifest.configs[run.recipe], run.seed)
        self._sides[side].run(config, folder / side)
        updates = config["trainer"]["max_steps"]
        with (folder / side / "metrics.csv").open(encoding="utf-8") as file:
            found = [row for row in csv.DictReader(file) if row.get("validation/loss")]
        curve = [(int(row["step"]) + 1, float(row["validation/loss"])) for row in found]
        if not curve or curve[-1][0] != updates:
            last = curve[-1][0] if curve else "no"
            raise RunError(f"the last validation is of update {last}, not {updates}")
        split = cache_manifest(config["data"]["cache"])["splits"]["validation"]
        key = {"recipe": run.recipe, "seed": run.seed, "side": side}
        end = {"protocol": self.protocol.hash}
        row = {
            **key,
            "final_loss": _plain(curve[-1][1]),
            "train_tokens": updates * recipe.update_tokens,
            "validation_tokens": split["tokens"] - 1,  # the first token is no target
            **end,
        }
        points = [
            {
                **key,
                "update": update,
                "train_tokens": update * recipe.update_tokens,
                "loss": _plain(loss),
                **end,
            }
            for update, loss in curve
        ]
        return self._result(side, rows=[row], curve=points)

    # --- collecting ---------------------------------------------------------------------------

    def collect(self) -> dict[str, int]:
        """Writes the tables of this candidate into the root; gives their numbers of rows.

        What is not measured yet is not in them, which ``tinyllm accept`` calls incomplete.

        Raises:
            EvidenceError: If a result was made under another manifest or candidate.
        """
        self.verify()
        protocol = self.protocol
        pairs = [self._of_candidate("pair", pair.id) for pair in protocol.pairs()]
        cases = [self._of_candidate("numerical", w.id) for w in protocol.workloads]
        runs = [
            _name(owner, "convergence", run.id)
            for run in protocol.convergence_runs()
            for owner in (NATIVE, str(self.candidate_id))
        ]
        tables = {
            "performance": ([*performance_columns(protocol), *COSTS], self._rows(pairs)),
            "numerical": (_COLUMNS["numerical"], self._rows(cases)),
            "convergence": (_COLUMNS["convergence"], self._rows(runs)),
            "validation-curves": (_COLUMNS["validation-curves"], self._rows(runs, "curve")),
        }
        for name, (columns, rows) in tables.items():
            _replace_csv(self.root / f"{name}.csv", pd.DataFrame(rows, columns=columns))
        return {name: len(rows) for name, (_, rows) in tables.items()}

    def _rows(self, names: Sequence[str], key: str = "rows") -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for name in names:
            result = read_result(self.root, name)
            if result is None:
                continue
            side = NATIVE if name.startswith(f"{NATIVE}.") else None
            if self._result(side) != {part: result.get(part) for part in self._identity}:
                raise EvidenceError(f"{name} was measured under another manifest or candidate")
            rows += result[key]
        return rows


def _name(owner: str, kind: str, part: str) -> str:
    return f"{owner}.{kind}.{part}"


def _plain(value: Any) -> Any:
    """JSON knows no NaN and no infinity."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _complete_timing(folder: Path) -> dict[str, Any]:
    timing: dict[str, Any] = json.loads((folder / "timing.json").read_text(encoding="utf-8"))
    if not timing["complete"]:
        raise RunError(f"{folder.name} ended before all windows were complete")
    return timing


def _timed_row(folder: Path, protocol: Protocol) -> dict[str, Any]:
    """What one side's files say, in the columns of the throughput gate."""
    timing = _complete_timing(folder)
    windows = pd.read_csv(folder / "throughput.csv")
    if (windows["seconds"] < protocol.window_seconds).any():
        raise RunError(
            f"{folder.name} has windows below {protocol.window_seconds:g} s, the shortest of "
            f"{windows['seconds'].min():.3g} s; the next attempt has more updates in each",
            kind=_SHORT,
        )
    memory = json.loads((folder / "memory.json").read_text(encoding="utf-8"))
    row = {
        "warmup_updates": timing["warmup_updates"],
        "window_updates": timing["updates_per_window"],
        **{f"window_{k}_seconds": s for k, s in enumerate(windows["seconds"].tolist(), start=1)},
    }
    known = timing | memory
    return row | {name: known[name] for name in COSTS if name in known}


def _replace_csv(path: Path, table: pd.DataFrame) -> None:
    """Writes a table that a reader finds whole, the old one or the new one."""
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=f".{path.name}.", delete=False, encoding="utf-8"
    ) as file:
        table.to_csv(file, index=False)
    partial = Path(file.name)
    partial.chmod(0o644)
    partial.replace(path)
