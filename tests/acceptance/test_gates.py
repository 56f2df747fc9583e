"""What all gates promise: no cell that is broken, in any column, ever passes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
from campaign_tables import SMALL, convergence_rows, numerical_rows, performance_rows, put

from tinyllm.acceptance import (
    GateResult,
    Protocol,
    Verdict,
    convergence_gate,
    numerical_gate,
    performance_gate,
)
from tinyllm.acceptance.gates import Findings, worst

Gate = Callable[[pd.DataFrame | None, Protocol], GateResult]
GATES: list[tuple[Gate, Callable[[], pd.DataFrame]]] = [
    (performance_gate, performance_rows),
    (numerical_gate, numerical_rows),
    (convergence_gate, convergence_rows),
]
COLUMNS = [(gate, make, column) for gate, make in GATES for column in make().columns]


@pytest.mark.parametrize(
    ("gate", "make", "column"), COLUMNS, ids=[f"{g.__name__}-{c}" for g, _, c in COLUMNS]
)
def test_a_broken_cell_never_passes(
    gate: Gate, make: Callable[[], pd.DataFrame], column: str
) -> None:
    good = make()
    assert gate(good.copy(), SMALL).verdict == "pass"
    broken = [None, "", np.nan]
    if column != "allocation":  # which may have any name
        broken += ["x", np.inf, -np.inf, -1, "1,5"]
    for value in broken:
        for place in (0, len(good) - 1):
            result = gate(put(place, column, value)(good.copy()), SMALL)
            assert result.verdict in ("failed", "incomplete"), (value, place)
            assert result.messages


@pytest.mark.parametrize(("gate", "make"), GATES)
def test_each_row_is_needed_once(gate: Gate, make: Callable[[], pd.DataFrame]) -> None:
    good = make()
    for place in range(0, len(good), 7):
        assert gate(good.drop(place), SMALL).verdict == "incomplete"
        twice = pd.concat([good, good.loc[[place]]])
        assert gate(twice, SMALL).verdict == "failed"


@pytest.mark.parametrize(("gate", "make"), GATES)
def test_a_column_of_nothing_never_passes(gate: Gate, make: Callable[[], pd.DataFrame]) -> None:
    good = make()
    for column in good.columns:
        assert gate(good.assign(**{column: None}), SMALL).verdict in ("failed", "incomplete")
        assert gate(good.drop(columns=column), SMALL).verdict == "failed"


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_numbers_that_overflow_never_pass() -> None:
    endless = performance_rows().assign(window_updates=1e308)  # tokens per second are infinite
    result = performance_gate(endless, SMALL)
    assert result.verdict == "incomplete"
    assert "small_batch: some results are no finite numbers" in result.messages

    huge = convergence_rows(
        difference=lambda recipe, seed: -1e308 + 1e307 * (seed - 46), native=1.5e308
    )
    assert convergence_gate(huge, SMALL).verdict != "pass"


@pytest.mark.parametrize(("gate", "make"), GATES)
def test_the_callers_table_is_left_alone(gate: Gate, make: Callable[[], pd.DataFrame]) -> None:
    rows, before = make(), make()
    gate(rows, SMALL)
    pd.testing.assert_frame_equal(rows, before)


def test_the_gravest_verdict_decides() -> None:
    assert worst([]) == Verdict.PASS
    assert worst([Verdict.PASS, Verdict.NOT_QUALIFIED]) == Verdict.NOT_QUALIFIED
    assert worst([Verdict.INCOMPLETE, Verdict.NOT_QUALIFIED]) == Verdict.INCOMPLETE
    assert worst([Verdict.INCOMPLETE, Verdict.FAILED, Verdict.PASS]) == Verdict.FAILED
    assert [v.value for v in Verdict] == ["pass", "not_qualified", "incomplete", "failed"]


def test_messages_are_grouped_and_the_gravest_is_first() -> None:
    findings = Findings()
    findings.add(Verdict.INCOMPLETE, "missing", ["a", "b"])
    findings.add(Verdict.FAILED, "broken", [str(n) for n in range(9)])
    findings.add(Verdict.INCOMPLETE, "missing", ["c", "a"])
    findings.add_any(Verdict.FAILED, "nowhere", [])
    assert findings.messages == ("broken: 0, 1, 2, 3 and 5 more", "missing: a, b, c")
    assert findings.verdict == Verdict.FAILED


def test_other_columns_are_welcome() -> None:
    extra: dict[str, Any] = {"note": "x", "host": None}
    for gate, make in GATES:
        assert gate(make().assign(**extra), SMALL).verdict == "pass"
