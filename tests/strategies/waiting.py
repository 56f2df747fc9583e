"""Whether a training waits for the GPU where it need not."""

from typing import Any

import torch
from lightning.pytorch import Callback, Trainer


class ForbidWaiting(Callback):
    """Makes any wait for the device an error, except at log points and in the first updates."""

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        logs = trainer._logger_connector.should_update_logs
        warm = trainer.global_step >= 3
        torch.cuda.set_sync_debug_mode("error" if warm and not logs else "default")

    def on_train_batch_end(self, *_: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")

    def on_exception(self, *_: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")
