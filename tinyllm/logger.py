"""The CSV log of a run, which survives resuming in the same folder."""

import csv
import os
from itertools import takewhile
from pathlib import Path
from typing import Any

from lightning.pytorch.core.saving import save_hparams_to_yaml
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only
from typing_extensions import override

from tinyllm.errors import naming
from tinyllm.files import replacing


class RunLogger(CSVLogger):
    """Writes ``metrics.csv`` straight into the run's folder.

    A resumed run continues the file: rows from its first one on, which the earlier run wrote after
    the checkpoint, are replaced. A run that starts anew in a used folder keeps the old file
    under a numbered name.

    Args:
        save_dir: The run's folder.
    """

    def __init__(self, save_dir: str | Path) -> None:
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

    @override
    @rank_zero_only
    def finalize(self, status: str) -> None:
        if status == "success" and self._experiment is not None:
            self.experiment.write_hparams()  # of a run without any row
        super().finalize(status)


class _ContinuingWriter(ExperimentWriter):
    """Lightning's writer, made to continue a file in place of deleting it."""

    _opened = False
    _hparams_written = True

    @override
    def _check_log_dir_exists(self) -> None:
        """Nothing is deleted; the file is looked at when the first row's step is known."""

    @override
    def log_hparams(self, params: dict[str, Any]) -> None:
        """Written with the first row: a run that is refused leaves the ones of the run before."""
        self.hparams.update(params)
        self._hparams_written = False

    def write_hparams(self) -> None:
        """Writes ``hparams.yaml`` if that has not been done."""
        if self._hparams_written:
            return
        path = Path(self.log_dir) / self.NAME_HPARAMS_FILE
        with replacing(path) as partial:
            save_hparams_to_yaml(partial, self.hparams)
        self._hparams_written = True

    @override
    def log_metrics(self, metrics_dict: dict[str, float], step: int | None = None) -> None:
        if not self._opened:
            self._opened = True
            self._continue_from(step or 0, set(metrics_dict) - {"epoch"})
        super().log_metrics(metrics_dict, step)

    @override
    def save(self) -> None:
        if self.metrics:
            self.write_hparams()
        path = Path(self.metrics_file_path)
        with naming(path):
            if self.metrics and not path.exists():
                _replace(path, ["step"], [])  # so that no reader finds it empty
            try:
                super().save()
            except OSError:  # a full disk may have taken a part of a row
                os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
                raise

    def _continue_from(self, step: int, names: set[str]) -> None:
        """Keeps what was logged before this run's first row, which has ``names`` at ``step``."""
        path = Path(self.metrics_file_path)
        if not path.exists():
            return

        def comes_before(row: dict[str, str]) -> bool:
            # an update's own row comes before its validation's
            other = int(row["step"])
            return other < step or (other == step and not any(row.get(name) for name in names))

        rows = _whole_rows(path)
        kept = list(takewhile(comes_before, rows))
        if kept:
            self.metrics_keys = list(kept[0])
            _replace(path, self.metrics_keys, kept)
        elif rows:
            number = 1
            while (aside := path.with_name(f"metrics-{number}.csv")).exists():
                number += 1
            path.rename(aside)
            rank_zero_info(f"{path} holds an earlier run; it is kept as {aside.name}")
        else:
            path.unlink()

    @override
    def _rewrite_with_new_header(self, fieldnames: list[str]) -> None:
        path = Path(self.metrics_file_path)
        _replace(path, fieldnames, _whole_rows(path))


def _whole_rows(path: Path) -> list[dict[str, str]]:
    """Rows of a log; without the last one if a killed run left only a part of it."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    return list(csv.DictReader(lines))


def _replace(path: Path, keys: list[str], rows: list[dict[str, str]]) -> None:
    with replacing(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=keys)
        writer.writeheader()
        writer.writerows(rows)
