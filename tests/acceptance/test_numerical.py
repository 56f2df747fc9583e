"""The numerical gate: limits, controls, and every way a table can be wrong."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from campaign_tables import SMALL, numerical_rows, put

from tinyllm.acceptance import PROTOCOL_1, PROTOCOL_2, numerical_gate

# 20m-sync-b4-c512-clip1 is first, with one worker: rows 0 to 4 its candidate, 5 to 9 its control.
FIRST = "20m-sync-b4-c512-clip1 comparison candidate/native update 0 worker 0"


def test_published_distances_pass_version_1() -> None:
    rows = numerical_rows(
        PROTOCOL_1,
        parameters=6.48e-05,
        gradients=0.00575,
        updates=0.0778,
        exp_avg=0.00515,
        exp_avg_sq=0.00515,
    )
    result = numerical_gate(rows, PROTOCOL_1)
    assert result.verdict == "pass"
    assert result.messages == ()
    worst = result.tables["worst"].set_index("quantity")
    assert worst["candidate/native"].to_dict() == pytest.approx(
        {
            "parameters": 6.48e-05,
            "gradients": 0.00575,
            "updates": 0.0778,
            "moments": 0.00515,
            "loss difference / tolerance": 0.001 / 0.022,
        }
    )
    assert worst.loc["gradients", "native/native"] == pytest.approx(0.00575 / 2)
    assert len(result.tables["cases"]) == 2 * 117


def test_a_csv_changes_nothing(tmp_path: Path) -> None:
    numerical_rows().sample(frac=1, random_state=0).to_csv(tmp_path / "numerical.csv", index=False)
    assert numerical_gate(pd.read_csv(tmp_path / "numerical.csv"), SMALL).verdict == "pass"


@pytest.mark.parametrize(
    ("column", "value", "verdict"),
    [
        ("gradients", 0.05, "not_qualified"),  # strictly below, so at the limit is too far
        ("gradients", 0.0499999, "pass"),
        ("parameters", 0.02, "not_qualified"),
        ("parameters", 0.0199999, "pass"),
        ("updates", 0.10, "not_qualified"),
        ("updates", 0.0999999, "pass"),
        ("exp_avg", 0.9, "pass"),  # shown, without a limit
        ("exp_avg_sq", 0.9, "pass"),
        ("loss", 10.022, "pass"),  # 0.002 + 0.002 · 10, and at it is within
        ("loss", 9.978, "pass"),
        ("loss", 10.0220001, "not_qualified"),
        ("loss", 9.9779999, "not_qualified"),
    ],
)
def test_at_and_beside_the_limits(column: str, value: float, verdict: str) -> None:
    result = numerical_gate(put(3, column, value)(numerical_rows()), SMALL)
    assert result.verdict == verdict
    if verdict == "not_qualified":
        (message,) = result.messages
        assert column in message
        assert "20m-sync-b4-c512-clip1 update 3 worker 0" in message
        cases = result.tables["cases"]
        assert list(cases["gate"][:2]) == ["not_qualified", "control"]
        assert set(cases["gate"][2::2]) == {"pass"}


def test_the_tolerance_is_relative_to_natives_loss() -> None:
    rows = numerical_rows()
    rows.loc[0, ["reference_loss", "loss"]] = [10.0, 10.0220000001]
    assert numerical_gate(rows, SMALL).verdict == "not_qualified"
    rows.loc[0, ["reference_loss", "loss"]] = [10.0220000001, 10.0]
    assert numerical_gate(rows, SMALL).verdict == "pass"


def test_every_worker_and_update_is_gated() -> None:
    rows = numerical_rows()
    candidates = rows.index[rows["comparison"] == "candidate/native"]
    for place in candidates:
        changed = put(place, "updates", 0.2)(rows.copy())
        assert numerical_gate(changed, SMALL).verdict == "not_qualified"


def test_controls_have_no_limit() -> None:
    result = numerical_gate(put(5, "gradients", 0.5)(numerical_rows()), SMALL)
    assert result.verdict == "pass"
    worst = result.tables["worst"].set_index("quantity")
    assert worst.loc["gradients", "native/native"] == 0.5


WRONG: dict[str, tuple[Callable[[pd.DataFrame], Any], str, str]] = {
    "no table": (lambda rows: None, "incomplete", "there are no rows"),
    "no rows": (lambda rows: rows[:0], "incomplete", "there are no rows"),
    "missing row": (lambda rows: rows.drop(0), "incomplete", f"missing: {FIRST}"),
    "four updates": (
        lambda rows: rows[rows["update"] < 4],
        "incomplete",
        "missing: 20m-sync-b4-c512-clip1 comparison candidate/native update 4 worker 0",
    ),
    "missing worker": (
        lambda rows: rows[rows["worker"] < 3],
        "incomplete",
        "missing: 20m-packed4-b4-c512-clip1 comparison candidate/native update 0 worker 3",
    ),
    "missing controls": (
        lambda rows: rows[rows["comparison"] == "candidate/native"],
        "incomplete",
        "missing: 20m-sync-b4-c512-clip1 comparison native/native update 0 worker 0",
    ),
    "duplicate row": (
        lambda rows: pd.concat([rows, rows[:1]]),
        "failed",
        f"more than one row: {FIRST}",
    ),
    "NaN gradients": (put(0, "gradients", np.nan), "failed", "gradients is not a finite number"),
    "infinite updates": (put(0, "updates", np.inf), "failed", "updates is not a finite number"),
    "negative": (put(0, "parameters", -1.0), "failed", "parameters is not a finite number"),
    "NaN moment": (put(0, "exp_avg_sq", np.nan), "failed", "exp_avg_sq is not a finite number"),
    "NaN loss": (
        put(0, "loss", np.nan),
        "failed",
        f"loss is not a finite number of at least 0: {FIRST}",
    ),
    "NaN loss of native": (put(0, "reference_loss", np.nan), "failed", "reference_loss is not"),
    "NaN control": (put(5, "gradients", np.nan), "failed", "comparison native/native update 0"),
    "wrong protocol": (
        put(0, "protocol", PROTOCOL_2.hash),
        "failed",
        f"measured under protocol {PROTOCOL_2.hash[:12]}",
    ),
    "unknown workload": (put(0, "workload", "x"), "failed", "no such workload: x comparison"),
    "unknown comparison": (put(0, "comparison", "x"), "failed", "the comparison is none of"),
    "a sixth update": (put(4, "update", 5), "failed", "the update is not one of 0 to 4"),
    "unknown worker": (put(0, "worker", 1), "failed", "the workload has no such worker"),
    "half a worker": (put(0, "worker", 0.5), "failed", "the workload has no such worker"),
    "different rows": (
        put(0, "rows_sha256", "other"),
        "failed",
        f"the two sides had different input rows, so they were not compared: {FIRST}",
    ),
    "no hash": (
        put(0, ["reference_rows_sha256", "rows_sha256"], None),
        "failed",
        "the two sides had different input rows",
    ),
    "a control on other rows": (
        lambda rows: put(5, "rows_sha256", "x")(put(5, "reference_rows_sha256", "x")(rows)),
        "failed",
        "native had other input rows in another comparison of this update",
    ),
    "two initial states": (
        put(0, "before", 2e-6),
        "failed",
        f"the two sides did not start from one initial state: {FIRST}",
    ),
    "missing column": (
        lambda rows: rows.drop(columns=["before"]),
        "failed",
        "the table lacks columns: before",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_tables_never_pass_and_say_why(name: str) -> None:
    change, verdict, message = WRONG[name]
    result = numerical_gate(change(numerical_rows()), SMALL)
    assert result.verdict == verdict
    assert any(message in found for found in result.messages), result.messages


def test_rows_that_were_not_compared_are_not_called_nan() -> None:
    rows = put(0, "rows_sha256", "other")(numerical_rows())
    rows.loc[0, ["gradients", "loss", "before"]] = np.nan
    (message,) = numerical_gate(rows, SMALL).messages
    assert "different input rows" in message


def test_states_may_drift_after_the_first_update() -> None:
    assert numerical_gate(put(1, "before", 1e-3)(numerical_rows()), SMALL).verdict == "pass"
    assert numerical_gate(put(0, "before", 1e-6)(numerical_rows()), SMALL).verdict == "pass"
