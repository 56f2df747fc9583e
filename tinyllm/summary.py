"""A run in four lines before it starts, and one when it is done."""

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from tinyllm.data.module import TokenDataModule
from tinyllm.module import TinyLLM


class RunSummary(Callback):
    """Says what is trained, on what, for how long, and where the files go."""

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        data = trainer.datamodule  # type: ignore[attr-defined]
        if isinstance(pl_module, TinyLLM) and isinstance(data, TokenDataModule):
            rank_zero_info("\n".join(_lines(trainer, pl_module, data)))

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        files: dict[str, str] = {}
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):
                files |= {"last": callback.last_model_path} if callback.last_model_path else {}
                files |= {"best": callback.best_model_path} if callback.best_model_path else {}
        where = "".join(f"; {name} {path}" for name, path in files.items())
        rank_zero_info(f"done      {trainer.global_step:,} updates{where}")


def _lines(trainer: Trainer, module: TinyLLM, data: TokenDataModule) -> list[str]:
    model, cache = module.config, data.cache
    rows = data.batch_size * trainer.accumulate_grad_batches
    tokens = len(cache.split("train"))
    updates = int(trainer.estimated_stepping_batches)
    seen = updates * rows * data.context
    groups = getattr(trainer.strategy, "data_groups", 1)
    dealt = f"{rows} rows" if groups == 1 else f"{groups} x {rows / groups:g} rows"
    return [
        f"model     {model.num_parameters:,} parameters: {_count(model.layers, 'layer')}, width "
        f"{model.width}, {_count(model.heads, 'head')}, feed-forward {model.ffn_width}",
        f"data      {cache.path}: {tokens:,} tokens to train on, "
        f"{len(cache.split('validation')):,} to validate on",
        f"training  {updates:,} updates of {dealt} of {data.context} tokens = {seen:,} tokens, "
        f"{seen / model.num_parameters:.2g} per parameter, {seen / tokens:.2g} epochs",
        f"files     {trainer.default_root_dir}",
    ]


def _count(number: int, name: str) -> str:
    return f"{number} {name}" if number == 1 else f"{number} {name}s"
