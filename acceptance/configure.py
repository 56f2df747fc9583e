"""From a protocol's workload or recipe to the configuration that ``tinyllm fit`` takes.

A campaign freezes one configuration for each id, with native's settings. What a measurement adds to
it, and what a candidate changes in it, are the functions below it; nothing else differs.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tinyllm.acceptance.protocol import (
    PARAMETERS,
    TARGETS_PER_PARAMETER,
    Protocol,
    Recipe,
    Workload,
)

Config = dict[str, Any]
"""A configuration of ``tinyllm fit``, as plain JSON content."""

# of 20m, by mode and scheme or "small": learning rate and betas of the recipes
_OPTIMIZERS = {
    ("sync", None): (5.6e-3, (0.9, 0.98)),
    ("packed4", "awc"): (8.0e-3, (0.95, 0.99)),
    ("packed4", "atc"): (5.6e-3, (0.9, 0.99)),
    ("packed8", "awc"): (5.6e-3, (0.95, 0.999)),
    ("packed4", "adaptive"): (4.8e-3, (0.9, 0.999)),
    ("sync", "small"): (1.0e-3, (0.99, 0.99943)),
    ("packed4", "small"): (4.0e-3, (0.98, 0.999999)),
    ("packed8", "small"): (4.0e-3, (0.98, 0.999999)),
}
_OTHER_OPTIMIZER = (1.0e-3, (0.9, 0.99))  # the recipes of 50m and 90m
_SMALL_TOKENS = 16 * 1024
"""Updates of up to this many tokens are small ones, for a recipe without a kind."""

_VALIDATIONS = 10
"""About how many validations a convergence run has; the last one is at its end."""

LOG_EVERY_UPDATES = 10
"""Between two log points."""

_WORKLOAD_SEED = 0
"""Of workloads; recipes bring their own."""

_VALIDATION_ROWS = 32
"""Of a validation batch; no loss depends on it."""


@dataclass(frozen=True)
class Settings:
    """What a protocol leaves open.

    Attributes:
        cache: Folder of the token cache.
        accelerator: Of the Trainer.
        precision: Of the Trainer.
        native: Arguments of the strategy that make it the trusted side.
        models: ``model`` section of presets that tinyllm does not know.
        planned_updates: Length of the schedule of a workload; None takes 20 targets per parameter.
    """

    cache: str
    accelerator: str = "gpu"
    precision: str = "bf16-mixed"
    native: Mapping[str, Any] = field(default_factory=lambda: {"backend": "native"})
    models: Mapping[str, Any] = field(default_factory=dict)
    planned_updates: int | None = None


def resolved_configs(protocol: Protocol, settings: Settings, tokens: int) -> dict[str, Config]:
    """The configuration of each workload and recipe, by id.

    Args:
        protocol: What is measured.
        settings: What it leaves open.
        tokens: Of the cache's train split.

    Raises:
        ValueError: As :func:`workload_config` and :func:`run_length`.
    """
    return {
        **{w.id: workload_config(w, settings) for w in protocol.workloads},
        **{r.id: recipe_config(r, settings, tokens) for r in protocol.recipes},
    }


def workload_config(workload: Workload, settings: Settings) -> Config:
    """Native's training of a workload, on the schedule of a full run and without validation.

    Raises:
        ValueError: If the length of its schedule is unknown.
    """
    updates = settings.planned_updates
    if updates is None:
        if workload.preset not in PARAMETERS:
            raise ValueError(
                f"{workload.id}: the preset {workload.preset!r} is none of {list(PARAMETERS)}; "
                "set planned_updates"
            )
        targets = TARGETS_PER_PARAMETER * PARAMETERS[workload.preset]
        updates = math.ceil(targets / workload.update_tokens)
    size = "small" if workload.kind != "production" else workload.scheme
    config = _config(workload, size, settings, updates=updates, seed=_WORKLOAD_SEED)
    if workload.micro_batch is not None:
        strategy = config["trainer"]["strategy"]
        strategy["init_args"]["micro_batch_size"] = workload.micro_batch
    config["trainer"] |= {"limit_val_batches": 0, "enable_checkpointing": False}
    return config


def recipe_config(recipe: Recipe, settings: Settings, tokens: int) -> Config:
    """Native's run of a recipe on its full budget, with its first seed; see :func:`run_length`."""
    updates, interval = run_length(recipe, tokens)
    size = "small" if recipe.update_tokens <= _SMALL_TOKENS else recipe.scheme
    config = _config(recipe, size, settings, updates=updates, seed=recipe.seeds[0])
    config["trainer"] |= {"val_check_interval": interval, "check_val_every_n_epoch": None}
    config["best_checkpoint"] = {"save_top_k": 0}  # last.ckpt is kept
    return config


def run_length(recipe: Recipe, tokens: int) -> tuple[int, int]:
    """Updates of a full run and of the interval of its validations, which divides them.

    The run crosses its budget with the last update, or stops before it if that number divides
    better and is less than an update short, which is what the convergence gate lets through.

    Args:
        recipe: What is trained.
        tokens: Of the train split.

    Raises:
        ValueError: If the split has no row.
    """
    crossing = _updates_for(recipe, tokens)
    rows = recipe.workers * recipe.local_batch
    before = trained_targets(tokens, crossing - 1, context=recipe.context, rows=rows)
    short = recipe.budget_tokens - before  # a whole update where the budget is a number of those
    choices = [
        (count < _VALIDATIONS // 2, abs(math.log(count / _VALIDATIONS)), -updates, updates // count)
        for updates in range(crossing - (short < recipe.update_tokens), crossing + 1)
        for count in range(1, min(updates, 50 * _VALIDATIONS) + 1)
        if updates % count == 0
    ]
    *_, updates, interval = min(choices)
    return -updates, interval


def _updates_for(recipe: Recipe, tokens: int) -> int:
    """The least number of updates with which a recipe is trained on its budget or more."""
    in_epoch = (tokens - 1) // recipe.context
    if in_epoch < 1:
        raise ValueError(
            f"the train split has {tokens:,} tokens, too few for a row of {recipe.id}, which takes "
            f"{recipe.context + 1:,}; prepare a larger cache"
        )
    rows = recipe.workers * recipe.local_batch
    epochs, more = divmod(math.ceil(recipe.budget_tokens / recipe.context), in_epoch)
    return epochs * math.ceil(in_epoch / rows) + math.ceil(more / rows)


def trained_targets(tokens: int, updates: int, *, context: int, rows: int) -> int:
    """How many targets a number of updates is trained on, as ``TokenLoader`` serves them.

    Each epoch serves every full row of the split once. Its last update has the rows that are left,
    and what pads it, up to a whole batch or to the same number for each worker, is no target.

    Args:
        tokens: Of the train split.
        updates: From the start of the run.
        context: Targets of a row.
        rows: Of an update, over all workers.
    """
    in_epoch = (tokens - 1) // context
    epochs, more = divmod(updates, math.ceil(in_epoch / rows))
    return context * (epochs * in_epoch + min(more * rows, in_epoch))


def throughput_config(
    config: Config,
    protocol: Protocol,
    *,
    updates_per_window: int | None = None,
    windows: int | None = None,
    hold: bool = False,
) -> Config:
    """Adds timed windows, after which the run ends.

    Args:
        config: A workload's.
        protocol: Says how long the warm-up and a window are.
        updates_per_window: None lets the run find out how many fill a window.
        windows: None takes the protocol's number.
        hold: Whether to wait after the first update until told to go on.
    """
    arguments = {
        "warmup_updates": protocol.warmup_updates,
        "windows": protocol.windows if windows is None else windows,
        "window_seconds": protocol.window_seconds,
        "updates_per_window": updates_per_window,
        "stop": True,
        "hold": hold,
    }
    return _with_callbacks(
        config, _callback("ThroughputWindows", **arguments), _callback("MemoryMonitor")
    )


def numerical_config(config: Config, protocol: Protocol) -> Config:
    """Adds the trace of the first updates of the same schedule, after which the run ends."""
    result = _with_callbacks(config, _callback("UpdateTrace", updates=protocol.numerical_updates))
    result["trainer"]["max_steps"] = protocol.numerical_updates
    return result


def convergence_config(config: Config, seed: int) -> Config:
    """Sets the seed of the initial state and of the order of the data."""
    result = _with_callbacks(config, _callback("MemoryMonitor"))
    result["seed_everything"] = result["data"]["seed"] = seed
    return result


def candidate_config(config: Config, strategy: Mapping[str, Any]) -> Config:
    """Replaces native's arguments of the strategy by the candidate's."""
    result = copy.deepcopy(config)
    result["trainer"]["strategy"]["init_args"] |= strategy
    return result


def _config(
    part: Workload | Recipe, size: str | None, settings: Settings, *, updates: int, seed: int
) -> Config:
    rate, betas = _optimizer(part, size)
    return {
        "seed_everything": seed,
        "trainer": {
            "accelerator": settings.accelerator,
            "devices": 1,
            "precision": settings.precision,
            "max_steps": updates,
            "gradient_clip_val": part.clip,
            "log_every_n_steps": LOG_EVERY_UPDATES,
            "num_sanity_val_steps": 0,
            "enable_progress_bar": False,
            "default_root_dir": ".",
            "strategy": _strategy(part, settings),
        },
        "model": {
            **copy.deepcopy(settings.models.get(part.preset, {"preset": part.preset})),
            "optimizer": {"lr": rate, "betas": list(betas), "eps": 1e-8, "weight_decay": 0.1},
            "schedule": {
                "class_path": "tinyllm.schedule.WarmupCosine",
                # fixed, so that a run of a few updates is the start of the full one
                "init_args": {"warmup_fraction": 0.05, "final_fraction": 0.1, "updates": updates},
            },
        },
        "data": {
            "cache": settings.cache,
            "context": part.context,
            "batch_size": part.workers * part.local_batch,
            "validation_batch_size": _VALIDATION_ROWS,
            "seed": seed,
        },
    }


def _optimizer(part: Workload | Recipe, size: str | None) -> tuple[float, tuple[float, float]]:
    if part.preset != "20m":
        return _OTHER_OPTIMIZER
    if (part.mode, size) not in _OPTIMIZERS:
        raise ValueError(
            f"{part.id}: there is no recipe of 20m for {part.mode} with {size}; there are those of "
            f"{', '.join(' '.join(filter(None, key)) for key in _OPTIMIZERS)}"
        )
    return _OPTIMIZERS[part.mode, size]


def _strategy(part: Workload | Recipe, settings: Settings) -> Config:
    if part.mode == "sync":
        return {
            "class_path": "tinyllm.strategies.SyncStrategy",
            "init_args": dict(settings.native),
        }
    adaptive = part.scheme == "adaptive"
    arguments: Config = {
        "workers": part.workers,
        "scheme": "awc" if adaptive else part.scheme,
        "topology": "one_peer_exponential",
        **settings.native,
    }
    if adaptive:
        arguments["adaptive_consensus"] = {"start_fraction": 0.5, "power": 1.0}
    return {"class_path": "tinyllm.strategies.DecentralizedStrategy", "init_args": arguments}


def _with_callbacks(config: Config, *callbacks: Config) -> Config:
    result = copy.deepcopy(config)
    result["trainer"]["callbacks"] = list(callbacks)
    return result


def _callback(name: str, **arguments: Any) -> Config:
    return {"class_path": f"tinyllm.callbacks.{name}", "init_args": arguments}
