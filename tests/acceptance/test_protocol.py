"""Every number of version 1, its ids, and that any change shows in the hash."""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import FrozenInstanceError, asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tinyllm.acceptance import PROTOCOL_1, PROTOCOL_2, Protocol, seeds_needed
from tinyllm.acceptance.power import pass_probability, student_t_quantile

HASH_1 = "aa12686ed218b6a3f7b475d4c4962db57be5b787ce09d1c1f7f97a28774e6ecc"
HASH_2 = "c0ba70585e8e9b13487af191a35cb63e3eaedadf04e2814fa7592e6e0839569e"
P1, P2 = PROTOCOL_1, PROTOCOL_2
BUDGET = 20 * 20_403_520


def test_hashes_are_pinned() -> None:
    assert PROTOCOL_1.hash == HASH_1
    assert PROTOCOL_2.hash == HASH_2


def test_numbers_of_version_1() -> None:
    numbers = {k: v for k, v in asdict(PROTOCOL_1).items() if k not in ("workloads", "recipes")}
    assert numbers == {
        "version": 1,
        "repeats": 3,
        "warmup_updates": 20,
        "windows": 5,
        "window_seconds": 1.0,
        "small_batch_ratio": 1.05,
        "production_ratio": 0.98,
        "numerical_updates": 5,
        "initial_state_limit": 1e-6,
        "loss_atol": 0.002,
        "loss_rtol": 0.002,
        "gradients_limit": 0.05,
        "parameters_limit": 0.02,
        "updates_limit": 0.10,
        "optimizer_rtol": 1e-6,
        "optimizer_atol": 1e-8,
        "convergence_margin": 0.005,
        "confidence": 0.95,
        "power": 0.9,
        "threshold_rounding": 1e-12,
    }


def test_the_117_workloads_of_version_1() -> None:
    small = {
        f"{preset}-{mode}-b{batch}-c{context}-clip{clip}"
        for preset in ("20m", "50m", "90m")
        for mode in ("sync", "packed4", "packed8")
        for batch in (4, 8, 16)
        for context in (512, 1024)
        for clip in ("1", "off")
    }
    others = {
        "20m-sync-production": 128 * 1024,
        "50m-sync-production": 32 * 1024,
        "90m-sync-production": 32 * 1024,
        "20m-packed4-awc-production": 4 * 32 * 1024,
        "20m-packed8-awc-production": 8 * 16 * 1024,
        "20m-packed4-atc-production": 4 * 32 * 1024,
        "20m-packed4-adaptive-production": 4 * 8 * 1024,
        "20m-accumulate-b32-m8": 32 * 512,
        "20m-accumulate-b11-m4": 11 * 512,
    }
    ids = [workload.id for workload in PROTOCOL_1.workloads]
    assert len(ids) == 117
    assert set(ids) == small | set(others)
    kinds = Counter(workload.kind for workload in PROTOCOL_1.workloads)
    assert kinds == {"small-batch": 108, "production": 7, "accumulate": 2}
    for workload_id, update_tokens in others.items():
        assert PROTOCOL_1.workload(workload_id).update_tokens == update_tokens


def test_ids_say_what_a_workload_is() -> None:
    workers = {"sync": 1, "packed4": 4, "packed8": 8}
    for workload in PROTOCOL_1.workloads:
        assert workload.workers == workers[workload.mode]
        assert (workload.scheme is None) == (workload.mode == "sync")
        if workload.kind == "small-batch":
            preset, mode, batch, context, clip = workload.id.split("-")
            assert (workload.preset, workload.mode) == (preset, mode)
            assert batch == f"b{workload.local_batch}"
            assert context == f"c{workload.context}"
            assert workload.clip == {"clip1": 1.0, "clipoff": None}[clip]
            assert workload.scheme in (None, "awc")
            assert workload.micro_batch is None
        else:
            assert workload.clip == 1.0
    remainder = PROTOCOL_1.workload("20m-accumulate-b11-m4")
    assert (remainder.local_batch, remainder.micro_batch, remainder.context) == (11, 4, 512)


def test_351_pairs_with_alternating_order() -> None:
    pairs = PROTOCOL_1.pairs()
    assert len({pair.id for pair in pairs}) == len(pairs) == 351
    for workload in PROTOCOL_1.workloads:
        orders = [pair.order for pair in pairs if pair.workload == workload.id]
        assert len(orders) == 3
        assert all(a == b[::-1] for a, b in pairwise(orders))
        assert all(set(order) == {"native", "candidate"} for order in orders)
    for repeat in (1, 2, 3):  # neither side is favoured by more than the odd workload
        first = Counter(pair.order[0] for pair in pairs if pair.repeat == repeat)
        assert set(first.values()) == {58, 59}


def test_15_convergence_runs() -> None:
    runs = PROTOCOL_1.convergence_runs()
    assert len({run.id for run in runs}) == len(runs) == 15
    assert runs[0].id == "sync-production-seed45"
    designs = {
        recipe.id: (recipe.workers, recipe.local_batch, recipe.context)
        for recipe in PROTOCOL_1.recipes
    }
    assert designs == {
        "sync-production": (1, 128, 1024),
        "packed4-production": (4, 32, 1024),
        "packed8-production": (8, 16, 1024),
        "sync-b16-c512": (1, 16, 512),
        "packed4-b32-c512": (4, 8, 512),
    }
    for recipe in PROTOCOL_1.recipes:
        assert recipe.seeds == (45, 46, 47)
        assert recipe.t_quantile == 2.920
        assert recipe.budget_tokens == BUDGET == 408_070_400
        assert recipe.assumed_paired_sd is None


@pytest.mark.parametrize("protocol", [PROTOCOL_1, PROTOCOL_2], ids=["1", "2"])
def test_t_quantiles_belong_to_the_number_of_seeds(protocol: Protocol) -> None:
    for recipe in protocol.recipes:
        exact = student_t_quantile(0.95, len(recipe.seeds) - 1)
        assert abs(recipe.t_quantile - exact) <= 5e-4  # written with three decimals


def test_version_2_has_the_fewest_seeds_that_reach_the_power() -> None:
    for recipe in PROTOCOL_2.recipes:
        assert recipe.assumed_paired_sd is not None
        assert len(recipe.seeds) == seeds_needed(recipe.assumed_paired_sd, margin=0.005)
        chance = pass_probability(
            recipe.assumed_paired_sd,
            seeds=len(recipe.seeds),
            margin=0.005,
            t_quantile=recipe.t_quantile,
        )
        assert chance >= 0.9
    assert [len(recipe.seeds) for recipe in PROTOCOL_2.recipes] == [12, 22, 4, 3, 3]
    assert len(PROTOCOL_2.convergence_runs()) == 44


def test_version_2_differs_in_seeds_only() -> None:
    changed = {"version", "recipes"}
    one, two = ({k: v for k, v in asdict(p).items() if k not in changed} for p in (P1, P2))
    assert one == two
    for old, new in zip(P1.recipes, P2.recipes, strict=True):
        differs = {k for k, v in asdict(old).items() if asdict(new)[k] != v}
        assert differs <= {"seeds", "t_quantile", "assumed_paired_sd"}


@pytest.mark.parametrize("field", sorted(set(asdict(P1)) - {"workloads", "recipes", "confidence"}))
def test_any_changed_number_changes_the_hash(field: str) -> None:
    changes: dict[str, Any] = {field: getattr(P1, field) + 1}
    assert replace(P1, **changes).hash != P1.hash


def test_another_confidence_comes_with_its_quantiles() -> None:
    stricter = tuple(replace(recipe, t_quantile=6.965) for recipe in P1.recipes)
    assert replace(P1, confidence=0.99, recipes=stricter).hash != P1.hash
    with pytest.raises(
        ValueError, match=r"2\.92; with 3 seeds and a confidence of 0\.99 it is 6\.965"
    ):
        replace(P1, confidence=0.99)


def test_any_changed_workload_or_recipe_changes_the_hash() -> None:
    other = replace(P1.workloads[0], clip=2.0)
    assert replace(P1, workloads=(other, *P1.workloads[1:])).hash != P1.hash
    assert replace(P1, workloads=P1.workloads[1:]).hash != P1.hash
    fewer = replace(P1.recipes[0], seeds=(45, 46), t_quantile=6.314)
    assert replace(P1, recipes=(fewer, *P1.recipes[1:])).hash != P1.hash


def test_protocols_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        P1.repeats = 2  # type: ignore[misc]


@pytest.mark.parametrize("protocol", [P1, P2, replace(P1, version=0, repeats=1)])
def test_json_round_trip(protocol: Protocol, tmp_path: Path) -> None:
    (tmp_path / "protocol.json").write_text(protocol.to_json())
    again = Protocol.load(tmp_path / "protocol.json")
    assert again == protocol
    assert again.hash == protocol.hash


def test_a_changed_protocol_may_not_call_itself_a_final_version() -> None:
    with pytest.raises(ValueError, match="calls itself version 1 and differs"):
        Protocol.from_json(replace(P1, small_batch_ratio=1.0).to_json())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"repeats": 0}, "at least 1"),
        ({"small_batch_ratio": float("nan")}, "small_batch_ratio"),
        ({"convergence_margin": float("inf")}, "convergence_margin"),
        ({"windows": 5.0}, "windows"),
        ({"version": "1"}, "version"),
        ({"workloads": ()}, "at least one workload"),
        ({"recipes": ()}, "at least one workload and one recipe"),
        ({"workloads": (P1.workloads[0], P1.workloads[0])}, "more than once"),
        ({"workloads": (replace(P1.workloads[0], kind="other"),)}, "kind 'other'"),
        ({"recipes": (replace(P1.recipes[0], seeds=(45,)),)}, "two or more seeds"),
        ({"recipes": (replace(P1.recipes[0], seeds=(45, 45, 46)),)}, "each once"),
        ({"recipes": (replace(P1.recipes[0], seeds=(45, 46)),)}, "with 2 seeds .* it is 6.314"),
        ({"confidence": 1.0}, "probability must be in"),
        ({"workloads": (replace(P1.workloads[0], workers=4),)}, "mode 'sync' of 4 is none of"),
        ({"workloads": (replace(P1.workloads[0], scheme="awc"),)}, "scheme 'awc' of sync is none"),
        ({"workloads": (replace(P1.workloads[0], mode="packed16", workers=16),)}, "'packed16'"),
    ],
)
def test_unusable_protocols_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(P1, **changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a protocol"),
        ("[]", "not a protocol"),
        (json.dumps(asdict(P1) | {"extra": 1}), "unknown fields"),
        ('{"version": 0}', "missing fields"),
        (json.dumps(asdict(P1) | {"workloads": [{"id": "a"}]}), "not a protocol"),
    ],
)
def test_other_json_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Protocol.from_json(text)


def test_load_by_number() -> None:
    assert Protocol.load("2") is P2
    with pytest.raises(ValueError, match="no version 7"):
        Protocol.load("7")
    with pytest.raises(ValueError, match="cannot read"):
        Protocol.load("nowhere.json")


def test_importing_loads_no_torch() -> None:
    code = "import tinyllm.acceptance, sys; assert not {'torch', 'lightning'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
