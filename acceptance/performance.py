"""The performance gate: how fast a candidate is beside native, from timed windows.

The table has a row for each side of each pair:

=====================  ==========================================================================
workload               id of the protocol's workload
repeat                 1 to the protocol's number of repeats
side                   ``native`` or ``candidate``
allocation             names the allocation (a job, a lease, a boot) that the side ran in; the
                       sides of a pair share one, the repeats of a workload do not
position               1 for the side of the pair that ran first, 2 for the other
warmup_updates         updates before the first window
window_updates         updates in each window: the ``updates_per_window`` of ``timing.json``
window_K_seconds       duration of window K, from 1 to the protocol's number of windows
protocol               hash of the protocol
=====================  ==========================================================================

A side's score is the median over its windows of the targets trained per second. Any of the columns
``startup_seconds``, ``training_seconds``, ``elapsed_seconds``, ``peak_allocated_bytes`` and
``peak_reserved_bytes`` may be there too: they are summarized, and no verdict depends on them.
"""

import re
from functools import partial
from itertools import product

import numpy as np
import pandas as pd

from tinyllm.acceptance.gates import (
    Findings,
    GateResult,
    RowChecks,
    Verdict,
    at_least,
    conclude,
    worst,
)
from tinyllm.acceptance.protocol import PROTOCOL_1, SIDES, Protocol, Workload

COSTS = (
    *("startup_seconds", "training_seconds", "elapsed_seconds"),
    *("peak_allocated_bytes", "peak_reserved_bytes"),
)
"""Columns that are summarized and decide nothing."""

SETUP_COSTS = ("startup_seconds", "elapsed_seconds")
"""Those that say nothing of a run which was set up beside others."""

_SCORES = {"small-batch": "small batches: the median ratio", "production": "production: the ratio"}


def window_columns(protocol: Protocol) -> list[str]:
    """Names of the columns with the durations of the windows."""
    return [f"window_{k}_seconds" for k in range(1, protocol.windows + 1)]


def performance_columns(protocol: Protocol) -> list[str]:
    """Names of all columns that the gate needs."""
    fixed = ["workload", "repeat", "side", "allocation", "position"]
    updates = ["warmup_updates", "window_updates"]
    return [*fixed, *updates, *window_columns(protocol), "protocol"]


def performance_gate(rows: pd.DataFrame | None, protocol: Protocol = PROTOCOL_1) -> GateResult:
    """Decides whether a candidate is fast enough.

    *Small batches*: in each category and repeat, the median over the category's workloads of
    candidate/native is at least ``small_batch_ratio``. *Production*: each workload is at least
    ``production_ratio`` in each repeat. Accumulation is measured and not gated.

    Args:
        rows: The table that the module describes, in any order of rows.
        protocol: What was to be measured.

    Returns:
        The verdict, with the tables ``small_batch``, ``production``, ``ratios`` and, where those
        columns are there, ``costs``.
    """
    findings = Findings()
    checks = _checked(rows, protocol, findings)
    ratios = _ratios(checks, protocol)
    judged = partial(_judged, ratios, protocol, findings)
    small_batch = judged("small-batch", "category", protocol.small_batch_ratio)
    production = judged("production", "workload", protocol.production_ratio)
    if small_batch.empty and production.empty:
        findings.add(Verdict.INCOMPLETE, "the protocol has no workload that is gated by speed")
    tables = {"small_batch": small_batch, "production": production, "ratios": ratios}
    if rows is not None and not checks.rows.empty:
        costs = _costs(rows, protocol)
        tables |= {} if costs.empty else {"costs": costs}
    return conclude("performance", findings, tables)


def _checked(rows: pd.DataFrame | None, protocol: Protocol, findings: Findings) -> RowChecks:
    """The table with all that can be said about single rows and pairs said."""
    windows = window_columns(protocol)
    checks = RowChecks(
        rows,
        text=["workload", "side", "allocation", "protocol"],
        numbers=["repeat", "position", "warmup_updates", "window_updates", *windows],
        label=["workload", "repeat", "side"],
        findings=findings,
        optional=COSTS,
    )
    table = checks.rows
    known, repeats = [w.id for w in protocol.workloads], range(1, protocol.repeats + 1)
    checks.require_protocol(protocol)
    checks.require_one_of("workload", known, "the protocol has no such workload")
    checks.require_one_of("repeat", repeats, f"the repeat is not one of 1 to {protocol.repeats}")
    checks.require_one_of("side", SIDES, "the side is neither native nor candidate")
    checks.require(table["allocation"] != "", "the allocation is not named")
    checks.require_one_of("position", (1, 2), "the position in the pair is neither 1 nor 2")
    checks.require_finite(windows, positive=True)
    checks.require_finite(["warmup_updates"])
    checks.require_finite(["window_updates"], positive=True)
    for column in ("warmup_updates", "window_updates"):
        checks.require(~(table[column] % 1 > 0), f"{column} is not a whole number")
    checks.require(
        ~(table["warmup_updates"] < protocol.warmup_updates),
        f"fewer than {protocol.warmup_updates} warm-up updates",
    )
    least = protocol.window_seconds - protocol.threshold_rounding
    checks.require(
        ~(table[windows] < least).any(axis=1),
        f"a window is shorter than {protocol.window_seconds:g} seconds",
    )
    _require_no_more_windows(rows, checks, protocol)
    checks.require_unique(["workload", "repeat", "side"])
    _require_matched_sides(checks)
    _require_own_allocations(checks)
    _require_alternating_order(checks)
    measured = set(zip(table["workload"], table["repeat"], table["side"], strict=True))
    findings.add_any(
        Verdict.INCOMPLETE,
        "missing",
        (
            f"{workload} repeat {repeat} side {side}"
            for workload, repeat, side in product(known, repeats, SIDES)
            if (workload, repeat, side) not in measured
        ),
    )
    return checks


def _require_no_more_windows(
    rows: pd.DataFrame | None, checks: RowChecks, protocol: Protocol
) -> None:
    """More windows than the protocol has would leave a choice."""
    if rows is None or checks.rows.empty:
        return
    for place, name in enumerate(map(str, rows.columns)):
        match = re.fullmatch(r"window_(\d+)_seconds", name)
        if match and not 1 <= int(match[1]) <= protocol.windows:
            checks.require(
                rows.iloc[:, place].reset_index(drop=True).isna(),
                f"{name}: the protocol has {protocol.windows} windows",
            )


def _require_matched_sides(checks: RowChecks) -> None:
    """Both sides of a pair: one allocation, one after the other, over the same updates."""
    pairs = checks.rows.groupby(["workload", "repeat"])

    def same(column: str) -> pd.Series:
        return pairs[column].transform("nunique") <= 1

    checks.require(same("allocation"), "the sides of the pair ran in different allocations")
    checks.require(same("warmup_updates"), "the sides have unequal numbers of warm-up updates")
    checks.require(same("window_updates"), "the sides have unequal numbers of updates per window")
    shared = checks.rows.duplicated(["workload", "repeat", "position"], keep=False)
    checks.require(~shared | ~checks.good, "both sides claim the same position in the pair's order")


def _require_own_allocations(checks: RowChecks) -> None:
    """No two repeats of a workload may share an allocation."""
    groups = checks.rows.groupby(["workload", "allocation"])
    alone = groups["repeat"].transform("nunique") <= 1
    named = checks.rows["allocation"] != ""
    checks.require(alone | ~named, "another repeat of the workload ran in the same allocation")


def _require_alternating_order(checks: RowChecks) -> None:
    """The side that goes first in one repeat of a workload goes second in the next."""
    first = checks.rows[checks.good & (checks.rows["position"] == 1)]
    for workload, group in first.groupby("workload"):
        by_repeat = dict(zip(group["repeat"], group["side"], strict=True))
        for repeat, side in by_repeat.items():
            if by_repeat.get(repeat - 1) == side:
                here = (checks.rows["workload"] == workload) & (checks.rows["repeat"] == repeat)
                checks.require(
                    ~here,
                    "the order does not alternate: the same side went first as in the "
                    "repeat before",
                )


def _ratios(checks: RowChecks, protocol: Protocol) -> pd.DataFrame:
    """Speed of both sides of every pair, and candidate/native; NaN where it does not count."""
    windows = window_columns(protocol)
    speeds: dict[tuple[str, float, str], float] = {}
    for row in checks.counted().to_dict("records"):
        tokens = protocol.workload(row["workload"]).update_tokens * row["window_updates"]
        seconds = np.array([row[name] for name in windows])
        key = (row["workload"], row["repeat"], row["side"])
        speeds[key] = float(np.median(tokens / seconds))
    records = []
    for workload in protocol.workloads:
        for repeat in range(1, protocol.repeats + 1):
            native, candidate = (speeds.get((workload.id, repeat, side), np.nan) for side in SIDES)
            records.append(
                {
                    "workload": workload.id,
                    "kind": workload.kind,
                    "category": workload.mode,
                    "repeat": repeat,
                    "native_tokens_per_second": native,
                    "candidate_tokens_per_second": candidate,
                    "ratio": candidate / native,
                }
            )
    return pd.DataFrame(records)


def _judged(
    ratios: pd.DataFrame, protocol: Protocol, findings: Findings, kind: str, by: str, least: float
) -> pd.DataFrame:
    """Median ratio of each group of a kind's workloads in each repeat, with the group's verdict."""
    records = []
    for name, mine in ratios[ratios["kind"] == kind].groupby(by, sort=False):
        cells, verdicts = {}, []
        for repeat, group in mine.groupby("repeat"):
            median = float(group["ratio"].median())  # over what is there
            cells[f"repeat_{repeat}"] = median
            if group["ratio"].isna().any():
                verdicts.append(Verdict.INCOMPLETE)
            elif at_least(median, least, protocol):
                verdicts.append(Verdict.PASS)
            else:
                verdicts.append(Verdict.NOT_QUALIFIED)
                place = f"{name} repeat {repeat} ({median:.6g})"
                problem = f"{_SCORES[kind]} is below {least:g}"
                findings.add(Verdict.NOT_QUALIFIED, problem, [place])
        measured = int(mine["ratio"].notna().sum())
        records.append({by: name, **cells, "measured": measured, "gate": worst(verdicts).value})
    return pd.DataFrame(records)


def _costs(rows: pd.DataFrame, protocol: Protocol) -> pd.DataFrame:
    """Median of each cost that was recorded, per kind, category and side."""
    present = [name for name in COSTS if name in rows.columns]
    if not present:
        return pd.DataFrame()
    workloads: dict[str, Workload] = {w.id: w for w in protocol.workloads}
    known = rows[rows["workload"].isin(list(workloads)) & rows["side"].isin(SIDES)]
    table = known[present].apply(pd.to_numeric, errors="coerce")
    table.insert(0, "kind", known["workload"].map(lambda name: workloads[name].kind))
    table.insert(1, "category", known["workload"].map(lambda name: workloads[name].mode))
    table.insert(2, "side", known["side"])
    return table.groupby(["kind", "category", "side"], sort=False, as_index=False).median()
