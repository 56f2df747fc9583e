"""Lightning's side of an update, shared by all strategies that own an arena."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import DoublePrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from tinyllm.arena import Arena, ArenaLayout, bind
from tinyllm.metrics import UpdateMetrics
from tinyllm.model import Llama
from tinyllm.strategies.engine import Engine, GroupHyperparameters
from tinyllm.strategies.native import NativeEngine
from tinyllm.strategies.state import load_optimizer_state, optimizer_state

Backend = Literal["auto", "native"]


class ArenaStrategy(DDPStrategy):
    """Runs whole updates over an arena, under Lightning's automatic optimization.

    ``training_step`` runs forward and backward, ``backward`` is a no-op, ``optimizer_step`` applies
    the update; ``global_step`` advances by one per update. Launching, process groups and reductions
    are those of :class:`~lightning.pytorch.strategies.DDPStrategy`.

    Args:
        backend: How updates are computed; ``auto`` takes the fastest one that this device has.
        micro_batch_size: Sequences per worker in one forward and backward; null takes all at once.
        compile: Whether ``torch.compile`` builds the native backend's model.
    """

    workers: int
    """Rows W of this rank's arena."""

    def __init__(
        self,
        *,
        backend: Backend = "auto",
        micro_batch_size: int | None = None,
        compile: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if backend not in ("auto", "native"):
            raise ValueError(f"backend {backend!r} is unknown; choose auto or native")
        if micro_batch_size is not None and micro_batch_size < 1:
            raise ValueError(f"micro_batch_size is {micro_batch_size}; it must be at least 1 or null")
        self._backend = backend
        self._micro_batch_size = micro_batch_size
        self._compile = compile
        self._engine: Engine | None = None
        self._average_bound = False
        self.update_metrics: UpdateMetrics | None = None

    # --- set-up -----------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """Runs the updates; there is one while fitting."""
        if self._engine is None:
            raise RuntimeError("the engine is built when Trainer.fit sets the strategy up")
        return self._engine

    @property
    def arena(self) -> Arena:
        """State of this rank's workers; there is one while fitting."""
        return self.engine.arena

    @override
    def setup_distributed(self) -> None:
        if self.num_nodes * self.num_processes > 1:
            super().setup_distributed()
        else:
            self.set_world_ranks()

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            _refuse_what_cannot_be_honoured(trainer, self.lightning_module, self.precision_plugin)
        self.model = self.precision_plugin.convert_module(self.lightning_module)
        self.model_to_device()
        if self._compile:
            self._llama.compile(dynamic=False)
        if fitting:
            self.setup_optimizers(trainer)
            self._engine = self._build_engine()
        self.setup_precision_plugin()

    @property
    def _llama(self) -> Llama:
        model = getattr(self.lightning_module, "model", None)
        if not isinstance(model, Llama):
            raise MisconfigurationException(
                f"{type(self).__name__} trains modules whose `model` is a tinyllm Llama, and "
                f"{type(self.lightning_module).__name__}.model is {type(model).__name__}; "
                "use TinyLLM, a subclass of it, or another strategy"
            )
        return model

    def _build_engine(self) -> Engine:
        optimizer = self._adamw
        llama = self._llama
        names = {parameter: name for name, parameter in llama.named_parameters()}
        layout = ArenaLayout.of(
            [{names[p]: p.shape[1:] for p in group["params"]} for group in optimizer.param_groups]
        )
        parameters = dict(llama.named_parameters())
        first = next(iter(parameters.values()))
        arena = Arena(layout, self.workers, first.dtype, first.device)
        arena.adopt(parameters)
        self._parameters = parameters
        if self.world_size > 1:  # every worker starts from rank 0's weights
            torch.distributed.broadcast(arena.weights, src=0)
        if self._backend == "auto":
            rank_zero_info("backend: native (the only one on this device)")
        return NativeEngine(
            llama,
            parameters,
            arena,
            micro_batch_size=self._micro_batch_size,
            forward_context=self.precision_plugin.train_step_context,
            data_parallel=self._data_parallel,
        )

    @property
    def _data_parallel(self) -> bool:
        raise NotImplementedError

    @property
    def _adamw(self) -> torch.optim.AdamW:
        if len(self.optimizers) != 1 or type(self.optimizers[0]) is not torch.optim.AdamW:
            named = ", ".join(type(o).__name__ for o in self.optimizers) or "none"
            raise MisconfigurationException(
                f"{type(self).__name__} applies AdamW itself and needs configure_optimizers to "
                f"return one torch.optim.AdamW; it returned {named}"
            )
        optimizer = self.optimizers[0]
        if any(group["amsgrad"] or group["maximize"] for group in optimizer.param_groups):
            raise MisconfigurationException(
                "AdamW with amsgrad or maximize is not supported by this strategy; turn both off"
            )
        return optimizer

    # --- an update --------------------------------------------------------------------------

    @override
    def training_step(self, batch: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.update_metrics = None
        return self.engine.accumulate(batch)

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        # the engine has run it: only the hooks are left
        assert self.lightning_module is not None
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        return self.precision_plugin.post_backward(closure_loss, self.lightning_module)

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        trainer = self._trainer
        result = closure()
        self.engine.finish_gradients()
        self._call_before_optimizer_step(optimizer)
        self.update_metrics = self._update(
            [GroupHyperparameters.of(group) for group in optimizer.param_groups],
            trainer.gradient_clip_val or None,
        )
        # reading the flag waits for the device, so between log points only the CPU looks
        if self.root_device.type == "cpu" or trainer._logger_connector.should_update_logs:
            self.engine.raise_if_failed()
        return result

    def _update(
        self, groups: list[GroupHyperparameters], clip_norm: float | None
    ) -> UpdateMetrics:
        return self.engine.update(groups, clip_norm)

    @property
    def _trainer(self) -> Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    def _call_before_optimizer_step(self, optimizer: Optimizer) -> None:
        from lightning.pytorch.trainer import call

        call._call_callback_hooks(self._trainer, "on_before_optimizer_step", optimizer)
        call._call_lightning_module_hook(self._trainer, "on_before_optimizer_step", optimizer)

    # --- evaluation and state: at the average of all workers ----------------------------------

    @contextmanager
    def average_bound(self) -> Generator[None, None, None]:
        """Within it the model's parameters are the average of all workers, ``[1, …]``."""
        if self._engine is None or self._average_bound:
            yield
            return
        self._bind_average()
        try:
            yield
        finally:
            self._bind_workers()

    def _bind_average(self) -> None:
        self.engine.raise_if_failed()
        bind(self._parameters, self.arena.layout, self._average())
        self._average_bound = True

    def _bind_workers(self) -> None:
        bind(self._parameters, self.arena.layout, self.arena.weights)
        self._average_bound = False

    def _average(self) -> Tensor:
        """Mean of the weights of all workers of all ranks, ``[1, D]``."""
        return self.arena.weights

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        if self._engine is not None:
            self._bind_average()

    @override
    def on_validation_end(self) -> None:
        super().on_validation_end()
        if self._engine is not None:
            self._bind_workers()

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self.engine.raise_if_failed()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        with self.average_bound():
            return super().lightning_module_state_dict()

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        super().load_model_state_dict(checkpoint, strict=strict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        self.engine.raise_if_failed()
        return optimizer_state(self.engine, optimizer)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        load_optimizer_state(self.engine, self._adamw, checkpoint["optimizer_states"][0])

    @override
    def teardown(self) -> None:
        self._engine = None
        super().teardown()


def _refuse_what_cannot_be_honoured(
    trainer: Trainer, module: LightningModule, precision: Precision
) -> None:
    """Raises for settings that would be silently ignored by a strategy that owns the update."""
    if not module.automatic_optimization:
        raise MisconfigurationException(
            "automatic_optimization is False, and this strategy runs the update itself; "
            "use automatic optimization or another strategy"
        )
    if trainer.gradient_clip_algorithm == "value":
        raise MisconfigurationException(
            "gradient_clip_algorithm is 'value'; this strategy clips each worker by its global "
            "norm: use gradient_clip_algorithm='norm'"
        )
    for hook in ("configure_gradient_clipping", "optimizer_step", "lr_scheduler_step"):
        if is_overridden(hook, module, parent=LightningModule) and hook != "lr_scheduler_step":
            raise MisconfigurationException(
                f"{type(module).__name__} overrides {hook}, which this strategy does not call; "
                "remove it or use another strategy"
            )
    allowed = type(precision) in (Precision, DoublePrecision) or (
        type(precision) is MixedPrecision and precision.precision == "bf16-mixed"
    )
    if not allowed:
        raise MisconfigurationException(
            f"precision {precision.precision!r} is not supported by this strategy; use "
            "bf16-mixed, 32-true or 64-true"
        )
