"""TinyLLM: the LightningModule that pre-trains a Llama."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from tinyllm.arguments import make_plain
from tinyllm.config import PRESETS, LlamaConfig
from tinyllm.hf import read_model
from tinyllm.metrics import TokenLoss, UpdateMetrics
from tinyllm.model import Llama, is_matrix, split_rows
from tinyllm.schedule import Schedule, WarmupCosine


@dataclass(frozen=True)
class AdamWConfig:
    """Hyperparameters of AdamW (Loshchilov & Hutter, 2019).

    Args:
        lr: Peak learning rate; the schedule scales it.
        betas: Decay rates of the first and second moment.
        eps: Added to the denominator.
        weight_decay: Decoupled decay of matrices; norm scales are never decayed.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        make_plain(self)
        if not (0 <= self.lr < inf and 0 < self.eps < inf and 0 <= self.weight_decay < inf):
            raise ValueError(
                f"lr {self.lr} and weight_decay {self.weight_decay} must be at least 0, "
                f"eps {self.eps} above 0, and all of them finite"
            )
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas are {self.betas}; they must be two numbers from 0 up to 1")


class TinyLLM(LightningModule):
    """A Llama with its optimizer and schedule, trained on token rows ``[B, T+1]``.

    Args:
        preset: A named size: 20m, 50m or 90m.
        config: The architecture in full, in place of a preset.
        optimizer: AdamW's hyperparameters.
        schedule: How the learning rate moves over the planned updates.
        init_from: Folder of a stock Llama to go on from, which needs no preset: what `tinyllm
            export` or transformers writes, with tied embeddings, no grouped-query attention, no
            biases and no RoPE scaling.

    Raises:
        ValueError: If the preset is unknown, the size is given not at all or twice, or the folder's
            model does not fit.
        FileNotFoundError: If the folder lacks a file.
    """

    def __init__(
        self,
        preset: str | None = None,
        config: LlamaConfig | None = None,
        optimizer: AdamWConfig = AdamWConfig(),
        schedule: Schedule = WarmupCosine(),  # noqa: B008  (frozen)
        init_from: str | Path | None = None,
    ) -> None:
        super().__init__()
        self.config, weights = _resolve(preset, config, init_from)
        # a checkpoint gives plain values
        if isinstance(optimizer, Mapping):
            optimizer = AdamWConfig(**optimizer)
        if isinstance(schedule, Mapping):
            schedule = Schedule.from_dict(schedule)
        self.optimizer_config = optimizer
        self.schedule = schedule
        self.model = Llama(self.config)
        if weights is not None:
            self.load_state_dict(weights)
        self.validation_loss = TokenLoss()
        self.test_loss = TokenLoss()
        # plain values only, so that checkpoints load with weights_only=True
        self.save_hyperparameters(
            {
                "preset": preset,
                "config": None if preset else self.config.to_dict(),
                "optimizer": asdict(self.optimizer_config),
                "schedule": self.schedule.to_dict(),
            }
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``[B, T, V]`` of ids ``[B, T]``."""
        logits: Tensor = self.model(tokens[None])[0]
        return logits

    def token_losses(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Summed loss and number of targets of rows ``[B, T+1]``, each ``[1]``."""
        inputs, targets = split_rows(rows[None])
        nll, scored = self.model(inputs, targets)
        return nll, scored

    def setup(self, stage: str) -> None:
        """Refuses token rows that are not the model's, before any of them is read."""
        data = getattr(self.trainer, "datamodule", None)
        if hasattr(type(data), "vocab_size"):
            self.check_data(data)

    def check_data(self, data: Any) -> None:
        """Raises ValueError if a TokenDataModule has more ids or longer rows than the model."""
        if data.vocab_size > self.config.vocab_size:
            raise ValueError(
                f"the cache {data.cache.path} has {data.vocab_size} token ids and the model "
                f"{self.config.vocab_size}; set model.config.vocab_size, or prepare a cache with "
                "the model's vocabulary"
            )
        if data.context > self.config.context:
            raise ValueError(
                f"data.context is {data.context} and the model's context {self.config.context}; "
                "lower data.context, or set model.config.context"
            )

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuses the checkpoint of another model.

        Raises:
            ValueError: It says which sizes differ.
        """
        saved = checkpoint.get("hyper_parameters", {})
        if not isinstance(saved, Mapping) or not {"preset", "config"} <= set(saved):
            return
        try:
            theirs, _ = _resolve(saved["preset"], saved["config"], None)
        except (TypeError, ValueError):
            return  # damaged, which the weights will show
        differ = [
            f"{name} {getattr(theirs, name)}, not {getattr(self.config, name)}"
            for name in ("layers", "width", "heads", "ffn_width", "vocab_size")
            if getattr(theirs, name) != getattr(self.config, name)
        ]
        if differ:
            raise ValueError(
                f"the checkpoint is of another model: {'; '.join(differ)}. Resume with the model "
                "that wrote it"
            )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Mean loss over the batch's targets, with the module's own :meth:`token_losses`."""
        nll, scored = self.token_losses(batch)
        loss = (nll / scored.clamp_min(1)).squeeze()
        self.log("train/loss", loss.detach(), prog_bar=True)
        return loss

    def on_train_start(self) -> None:
        """A resumed run goes by its own configuration, not by the hyperparameters saved."""
        if is_overridden("configure_optimizers", self, parent=TinyLLM):
            return
        optimizer, scheduler = self.optimizers(use_pl_optimizer=False), self.lr_schedulers()
        assert isinstance(optimizer, torch.optim.AdamW)
        if not isinstance(scheduler, LambdaLR):
            return  # LearningRateFinder has put its own in place
        chosen = self.optimizer_config
        factor = self.schedule.factor(scheduler.last_epoch, self.planned_updates)
        scheduler.base_lrs = [chosen.lr for _ in optimizer.param_groups]
        for group, decay in zip(optimizer.param_groups, (chosen.weight_decay, 0.0), strict=True):
            group.update(
                lr=chosen.lr * factor,
                initial_lr=chosen.lr,
                betas=chosen.betas,
                eps=chosen.eps,
                weight_decay=decay,
            )

    def on_log_point(self, metrics: UpdateMetrics) -> dict[str, float]:
        """What a strategy is to log of an update; it calls this when the values are there."""
        return metrics.scalars()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Adds a batch to the split's exact loss."""
        self.validation_loss.update(*self.token_losses(batch))

    def on_validation_epoch_end(self) -> None:
        """Logs Σ loss / Σ targets over the split, and its exponential."""
        self._log_split("validation", self.validation_loss)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        """Adds a batch to the split's exact loss."""
        self.test_loss.update(*self.token_losses(batch))

    def on_test_epoch_end(self) -> None:
        """Logs Σ loss / Σ targets over the split, and its exponential."""
        self._log_split("test", self.test_loss)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Loss of every target of rows ``[B, T+1]`` in nats, ``[B, T]``, 0 where none is scored."""
        inputs, targets = split_rows(batch)
        return torch.nn.functional.cross_entropy(
            self(inputs).transpose(1, 2), targets, reduction="none"
        )

    def _log_split(self, split: str, metric: TokenLoss) -> None:
        loss = metric.compute()
        metric.reset()
        self.log(f"{split}/loss", loss, prog_bar=True)
        self.log(f"{split}/perplexity", loss.exp())

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW over two groups, decayed matrices and norm scales, with the schedule per update."""
        chosen = self.optimizer_config
        matrices, scales = parameter_groups(self.model)
        groups: list[dict[str, Any]] = [
            {"params": matrices},
            {"params": scales, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(
            groups,
            lr=chosen.lr,
            betas=chosen.betas,
            eps=chosen.eps,
            weight_decay=chosen.weight_decay,
        )
        total = self.planned_updates
        scheduler = LambdaLR(optimizer, lambda update: self.schedule.factor(update, total))
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    @property
    def planned_updates(self) -> int:
        """Length of the schedule in updates.

        Raises:
            ValueError: If neither the schedule nor the Trainer says how long to train.
        """
        if self.schedule.updates is not None:
            return self.schedule.updates
        planned = self.trainer.estimated_stepping_batches
        if planned == float("inf") or planned < 1:
            raise ValueError(
                f"{planned} updates are planned, and the schedule needs to know how many: set "
                "trainer.max_steps, trainer.max_epochs or model.schedule.updates"
            )
        return int(planned)


def module_of(state: Mapping[str, Any], path: Path) -> TinyLLM:
    """The model of a checkpoint, with the average of all workers' weights.

    Args:
        state: What :func:`~tinyllm.checkpoint.read_checkpoint` gave.
        path: The checkpoint's, for errors.

    Raises:
        ValueError: It is no checkpoint of a TinyLLM, or its weights are not those of its size.
    """
    saved, weights = state.get("hyper_parameters", {}), state["state_dict"]
    if not {"preset", "config"} <= set(saved):
        raise ValueError(
            f"{path} is no checkpoint of a TinyLLM: its hyperparameters are "
            f"{', '.join(map(str, saved)) or 'missing'}"
        )
    try:
        config, _ = _resolve(saved["preset"], saved["config"], None)
        # before memory is taken for a size that the file only claims
        found = sum(weight.numel() for weight in weights.values() if weight.is_contiguous())
        if found != config.num_parameters:
            raise ValueError(f"its size has {config.num_parameters} and its weights {found}")
        module = TinyLLM(config=config)
        module.load_state_dict(weights)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{path} holds no whole TinyLLM: {error}") from error
    return module


def parameter_groups(model: Llama) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices, which decay, and the norm scales, which do not, in the optimizer's order."""
    parameters = list(model.parameters())
    return [p for p in parameters if is_matrix(p)], [p for p in parameters if not is_matrix(p)]


def _resolve(
    preset: str | None, config: LlamaConfig | None, init_from: str | Path | None
) -> tuple[LlamaConfig, dict[str, Tensor] | None]:
    """The architecture, and the weights to start from unless they are to be drawn."""
    if preset is not None and preset not in PRESETS:
        raise ValueError(f"preset {preset!r} is unknown; choose from {', '.join(PRESETS)}")
    if preset is not None and config is not None:
        raise ValueError(
            f"preset {preset!r} and a config are given; leave one out, or set it to null where a "
            "file has it"
        )
    if isinstance(config, Mapping):
        config = LlamaConfig(**config)
    chosen = PRESETS[preset] if preset is not None else config
    if init_from is not None:
        found, weights = read_model(init_from)
        if chosen is not None and chosen != found:
            named = "the config" if preset is None else f"preset {preset!r}"
            wanted, other = chosen.to_dict(), found.to_dict()
            differences = [
                f"{k} {wanted[k]}, not {other[k]}" for k in wanted if wanted[k] != other[k]
            ]
            raise ValueError(
                f"{named} is another model than the one in {init_from}: {'; '.join(differences)}. "
                "Leave it out, as in --model.preset null --model.config null"
            )
        return found, weights
    if chosen is None:
        raise ValueError(
            "none of preset, config and init_from is given; give one of them "
            f"(presets: {', '.join(PRESETS)})"
        )
    return chosen, None
