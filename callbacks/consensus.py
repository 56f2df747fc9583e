"""How far workers are from their mean, as a table."""

import csv
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from tinyllm.errors import naming
from tinyllm.files import write_csv
from tinyllm.metrics import UpdateMetrics


class ConsensusDistance(Callback):
    """Writes ``consensus.csv``: distances of all workers from their mean x̄ at each log point.

    A decentralized strategy computes the distances at log points, and this callback only writes
    down what it publishes. Computing them at other updates, too, would be a second pass over all
    weights for the same numbers; where more points are wanted, lower
    ``trainer.log_every_n_steps``.

    Columns: ``update`` (from 0), ``distance`` over all N workers (the root of the mean of
    squares), ``relative_distance`` (that over ‖x̄‖), then ``distance/i`` = ‖x_i − x̄‖ and
    ``relative_distance/i`` for each worker i. A resumed run continues the file.
    ``consensus/distance`` and ``consensus/relative_distance`` are logged, too, as
    :class:`TinyLLM` does by itself.

    With one worker there is no distance: it says so once and does nothing.

    Args:
        folder: Where the file goes; null takes the Trainer's ``default_root_dir``.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self._folder = folder
        self._active = False
        self._path: Path | None = None  # once it has a header
        self._first_update = 0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        ranks = getattr(trainer.strategy, "ranks", None)
        self._active = ranks is not None and ranks.num_workers > 1
        self._path = None
        self._first_update = trainer.global_step
        if not self._active:
            rank_zero_info("ConsensusDistance: there is one worker, so there is no distance")

    def on_log_point(
        self, trainer: Trainer, pl_module: LightningModule, metrics: UpdateMetrics
    ) -> dict[str, float]:
        """Writes a row; a strategy calls this when the distances have come from the device."""
        if not self._active:
            return {}
        values = metrics.scalars()
        overall = {name: values[f"consensus/{name}"] for name in ("distance", "relative_distance")}
        if trainer.is_global_zero:
            row = {"update": metrics.step, **overall}
            for worker in range(trainer.strategy.ranks.num_workers):  # type: ignore[attr-defined]
                for name in ("distance", "relative_distance"):
                    row[f"{name}/{worker}"] = values[f"worker_{name}/{worker}"]
            self._write(Path(self._folder or trainer.default_root_dir), row)
        return {f"consensus/{name}": value for name, value in overall.items()}

    def _write(self, folder: Path, row: dict[str, Any]) -> None:
        if self._path is None:
            self._path = folder / "consensus.csv"
            columns = list(row)
            write_csv(self._path, columns, _rows_before(self._path, columns, self._first_update))
        with naming(self._path), self._path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerow(row.values())


def _rows_before(path: Path, columns: list[str], update: int) -> list[list[str]]:
    """What an earlier run, which this one continues, has written; whole rows only."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    if not rows or rows[0] != columns:
        return []
    return [row for row in rows[1:] if len(row) == len(columns) and int(row[0]) < update]
