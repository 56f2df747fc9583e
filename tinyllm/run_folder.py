"""A run's folder, in which an earlier run's files are kept aside."""

from pathlib import Path

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

_CONFIG = "config.yaml"
_ASIDE = ".earlier"  # an earlier run's files while they are being moved
_OF_A_RUN = (
    *("checkpoints", "metrics.csv", _CONFIG, "hparams.yaml", "predictions.npy"),
    # of callbacks
    *("throughput.csv", "timing.json", "ready", "go"),
    *("memory.json", "consensus.csv", "trace", "report.html", "curves"),
)


class RunFolder(SaveConfigCallback):
    """Writes ``config.yaml``, after what another run left in the folder was moved aside.

    Earlier runs are kept in ``earlier-1``, ``earlier-2`` and so on. A run that resumes from a
    checkpoint of the folder continues it, and nothing is moved. Both happen when the settings and
    the checkpoint have been accepted, and not before. The first of the callbacks, since others
    write files when training starts.
    """

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Too early: the run may yet be refused."""

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        folder = Path(trainer.default_root_dir)
        if trainer.is_global_zero and not _resumes(trainer):
            _keep_aside(folder)
        # a reader finds the old settings or the new ones, never a part
        self.config_filename = f".{_CONFIG}.partial"
        super().setup(trainer, pl_module, "fit")
        written = Path(trainer.log_dir or folder) / self.config_filename
        if trainer.is_global_zero and written.exists():
            written.replace(written.with_name(_CONFIG))


def _keep_aside(folder: Path) -> None:
    """Moves an earlier run's files to a folder of their own, which appears whole.

    Where that was cut short by a kill, the next run completes it.
    """
    if not any((folder / name).exists() for name in (*_OF_A_RUN, _ASIDE)):
        return
    number = 1
    while (aside := folder / f"earlier-{number}").exists():
        number += 1
    moving = folder / _ASIDE
    moving.mkdir(exist_ok=True)
    for name in _OF_A_RUN:
        if (folder / name).exists():
            (folder / name).rename(moving / name)
    moving.rename(aside)
    rank_zero_info(f"{folder} holds an earlier run; it is kept in {aside}")


def _resumes(trainer: Trainer) -> bool:
    """Whether the checkpoint to start from belongs to the run's folder."""
    if trainer.ckpt_path is None:
        return False
    # not any file below the run's folder: an earlier run's lie there, too
    start = Path(trainer.ckpt_path).resolve().parent
    folders = [getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks]
    return any(folder is not None and start == Path(folder).resolve() for folder in folders)
