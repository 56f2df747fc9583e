"""What a run's files tell, and the curves that are drawn from it."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BLUE, _RED, _GREY = "#1b6f8a", "#c2410c", "#7b818b"
_SMOOTHED_ROWS = 50  # from this many points on, a curve also gets its running mean


class RunFiles:
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


def svg_curves(files: RunFiles) -> dict[str, str | None]:
    """Each curve by name, as the text of an SVG file; None where there is nothing to draw."""
    figures = {name: _figure(draw, files) for name, draw in _CURVES.items()}
    return {name: _svg(drawn, name) if drawn else None for name, drawn in figures.items()}


# Curves: each draws into a panel, or says that there is nothing to draw


def _loss(panel: "Axes", files: RunFiles) -> bool:
    train = files.series("train/loss", "train/loss_step", "train_loss")
    validation = files.series("validation/loss", "val/loss", "val_loss")
    if not train.empty:
        _line(panel, train, "training")
    if not validation.empty:
        label = f"validation, last {validation.iloc[-1]:.4f}"
        panel.plot(validation.index, validation, "o-", color=_RED, markersize=4, label=label)
    panel.set(title="Loss", ylabel="nats per token")
    return not (train.empty and validation.empty)


def _learning_rate(panel: "Axes", files: RunFiles) -> bool:
    rates = files.learning_rate
    panel.plot(rates.index, rates, color=_BLUE)
    panel.set(title="Learning rate", ylim=(0, None) if rates.empty else (0, 1.08 * rates.max()))
    return not rates.empty


def _throughput(panel: "Axes", files: RunFiles) -> bool:
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


def _memory(panel: "Axes", files: RunFiles) -> bool:
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


def _consensus(panel: "Axes", files: RunFiles) -> bool:
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


_CURVES: dict[str, Callable[["Axes", RunFiles], bool]] = {
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


def _figure(draw: Callable[["Axes", RunFiles], bool], files: RunFiles) -> "Figure | None":
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
