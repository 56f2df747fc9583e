"""What a strategy that owns the update cannot do, and says so before it trains."""

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins.precision import DoublePrecision, MixedPrecision, Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.nn.modules.batchnorm import _BatchNorm

from tinyllm.module import TinyLLM


def is_overridden_anywhere(hook: str, trainer: Trainer) -> bool:
    """Whether the module or a callback has a hook of its own."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return is_overridden(hook, trainer.lightning_module, parent=LightningModule) or any(
        is_overridden(hook, callback, parent=Callback) for callback in callbacks
    )


def _refuse_callbacks(trainer: Trainer, module: LightningModule) -> None:
    """Raises for callbacks that change weights or the optimizer behind the strategy's back."""
    packed = trainer.strategy.ranks.local_workers > 1  # type: ignore[attr-defined]
    has_batch_norm = any(isinstance(part, _BatchNorm) for part in module.modules())
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        name = type(callback).__name__
        if packed and isinstance(callback, WeightAveraging | StochasticWeightAveraging):
            raise MisconfigurationException(
                f"{name} keeps one model and this strategy packs several workers; leave it out. "
                "Validation, `best.ckpt` and exports are of the workers' average already"
            )
        if has_batch_norm and isinstance(callback, StochasticWeightAveraging):
            raise MisconfigurationException(
                f"{name} ends with an epoch that computes batch norm and updates nothing, and this "
                "strategy updates in every epoch; use WeightAveraging or another strategy"
            )
        if isinstance(callback, ModelPruning):
            raise MisconfigurationException(
                f"{name} puts masked copies in the place of parameters, and this strategy keeps "
                "the parameters themselves; prune after training, or use another strategy"
            )
        has_no_rate = isinstance(module, TinyLLM) and not hasattr(module, "lr")
        if isinstance(callback, LearningRateFinder) and has_no_rate:
            raise MisconfigurationException(
                f"{name} sets an attribute `lr` of the module, and {type(module).__name__} has its "
                "rate in `model.optimizer.lr`; compare short runs with several rates"
            )
        if isinstance(callback, BaseFinetuning):
            raise MisconfigurationException(
                f"{name} gives the optimizer more parameters while training, and this strategy "
                "lays them out before; use another strategy"
            )


def refuse_what_cannot_be_honoured(
    trainer: Trainer, module: LightningModule, precision: Precision
) -> None:
    """Raises for settings that would be silently ignored by a strategy that owns the update."""
    if not module.automatic_optimization:
        raise MisconfigurationException(
            "automatic_optimization is False, and this strategy runs the update itself; "
            "use automatic optimization or another strategy"
        )
    _refuse_callbacks(trainer, module)
    if trainer.gradient_clip_algorithm == "value":
        raise MisconfigurationException(
            "gradient_clip_algorithm is 'value'; this strategy clips each worker by its global "
            "norm: use gradient_clip_algorithm='norm'"
        )
    if getattr(trainer.strategy, "_layer_sync", None) is not None:
        raise MisconfigurationException(
            "sync_batchnorm is True, and this strategy keeps batch norm local to each rank; leave "
            "it out, or use another strategy"
        )
    if is_overridden("backward", module, parent=LightningModule):
        raise MisconfigurationException(
            f"{type(module).__name__} overrides backward, and this strategy runs the backward pass "
            "itself; leave it as it is or use another strategy"
        )
    if is_overridden("configure_gradient_clipping", module, parent=LightningModule):
        raise MisconfigurationException(
            f"{type(module).__name__} overrides configure_gradient_clipping, and this strategy "
            "clips inside the update; set trainer.gradient_clip_val or use another strategy"
        )
    allowed = type(precision) in (Precision, DoublePrecision) or (
        type(precision) is MixedPrecision and precision.precision == "bf16-mixed"
    )
    if not allowed:
        raise MisconfigurationException(
            f"precision {precision.precision!r} is not supported by this strategy; use "
            "bf16-mixed, 32-true or 64-true"
        )
