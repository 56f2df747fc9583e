"""What the tests run on several ranks."""

from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from simulation import CONFIG, Recorder, new_trainer, tiny

from tinyllm import TokenDataModule
from tinyllm.strategies import DecentralizedStrategy, SyncStrategy


def train(
    cache: str,
    ranks: int,
    strategy: dict[str, Any] | None,
    *,
    batch_size: int = 16,
    save_at: int | None = None,
    folder: str | None = None,
    resume: str | None = None,
    **options: Any,
) -> Any:
    recorder = Recorder()
    callbacks: list[Any] = [recorder]
    if save_at is not None:
        callbacks.append(
            ModelCheckpoint(folder, filename="saved", every_n_train_steps=save_at, save_top_k=1)
        )
        options |= {"enable_checkpointing": True}
    trainer = new_trainer(
        SyncStrategy(compile=False)
        if strategy is None
        else DecentralizedStrategy(compile=False, **strategy),
        devices=ranks,
        callbacks=callbacks,
        **options,
    )
    data = TokenDataModule(cache, context=CONFIG.context, batch_size=batch_size)
    trainer.fit(tiny(seed=1 + trainer.global_rank), data, ckpt_path=resume)
    record = recorder.record
    return {
        "weights": torch.stack(record.weights),
        "losses": torch.stack(record.losses),
        "grad_norms": torch.stack(record.grad_norms),
    }
