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
