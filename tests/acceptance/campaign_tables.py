"""Tables of a complete campaign on a small protocol, to break in one place at a time."""

from collections.abc import Callable
from dataclasses import replace

import pandas as pd

from tinyllm.acceptance import PROTOCOL_1, Protocol

SELECTED = (
    "20m-sync-b4-c512-clip1",
    "20m-sync-b8-c512-clipoff",
    "20m-sync-b4-c1024-clip1",
    "20m-packed4-b4-c512-clip1",
    "20m-sync-production",
    "20m-packed4-awc-production",
    "20m-accumulate-b11-m4",
)
SMALL = replace(
    PROTOCOL_1,
    version=0,
    workloads=tuple(PROTOCOL_1.workload(name) for name in SELECTED),
    recipes=PROTOCOL_1.recipes[:2],
)
"""Version 1 with seven workloads and two recipes."""


def performance_rows(
    protocol: Protocol = SMALL, ratio: Callable[[str, int], float] = lambda workload, repeat: 1.1
) -> pd.DataFrame:
    """A performance table in which candidate/native is as given, and all else is in order."""
    spread = [0.9, 1.1, 1.0, 1.3, 0.95]  # its median is 1
    rows = []
    for pair in protocol.pairs():
        for side in pair.order:
            seconds = 4.0 if side == "candidate" else 4.0 * ratio(pair.workload, pair.repeat)
            rows.append(
                {
                    "workload": pair.workload,
                    "repeat": pair.repeat,
                    "side": side,
                    "allocation": f"job-{pair.repeat}",
                    "position": pair.order.index(side) + 1,
                    "warmup_updates": 20,
                    "window_updates": 50,
                    **{f"window_{k}_seconds": seconds * w for k, w in enumerate(spread, 1)},
                    "protocol": protocol.hash,
                }
            )
    return pd.DataFrame(rows)


def numerical_rows(protocol: Protocol = SMALL, **values: float) -> pd.DataFrame:
    """A numerical table of candidates and controls, well within all limits unless values say so.

    Values are for the candidates; controls are half as far from native.
    """
    far = {
        "gradients": 0.006,
        "parameters": 6e-5,
        "updates": 0.08,
        "exp_avg": 0.005,
        "exp_avg_sq": 0.004,
        "before": 0.0,
    } | values
    rows = [
        {
            "workload": workload.id,
            "comparison": comparison,
            "update": update,
            "worker": worker,
            "reference_loss": 10.0,
            "loss": 10.001,
            **{name: value * share for name, value in far.items()},
            "reference_rows_sha256": f"{workload.id}-{update}",
            "rows_sha256": f"{workload.id}-{update}",
            "protocol": protocol.hash,
        }
        for workload in protocol.workloads
        for comparison, share in (("candidate/native", 1.0), ("native/native", 0.5))
        for update in range(protocol.numerical_updates)
        for worker in range(workload.workers)
    ]
    return pd.DataFrame(rows)


def put(
    place: object, column: str | list[str], value: object
) -> Callable[[pd.DataFrame], pd.DataFrame]:
    """A change of a table: a value at one or more rows of a column."""

    def change(rows: pd.DataFrame) -> pd.DataFrame:
        for name in [column] if isinstance(column, str) else column:
            rows[name] = rows[name].astype(object) if name in rows else None
        rows.loc[place, column] = value  # type: ignore[index]
        return rows

    return change


PUBLISHED_DIFFERENCES = {
    "sync-production": (0.006872257872510001, -0.003859072079784198, 0.002927528688834169),
    "packed4-production": (0.0018901700874307537, -0.00875033936641012, -0.012953424322820872),
    "packed8-production": (0.000810526952166768, -0.0009985343943714753, 0.0038015016456585116),
    "sync-b16-c512": (-0.0001299126787577265, 0.0010886194255017578, -0.00008321164745339615),
    "packed4-b32-c512": (0.002188230232901489, 0.0038082138778436914, 0.0006378337275307899),
}
"""Candidate minus native, by recipe, for seeds 45, 46 and 47."""


def convergence_rows(
    protocol: Protocol = SMALL,
    difference: Callable[[str, int], float] = lambda recipe, seed: 0.0001 * (seed - 46),
    native: float | dict[str, float] = 3.5,
) -> pd.DataFrame:
    """A convergence table in which candidate − native is as given, and all else is in order."""
    tokens = {
        r.id: -(-r.budget_tokens // r.update_tokens) * r.update_tokens for r in protocol.recipes
    }
    return pd.DataFrame(
        [
            {
                "recipe": run.recipe,
                "seed": run.seed,
                "side": side,
                "final_loss": (native[run.recipe] if isinstance(native, dict) else native)
                + (difference(run.recipe, run.seed) if side == "candidate" else 0.0),
                "train_tokens": tokens[run.recipe],
                "validation_tokens": 1_000_003,
                "protocol": protocol.hash,
            }
            for run in protocol.convergence_runs()
            for side in ("native", "candidate")
        ]
    )
