"""What is measured: each function does one piece of a campaign's work in a folder of its own.

It trains through ``tinyllm fit`` from the frozen sources, and gives what ``result.json`` holds.
"""

import csv
import json
import math
import multiprocessing
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from tinyllm.acceptance.configure import (
    candidate_config,
    convergence_config,
    numerical_config,
    throughput_config,
    trained_targets,
)
from tinyllm.acceptance.evidence import Candidate, EvidenceError, Manifest
from tinyllm.acceptance.fit import Fit
from tinyllm.acceptance.freezing import cache_manifest
from tinyllm.acceptance.launcher import Launchers
from tinyllm.acceptance.locks import device_lock
from tinyllm.acceptance.performance import COSTS, SETUP_COSTS
from tinyllm.acceptance.protocol import SIDES, ConvergenceRun, Pair, Protocol, Workload
from tinyllm.acceptance.retained import retain
from tinyllm.acceptance.runs import RunError, failures, read_result
from tinyllm.acceptance.traces import TraceComparison, TraceError, compare_traces
from tinyllm.acceptance.turns import Turns

NATIVE, CANDIDATE = SIDES
HEADROOM = 1.25
"""How many more updates a pair's windows have than fill one: speed differs from run to run.

A workload bound by the host differs by a tenth and more, and a window that is too short costs a
whole attempt.
"""
SHORT = "short windows"
"""Kind of a failed pair: the next attempt has more updates in a window."""


def job_name(owner: str, kind: str, part: str) -> str:
    """Name of a piece of work: whose it is, ``native`` or a candidate's id, and what."""
    return f"{owner}.{kind}.{part}"


@dataclass(frozen=True)
class Bench:
    """A campaign's frozen sides, ready to run.

    Attributes:
        root: The campaign's folder.
        manifest: Native, and what both sides share.
        candidate: The other side, where there is one.
        together: Whether timed runs are set up beside others. Then only their windows are figures.
        turns: Who may set up and who may be timed.
        launchers: Start trainings from the sources.
    """

    root: Path
    manifest: Manifest
    candidate: Candidate | None
    together: bool = False
    turns: Turns = field(default_factory=lambda: Turns(device_lock()))
    launchers: Launchers = field(default_factory=Launchers)

    @property
    def protocol(self) -> Protocol:
        """What is measured."""
        return self.manifest.protocol

    def owner(self, side: str) -> str:
        """Whose work a side's is."""
        if side != CANDIDATE:
            return NATIVE
        if self.candidate is None:
            raise ValueError("this step needs a candidate; freeze one and name it")
        return self.candidate.id

    def source(self, side: str) -> Path:
        """Folder that a side is run from."""
        if side != CANDIDATE or self.candidate is None:
            return self.root / "native"
        return self.candidate.source

    def start(self, side: str, config: Mapping[str, Any], folder: Path) -> Fit:
        """Trains one side.

        Raises:
            EvidenceError: If the token cache is not the frozen one.
        """
        cache = config["data"]["cache"]
        if cache_manifest(cache)["identity"] != self.manifest.token_cache:
            raise EvidenceError(f"{cache} is not the token cache that was frozen")
        complete = dict(config)
        if side == CANDIDATE and self.candidate is not None:
            complete = candidate_config(complete, self.candidate.details["strategy"])
        return Fit(self.launchers.of(self.source(side)), complete, folder)

    def train(self, side: str, config: Mapping[str, Any], folder: Path) -> int:
        """Trains one side to the end; gives how many times it had to be started."""
        with self.start(side, config, folder) as run:
            run.wait()
            return run.starts

    def time(self, sides: Sequence[str], config: Mapping[str, Any], folder: Path) -> None:
        """Trains sides one after the other; if set up together, only their windows are."""
        if not self.together:
            with self.turns.timed():
                for side in sides:
                    self.train(side, config, folder / side)
            return
        with ExitStack() as ending:
            try:
                with self.turns.untimed():
                    runs = [
                        ending.enter_context(self.start(side, config, folder / side))
                        for side in sides
                    ]
                    for run in runs:
                        run.wait_until_ready()
                with self.turns.timed():
                    for run in runs:
                        run.go()
                with self.turns.untimed():
                    for run in runs:
                        run.wait()
            except BaseException:
                with self.turns.untimed():  # the other side may take seconds to end
                    ending.close()
                raise


def windows(bench: Bench, side: str, workload: Workload, folder: Path) -> dict[str, Any]:
    """How many updates of one side, alone, fill a window."""
    config = throughput_config(
        bench.manifest.configs[workload.id], bench.protocol, windows=1, hold=bench.together
    )
    bench.time([side], config, folder)
    return {"updates_per_window": _complete_timing(folder / side)["updates_per_window"]}


def pair(bench: Bench, pair: Pair, allocation: str, folder: Path) -> dict[str, Any]:
    """Times both sides of a pair, over equal numbers of updates."""
    protocol = bench.protocol
    alone = []
    for side in SIDES:
        found = read_result(bench.root, job_name(bench.owner(side), "windows", pair.workload))
        if found is None:
            raise RunError(
                f"{pair.workload}: it is not known how many updates of {side} fill a window; run "
                "its windows first"
            )
        alone.append(found["updates_per_window"])
    name = job_name(bench.owner(CANDIDATE), "pairs", pair.id)
    # the faster side needs more
    updates = math.ceil(HEADROOM * max(alone)) * 2 ** failures(bench.root, name, SHORT)
    config = throughput_config(
        bench.manifest.configs[pair.workload],
        protocol,
        updates_per_window=updates,
        hold=bench.together,
    )
    bench.time(pair.order, config, folder)
    rows = []
    for position, side in enumerate(pair.order, start=1):
        key = {"workload": pair.workload, "repeat": pair.repeat, "side": side}
        place = {"allocation": allocation, "position": position}
        measured = _timed_row(folder / side, protocol)
        if bench.together:
            measured |= dict.fromkeys(SETUP_COSTS)  # others were set up at the same time
        rows.append({**key, **place, **measured, "protocol": protocol.hash})
    return {"allocation": allocation, "rows": rows}


def numerical(bench: Bench, workload: Workload, folder: Path) -> dict[str, Any]:
    """Compares a workload's first updates: native with itself, and with the candidate."""
    protocol = bench.protocol
    config = numerical_config(bench.manifest.configs[workload.id], protocol)
    runs = {CANDIDATE: CANDIDATE, "reference": NATIVE, "control": NATIVE}  # news comes first
    for name, side in runs.items():
        bench.train(side, config, folder / name)
    rows: list[dict[str, Any]] = []
    comparisons = {CANDIDATE: "candidate/native", "control": "native/native"}
    # other jobs' comparisons would wait for this one's in a process that they share
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, spawn, initializer=_end_with_parent) as processes:
        under_way: dict[str, Future[TraceComparison]] = {}
        for name, comparison in comparisons.items():
            with suppress(BrokenProcessPool):  # the first one's result says so
                under_way[name] = processes.submit(
                    compare_traces,
                    folder / "reference" / "trace",
                    folder / name / "trace",
                    workload=workload.id,
                    comparison=comparison,
                    protocol=protocol.hash,
                    updates=protocol.numerical_updates,
                )
        for name, comparison in comparisons.items():
            try:
                found = under_way[name].result()
            except TraceError as error:
                raise RunError(f"the traces of {comparison} do not match: {error}") from error
            except BrokenProcessPool as error:
                raise RunError(
                    f"comparing the traces of {comparison} was ended from outside, by the system "
                    "perhaps, for want of memory; run fewer at a time: --parallel"
                ) from error
            found.parameters.to_csv(folder / f"parameters-{name}.csv", index=False)
            # what is not finite goes on as text, for the gate to refuse
            records = found.rows.to_dict("records")
            rows += [{str(k): _plain(v) for k, v in row.items()} for row in records]
    inputs = {name: _retain_inputs(bench.root, folder / name / "trace") for name in runs}
    return {"inputs": inputs, "rows": rows}


def _end_with_parent() -> None:
    """Ends this process with the one that started it, however that ends."""

    def wait() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _retain_inputs(root: Path, trace: Path) -> dict[str, Any]:
    """Keeps what a trace started from; what it led to goes.

    That can be tens of GiB, and can be made again.
    """
    for tensors in trace.glob("update-*.safetensors"):
        tensors.unlink()
    return {
        "initial": retain(root, trace / "initial.safetensors"),
        "rows": [retain(root, path) for path in sorted(trace.glob("rows-*.safetensors"))],
    }


def convergence(bench: Bench, run: ConvergenceRun, side: str, folder: Path) -> dict[str, Any]:
    """Trains a recipe with a seed to the end; the side may be ``control``, which is native."""
    protocol = bench.protocol
    config = convergence_config(bench.manifest.configs[run.recipe], run.seed)
    starts = bench.train(side, config, folder / side)
    updates = config["trainer"]["max_steps"]
    with (folder / side / "metrics.csv").open(encoding="utf-8") as file:
        found = [row for row in csv.DictReader(file) if row.get("validation/loss")]
    curve = [(int(row["step"]) + 1, float(row["validation/loss"])) for row in found]
    if not curve or curve[-1][0] != updates:
        last = curve[-1][0] if curve else "no"
        raise RunError(f"the last validation is of update {last}, not {updates}")
    splits = cache_manifest(config["data"]["cache"])["splits"]

    def train_tokens(update: int) -> int:
        data, held = config["data"], splits["train"]["tokens"]
        return trained_targets(held, update, context=data["context"], rows=data["batch_size"])

    key = {"recipe": run.recipe, "seed": run.seed, "side": side}
    end = {"protocol": protocol.hash}
    row = {
        **key,
        "final_loss": _plain(curve[-1][1]),
        "train_tokens": train_tokens(updates),
        "validation_tokens": splits["validation"]["tokens"] - 1,  # the first token is no target
        **end,
    }
    points = [
        {
            **key,
            "update": update,
            "train_tokens": train_tokens(update),
            "loss": _plain(loss),
            **end,
        }
        for update, loss in curve
    ]
    return {"starts": starts, "rows": [row], "curve": points}


def _plain(value: Any) -> Any:
    """JSON knows no NaN and no infinity."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _complete_timing(folder: Path) -> dict[str, Any]:
    timing: dict[str, Any] = json.loads((folder / "timing.json").read_text(encoding="utf-8"))
    if not timing["complete"]:
        raise RunError(f"{folder.name} ended before all windows were complete")
    return timing


def _timed_row(folder: Path, protocol: Protocol) -> dict[str, Any]:
    """What one side's files say, in the columns of the performance gate."""
    timing = _complete_timing(folder)
    timed = pd.read_csv(folder / "throughput.csv")
    if (timed["seconds"] < protocol.window_seconds).any():
        raise RunError(
            f"{folder.name} has windows below {protocol.window_seconds:g} s, the shortest of "
            f"{timed['seconds'].min():.3g} s; the next attempt has more updates in each",
            kind=SHORT,
        )
    memory = json.loads((folder / "memory.json").read_text(encoding="utf-8"))
    row = {
        "warmup_updates": timing["warmup_updates"],
        "window_updates": timing["updates_per_window"],
        **{f"window_{k}_seconds": s for k, s in enumerate(timed["seconds"].tolist(), start=1)},
    }
    known = timing | memory
    return row | {name: known[name] for name in COSTS if name in known}
