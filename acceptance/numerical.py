"""The numerical gate: whether a candidate makes the same updates as native.

The table has a row per workload, comparison, update and worker, as ``compare_traces`` makes them:

=======================  ========================================================================
workload                 id of the protocol's workload
comparison               ``candidate/native``, or ``native/native`` for the control: two executors
                         that were built independently, with the same code
update                   0 for the first
worker                   0 for the first
reference_loss, loss     of a, always native, and of b, in nats
gradients, parameters,   relative L2 of b against a over all parameters of the worker
updates, exp_avg,
exp_avg_sq
before                   the same for the parameters before the update; at update 0, whether both
                         started from one state
reference_rows_sha256,   hashes of the input rows of a and b
rows_sha256
protocol                 hash of the protocol
=======================  ========================================================================

Controls show how far native is from itself; they must be there, and no limit applies to them.
"""

import numpy as np
import pandas as pd

from tinyllm.acceptance.gates import Findings, GateResult, RowChecks, Verdict, below, conclude
from tinyllm.acceptance.protocol import PROTOCOL_1, Protocol
from tinyllm.acceptance.traces import QUANTITIES

COMPARISONS = ("candidate/native", "native/native")
"""The comparison that is gated, and its control."""

_KEY = ["workload", "comparison", "update", "worker"]
_HASHES = ["reference_rows_sha256", "rows_sha256"]
NUMERICAL_COLUMNS = [*_KEY, "reference_loss", "loss", *QUANTITIES, "before", *_HASHES, "protocol"]
"""Names of all columns that the gate needs."""


def numerical_gate(rows: pd.DataFrame | None, protocol: Protocol = PROTOCOL_1) -> GateResult:
    """Decides whether a candidate's updates are native's, up to rounding.

    Losses: ``|a − b| ≤ loss_atol + loss_rtol · |a|``. Relative L2 of gradients, parameters and
    updates: strictly below the protocol's limits, for each worker and update. Moments are shown.

    Args:
        rows: The table that the module describes, in any order of rows.
        protocol: What was to be compared.

    Returns:
        The verdict, with the tables ``worst`` (over all cases) and ``cases``.
    """
    findings = Findings()
    checks = _checked(rows, protocol, findings)
    counted = checks.counted().copy()
    allowed = protocol.loss_atol + protocol.loss_rtol * counted["reference_loss"].abs()
    counted["loss_difference"] = (counted["loss"] - counted["reference_loss"]).abs()
    counted["loss_share"] = counted["loss_difference"] / allowed
    limits = _limits(protocol)
    failing = _beyond_limits(counted, limits, protocol)
    for quantity, label in failing:
        bound = f"reaches {limits[quantity]:g}" if quantity in limits else "exceeds its tolerance"
        what = f"relative L2 of {quantity}" if quantity in limits else "the loss difference"
        findings.add(Verdict.NOT_QUALIFIED, f"{what} {bound}", [label])
    cases = _cases(counted, {label.partition(" update ")[0] for _, label in failing}, protocol)
    tables = {"worst": _worst(counted, protocol), "cases": cases}
    return conclude("numerical", findings, tables)


def _limits(protocol: Protocol) -> dict[str, float]:
    return {
        "gradients": protocol.gradients_limit,
        "parameters": protocol.parameters_limit,
        "updates": protocol.updates_limit,
    }


def _checked(rows: pd.DataFrame | None, protocol: Protocol, findings: Findings) -> RowChecks:
    """The table with all that can be said about rows without the limits said."""
    checks = RowChecks(
        rows,
        text=["workload", "comparison", *_HASHES, "protocol"],
        numbers=["update", "worker", "reference_loss", "loss", *QUANTITIES, "before"],
        label=_KEY,
        findings=findings,
    )
    table = checks.rows
    workers = {workload.id: workload.workers for workload in protocol.workloads}
    checks.require_protocol(protocol)
    checks.require_one_of("workload", workers, "the protocol has no such workload")
    checks.require_one_of("comparison", COMPARISONS, f"the comparison is none of {COMPARISONS}")
    last = protocol.numerical_updates - 1
    checks.require_one_of("update", range(last + 1), f"the update is not one of 0 to {last}")
    numbered = table["worker"] % 1 == 0
    most = table["workload"].map(workers).fillna(np.inf)
    exists = numbered & (table["worker"] >= 0) & (table["worker"] < most)
    checks.require(exists, "the workload has no such worker")
    checks.require_unique(_KEY)
    matched = (table["rows_sha256"] != "") & (table["rows_sha256"] == table[_HASHES[0]])
    checks.require(matched, "the two sides had different input rows, so they were not compared")
    inputs = table[table[_HASHES[0]] != ""].groupby(["workload", "update"])[_HASHES[0]]
    alike = (inputs.transform("nunique") <= 1).reindex(table.index, fill_value=True)
    checks.require(alike, "native had other input rows in another comparison of this update")
    checks.require_finite(
        ["reference_loss", "loss", *QUANTITIES, "before"], among=matched.astype(bool)
    )
    apart = table["before"] > protocol.initial_state_limit + protocol.threshold_rounding
    checks.require(
        ~((table["update"] == 0) & apart), "the two sides did not start from one initial state"
    )
    measured = set(zip(*(table[name] for name in _KEY), strict=True))
    findings.add_any(
        Verdict.INCOMPLETE,
        "missing",
        (
            f"{workload} comparison {comparison} update {update} worker {worker}"
            for workload in workers
            for comparison in COMPARISONS
            for update in range(protocol.numerical_updates)
            for worker in range(workers[workload])
            if (workload, comparison, update, worker) not in measured
        ),
    )
    return checks


def _beyond_limits(
    counted: pd.DataFrame, limits: dict[str, float], protocol: Protocol
) -> list[tuple[str, str]]:
    """Quantity and label of each candidate row that breaks a limit."""
    candidates = counted[counted["comparison"] == COMPARISONS[0]]
    found = []
    for row in candidates.to_dict("records"):
        label = f"{row['workload']} update {row['update']:.0f} worker {row['worker']:.0f}"
        for quantity, limit in limits.items():
            if not below(row[quantity], limit, protocol):
                found.append((quantity, f"{label} ({row[quantity]:.4g})"))
        allowed = protocol.loss_atol + protocol.loss_rtol * abs(row["reference_loss"])
        if not row["loss_difference"] <= allowed + protocol.threshold_rounding:
            found.append(("loss", f"{label} ({row['loss_difference']:.4g} of {allowed:.4g})"))
    return found


def _worst(counted: pd.DataFrame, protocol: Protocol) -> pd.DataFrame:
    """The largest distance of each quantity over all cases, beside its control and its limit."""
    limits = _limits(protocol) | {"loss difference / tolerance": 1.0}
    columns = {
        "parameters": ["parameters"],
        "gradients": ["gradients"],
        "updates": ["updates"],
        "moments": ["exp_avg", "exp_avg_sq"],
        "loss difference / tolerance": ["loss_share"],
    }
    return pd.DataFrame(
        [
            {
                "quantity": quantity,
                **{
                    comparison: counted.loc[counted["comparison"] == comparison, names].max().max()
                    for comparison in COMPARISONS
                },
                "limit": limits.get(quantity, np.nan),
            }
            for quantity, names in columns.items()
        ]
    )


def _cases(counted: pd.DataFrame, failing: set[str], protocol: Protocol) -> pd.DataFrame:
    """The largest distance of each quantity per case and comparison, with the case's verdict.

    ``measured`` is how many rows it is over: one for each update and worker where none is missing.
    """
    quantities = ["loss_difference", *QUANTITIES]
    largest = counted.groupby(["workload", "comparison"])[quantities].max()
    found = {key: row.to_dict() for key, row in largest.iterrows()}
    sizes = counted.groupby(["workload", "comparison"]).size()
    records = []
    for workload in protocol.workloads:
        complete = workload.workers * protocol.numerical_updates
        for comparison in COMPARISONS:
            key = (workload.id, comparison)
            measured = int(sizes.get(key, 0))
            if comparison != COMPARISONS[0]:
                gate = "control"
            elif workload.id in failing:
                gate = Verdict.NOT_QUALIFIED.value
            else:
                gate = (Verdict.PASS if measured == complete else Verdict.INCOMPLETE).value
            values = found.get(key, dict.fromkeys(quantities, np.nan))
            case = {"workload": workload.id, "comparison": comparison, **values}
            records.append(case | {"measured": measured, "gate": gate})
    return pd.DataFrame(records)
