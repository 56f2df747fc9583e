"""A run's newest state is always in ``last.ckpt``."""

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import proxy

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.call import _call_callbacks_state_dict
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from tinyllm.errors import NonFiniteError


class RunCheckpoint(ModelCheckpoint):
    """Keeps ``last.ckpt``, the state to resume from.

    It is written at the interval that is set, or else after each validation; after the last update
    in any case; and when SIGTERM or an error stops the run between two updates. Where an update is
    followed by a validation, it is written after that, so that a resumed run lacks none.

    Where a checkpoint callback before this one has just saved the same state, as the best one does
    after a validation, ``last.ckpt`` becomes a second name of that file.
    """

    _begun = False
    _saved_before: Sequence[tuple[int, str]] = ()

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._begun = False
        if stage == "fit":  # a new list, since Lightning is going through the old one
            untyped: Any = trainer  # mypy does not see the attribute
            firsts = [c.checkpoint for c in untyped.callbacks if isinstance(c, _SaveFirst)]
            if self not in firsts:
                untyped.callbacks = [_SaveFirst(self), *untyped.callbacks]

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._begun = True
        # callbacks that served another fit still name what they saved there
        self._saved_before = self._saved_by_others(trainer)

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        loop = trainer.fit_loop.epoch_loop
        data_fetcher = trainer.fit_loop._data_fetcher
        assert data_fetcher is not None
        if self.save_top_k != 0 or not loop._should_check_val_fx(data_fetcher):
            super().on_train_batch_end(trainer, *args, **kwargs)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        every = self._every_n_train_steps  # 0 unless it is set
        if every >= 1 and trainer.global_step % every == 0:
            self._save_newest(trainer)
        if not self._should_save_on_train_epoch_end(trainer):
            self._save_at_epoch_interval(trainer)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        if self._should_save_on_train_epoch_end(trainer):
            self._save_at_epoch_interval(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pass  # it was saved before other callbacks came to this

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        if not self._begun:
            return  # there is nothing new, and a state that was refused may be restored in part
        if self._should_save_on_exception(trainer) and _stopped_together(trainer, exception):
            if trainer.validating:
                _validate_again(trainer)
            self._save_newest(trainer)
        elif not self.last_model_path or self._last_global_step_saved != trainer.global_step:
            return
        rank_zero_info(
            f"the state after {trainer.global_step} updates is saved in {self.last_model_path}; "
            "continue from it with --ckpt_path last"
        )

    def _save_at_epoch_interval(self, trainer: Trainer) -> None:
        """Lightning does this only if it writes another file, too."""
        every = self._every_n_epochs  # 1 unless another interval is set
        if every >= 1 and (trainer.current_epoch + 1) % every == 0:
            self._save_newest(trainer)

    def _save_newest(self, trainer: Trainer) -> None:
        if self.save_last and not self._should_skip_saving_checkpoint(trainer):
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))

    @override
    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        if not self._links(trainer, filepath):
            super()._save_checkpoint(trainer, filepath)
            return
        # what Lightning does after saving
        self._last_global_step_saved = trainer.global_step
        self._last_checkpoint_saved = filepath
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.after_save_checkpoint(proxy(self))

    def _links(self, trainer: Trainer, filepath: str) -> bool:
        """Whether the state was saved already and now has this name, too; the same on all ranks."""
        saved = [
            path
            for step, path in self._saved_by_others(trainer)
            if path and step == trainer.global_step and (step, path) not in self._saved_before
        ]
        # not by other writers, which may change a file in place, or not be done with it
        writer = trainer.strategy.checkpoint_io if saved else None
        link = getattr(writer, "link_checkpoint", None)
        if link is None:
            return False
        # the file says where the last one was before, which matters if names are counted up
        if self.save_weights_only or self._enable_version_counter:
            return False
        # weights and moments follow from the number of updates; by all ranks, as if it were saved
        now = {
            "loops": trainer._checkpoint_connector._get_loops_state_dict(),
            "callbacks": _call_callbacks_state_dict(trainer),
        }
        linked = False
        if trainer.is_global_zero and (same := self._first_with(now, saved)) is not None:
            try:
                link(same, filepath)
                linked = True
            except OSError:
                pass  # another file system, or one without hard links
        linked = trainer.strategy.broadcast(linked)
        trainer.strategy.barrier("Trainer.save_checkpoint")
        return linked

    def _saved_by_others(self, trainer: Trainer) -> list[tuple[int, str]]:
        """What other callbacks saved last, and after how many updates."""
        return [
            (other._last_global_step_saved, other._last_checkpoint_saved)
            for other in trainer.checkpoint_callbacks
            if isinstance(other, ModelCheckpoint) and other is not self
        ]

    def _first_with(self, state: dict[str, Any], paths: list[str]) -> str | None:
        """The first of some checkpoints that holds a state, but for where the last one was."""
        own = state["callbacks"][self.state_key]
        for path in paths:
            try:
                found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
                found["callbacks"][self.state_key]["last_model_path"] = own["last_model_path"]
                if all(_same(found[name], part) for name, part in state.items()):
                    return path
            except Exception:  # it is gone, a folder, without callbacks, or holds other things
                continue
        return None


class _SaveFirst(Callback):
    """Has the last state saved before other callbacks end the training.

    WeightAveraging puts its average in the weights' place then, from which no run could go on.
    """

    def __init__(self, checkpoint: RunCheckpoint) -> None:
        self.checkpoint = checkpoint

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.checkpoint._save_newest(trainer)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one.cpu(), other.cpu())
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def _stopped_together(trainer: Trainer, exception: BaseException) -> bool:
    """Whether all ranks stop here, and not in the middle of an update; saving needs both."""
    if isinstance(exception, SIGTERMException):
        return True
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    between_batches = batches.ready == batches.processed or isinstance(exception, NonFiniteError)
    return trainer.world_size == 1 and between_batches and isinstance(exception, Exception)


def _validate_again(trainer: Trainer) -> None:
    """Lets a resumed run start over with the validation that is under way.

    Lightning would take it for done. These are the counters of one that was left in its first
    batch, which it repeats.
    """
    progress = trainer.fit_loop.epoch_loop.val_loop.batch_progress
    progress.reset()
    progress.increment_ready()
    progress.increment_started()
