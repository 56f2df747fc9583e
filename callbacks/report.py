"""A run to look at: one HTML file and SVG curves, drawn from the files that the run left."""

import html
import importlib.util
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from tinyllm.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BLUE, _RED, _GREY = "#1b6f8a", "#c2410c", "#7b818b"
_SMOOTHED_ROWS = 50  # from this many points on, a curve also gets its running mean
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
            _require_matplotlib()

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
    _require_matplotlib()
    files = _RunFiles(folder, Path(metrics) if metrics else folder / "metrics.csv")
    curves, written = {}, []
    for name, draw in _CURVES.items():
        path = folder / "curves" / f"{name}.svg"
        figure = _figure(draw, files)
        if figure is None:
            path.unlink(missing_ok=True)
            continue
        curves[name] = _svg(figure, name)
        _write(path, curves[name])
        written.append(path)
    page = folder / "report.html"
    _write(page, _page(files, curves, status))
    return [page, *written]


class _RunFiles:
    """What a run left; a file that is absent or unreadable is an empty table."""

    def __init__(self, folder: Path, metrics: Path) -> None:
        self.name = folder.resolve().name
        self.metrics = _table(metrics)
        self.throughput = _table(folder / "throughput.csv")
        self.consensus = _table(folder / "consensus.csv")
        self.memory = _json(folder / "memory.json")
        config = folder / "config.yaml"
        self.config = config.read_text(encoding="utf-8") if config.is_file() else ""

    def series(self, *names: str) -> pd.Series:
        """The first of some logged quantities that is there, by update; empty if none is."""
        for name in names:
            if name in self.metrics and "step" in self.metrics:
                found = self.metrics.set_index("step")[name].dropna()
                if not found.empty:
                    return found
        return pd.Series(dtype=float)

    @property
    def learning_rate(self) -> pd.Series:
        """By update; as TinyLLM logs it, or else a LearningRateMonitor."""
        monitored = [str(name) for name in self.metrics.columns if str(name).startswith("lr-")]
        return self.series("train/lr", *monitored)


def _table(path: Path) -> pd.DataFrame:
    try:
        rows = pd.read_csv(path, on_bad_lines="skip")  # a killed run may leave half a row
    except (FileNotFoundError, ValueError):
        return pd.DataFrame()
    return rows.apply(pd.to_numeric, errors="coerce")


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


# Curves: each draws into a panel, or says that there is nothing to draw


def _loss(panel: "Axes", files: _RunFiles) -> bool:
    train = files.series("train/loss", "train/loss_step", "train_loss")
    validation = files.series("validation/loss", "val/loss", "val_loss")
    if not train.empty:
        _line(panel, train, "training")
    if not validation.empty:
        label = f"validation, last {validation.iloc[-1]:.4f}"
        panel.plot(validation.index, validation, "o-", color=_RED, markersize=4, label=label)
    panel.set(title="Loss", ylabel="nats per token")
    return not (train.empty and validation.empty)


def _learning_rate(panel: "Axes", files: _RunFiles) -> bool:
    rates = files.learning_rate
    panel.plot(rates.index, rates, color=_BLUE)
    panel.set(title="Learning rate", ylim=(0, None) if rates.empty else (0, 1.08 * rates.max()))
    return not rates.empty


def _throughput(panel: "Axes", files: _RunFiles) -> bool:
    if "tokens_per_second" not in files.throughput:
        return False
    speeds = files.throughput["tokens_per_second"].dropna()
    if speeds.empty:
        return False
    median = speeds.median()
    panel.bar(range(1, len(speeds) + 1), speeds, color=_BLUE, width=0.7)
    panel.axhline(median, color=_RED, linestyle="--", label=f"median {median:,.0f}")
    panel.set_xticks(range(1, len(speeds) + 1))
    panel.yaxis.set_major_formatter("{x:,.0f}")
    panel.set(title="Throughput", xlabel="window", ylabel="tokens per second")
    return True


def _memory(panel: "Axes", files: _RunFiles) -> bool:
    phases = files.memory.get("phases") or {}
    names = list(next(iter(phases.values()), {}))
    height = 0.8 / max(1, len(names))
    shades = dict(zip(names, (_BLUE, _RED, _GREY), strict=False))
    for place, name in enumerate(names):
        gib = [peaks.get(name, 0) / 2**30 for peaks in phases.values()]
        rows = [row + (place - (len(names) - 1) / 2) * height for row in range(len(gib))]
        label = name.removeprefix("peak_").removesuffix("_bytes").replace("rss", "resident set")
        bars = panel.barh(rows, gib, height * 0.9, color=shades.get(name, _GREY), label=label)
        panel.bar_label(bars, fmt="{:.3g}", padding=3)
    panel.set_yticks(range(len(phases)), list(phases))
    panel.invert_yaxis()
    panel.margins(x=0.12)
    panel.set(title="Peak memory by phase", xlabel="GiB")
    return bool(names)


def _consensus(panel: "Axes", files: _RunFiles) -> bool:
    table = files.consensus
    if "relative_distance" in table and "update" in table and not table.empty:
        overall = table.set_index("update")["relative_distance"].dropna()
        for name in table.columns:
            if str(name).startswith("relative_distance/"):
                panel.plot(table["update"], table[name], color=_GREY, linewidth=0.7, alpha=0.6)
        panel.plot([], [], color=_GREY, linewidth=0.7, label="single workers")
    else:
        overall = files.series("consensus/relative_distance")
    panel.plot(overall.index, overall, color=_BLUE, label="all workers")
    if not overall.empty and overall.min() > 0:
        panel.set_yscale("log")
    panel.set(title="Distance of workers from their mean", ylabel="relative to the mean's norm")
    return not overall.empty


_CURVES: dict[str, Callable[["Axes", _RunFiles], bool]] = {
    "loss": _loss,
    "learning_rate": _learning_rate,
    "throughput": _throughput,
    "memory": _memory,
    "consensus": _consensus,
}


def _line(panel: "Axes", values: pd.Series, label: str) -> None:
    """A curve; a long one as its running mean, over the points themselves."""
    if len(values) < _SMOOTHED_ROWS:
        panel.plot(values.index, values, color=_BLUE, label=label)
        return
    smooth = values.rolling(len(values) // 25 + 1, center=True, min_periods=1).mean()
    panel.plot(values.index, values, color=_BLUE, alpha=0.25, linewidth=0.8)
    panel.plot(values.index, smooth, color=_BLUE, label=f"{label}, running mean")


def _figure(draw: Callable[["Axes", _RunFiles], bool], files: _RunFiles) -> "Figure | None":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    panel = figure.subplots()
    if not draw(panel, files):
        return None
    if not panel.get_xlabel():
        panel.set_xlabel("update")
    title = panel.get_title()
    panel.set_title("")
    panel.set_title(title, loc="left", fontweight="bold")
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(color="#e5e7eb")
    panel.set_axisbelow(True)
    if labels := panel.get_legend_handles_labels()[1]:
        # above the panel, where it covers nothing
        figure.legend(loc="outside upper right", frameon=False, ncols=len(labels))
    return figure


def _svg(figure: "Figure", name: str) -> str:
    import matplotlib

    text = io.StringIO()
    # ids that differ between the figures of a page, and not between two drawings of one
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def _page(files: _RunFiles, curves: dict[str, str], status: str) -> str:
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


def _numbers(files: _RunFiles, status: str) -> dict[str, str]:
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


def _require_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError(
            "a run's report needs matplotlib, which is missing: pip install 'tinyllm[report]'"
        )


def _write(path: Path, text: str) -> None:
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")
