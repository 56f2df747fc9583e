"""A run on one screen before it starts, and in a line when it is done."""

from math import inf, isinf
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from tinyllm.data.module import TokenDataModule
from tinyllm.module import TinyLLM


class RunSummary(Callback):
    """Says on what and what is trained, for how long, and where the files go.

    The strategy has just said which backend it takes and why; these lines go on from there.
    """

    def __init__(self) -> None:
        self._trains = False

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._trains = False
        data = trainer.datamodule  # type: ignore[attr-defined]
        if isinstance(pl_module, TinyLLM) and isinstance(data, TokenDataModule):
            rank_zero_info("\n".join(_lines(trainer, pl_module, data)))

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._trains = True

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        files: dict[str, str] = {}
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):
                files |= {"last": callback.last_model_path} if callback.last_model_path else {}
                files |= {"best": callback.best_model_path} if _has_best(callback) else {}
        where = "".join(f"; {name} {path}" for name, path in sorted(files.items(), reverse=True))
        done, planned = trainer.global_step, _planned(trainer)
        short = f" of {int(planned):,} planned" if done < planned < inf else ""
        before = "" if self._trains else " before this run, which has nothing to do"
        rank_zero_info(f"done:    {_count(done, 'update')}{short}{before}{where}")


def _has_best(callback: ModelCheckpoint) -> bool:
    """Whether what it calls the best is so by a value, and of this run, not of one resumed from."""
    folder = Path(callback.best_model_path).parent
    return bool(callback.monitor and callback.best_model_path) and folder == Path(
        callback.dirpath or folder
    )


def _lines(trainer: Trainer, module: TinyLLM, data: TokenDataModule) -> list[str]:
    model, cache = module.config, data.cache
    per_batch = data.batch_size * data.context
    tokens = held = len(cache.split("train"))
    trainer.fit_loop.setup_data()
    if trainer.overfit_batches:  # type: ignore[attr-defined]
        tokens = min(held, int(trainer.num_training_batches) * per_batch)
    of = f" of {held:,}" if tokens < held else ""
    facts = {
        "device": f"{_devices(trainer)}, precision {trainer.precision}",
        "model": f"{model.num_parameters:,} parameters: {_count(model.layers, 'layer')}, width "
        f"{model.width}, {_count(model.heads, 'head')}, feed-forward {model.ffn_width}",
        "workers": getattr(
            trainer.strategy, "description", f"1, {type(trainer.strategy).__name__}"
        ),
        "data": f"{cache.path}: {tokens:,}{of} tokens to train on, "
        f"{len(cache.split('validation')):,} to validate on",
    }
    batches = _batches(trainer)
    if batches is None:
        facts["batch"] = (
            f"{_rows(trainer, data)} of {data.context} tokens = {per_batch:,} tokens, accumulated "
            "as GradientAccumulationScheduler says"
        )
    else:
        batches = int(min(batches, trainer.num_training_batches))  # an epoch's end cuts an update
        rows = _rows(trainer, data) if batches == 1 else f"{batches} x {_rows(trainer, data)}"
        facts["batch"] = f"{rows} of {data.context} tokens = {batches * per_batch:,} tokens"
        facts["plan"] = _plan(trainer, data, batches, model.num_parameters, tokens)
    facts["files"] = str(trainer.default_root_dir)
    return [f"{name + ':':<9}{text}" for name, text in facts.items()]


def _plan(
    trainer: Trainer, data: TokenDataModule, batches: int, parameters: int, tokens: int
) -> str:
    updates = _planned(trainer)
    if isinf(updates):
        return "updates until the run is stopped"
    seen = _trained_on(int(updates), batches, trainer.num_training_batches, data)
    return (
        f"{_count(int(updates), 'update')} = {seen:,} tokens, {_short(seen / parameters)} per "
        f"parameter, {_short(seen / tokens)} epochs"
    )


def _trained_on(updates: int, batches: int, in_epoch: float, data: TokenDataModule) -> int:
    """The tokens of some updates, of which each epoch's last one has those that are left."""
    if isinf(in_epoch):
        return 0  # none are trained on
    whole_rows = (len(data.cache.split("train")) - 1) // data.context
    epoch_rows = min(whole_rows, int(in_epoch) * data.batch_size)
    epochs, more = divmod(updates, -(-int(in_epoch) // batches))
    return data.context * (epochs * epoch_rows + min(more * batches * data.batch_size, epoch_rows))


def _short(number: float) -> str:
    return f"{number:.2g}" if number < 100 else f"{number:,.0f}"


def _devices(trainer: Trainer) -> str:
    """All ranks', which are taken to be alike."""
    device, ranks = trainer.strategy.root_device, trainer.world_size
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name = f"{properties.name} with {properties.total_memory / (1 << 30):.0f} GiB"
    else:
        name = f"{device.type} with {_count(torch.get_num_threads(), 'thread')}"
    return name if ranks == 1 else f"{ranks} x {name}"


def _batches(trainer: Trainer) -> int | None:
    """How many make an update; None where that depends on the epoch."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    scheduled = any(isinstance(c, GradientAccumulationScheduler) for c in callbacks)
    return None if scheduled else trainer.accumulate_grad_batches


def _planned(trainer: Trainer) -> float:
    """Updates of the whole run; infinite where there is no plan, or none that can be known."""
    return inf if _batches(trainer) is None else trainer.estimated_stepping_batches


def _rows(trainer: Trainer, data: TokenDataModule) -> str:
    """The rows of a batch, and whose they are."""
    groups = getattr(trainer.strategy, "data_groups", 1)
    rows = _count(data.batch_size, "row")
    if groups == 1:
        return rows
    each = -(-data.batch_size // groups)
    dealt = f"{groups} x {each}"
    even = data.batch_size == groups * each
    return f"{dealt} rows" if even else f"{rows}, padded to {dealt},"


def _count(number: int, name: str) -> str:
    return f"{number:,} {name}" if number == 1 else f"{number:,} {name}s"
