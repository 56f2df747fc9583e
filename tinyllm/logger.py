"""The CSV log of a run, which survives resuming in the same folder."""

import csv
import os
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override


class RunLogger(CSVLogger):
    """Writes ``metrics.csv`` straight into the run's folder.

    A resumed run continues the file: rows at or past its first step, which the earlier run wrote
    after the checkpoint, are replaced. A run that starts anew in a used folder keeps the old file
    under a numbered name.

    Args:
        save_dir: The run's folder.
    """

    def __init__(self, save_dir: str | os.PathLike[str]) -> None:
        super().__init__(save_dir, name="", version="", flush_logs_every_n_steps=1)

    @property
    @override
    def log_dir(self) -> str:
        return self.save_dir

    @property
    @override
    @rank_zero_experiment
    def experiment(self) -> Any:
        if self._experiment is None:
            self._experiment = _ContinuingWriter(self.log_dir)
        return self._experiment


class _ContinuingWriter(ExperimentWriter):
    """Lightning's writer, made to continue a file in place of deleting it."""

    _opened = False

    @override
    def _check_log_dir_exists(self) -> None:
        """Nothing is deleted; the file is looked at when the first row's step is known."""

    @override
    def log_metrics(self, metrics_dict: dict[str, float], step: int | None = None) -> None:
        if not self._opened:
            self._opened = True
            self._continue_from(step or 0)
        super().log_metrics(metrics_dict, step)

    def _continue_from(self, step: int) -> None:
        path = Path(self.metrics_file_path)
        if not path.exists():
            return
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            rows = list(reader)
            self.metrics_keys = list(reader.fieldnames or [])
        kept = [row for row in rows if int(row["step"]) < step]
        if rows and not kept:
            number = 1
            while (aside := path.with_name(f"metrics-{number}.csv")).exists():
                number += 1
            path.rename(aside)
            self.metrics_keys = []
            rank_zero_info(f"{path} holds an earlier run; it is kept as {aside.name}")
            return
        partial = path.with_suffix(".partial")
        with partial.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=self.metrics_keys)
            writer.writeheader()
            writer.writerows(kept)
        partial.replace(path)
