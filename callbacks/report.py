"""A run to look at: one HTML file and SVG curves, drawn from the files that the run left."""

import html
from pathlib import Path

import pandas as pd
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from tinyllm.callbacks.run_curves import RunFiles, svg_curves
from tinyllm.extras import require
from tinyllm.files import replacing

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #111827; max-width: 980px; margin: 2em auto;
       padding: 0 1em; }
table { border-collapse: collapse; } td { padding: .15em 1.5em .15em 0; }
figure { margin: 1.5em 0; } svg { max-width: 100%; height: auto; }
pre { background: #f3f4f6; padding: 1em; overflow-x: auto; }
"""


class RunReport(Callback):
    """Writes ``report.html`` and ``curves/*.svg`` when a run ends, also when it is interrupted.

    They are drawn from files of the run: losses, learning rate and consensus distance from the
    ``metrics.csv`` of a CSVLogger, windows from ``throughput.csv``, peaks from ``memory.json``,
    distances of workers from ``consensus.csv``, settings from ``config.yaml``. What is not there is
    left out. ``report.html`` needs no other file.

    Nothing happens during training; at its end, on rank 0 only, the drawing takes about a second. A
    report that fails is a warning and not an error. A run that is killed leaves its files, from
    which :func:`write_run_report` draws the same.

    Args:
        folder: Where the files of the callbacks are and the report goes; null takes the Trainer's
            ``default_root_dir``.

    Raises:
        ModuleNotFoundError: When the run starts, if matplotlib is missing.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self._folder = folder
        self._trains = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            require("matplotlib", "report")

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._trains = True

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._report(trainer, f"stopped by {type(exception).__name__}")

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # after all callbacks' on_fit_end, in which some write their files
        if stage == "fit":
            self._report(trainer, "finished")

    def _report(self, trainer: Trainer, ending: str) -> None:
        if not (self._trains and trainer.is_global_zero):
            return
        self._trains = False
        folder = Path(self._folder or trainer.default_root_dir)
        status = f"{ending} after {trainer.global_step:,} updates"
        try:
            write_run_report(folder, metrics=_metrics_file(trainer), status=status)
        except Exception as error:  # the run is worth more than its picture
            rank_zero_warn(f"there is no report of the run in {folder}: {error!r}")


def write_run_report(
    folder: str | Path, *, metrics: str | Path | None = None, status: str = ""
) -> list[Path]:
    """Draws the report of a run from the files in its folder.

    Args:
        folder: The run's folder.
        metrics: The CSV log; None takes the folder's ``metrics.csv``.
        status: How the run ended, for the head of the report.

    Returns:
        The files that were written, ``report.html`` first. Curves of an earlier report for which
        there is nothing to draw any more are removed.

    Raises:
        NotADirectoryError: If there is no such folder.
        ModuleNotFoundError: If matplotlib is missing.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is not a folder")
    require("matplotlib", "report")
    files = RunFiles(folder, Path(metrics) if metrics else folder / "metrics.csv")
    curves, written = {}, []
    for name, text in svg_curves(files).items():
        path = folder / "curves" / f"{name}.svg"
        if text is None:
            path.unlink(missing_ok=True)
            continue
        curves[name] = text
        _write(path, text)
        written.append(path)
    page = folder / "report.html"
    _write(page, _page(files, curves, status))
    return [page, *written]


def _page(files: RunFiles, curves: dict[str, str], status: str) -> str:
    title = html.escape(f"Run {files.name}")
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(value)}</td></tr>"
        for name, value in _numbers(files, status).items()
    )
    # a drawing inside a page has no prolog
    figures = "".join(
        f'<figure id="{name}">{text[text.index("<svg") :]}</figure>'
        for name, text in curves.items()
    )
    settings = html.escape(files.config)
    config = f"<details><summary>Settings</summary><pre>{settings}</pre></details>"
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head>\n<body><h1>{title}</h1>\n<table>{rows}</table>\n"
        f"{figures or '<p>The run left nothing to draw.</p>'}\n"
        f"{config if settings else ''}</body></html>\n"
    )


def _numbers(files: RunFiles, status: str) -> dict[str, str]:
    """What to see at a glance."""
    found = {"status": status} if status else {}
    train, validation = files.series("train/loss"), files.series("validation/loss")
    if not train.empty:
        found["last training loss"] = f"{train.iloc[-1]:.4f} nats per token"
    if not validation.empty:
        found["last validation loss"] = f"{validation.iloc[-1]:.4f} nats per token"
        found["least validation loss"] = f"{validation.min():.4f} at update {validation.idxmin()}"
    if not files.throughput.get("tokens_per_second", pd.Series(dtype=float)).dropna().empty:
        median = files.throughput["tokens_per_second"].median()
        found["median throughput"] = f"{median:,.0f} tokens per second"
    for name, value in files.memory.items():
        if name.endswith("_bytes"):
            label = name.removesuffix("_bytes").replace("_", " ").replace("rss", "resident set")
            found[label] = f"{value / 2**30:.3g} GiB"
    return found


def _metrics_file(trainer: Trainer) -> Path | None:
    """The log of the first CSVLogger, on the disk as it is now."""
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger):
            logger.save()
            return Path(logger.log_dir) / "metrics.csv"
    return None


def _write(path: Path, text: str) -> None:
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")
