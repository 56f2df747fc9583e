"""The convergence gate: whether a candidate trains to the same loss, and how likely it could show.

The table has a row per finished run:

=====================  ==========================================================================
recipe                 id of the protocol's recipe
seed                   one of the recipe's seeds
side                   ``native`` or ``candidate``; ``control`` for a second native run of the seed
final_loss             mean over the full validation split, in nats
train_tokens           targets trained on, without what pads the last update of an epoch: within
                       one update of the recipe's budget, and the same on all sides of a seed
validation_tokens      targets of the validation split: the same for all runs
protocol               hash of the protocol
=====================  ==========================================================================

Differences are paired by seed, candidate − native. With d their mean and s their standard deviation
over n seeds, the one-sided upper bound is ``d + t · s / √n``, and it must be strictly below the
margin: an inconclusive bound blocks, even where the mean improves.

A bound can be inconclusive because there are too few seeds. So the gate says how likely a truly
equal candidate would pass, given the spread between two native runs of a seed: that of the
controls, else the protocol's assumption, else that of candidate − native.
"""

import math

import numpy as np
import pandas as pd

from tinyllm.acceptance.gates import Findings, GateResult, RowChecks, Verdict, below, conclude
from tinyllm.acceptance.power import pass_probability, seeds_needed
from tinyllm.acceptance.protocol import PROTOCOL_1, SIDES, Protocol, Recipe

CONTROL = "control"
"""The side of a second native run; optional, and never gated."""

CONVERGENCE_COLUMNS = (
    *("recipe", "seed", "side", "final_loss"),
    *("train_tokens", "validation_tokens", "protocol"),
)
"""Names of all columns that the gate needs."""


def convergence_gate(rows: pd.DataFrame | None, protocol: Protocol = PROTOCOL_1) -> GateResult:
    """Decides whether a candidate converges like native, for each recipe.

    Args:
        rows: The table that the module describes, in any order of rows.
        protocol: What was to be trained.

    Returns:
        The verdict, with the tables ``convergence`` (means, bounds, verdicts), ``power`` (how
        likely an equal candidate passes, and with how many seeds it would) and ``pairs``.
    """
    findings = Findings()
    checks = _checked(rows, protocol, findings)
    pairs = _pairs(checks, protocol)
    bounds = pd.DataFrame(
        [_bound(recipe, pairs, protocol, findings) for recipe in protocol.recipes]
    )
    power = _power(pairs, protocol)
    tables = {"convergence": bounds, "power": power, "pairs": pairs}
    return conclude("convergence", findings, tables)


def _checked(rows: pd.DataFrame | None, protocol: Protocol, findings: Findings) -> RowChecks:
    """The table with all that can be said about runs said."""
    checks = RowChecks(
        rows,
        text=["recipe", "side", "protocol"],
        numbers=["seed", "final_loss", "train_tokens", "validation_tokens"],
        label=["recipe", "seed", "side"],
        findings=findings,
    )
    table = checks.rows
    recipes = {recipe.id: recipe for recipe in protocol.recipes}
    checks.require_protocol(protocol)
    checks.require_one_of("recipe", recipes, "the protocol has no such recipe")
    planned = {(recipe.id, seed) for recipe in protocol.recipes for seed in recipe.seeds}
    seeded = [pair in planned for pair in zip(table["recipe"], table["seed"], strict=True)]
    known = table["recipe"].isin(list(recipes))
    checks.require(
        ~known | pd.Series(seeded, index=table.index, dtype=bool), "the recipe has no such seed"
    )
    checks.require_one_of(
        "side", (*SIDES, CONTROL), f"the side is none of {', '.join((*SIDES, CONTROL))}"
    )
    checks.require_finite(["final_loss", "train_tokens", "validation_tokens"], positive=True)
    checks.require_unique(["recipe", "seed", "side"])
    budget = table["recipe"].map({r.id: r.budget_tokens for r in protocol.recipes})
    update = table["recipe"].map({r.id: r.update_tokens for r in protocol.recipes})
    off = (table["train_tokens"] - budget).abs() >= update
    checks.require(~off, "not trained on the recipe's budget, to within one update")
    alike = table.groupby(["recipe", "seed"])["train_tokens"].transform("nunique") <= 1
    checks.require(alike, "the sides of the seed were trained on unequal numbers of tokens")
    splits = table.loc[checks.good, "validation_tokens"].nunique()
    checks.require(
        pd.Series(splits <= 1, index=table.index),
        "final losses are over unequal numbers of validation tokens",
    )
    trained = set(zip(table["recipe"], table["seed"], table["side"], strict=True))
    findings.add_any(
        Verdict.INCOMPLETE,
        "missing",
        (
            f"{run.recipe} seed {run.seed} side {side}"
            for run in protocol.convergence_runs()
            for side in SIDES
            if (run.recipe, run.seed, side) not in trained
        ),
    )
    return checks


def _pairs(checks: RowChecks, protocol: Protocol) -> pd.DataFrame:
    """Final losses of each recipe and seed side by side; NaN where a run does not count."""
    losses = {
        (row["recipe"], row["seed"], row["side"]): row["final_loss"]
        for row in checks.counted().to_dict("records")
    }
    records = []
    for run in protocol.convergence_runs():
        native, candidate, control = (
            losses.get((run.recipe, run.seed, side), math.nan) for side in (*SIDES, CONTROL)
        )
        records.append(
            {
                "recipe": run.recipe,
                "seed": run.seed,
                "native": native,
                "candidate": candidate,
                "control": control,
                "difference": candidate - native,
                "control_difference": control - native,
            }
        )
    return pd.DataFrame(records)


def _bound(
    recipe: Recipe, pairs: pd.DataFrame, protocol: Protocol, findings: Findings
) -> dict[str, object]:
    """A recipe's line of the table: means over its seeds, the bound, and the verdict."""
    mine = pairs[pairs["recipe"] == recipe.id]
    differences = mine["difference"].to_numpy(dtype=float)
    sd = float(np.std(differences, ddof=1))  # NaN where a pair is missing, and so is the bound
    upper = float(np.mean(differences)) + recipe.t_quantile * sd / math.sqrt(len(differences))
    if math.isnan(upper):
        verdict = Verdict.INCOMPLETE
    elif below(upper, protocol.convergence_margin, protocol):
        verdict = Verdict.PASS
    else:
        verdict = Verdict.NOT_QUALIFIED
        findings.add(
            verdict,
            f"the upper bound of the difference is not below {protocol.convergence_margin:g} nats",
            [f"{recipe.id} ({upper:.6f})"],
        )
    whole = mine.dropna(subset=["difference"])
    return {
        "recipe": recipe.id,
        "pairs": len(whole),
        "native_mean": whole["native"].mean(),
        "candidate_mean": whole["candidate"].mean(),
        "difference": whole["difference"].mean(),
        "sd": sd,
        "upper_bound": upper,
        "gate": verdict.value,
    }


def _power(pairs: pd.DataFrame, protocol: Protocol) -> pd.DataFrame:
    """How likely a truly equal candidate passes each recipe and all of them."""
    records = []
    for recipe in protocol.recipes:
        spread, source = _spread(recipe, pairs[pairs["recipe"] == recipe.id])
        chance, needed = math.nan, math.nan
        if math.isfinite(spread):
            chance = pass_probability(
                spread,
                seeds=len(recipe.seeds),
                margin=protocol.convergence_margin,
                t_quantile=recipe.t_quantile,
            )
            needed = _seeds_needed(spread, protocol)
        records.append(
            {
                "recipe": recipe.id,
                "seeds": len(recipe.seeds),
                "paired_sd": spread,
                "spread_of": source,
                "equal_candidate_passes": chance,
                f"seeds_for_{protocol.power:g}": needed,
            }
        )
    table = pd.DataFrame(records)
    every = {"recipe": "all", "seeds": table["seeds"].sum(), "spread_of": ""}
    every["equal_candidate_passes"] = table["equal_candidate_passes"].prod(skipna=False)
    return pd.concat([table, pd.DataFrame([every])], ignore_index=True)


def _spread(recipe: Recipe, pairs: pd.DataFrame) -> tuple[float, str]:
    """The standard deviation of paired differences to reckon with, and where it is from."""
    controls = pairs["control_difference"].dropna()
    if len(controls) >= 2:
        return float(controls.std()), f"native/native ({len(controls)} pairs)"
    if recipe.assumed_paired_sd is not None:
        return recipe.assumed_paired_sd, "the protocol's assumption"
    differences = pairs["difference"].dropna()
    if len(differences) >= 2:
        return float(differences.std()), f"candidate/native ({len(differences)} pairs)"
    return math.nan, "unknown"


def _seeds_needed(spread: float, protocol: Protocol) -> float:
    try:
        return seeds_needed(
            spread,
            margin=protocol.convergence_margin,
            confidence=protocol.confidence,
            power=protocol.power,
        )
    except ValueError:  # no practical number
        return math.inf
