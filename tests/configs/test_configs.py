"""Every recipe is accepted by the command its file names, and holds the numbers it promises."""

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from tinyllm.cli import main
from tinyllm.config import PRESETS

CONFIGS = Path(__file__).parents[2] / "configs"
OVERLAYS = {
    "20m.yaml": [
        *("20m-small", "packed4-small", "packed4-awc", "packed4-atc", "packed8-awc"),
        *("packed4-adaptive", "wsd"),
    ],
    "50m.yaml": ["50m-packed4"],
    "90m.yaml": ["90m-packed4"],
    "quickstart.yaml": ["packed4-quickstart"],
}
DATA = ["quickstart-data.yaml"]
SHIPPED = {
    # preset, rows of a global batch, context, lr, betas, workers, scheme, updates
    "20m": ("20m", 128, 1024, 0.0056, (0.9, 0.98), 1, None, 3_114),
    "packed4-awc": ("20m", 128, 1024, 0.008, (0.95, 0.99), 4, "awc", 3_114),
    "packed4-atc": ("20m", 128, 1024, 0.0056, (0.9, 0.99), 4, "atc", 3_114),
    "packed8-awc": ("20m", 128, 1024, 0.0056, (0.95, 0.999), 8, "awc", 3_114),
    "packed4-adaptive": ("20m", 32, 1024, 0.0048, (0.9, 0.999), 4, "awc", 12_454),
    "50m": ("50m", 32, 1024, 0.001, (0.9, 0.99), 1, None, 29_620),
    "90m": ("90m", 32, 1024, 0.001, (0.9, 0.99), 1, None, 55_920),
    "50m-packed4": ("50m", 32, 1024, 0.001, (0.9, 0.99), 4, "awc", 29_620),
    "90m-packed4": ("90m", 32, 1024, 0.001, (0.9, 0.99), 4, "awc", 55_920),
    "20m-small": ("20m", 16, 512, 0.001, (0.99, 0.99943), 1, None, 49_820),
    "packed4-small": ("20m", 32, 512, 0.004, (0.98, 0.999999), 4, "awc", 24_920),
    "wsd": ("20m", 128, 1024, 0.0056, (0.9, 0.98), 1, None, 3_114),
}
BASE_OF = {overlay: base for base, overlays in OVERLAYS.items() for overlay in overlays}


def files(recipe: str) -> list[Path]:
    """The files of a recipe, the ones below first."""
    own = CONFIGS / f"{recipe}.yaml"
    return [CONFIGS / BASE_OF[recipe], own] if recipe in BASE_OF else [own]


def parsed(capsys: pytest.CaptureFixture[str], command: str, *configs: Path) -> dict[str, Any]:
    """A configuration as the command sees it."""
    args = [arg for path in configs for arg in ("--config", str(path))]
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main([command, *args, "--print_config"])
    captured = capsys.readouterr()
    assert stop.value.code == 0, captured.err
    config: dict[str, Any] = yaml.safe_load(captured.out)
    return config


def test_every_file_is_known_here() -> None:
    known = {*OVERLAYS, *DATA, *(f"{name}.yaml" for name in BASE_OF)}
    assert {path.name for path in CONFIGS.iterdir()} == known
    assert {*SHIPPED, "quickstart", "packed4-quickstart"} == {
        name.removesuffix(".yaml") for name in known - set(DATA)
    }


@pytest.mark.parametrize("name", DATA)
def test_prepare_accepts(capsys: pytest.CaptureFixture[str], name: str) -> None:
    config = parsed(capsys, "prepare", CONFIGS / name)
    assert config["source"] == "stdlib"
    assert config["output"] == "data/quickstart"


def test_the_quickstart_trains_in_what_every_processor_computes_fast(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = parsed(capsys, "fit", CONFIGS / "quickstart.yaml")
    assert config["trainer"]["precision"] == "32-true"


@pytest.mark.parametrize("recipe", sorted(SHIPPED))
def test_a_recipe_holds_its_numbers(capsys: pytest.CaptureFixture[str], recipe: str) -> None:
    preset, rows, context, lr, betas, workers, scheme, updates = SHIPPED[recipe]
    config = parsed(capsys, "fit", *files(recipe))
    trainer, model, data = config["trainer"], config["model"], config["data"]

    targets = 20 * PRESETS[preset].num_parameters
    every = trainer["val_check_interval"]
    assert updates == every * math.ceil(targets / (rows * context * every))
    assert (trainer["max_steps"], data["batch_size"], data["context"]) == (updates, rows, context)
    assert (model["preset"], model["config"]) == (preset, None)
    assert model["optimizer"] == {"lr": lr, "betas": list(betas), "eps": 1e-8, "weight_decay": 0.1}
    assert trainer["gradient_clip_val"] == 1.0
    assert trainer["gradient_clip_algorithm"] is None  # by norm
    assert trainer["precision"] == "bf16-mixed"
    assert trainer["accumulate_grad_batches"] == 1
    schedule, kind = model["schedule"], "WSD" if recipe == "wsd" else "WarmupCosine"
    assert schedule["class_path"] == f"tinyllm.schedule.{kind}"
    assert schedule["init_args"]["warmup_fraction"] == 0.05
    assert schedule["init_args"]["final_fraction"] == 0.1

    strategy = trainer["strategy"]["init_args"]
    assert strategy.get("workers", 1) == workers
    assert strategy.get("scheme") == scheme
    if workers > 1:
        assert strategy["topology"] == "one_peer_exponential"
        assert rows % workers == 0
    consensus = strategy.get("adaptive_consensus")
    is_adaptive = recipe == "packed4-adaptive"
    assert consensus == ({"start_fraction": 0.5, "power": 1.0} if is_adaptive else None)

    assert data["cache"] == "data/corpus"
    assert trainer["default_root_dir"].startswith("runs/")
    # whole validations fit, so the last one sees the final model
    assert trainer["check_val_every_n_epoch"] is None
    assert updates % every == 0
    assert every <= updates / 5
    assert trainer["limit_val_batches"] is None  # the whole split
    # the last checkpoint follows each validation
    assert config["checkpoint"]["every_n_train_steps"] is None
    assert updates / 20 <= every


@pytest.mark.parametrize("recipe", ["quickstart", "packed4-quickstart"])
def test_the_quickstart_fits_its_cache(capsys: pytest.CaptureFixture[str], recipe: str) -> None:
    config = parsed(capsys, "fit", *files(recipe))
    prepared = parsed(capsys, "prepare", CONFIGS / "quickstart-data.yaml")
    assert config["data"]["cache"] == str(prepared["output"])
    assert config["model"]["config"]["vocab_size"] == prepared["vocab_size"]
    assert config["model"]["config"]["context"] == config["data"]["context"]
    assert config["trainer"]["max_steps"] % config["trainer"]["val_check_interval"] == 0
    workers = config["trainer"]["strategy"]["init_args"].get("workers", 1)
    assert workers == (4 if recipe.startswith("packed4") else 1)
    assert config["data"]["batch_size"] % workers == 0


@pytest.mark.parametrize("recipe", sorted(BASE_OF))
def test_an_overlay_holds_only_what_differs_and_says_over_what(recipe: str) -> None:
    base, own = files(recipe)
    first = own.read_text(encoding="utf-8").splitlines()[0]
    assert first == f"# tinyllm fit --config configs/{base.name} --config configs/{own.name}"

    def same(below: Any, above: Any, key: str = "") -> list[str]:
        if isinstance(below, dict) and isinstance(above, dict):
            return [
                k for name in above for k in same(below.get(name), above[name], f"{key}.{name}")
            ]
        # a schedule of another class takes nothing from the one below
        in_schedule = key.startswith(".model.schedule")
        return [key] if below == above and not in_schedule else []

    repeated = same(*(yaml.safe_load(path.read_text(encoding="utf-8")) for path in (base, own)))
    assert not repeated


def test_folders_of_runs_are_their_own() -> None:
    recipes = [name for name in (*SHIPPED, "quickstart", "packed4-quickstart") if name != "wsd"]
    own = [yaml.safe_load(files(recipe)[-1].read_text(encoding="utf-8")) for recipe in recipes]
    assert len({config["trainer"]["default_root_dir"] for config in own}) == len(recipes)


@pytest.mark.parametrize("recipe", ["packed4-adaptive", "packed8-awc"])
def test_wsd_lies_over_any_recipe(capsys: pytest.CaptureFixture[str], recipe: str) -> None:
    config = parsed(capsys, "fit", *files(recipe), CONFIGS / "wsd.yaml")
    assert config["model"]["schedule"]["class_path"] == "tinyllm.schedule.WSD"
    assert config["trainer"]["strategy"]["init_args"]["workers"] == int(recipe[6])
