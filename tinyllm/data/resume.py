"""Repairs of how Lightning 2.6 resumes, by moving a checkpoint's counters.

At the end of an epoch: the epoch loop, restored with all batches done, waits for a validation even
if none comes and meanwhile trains one batch of the next epoch; then it starts that epoch anew.
Under `max_steps` the run so skips the rest of an epoch. The counters are moved on to where the
uninterrupted run stands before its next batch: at the start of the next epoch.

In the middle of an epoch: what ends a run there in good order (`max_steps`, `max_time`, early
stopping) counts the epoch as completed, and the resumed run has one epoch less. The counters are
moved back to where an interrupted run stands: in that epoch.
"""

from typing import Any

import lightning


def repair_restored_epoch(trainer: lightning.Trainer, epoch: int) -> None:
    """Correct the loop counters of a checkpoint that is being restored; call before they are.

    Args:
        trainer: It has loaded the checkpoint.
        epoch: In which the loader's next batch lies; it counts right however a run has ended.
    """
    loops = trainer._checkpoint_connector._loaded_checkpoint.get("loops")
    if not loops:
        return
    state = loops["fit_loop"]
    batches, epochs = state["epoch_loop.batch_progress"], state["epoch_progress"]
    is_inside = batches["current"]["ready"] and not batches["is_last_batch"]
    if is_inside and epochs["current"]["completed"] == epoch + 1:
        for count in (epochs["total"], epochs["current"]):
            count["processed"] -= 1
            count["completed"] -= 1
    is_at_end = (
        batches["is_last_batch"] and batches["current"]["completed"] == batches["current"]["ready"]
    )
    # Saved after a validation inside the epoch: Lightning ends such an epoch correctly.
    every = trainer.check_val_every_n_epoch
    was_validated = (
        trainer.enable_validation
        and epochs["current"]["completed"] < epochs["current"]["started"]
        and (every is None or epochs["current"]["started"] % every == 0)
    )
    if not is_at_end or was_validated:
        return
    for count in (epochs["total"], epochs["current"]):
        count["processed"] = count["completed"] = count["started"]
    _set_to_zero(batches["current"])
    batches["is_last_batch"] = False
    _set_to_zero(state["epoch_loop.scheduler_progress"]["current"])
    optimizer = state["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
    for progress in (optimizer["step"], optimizer["zero_grad"]):
        _set_to_zero(progress["current"])


def _set_to_zero(counts: dict[str, Any]) -> None:
    for name in counts:
        counts[name] = 0
