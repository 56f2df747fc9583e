"""Configurations of a protocol's parts: what is in them, and that ``tinyllm fit`` takes them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tinyllm.acceptance import PROTOCOL_1
from tinyllm.acceptance.configure import (
    Settings,
    candidate_config,
    convergence_config,
    numerical_config,
    recipe_config,
    resolved_configs,
    run_length,
    throughput_config,
    trained_targets,
    workload_config,
)
from tinyllm.cli import main
from tinyllm.trainer_cli import TinyLLMCLI

SETTINGS = Settings(cache="data/corpus")
ONE_EPOCH = 10**9
"""Tokens of a cache of which no recipe sees the end."""

CONFIGS = resolved_configs(PROTOCOL_1, SETTINGS, ONE_EPOCH)
RECIPES = {  # ours: the files that ship the same training
    "20m-sync-production": ["20m"],
    "50m-sync-production": ["50m"],
    "90m-sync-production": ["90m"],
    "20m-packed4-awc-production": ["20m", "packed4-awc"],
    "20m-packed4-atc-production": ["20m", "packed4-atc"],
    "20m-packed8-awc-production": ["20m", "packed8-awc"],
    "20m-packed4-adaptive-production": ["20m", "packed4-adaptive"],
    "20m-sync-b16-c512-clip1": ["20m", "20m-small"],
    "20m-packed4-b8-c512-clip1": ["20m", "packed4-small"],
    "sync-production": ["20m"],
    "packed4-production": ["20m", "packed4-awc"],
    "packed8-production": ["20m", "packed8-awc"],
    "sync-b16-c512": ["20m", "20m-small"],
    "packed4-b32-c512": ["20m", "packed4-small"],
}
FOLDER = Path(__file__).resolve().parents[2] / "configs"


def merged(base: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    both = {
        key: merged(base[key], value)
        if isinstance(value, dict) and isinstance(base.get(key), dict)
        else value
        for key, value in other.items()
    }
    return {**base, **both}


def shipped(names: list[str]) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for name in names:
        config = merged(config, yaml.safe_load((FOLDER / f"{name}.yaml").read_text()))
    return config


def test_every_part_has_a_configuration() -> None:
    assert len(CONFIGS) == 117 + 5


@pytest.mark.parametrize("part", RECIPES)
def test_training_is_that_of_the_shipped_recipe(part: str) -> None:
    ours, recipe = CONFIGS[part], shipped(RECIPES[part])
    assert ours["model"]["preset"] == recipe["model"]["preset"]
    assert ours["model"]["optimizer"] == recipe["model"]["optimizer"]
    schedule = dict(ours["model"]["schedule"]["init_args"])
    del schedule["updates"]
    assert schedule == recipe["model"]["schedule"]["init_args"]
    for name in ("cache", "context", "batch_size"):
        assert ours["data"][name] == recipe["data"][name]
    for name in ("precision", "gradient_clip_val"):
        assert ours["trainer"][name] == recipe["trainer"][name]
    strategy = dict(ours["trainer"]["strategy"]["init_args"])
    assert strategy.pop("backend") == "native"
    assert strategy == recipe["trainer"].get("strategy", {}).get("init_args", {})
    # shipped ones go on to whole validations
    assert ours["trainer"]["max_steps"] == pytest.approx(recipe["trainer"]["max_steps"], rel=1e-3)


def test_what_a_workload_says_is_in_its_configuration() -> None:
    off = workload_config(PROTOCOL_1.workload("50m-packed8-b16-c1024-clipoff"), SETTINGS)
    assert off["trainer"]["gradient_clip_val"] is None
    assert off["trainer"]["strategy"]["init_args"]["workers"] == 8
    assert off["data"]["batch_size"] == 128
    remainder = workload_config(PROTOCOL_1.workload("20m-accumulate-b11-m4"), SETTINGS)
    assert remainder["trainer"]["strategy"]["init_args"]["micro_batch_size"] == 4
    assert remainder["data"]["batch_size"] == 11


@pytest.mark.parametrize("recipe", PROTOCOL_1.recipes, ids=lambda recipe: recipe.id)
def test_a_run_meets_its_budget_and_ends_with_a_validation(recipe: Any) -> None:
    updates, interval = run_length(recipe, ONE_EPOCH)
    assert abs(updates * recipe.update_tokens - recipe.budget_tokens) < recipe.update_tokens
    assert updates % interval == 0
    assert 5 <= updates // interval <= 200
    config = recipe_config(recipe, SETTINGS, ONE_EPOCH)
    assert config["trainer"]["max_steps"] == updates
    assert config["trainer"]["val_check_interval"] == interval


@pytest.mark.parametrize("recipe", PROTOCOL_1.recipes, ids=lambda recipe: recipe.id)
@pytest.mark.parametrize(
    "tokens", [1_200, 200_000, 3_000_000, 133_001_198, *range(300_000_000, 450_000_001, 7_500_001)]
)
def test_a_run_meets_its_budget_where_the_last_updates_of_epochs_are_small(
    recipe: Any, tokens: int
) -> None:
    updates, interval = run_length(recipe, tokens)
    rows = recipe.workers * recipe.local_batch
    trained = trained_targets(tokens, updates, context=recipe.context, rows=rows)
    assert abs(trained - recipe.budget_tokens) < recipe.update_tokens
    assert updates % interval == 0


@pytest.mark.parametrize("tokens", [ONE_EPOCH, 3_000_000])
@pytest.mark.parametrize("updates", [1, 11, 13, 101])
def test_a_budget_of_whole_updates_is_met_though_one_less_divides_better(
    updates: int, tokens: int
) -> None:
    recipe = PROTOCOL_1.recipes[0]
    recipe = replace(recipe, budget_tokens=updates * recipe.update_tokens)
    planned, _ = run_length(recipe, tokens)
    rows = recipe.workers * recipe.local_batch
    trained = trained_targets(tokens, planned, context=recipe.context, rows=rows)
    assert abs(trained - recipe.budget_tokens) < recipe.update_tokens


def test_a_cache_without_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match="513 tokens, too few for a row of sync-production, which"):
        resolved_configs(PROTOCOL_1, SETTINGS, 513)


def test_a_numerical_run_is_the_start_of_the_whole_one() -> None:
    whole = CONFIGS["20m-sync-production"]
    short = numerical_config(whole, PROTOCOL_1)
    assert short["trainer"]["max_steps"] == 5
    assert short["model"] == whole["model"]
    assert "callbacks" not in whole["trainer"]  # measuring leaves the frozen one as it was


def test_a_candidate_changes_the_strategy_and_nothing_else() -> None:
    native = CONFIGS["20m-packed4-awc-production"]
    config = candidate_config(native, {"backend": "gh200"})
    assert config["trainer"]["strategy"]["init_args"].pop("backend") == "gh200"
    native = json.loads(json.dumps(native))
    assert native["trainer"]["strategy"]["init_args"].pop("backend") == "native"
    assert config == native


def test_an_unknown_preset_needs_a_length() -> None:
    workload = replace(PROTOCOL_1.workload("20m-sync-production"), preset="7b")
    with pytest.raises(ValueError, match="planned_updates"):
        workload_config(workload, SETTINGS)


@pytest.mark.parametrize(
    "part",
    [
        *("20m-sync-b4-c512-clip1", "90m-packed8-b16-c1024-clipoff", "20m-accumulate-b11-m4"),
        *("20m-packed4-adaptive-production", "20m-packed4-atc-production", "packed8-production"),
    ],
)
def test_tinyllm_fit_accepts_it(
    part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = CONFIGS[part]
    timed = throughput_config(config, PROTOCOL_1, updates_per_window=7, hold=True)
    for complete in (timed, numerical_config(config, PROTOCOL_1), convergence_config(config, 46)):
        path = tmp_path / "given.json"
        path.write_text(json.dumps(complete))
        with pytest.raises(SystemExit) as ended:
            main(["fit", "--config", str(path), "--print_config"])
        assert not ended.value.code
        printed = yaml.safe_load(capsys.readouterr().out)
        assert printed["trainer"]["max_steps"] == complete["trainer"]["max_steps"]
        assert printed["data"] == {**printed["data"], **complete["data"]}


def test_tinyllm_fit_accepts_every_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a candidate's backend; the callbacks of measuring are tested above."""
    path = tmp_path / "given.json"
    parse, backends = TinyLLMCLI.parse_arguments, []

    class AllParsedError(Exception):
        """Instead of training."""

    def parse_each(cli: TinyLLMCLI, parser: Any, args: Any) -> None:
        # by one parser, since making it takes longer than what it does
        for config in CONFIGS.values():
            path.write_text(json.dumps(candidate_config(config, {"backend": "gh200"})))
            parse(cli, parser, args)
            backends.append(cli.config["fit"].trainer.strategy.init_args.backend)
        raise AllParsedError

    monkeypatch.setattr(TinyLLMCLI, "parse_arguments", parse_each)
    with pytest.raises(AllParsedError):
        TinyLLMCLI("fit", ["--config", str(path)])
    assert backends == ["gh200"] * (117 + 5)
