"""The performance gate: published rows, thresholds, and every way a table can be wrong."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from campaign_tables import SMALL, performance_rows, put

from tinyllm.acceptance import PROTOCOL_1, PROTOCOL_2, GateResult, Verdict, performance_gate

PUBLISHED = {
    "sync": (1.837, 1.946, 1.726),
    "packed4": (1.063, 1.087, 1.085),
    "packed8": (1.057, 1.047, 1.055),
}


def published_ratio(workload_id: str, repeat: int) -> float:
    """The published median, with workloads of a category spread evenly around it."""
    workload = PROTOCOL_1.workload(workload_id)
    if workload.kind != "small-batch":
        return 1.0
    median = PUBLISHED[workload.mode][repeat - 1]
    alike = [w.id for w in PROTOCOL_1.workloads if w.kind == workload.kind]
    alike = [name for name in alike if f"-{workload.mode}-" in name]
    place = alike.index(workload_id)
    return median + 0.01 * (place - (len(alike) - 1) / 2)


def test_published_categories() -> None:
    result = performance_gate(performance_rows(PROTOCOL_1, published_ratio))
    table = result.tables["small_batch"].set_index("category")
    for category, medians in PUBLISHED.items():
        found = table.loc[category, ["repeat_1", "repeat_2", "repeat_3"]]
        assert list(found) == pytest.approx(medians, abs=1e-9)
        assert table.loc[category, "measured"] == 108
    assert table["gate"].to_dict() == {
        "sync": "pass",
        "packed4": "pass",
        "packed8": "not_qualified",
    }
    assert set(result.tables["production"]["gate"]) == {"pass"}
    assert result.verdict == Verdict.NOT_QUALIFIED
    (message,) = result.messages
    assert "below 1.05: packed8 repeat 2 (1.047)" in message


def test_a_complete_fast_campaign_passes() -> None:
    result = performance_gate(performance_rows(), SMALL)
    assert result.verdict == Verdict.PASS
    assert result.messages == ()
    assert result.tables["ratios"]["ratio"].to_numpy() == pytest.approx(1.1)


def test_the_order_of_rows_and_what_a_csv_does_to_types_change_nothing(tmp_path: Any) -> None:
    rows = performance_rows().sample(frac=1, random_state=0)
    rows.to_csv(tmp_path / "performance.csv", index=False)
    assert performance_gate(pd.read_csv(tmp_path / "performance.csv"), SMALL).verdict == "pass"
    as_text = pd.read_csv(tmp_path / "performance.csv", dtype=str)
    assert performance_gate(as_text, SMALL).verdict == "pass"


def test_scores_are_medians_of_targets_per_second() -> None:
    ratios = performance_gate(performance_rows(), SMALL).tables["ratios"]
    row = ratios[(ratios["workload"] == "20m-packed4-b4-c512-clip1") & (ratios["repeat"] == 2)]
    assert row["candidate_tokens_per_second"].item() == pytest.approx(50 * 4 * 4 * 512 / 4.0)
    assert row["native_tokens_per_second"].item() == pytest.approx(50 * 4 * 4 * 512 / 4.4)


def test_each_repeat_needs_its_own_median() -> None:
    def ratio(workload: str, repeat: int) -> float:
        return 1.04 if "-sync-b" in workload and repeat == 3 else 2.0

    result = performance_gate(performance_rows(ratio=ratio), SMALL)
    assert result.verdict == Verdict.NOT_QUALIFIED
    assert "sync repeat 3 (1.04)" in result.messages[0]


def test_a_slow_workload_of_a_fast_category_passes() -> None:
    def ratio(workload: str, repeat: int) -> float:
        return 0.7 if workload == "20m-sync-b4-c512-clip1" else 1.06

    assert performance_gate(performance_rows(ratio=ratio), SMALL).verdict == "pass"


def test_accumulation_is_shown_and_not_gated() -> None:
    def ratio(workload: str, repeat: int) -> float:
        return 0.5 if "accumulate" in workload else 1.06

    result = performance_gate(performance_rows(ratio=ratio), SMALL)
    assert result.verdict == Verdict.PASS
    assert 0.5 in result.tables["ratios"]["ratio"].round(9).to_numpy()


@pytest.mark.parametrize(
    ("small_batch", "production", "verdict"),
    [
        (1.05, 0.98, "pass"),  # exactly at both
        (1.0499999, 0.98, "not_qualified"),
        (1.05, 0.9799999, "not_qualified"),
    ],
)
def test_at_and_below_the_thresholds(small_batch: float, production: float, verdict: str) -> None:
    def ratio(workload: str, repeat: int) -> float:
        return small_batch if "-b" in workload else production

    result = performance_gate(performance_rows(ratio=ratio), SMALL)
    assert result.verdict == verdict
    assert bool(result.messages) == (verdict != "pass")


def test_one_slow_production_repeat_blocks() -> None:
    def ratio(workload: str, repeat: int) -> float:
        return 0.97 if (workload, repeat) == ("20m-sync-production", 2) else 1.2

    result = performance_gate(performance_rows(ratio=ratio), SMALL)
    assert result.verdict == Verdict.NOT_QUALIFIED
    assert result.messages == (
        "production: the ratio is below 0.98: 20m-sync-production repeat 2 (0.97)",
    )


# Wrong tables. Row 0 is the first workload's repeat 1, native, row 1 its candidate; the same
# workload's repeat 2 is at 14 and 15, and its repeat 3 at 28 and 29.


def swapped(rows: pd.DataFrame) -> pd.DataFrame:
    rows.loc[[14, 15], "position"] = [2, 1]
    return rows


def costs(rows: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame({"startup_seconds": 1.0}, index=rows.index)


def sixth(rows: pd.DataFrame, seconds: float) -> pd.DataFrame:
    return pd.DataFrame({"window_6_seconds": seconds}, index=rows.index)


FIRST = "20m-sync-b4-c512-clip1 repeat 1"
NATIVE, CANDIDATE = f"{FIRST} side native", f"{FIRST} side candidate"
WRONG: dict[str, tuple[Callable[[pd.DataFrame], Any], str, str]] = {
    "no table": (lambda rows: None, "incomplete", "there are no rows"),
    "no rows": (lambda rows: rows[:0], "incomplete", "there are no rows"),
    "missing row": (lambda rows: rows.drop(0), "incomplete", f"missing: {NATIVE}"),
    "missing pair": (
        lambda rows: rows.drop([0, 1]),
        "incomplete",
        f"missing: {NATIVE}, {CANDIDATE}",
    ),
    "missing repeat": (
        lambda rows: rows[rows["repeat"] < 3],
        "incomplete",
        "missing: 20m-sync-b4-c512-clip1 repeat 3 side native",
    ),
    "duplicate row": (
        lambda rows: pd.concat([rows, rows[:1]]),
        "failed",
        f"more than one row: {NATIVE}",
    ),
    "NaN": (
        put(1, "window_3_seconds", np.nan),
        "failed",
        f"window_3_seconds is not a finite number above 0: {CANDIDATE}",
    ),
    "infinite": (put(0, "window_1_seconds", np.inf), "failed", "window_1_seconds is not a finite"),
    "zero": (put(0, "window_1_seconds", 0.0), "failed", "window_1_seconds is not a finite"),
    "negative": (put(0, "window_1_seconds", -2.0), "failed", "window_1_seconds is not a finite"),
    "not a number": (put(0, "window_2_seconds", "fast"), "failed", "window_2_seconds is not a"),
    "short window": (
        put(0, "window_5_seconds", 0.999),
        "failed",
        f"a window is shorter than 1 seconds: {NATIVE}",
    ),
    "a sixth window": (put(0, "window_6_seconds", 2.0), "failed", "the protocol has 5 windows"),
    "wrong protocol": (
        put(0, "protocol", PROTOCOL_2.hash),
        "failed",
        f"measured under protocol {PROTOCOL_2.hash[:12]}, not under version 0",
    ),
    "no protocol": (put(0, "protocol", None), "failed", "measured under protocol (none)"),
    "wrong repeat": (
        put([28, 29], "repeat", 4),
        "failed",
        "the repeat is not one of 1 to 3: 20m-sync-b4-c512-clip1 repeat 4",
    ),
    "half a repeat": (put(0, "repeat", 1.5), "failed", "repeat 1.5 side native"),
    "unknown workload": (
        put([0, 1], "workload", "20m-other"),
        "failed",
        "the protocol has no such workload: 20m-other repeat 1",
    ),
    "unknown side": (put(0, "side", "gh200"), "failed", "neither native nor candidate"),
    "same allocation for two repeats": (
        put([14, 15], "allocation", "job-1"),
        "failed",
        f"another repeat of the workload ran in the same allocation: {NATIVE}",
    ),
    "a pair in two allocations": (
        put(1, "allocation", "job-9"),
        "failed",
        f"the sides of the pair ran in different allocations: {NATIVE}, {CANDIDATE}",
    ),
    "no allocation": (put(0, "allocation", None), "failed", "the allocation is not named"),
    "out of order": (
        swapped,
        "failed",
        "the order does not alternate: the same side went first as in the repeat before: "
        "20m-sync-b4-c512-clip1 repeat 2",
    ),
    "one position twice": (
        put(1, "position", 1),
        "failed",
        "both sides claim the same position in the pair's order",
    ),
    "no position": (put(1, "position", 3), "failed", "position in the pair is neither 1 nor 2"),
    "unequal updates": (
        put(1, "window_updates", 51),
        "failed",
        f"the sides have unequal numbers of updates per window: {NATIVE}, {CANDIDATE}",
    ),
    "no updates": (put(1, "window_updates", 0), "failed", "window_updates is not a finite"),
    "half an update": (put([0, 1], "window_updates", 50.5), "failed", "not a whole number"),
    "unequal warm-up": (
        put(1, "warmup_updates", 21),
        "failed",
        "the sides have unequal numbers of warm-up updates",
    ),
    "short warm-up": (
        put([0, 1], "warmup_updates", 19),
        "failed",
        f"fewer than 20 warm-up updates: {NATIVE}, {CANDIDATE}",
    ),
    "missing column": (
        lambda rows: rows.drop(columns=["position", "allocation"]),
        "failed",
        "the table lacks columns: allocation, position",
    ),
    "doubled column": (
        lambda rows: pd.concat([rows, rows[["repeat"]]], axis=1),
        "failed",
        "the table has columns more than once: repeat",
    ),
    "doubled cost": (
        lambda rows: pd.concat([rows, costs(rows), costs(rows)], axis=1),
        "failed",
        "the table has columns more than once: startup_seconds",
    ),
    "a sixth window twice": (
        lambda rows: pd.concat([rows, sixth(rows, np.nan), sixth(rows, 2.0)], axis=1),
        "failed",
        "the protocol has 5 windows",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_tables_never_pass_and_say_why(name: str) -> None:
    change, verdict, message = WRONG[name]
    result = performance_gate(change(performance_rows()), SMALL)
    assert result.verdict == verdict
    assert any(message in found for found in result.messages), result.messages


def test_a_bad_row_is_not_called_missing() -> None:
    result = performance_gate(put(0, "window_1_seconds", np.nan)(performance_rows()), SMALL)
    assert not any("missing" in message for message in result.messages)
    first = result.tables["ratios"].iloc[0]
    assert np.isnan(first["ratio"])


def test_a_category_with_a_gap_has_no_verdict_of_its_own() -> None:
    result = performance_gate(performance_rows().drop(0), SMALL)
    gates = result.tables["small_batch"].set_index("category")["gate"]
    assert gates.to_dict() == {"sync": "incomplete", "packed4": "pass"}


def test_many_places_become_one_message() -> None:
    rows = performance_rows()
    result = performance_gate(rows[rows["side"] == "native"], SMALL)
    (message,) = result.messages
    assert message.startswith("missing: ")
    assert message.endswith("and 17 more")  # 21 pairs, four of them named


def test_a_protocol_without_gated_workloads_cannot_pass() -> None:
    ungated = replace(SMALL, workloads=SMALL.workloads[-1:])
    result = performance_gate(performance_rows(ungated), ungated)
    assert result.verdict == Verdict.INCOMPLETE
    assert "no workload that is gated" in result.messages[0]


def test_costs_are_summarized() -> None:
    rows = performance_rows()
    rows["startup_seconds"] = np.where(rows["side"] == "native", 30.0, 10.0)
    costs = performance_gate(rows, SMALL).tables["costs"]
    chosen = costs[(costs["kind"] == "production") & (costs["category"] == "sync")]
    assert chosen.set_index("side")["startup_seconds"].to_dict() == {
        "native": 30.0,
        "candidate": 10.0,
    }


def test_results_become_json() -> None:
    import json

    result: GateResult = performance_gate(performance_rows().drop(0), SMALL)
    content = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert content["verdict"] == "incomplete"
    assert content["tables"]["ratios"][0]["ratio"] is None
