"""The convergence gate: published differences, the margin, power, and wrong tables."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from campaign_tables import PUBLISHED_DIFFERENCES, SMALL, convergence_rows, put

from tinyllm.acceptance import PROTOCOL_1, PROTOCOL_2, convergence_gate

PUBLISHED = {  # native mean, candidate mean, difference, upper bound, verdict, power
    "sync-production": (3.561927, 3.563907, 0.001980, 0.011131, "not_qualified", 0.29),
    "packed4-production": (3.582629, 3.576025, -0.006605, 0.006294, "not_qualified", 0.20),
    "packed8-production": (3.589794, 3.590999, 0.001204, 0.005291, "not_qualified", 0.73),
    "sync-b16-c512": (3.562178, 3.562470, 0.000292, 0.001456, "pass", 1.00),
    "packed4-b32-c512": (3.562264, 3.564476, 0.002211, 0.004884, "pass", 0.95),
}


def published_rows() -> pd.DataFrame:
    return convergence_rows(
        PROTOCOL_1,
        lambda recipe, seed: PUBLISHED_DIFFERENCES[recipe][seed - 45],
        {recipe: values[0] for recipe, values in PUBLISHED.items()},
    )


def test_published_differences_give_the_published_table() -> None:
    result = convergence_gate(published_rows())
    table = result.tables["convergence"].set_index("recipe")
    assert list(table.index) == list(PUBLISHED)
    for recipe, (native, candidate, difference, upper, verdict, _) in PUBLISHED.items():
        found = table.loc[recipe]
        # printed with six decimals, and the candidate's mean is a sum of two such numbers
        assert found["native_mean"] == pytest.approx(native, abs=1e-6)
        assert found["candidate_mean"] == pytest.approx(candidate, abs=1.5e-6)
        assert found["difference"] == pytest.approx(difference, abs=1e-6)
        assert found["upper_bound"] == pytest.approx(upper, abs=1e-6)
        assert found["gate"] == verdict
        assert found["pairs"] == 3
    assert result.verdict == "not_qualified"
    (message,) = result.messages
    assert message == (
        "the upper bound of the difference is not below 0.005 nats: sync-production (0.011131), "
        "packed4-production (0.006294), packed8-production (0.005291)"
    )


def test_version_2_assumes_the_published_spreads() -> None:
    for recipe in PROTOCOL_2.recipes:
        spread = np.std(PUBLISHED_DIFFERENCES[recipe.id], ddof=1)
        assert recipe.assumed_paired_sd is not None
        # rounded up at the third digit
        assert spread <= recipe.assumed_paired_sd < spread * 1.01


def test_power_is_reported_beside_the_verdict() -> None:
    power = convergence_gate(published_rows()).tables["power"].set_index("recipe")
    for recipe, (*_, chance) in PUBLISHED.items():
        assert power.loc[recipe, "equal_candidate_passes"] == pytest.approx(chance, abs=0.01)
    assert list(power["seeds_for_0.9"][:5]) == [12, 22, 4, 3, 3]
    assert set(power["spread_of"][:5]) == {"candidate/native (3 pairs)"}
    each = power["equal_candidate_passes"]
    assert each["all"] == pytest.approx(np.prod(each[:5]))


def test_a_spread_is_taken_from_controls_then_the_protocol() -> None:
    rows = convergence_rows(PROTOCOL_2)
    controls = rows[(rows["side"] == "native") & (rows["recipe"] == "packed8-production")].copy()
    controls["side"] = "control"
    controls["final_loss"] += [0.001, -0.001, 0.001, -0.001]
    rows = pd.concat([rows, controls])
    result = convergence_gate(rows, PROTOCOL_2)
    assert result.verdict == "pass"
    power = result.tables["power"].set_index("recipe")
    assert power.loc["packed8-production", "spread_of"] == "native/native (4 pairs)"
    spread = np.std([0.001, -0.001, 0.001, -0.001], ddof=1)
    assert power.loc["packed8-production", "paired_sd"] == pytest.approx(spread)
    assert power.loc["packed4-production", "spread_of"] == "the protocol's assumption"
    assert (power["equal_candidate_passes"][:5] >= 0.9).all()


def test_a_hopeless_spread_needs_no_finite_number_of_seeds() -> None:
    rows = convergence_rows(difference=lambda recipe, seed: 50.0 * (seed - 45))
    power = convergence_gate(rows, SMALL).tables["power"]
    assert power["paired_sd"][0] == 50.0
    assert power["seeds_for_0.9"][0] == np.inf


def test_version_2_uses_its_own_quantiles() -> None:
    rows = convergence_rows(PROTOCOL_2, lambda recipe, seed: 0.002 * (-1) ** seed)
    table = convergence_gate(rows, PROTOCOL_2).tables["convergence"].set_index("recipe")
    # 22 seeds, half up and half down: mean 0, sd 0.002 · √(22/21)
    upper = 1.721 * 0.002 * np.sqrt(22 / 21) / np.sqrt(22)
    assert table.loc["packed4-production", "upper_bound"] == pytest.approx(upper, abs=1e-12)
    assert table.loc["packed4-production", "pairs"] == 22


def test_a_csv_changes_nothing(tmp_path: Path) -> None:
    rows = convergence_rows().sample(frac=1, random_state=0)
    rows.to_csv(tmp_path / "convergence.csv", index=False)
    result = convergence_gate(pd.read_csv(tmp_path / "convergence.csv"), SMALL)
    assert result.verdict == "pass"
    assert result.messages == ()


@pytest.mark.parametrize(
    ("difference", "verdict"), [(0.005, "not_qualified"), (0.0049999, "pass"), (-1.0, "pass")]
)
def test_the_bound_is_strictly_below_the_margin(difference: float, verdict: str) -> None:
    rows = convergence_rows(difference=lambda recipe, seed: difference)  # without any spread
    assert convergence_gate(rows, SMALL).verdict == verdict


def test_an_inconclusive_bound_blocks_though_the_mean_improves() -> None:
    rows = convergence_rows(difference=lambda recipe, seed: -0.01 + 0.02 * (seed - 46))
    result = convergence_gate(rows, SMALL)
    assert (result.tables["convergence"]["difference"] < 0).all()
    assert result.verdict == "not_qualified"


def test_one_recipe_is_enough_to_block() -> None:
    rows = convergence_rows(
        difference=lambda recipe, seed: 0.006 if recipe == "packed4-production" else 0.0
    )
    result = convergence_gate(rows, SMALL)
    assert result.verdict == "not_qualified"
    assert list(result.tables["convergence"]["gate"]) == ["pass", "not_qualified"]


FIRST = "sync-production seed 45 side native"
TOKENS = 3114 * 128 * 1024
WRONG: dict[str, tuple[Callable[[pd.DataFrame], Any], str, str]] = {
    "no table": (lambda rows: None, "incomplete", "there are no rows"),
    "no rows": (lambda rows: rows[:0], "incomplete", "there are no rows"),
    "missing run": (lambda rows: rows.drop(0), "incomplete", f"missing: {FIRST}"),
    "missing recipe": (
        lambda rows: rows[rows["recipe"] != "packed4-production"],
        "incomplete",
        "missing: packed4-production seed 45 side native",
    ),
    "missing side": (
        lambda rows: rows[rows["side"] == "native"],
        "incomplete",
        "missing: sync-production seed 45 side candidate",
    ),
    "duplicate run": (
        lambda rows: pd.concat([rows, rows[:1]]),
        "failed",
        f"more than one row: {FIRST}",
    ),
    "NaN": (put(0, "final_loss", np.nan), "failed", "final_loss is not a finite number above 0"),
    "infinite": (put(0, "final_loss", np.inf), "failed", "final_loss is not a finite number"),
    "minus infinity": (put(1, "final_loss", -np.inf), "failed", "final_loss is not a finite"),
    "zero": (put(1, "final_loss", 0.0), "failed", "final_loss is not a finite number above 0"),
    "not a number": (put(1, "final_loss", "low"), "failed", "final_loss is not a finite number"),
    "wrong protocol": (
        put(0, "protocol", PROTOCOL_1.hash),
        "failed",
        f"measured under protocol {PROTOCOL_1.hash[:12]}, not under version 0",
    ),
    "unknown recipe": (put(0, "recipe", "x"), "failed", "the protocol has no such recipe: x"),
    "wrong seed": (
        put([0, 1], "seed", 48),
        "failed",
        "the recipe has no such seed: sync-production seed 48 side native",
    ),
    "unknown side": (put(0, "side", "gh200"), "failed", "the side is none of native, candidate"),
    "half a budget": (
        put([0, 1], "train_tokens", TOKENS // 2),
        "failed",
        f"not trained on the recipe's budget, to within one update: {FIRST}",
    ),
    "an update too many": (
        put([0, 1], "train_tokens", TOKENS + 128 * 1024),
        "failed",
        "not trained on the recipe's budget",
    ),
    "unequal budgets": (
        put(1, "train_tokens", TOKENS - 128 * 1024),
        "failed",
        f"the sides of the seed were trained on unequal numbers of tokens: {FIRST}",
    ),
    "part of the validation split": (
        put(1, "validation_tokens", 1000),
        "failed",
        "final losses are over unequal numbers of validation tokens",
    ),
    "no validation tokens": (put(1, "validation_tokens", np.nan), "failed", "validation_tokens is"),
    "missing column": (
        lambda rows: rows.drop(columns=["train_tokens"]),
        "failed",
        "the table lacks columns: train_tokens",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_tables_never_pass_and_say_why(name: str) -> None:
    change, verdict, message = WRONG[name]
    result = convergence_gate(change(convergence_rows()), SMALL)
    assert result.verdict == verdict
    assert any(message in found for found in result.messages), result.messages


def test_a_recipe_with_a_gap_has_no_bound() -> None:
    table = convergence_gate(convergence_rows().drop(0), SMALL).tables["convergence"]
    assert np.isnan(table["upper_bound"][0])
    assert table["pairs"][0] == 2
    assert list(table["gate"]) == ["incomplete", "pass"]


def test_a_broken_control_fails_too() -> None:
    rows = convergence_rows()
    control = rows[:1].assign(side="control", final_loss=np.nan)
    assert convergence_gate(pd.concat([rows, control]), SMALL).verdict == "failed"


def test_the_margin_is_the_protocols() -> None:
    wide = replace(SMALL, convergence_margin=0.5)
    rows = convergence_rows(wide, difference=lambda recipe, seed: 0.4)
    assert convergence_gate(rows, wide).verdict == "pass"
