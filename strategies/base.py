"""Lightning's side of an update, shared by all strategies that own an arena."""

from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from tinyllm.arguments import check_choice
from tinyllm.errors import NonFiniteError
from tinyllm.kernel_cache import use_local_kernel_cache
from tinyllm.metrics import UpdateMetrics
from tinyllm.strategies.backends import Backend, choose_backend
from tinyllm.strategies.checkpoint_io import AtomicCheckpointIO
from tinyllm.strategies.engine import Combine, Engine, GroupHyperparameters, Ranks
from tinyllm.strategies.log_points import LogPoints
from tinyllm.strategies.native import NativeEngine
from tinyllm.strategies.processes import ProcessStrategy
from tinyllm.strategies.refusals import is_overridden_anywhere, refuse_what_cannot_be_honoured
from tinyllm.strategies.state import EngineState
from tinyllm.strategies.stopping import CommonStop
from tinyllm.strategies.tenant import Tenant

Buffers = Literal["local", "average"]


class ArenaStrategy(ProcessStrategy):
    """Runs whole updates over an arena, under Lightning's automatic optimization.

    ``training_step`` runs forward and backward, ``backward`` is a no-op, ``optimizer_step`` applies
    the update; ``global_step`` advances by one per update. Evaluation and the module's state dict
    are those of the average of all workers.

    Args:
        num_workers: Workers N on all ranks; None for one that every rank holds a copy of.
        backend: Which engine runs the updates; ``auto`` takes gh200 where it can run.
        micro_batch_size: Sequences per worker in one forward and backward; None takes all at once.
        compile: Whether ``torch.compile`` builds the native backend's model.
        buffers: Whether ranks keep their own buffers or evaluate with the average of them.
    """

    def __init__(
        self,
        *,
        num_workers: int | None,
        backend: Backend,
        micro_batch_size: int | None,
        compile: bool,
        buffers: Buffers,
        **kwargs: Any,
    ) -> None:
        super().__init__(checkpoint_io=AtomicCheckpointIO(), **kwargs)
        check_choice("backend", backend, Backend)
        check_choice("buffers", buffers, Buffers)
        if micro_batch_size is not None and micro_batch_size < 1:
            raise ValueError(
                f"micro_batch_size is {micro_batch_size}; it must be at least 1 or null"
            )
        self._num_workers = num_workers
        self._backend: Backend = backend
        self._micro_batch_size = micro_batch_size
        self._compile = compile
        self._buffers = buffers
        self._engine: Engine | None = None
        self._gradients_are_seen = False
        self._sums_are_seen = False
        self._tenant: Tenant | None = None
        self._evaluation = ExitStack()
        self._losses: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
        self._failure_raised = False
        self._state_left: dict[str, Any] | None = None
        self._common_stop: CommonStop | None = None
        self.update_metrics: UpdateMetrics | None = None
        self._log_points: LogPoints | None = None

    # --- set-up -----------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """Runs the updates; there is one while fitting."""
        if self._engine is None:
            raise RuntimeError("the engine is built when Trainer.fit sets the strategy up")
        return self._engine

    @property
    def _own_tenant(self) -> Tenant:
        assert self._tenant is not None
        return self._tenant

    @property
    def ranks(self) -> Ranks:
        """Which workers are where."""
        world = self.num_nodes * self.num_processes
        if self._num_workers is None:
            return Ranks(1, 1, world)
        if self._num_workers % world:
            raise MisconfigurationException(
                f"{self._num_workers} workers cannot be placed evenly on {world} ranks; use a "
                "number of ranks that divides the workers"
            )
        return Ranks(self._num_workers, self._num_workers // world, world)

    @property
    def data_groups(self) -> int:
        """In how many groups a batch's rows are dealt out: workers, or ranks that hold copies."""
        return self._num_workers or self.world_size

    @property
    def description(self) -> str:
        """How many workers train and how, for people."""
        world = self.ranks.world_size
        return (
            "1" if world == 1 else f"1, with a copy on each of {world} ranks, which share a batch"
        )

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            refuse_what_cannot_be_honoured(trainer, self.lightning_module, self.precision_plugin)
        self.model = self.precision_plugin.convert_module(self.lightning_module)
        self.model_to_device()
        self._tenant = Tenant(self.lightning_module, self.ranks, self._buffers == "average")
        if fitting:
            self.setup_optimizers(trainer)
        backend, reason = choose_backend(
            self._backend,
            self._tenant.llama,
            self.precision_plugin,
            self.root_device,
            self.optimizers if fitting else (),
        )
        if self._compile and backend == "native":
            self._tenant.compile()
        if fitting:
            rank_zero_info(f"backend: {backend} ({reason})")
            self._failure_raised = False
            self._state_left = None
            self._log_points = LogPoints(trainer, self._check_for_failure)
            if self.ranks.world_size > 1:
                self._common_stop = CommonStop(trainer)
            self._engine = self._build_engine(self._tenant, backend)
            self._gradients_are_seen = is_overridden_anywhere("on_before_optimizer_step", trainer)
            self._sums_are_seen = is_overridden_anywhere("on_after_backward", trainer)
            if self._sums_are_seen:
                rank_zero_warn(
                    "on_after_backward sees gradients summed over the targets so far; each "
                    "worker's mean gradient is there in on_before_optimizer_step"
                )
        self.setup_precision_plugin()

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        # the engine steps in the optimizer's place; a schedule would warn of a missing step
        self._adamw._opt_called = True  # type: ignore[attr-defined]

    def _build_engine(self, tenant: Tenant, backend: Literal["gh200", "native"]) -> Engine:
        arena = tenant.move_into_arena(self._adamw.param_groups)
        if self.ranks.world_size > 1:  # every worker starts from rank 0's weights
            tenant.broadcast()
        if backend == "gh200":
            use_local_kernel_cache()
            from tinyllm.strategies.gh200 import Gh200Engine  # needs Triton

            assert tenant.llama is not None
            return Gh200Engine(
                arena, tenant.llama, micro_batch_size=self._micro_batch_size, ranks=self.ranks
            )
        return NativeEngine(
            arena,
            tenant.losses(self._micro_batch_size),
            collect_gradients=tenant.collect_gradients,
            forward_context=self.precision_plugin.train_step_context,
            ranks=self.ranks,
        )

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
    def training_step(self, *args: Any, **kwargs: Any) -> Tensor | dict[str, Any]:
        self.update_metrics = None
        # autograd is to make gradients of its own, and the zero_grad that Lightning calls after
        # this must not reach what has been accumulated
        self._own_tenant.release_gradients()
        self._own_tenant.check_memory()
        loop = self._trainer.fit_loop.epoch_loop
        # the step of what modules log, validations included, for which Lightning may count one
        # update more where a run was resumed
        loop._batches_that_stepped = self._trainer.global_step
        if loop.batch_idx % self._trainer.accumulate_grad_batches == 0:
            self.engine.pending = False  # of an update that somebody has left out
        loss = self.engine.accumulate(*args, **kwargs)
        extras = self._own_tenant.extras
        return {"loss": loss, **extras} if extras else loss

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        # the engine has run it: only the hooks are left, which see sums over targets so far
        assert self.lightning_module is not None
        self._own_tenant.bind_gradients()
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        closure_loss = self.precision_plugin.post_backward(closure_loss, self.lightning_module)
        if self._sums_are_seen:
            self._own_tenant.take_replaced_gradients()
        return closure_loss

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        trainer, log_points = self._trainer, self._log_points
        clip = trainer.gradient_clip_val
        assert log_points is not None
        result = closure()
        self.engine.finish_gradients(self._gradients_are_seen)
        if self._gradients_are_seen:  # hooks that nobody has overridden cost small updates time
            call._call_callback_hooks(trainer, "on_before_optimizer_step", optimizer)
            call._call_lightning_module_hook(trainer, "on_before_optimizer_step", optimizer)
            self._own_tenant.take_replaced_gradients()
        dtype = self.engine.arena.weights.dtype
        if len(optimizer.param_groups) != len(self.engine.arena.layout.groups):
            raise MisconfigurationException(
                f"the optimizer has {len(optimizer.param_groups)} parameter groups and had "
                f"{len(self.engine.arena.layout.groups)} when training started; this strategy "
                "lays parameters out before: give the optimizer all of them in configure_optimizers"
            )
        metrics = self.engine.update(
            [GroupHyperparameters.of(group, dtype) for group in optimizer.param_groups],
            clip if clip and clip > 0 else None,  # as Lightning takes it
            self._combine(),
        )
        # only at log points is anything gathered or read
        every: int = trainer.log_every_n_steps or 50  # type: ignore[attr-defined]
        if (trainer.global_step + 1) % every == 0:
            self._complete(metrics)
            log_points.add(metrics)
            if self._common_stop is not None:
                self._common_stop.agree(self.root_device)
        # the device is given the next updates meanwhile; several ranks have to fail at the same one
        log_points.show(wait=self.ranks.world_size > 1)
        if self._asks_after_every_update:
            self._check_for_failure()
        self.update_metrics = metrics
        return result

    @property
    def _asks_after_every_update(self) -> bool:
        """Whether to look for failures at once; on a CPU there is nothing to wait for."""
        return self.root_device.type == "cpu"

    def stop_all_ranks(self) -> bool:
        """Ends the fit of several ranks at the next log point, as SIGTERM does.

        Returns:
            False, and nothing is done, where no such fit is under way.
        """
        if self._common_stop is None:
            return False
        self._common_stop.tell()
        return True

    def _check_for_failure(self) -> None:
        """Raises once for a non-finite update; after that the last good state can be saved."""
        if not self._failure_raised:
            try:
                self.engine.raise_if_failed()
            except NonFiniteError:
                self._failure_raised = True
                raise

    def _combine(self) -> Combine | None:
        """How the coming update mixes workers."""
        return None

    def _complete(self, metrics: UpdateMetrics) -> None:
        """Adds what is only wanted at log points, and brings all workers' values together."""
        ranks = self.ranks
        metrics.step, metrics.epoch = self._trainer.global_step, self._trainer.current_epoch
        metrics.loss = ranks.gather(metrics.loss)
        metrics.targets = ranks.gather(metrics.targets)
        metrics.grad_norm = ranks.gather(metrics.grad_norm)
        if ranks.num_workers > 1:
            distance, metrics.average_norm = self.engine.consensus_distance()
            metrics.consensus_distance = ranks.gather(distance)
        metrics.send()

    @property
    def _trainer(self) -> Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    # --- evaluation and checkpoints: at the average of all workers -----------------------------

    @contextmanager
    def average_bound(self) -> Generator[None, None, None]:
        """Within it the module is the average of all workers; training state is not touched."""
        if self._engine is None or self._tenant is None:
            yield
            return
        self._check_for_failure()
        if self._log_points is not None:
            self._log_points.show(wait=True)
        with self._tenant.average_bound():
            yield

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._evaluation.enter_context(self.average_bound())
        tenant, engine = self._tenant, self._engine
        if engine is not None and tenant is not None and tenant.average is not None:
            self._losses = engine.losses(tenant.average)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._losses is None:
            return super().validation_step(*args, **kwargs)
        self._own_tenant.check_memory()
        # not while callbacks run, which may copy the module
        with self._own_tenant.token_losses_by(self._losses):
            return super().validation_step(*args, **kwargs)

    @override
    def on_validation_end(self) -> None:
        self._losses = None
        self._evaluation.close()
        super().on_validation_end()

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        # topology and γ go by the Trainer's count, as the schedule does: after a failure it may be
        # ahead of the updates that were applied
        self.engine.next_update = self._trainer.global_step

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self._check_for_failure()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        with self.average_bound():
            return super().lightning_module_state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self._engine is None:
            if self._state_left is None:
                raise RuntimeError(
                    "after Trainer.fit on several ranks the other ranks' workers are gone; save "
                    "while fitting, as ModelCheckpoint does, or with weights_only=True"
                )
            return self._state_left
        self._check_for_failure()
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        return self._engine_state.save(optimizer)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if not checkpoint["optimizer_states"]:
            raise ValueError(
                "the checkpoint holds weights and no state of an optimizer, so no run can go on "
                "from it; load its weights into a new one"
            )
        state = checkpoint["optimizer_states"][0]
        self._engine_state.load(self._adamw, state, self.global_rank)

    @property
    def _engine_state(self) -> EngineState:
        return EngineState(self.engine, self._own_tenant, self.ranks)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        # Lightning restores before set-up: take the run's precision first, so nothing is rounded
        assert self.lightning_module is not None
        self.precision_plugin.convert_module(self.lightning_module)
        super().load_model_state_dict(checkpoint, strict)

    @override
    def teardown(self) -> None:
        self._losses = None
        self._evaluation.close()  # an error may have come before its end
        if self._log_points is not None:
            self._log_points.end()
            self._log_points = None
        if self._common_stop is not None:
            self._common_stop.end()
            self._common_stop = None
        # after an error other ranks may be gone, and with them their workers
        alone = self._trainer.interrupted
        if self._engine is not None and self.ranks.world_size == 1:
            # a user may still call Trainer.save_checkpoint
            state = self._engine_state.save(self._adamw)
            self._state_left = move_data_to_device(state, torch.device("cpu"))
        if self._engine is not None:
            self._engine.release()
        if self._tenant is not None:
            self._tenant.leave(alone)
        self._engine = self._tenant = None
        super().teardown()
