"""A Slurm job that has to make room saves after its update, queues itself again and goes on later.

Lightning's own handler saves inside the signal handler, in the middle of whatever is running.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from tinyllm.checkpoint import read_checkpoint

_JOB = "slurm_job"  # a checkpoint's entry: which job has written it


@contextmanager
def requeued_by_slurm(trainer: Trainer) -> Iterator[None]:
    """Within it, Slurm's signal stops training after the running update and requeues the job.

    The signal is that of Lightning's SLURMEnvironment, SIGUSR1 unless told otherwise; with
    ``auto_requeue=False``, and outside of Slurm, nothing is changed. Several ranks stop together,
    as soon as the strategy lets them agree, and the job is requeued once, whichever of them were
    told. What is saved is up to the checkpoint callback.

    Args:
        trainer: Whose ``fit`` runs within.

    Raises:
        SystemExit: 128 and the signal's number, when the run was stopped by it.
    """
    environment = trainer._accelerator_connector.cluster_environment
    if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
        yield
        return
    assert environment.requeue_signal is not None
    request = _Request(environment.requeue_signal)
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    callbacks.insert(0, request)  # checkpoint callbacks stay last
    # Lightning leaves a signal alone for which there is a handler
    before = signal.signal(request.signal, request.note)
    try:
        yield
    except SIGTERMException:
        if not request.agreed:
            raise
        if trainer.is_global_zero:
            _requeue()
        raise SystemExit(128 + request.signal) from None
    finally:
        signal.signal(request.signal, before)
        callbacks.remove(request)


class _Request(Callback):
    """Slurm's wish, from the signal that may come at any moment to an update's end."""

    def __init__(self, number: signal.Signals) -> None:
        self.signal = number
        self.agreed = False
        self._told = False
        self._passed_on = False

    def note(self, *_: Any) -> None:
        """The signal's handler, which does nothing that could be in the way of anything."""
        self._told = True

    def _pass_on(self, trainer: Trainer) -> None:
        """Lets Lightning stop as if it were SIGTERM, which it does between two updates."""
        if not self._told or self._passed_on:
            return
        self._passed_on = True
        rank_zero_info(f"{self.signal.name}: this job is saved after an update and queued again")
        connector = trainer._signal_connector
        if trainer.world_size > 1:
            connector._sigterm_notifier_fn(self.signal, None)  # type: ignore[arg-type]
        else:
            connector.received_sigterm = True

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        self._pass_on(trainer)

    @override
    def on_validation_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        self._pass_on(trainer)

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        if isinstance(exception, SIGTERMException):  # of all ranks, so they can speak
            self.agreed = trainer.strategy.reduce_boolean_decision(self._told, all=False)

    @override
    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint[_JOB] = os.environ.get("SLURM_JOB_ID")


def _requeue() -> None:
    """Queues this job again; if Slurm does not, says how to go on."""
    array, job = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_JOB_ID", "")
    if array is not None:
        job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True)
        problem = done.stderr.strip() if done.returncode else None
    except OSError as error:
        problem = str(error)
    if problem is None:
        rank_zero_info(f"job {job} is queued again and goes on from its last checkpoint")
    else:
        sys.stderr.write(
            f"`scontrol requeue {job}` failed: {problem}\nSubmit the job again, with "
            "--ckpt_path last; `sbatch --requeue` lets jobs be requeued\n"
        )


def goes_on_from(last: Path | None) -> bool:
    """Whether this job was started again, and the checkpoint is the one it left.

    Args:
        last: The newest checkpoint in the run's folder, which an earlier run may have written.
    """
    started_again = int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0
    return (
        last is not None
        and started_again
        and read_checkpoint(last).get(_JOB) == os.environ.get("SLURM_JOB_ID")
    )
