"""The one figure of a qualification: what was measured, against what it must reach.

Four panels: small batches by category and repeat, production cases, numerical distances, and
differences of final losses with their upper bounds. A filled circle passed, a cross did not, and a
hollow circle decides nothing.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from tinyllm.acceptance.accept import Qualification
from tinyllm.acceptance.gates import Verdict, at_least, below
from tinyllm.acceptance.numerical import COMPARISONS
from tinyllm.acceptance.protocol import Protocol

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PASS, _FAIL, _NEUTRAL, _LIMIT = "#1b6f8a", "#c2410c", "#7b818b", "#111827"
_COLOURS = {True: _PASS, False: _FAIL, None: _NEUTRAL}
_BEHIND = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.0}  # of a label
_WIDTH_INCHES, _ROW_INCHES = 13.0, 0.42


def qualification_figure(
    found: Qualification, missing: Mapping[str, Sequence[str]], candidate: str = "Candidate"
) -> "Figure":
    """Draws a qualification.

    Args:
        found: What the gates said.
        missing: Of a partial report, what was not measured, by gate; empty for a complete one.
        candidate: Which one it is, for the title.

    Raises:
        ModuleNotFoundError: If matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ModuleNotFoundError(
            "the figure needs matplotlib, which is missing: pip install 'tinyllm[report]'"
        ) from error
    protocol = found.protocol
    tables = {name: table for gate in found.gates for name, table in gate.tables.items()}
    small = tables["small_batch"].to_dict("records")
    rows = [
        max(6, len(tables["production"]) + 1, len(small) * (protocol.repeats + 1.3)),
        max(6, len(tables["convergence"]) + 1, len(tables["worst"]) + 1),
    ]
    heights = [_ROW_INCHES * number + 0.9 for number in rows]
    figure = Figure(figsize=(_WIDTH_INCHES, sum(heights) + 0.9), layout="constrained")
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.08)
    grid = figure.add_gridspec(2, 2, height_ratios=heights)
    # a scale for each category: they lie far apart
    inner = grid[0, 0].subgridspec(max(1, len(small)), 1)
    panels = [figure.add_subplot(inner[row, 0]) for row in range(max(1, len(small)))]
    panels += [figure.add_subplot(grid[place]) for place in ((0, 1), (1, 0), (1, 1))]
    for panel, category in zip(panels[:-3], small, strict=False):
        _small_batch(panel, category, tables["ratios"], protocol)
    if not small:
        _nothing(panels[0], "the protocol has no small batches")
    _title(panels[0], "Small batches: candidate/native speed")
    if small:
        panels[-4].set_xlabel("median per category and repeat; grey: single workloads")
    _production(panels[-3], tables["production"], protocol)
    _numerical(panels[-2], tables["worst"], protocol)
    _convergence(panels[-1], tables["convergence"], tables["pairs"], protocol)
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
    title = f"{candidate}: {words(found.verdict)}"
    title += f" (protocol {protocol.version}, {protocol.hash[:12]})"
    if missing:
        _mark_partial(figure, title, tables, missing)
    else:
        figure.suptitle(title, fontsize=14, color=_LIMIT)
    _fix_layout(figure)
    return figure


def _mark_partial(
    figure: "Figure",
    title: str,
    tables: Mapping[str, pd.DataFrame],
    missing: Mapping[str, Sequence[str]],
) -> None:
    """Says in the title how much of what was planned is missing, and lays a watermark over all."""
    planned = {
        "performance": f"{len(tables['ratios'])} pairs",
        "numerical": f"{len(tables['cases'])} comparisons",
        "convergence": f"{len(tables['pairs'])} seeds",
    }
    counts = [f"{len(names)} of {planned[gate]}" for gate, names in missing.items() if names]
    lacks = f"missing {', '.join(counts)}" if counts else "some rows do not count"
    figure.text(
        0.5,
        0.5,
        "PARTIAL",
        fontsize=130,
        fontweight="bold",
        color=_FAIL,
        alpha=0.07,
        rotation=28,
        ha="center",
        va="center",
    )
    figure.suptitle(f"PARTIAL: {lacks}\n{title}", fontsize=14, color=_FAIL)


def _fix_layout(figure: "Figure") -> None:
    """Lays out once, to four digits: the solver's last digits are not the same each time."""
    figure.draw_without_rendering()
    places = [[round(x, 4) for x in panel.get_position().bounds] for panel in figure.axes]
    figure.set_layout_engine("none")
    for panel, (left, bottom, width, height) in zip(figure.axes, places, strict=True):
        panel.set_position((left, bottom, width, height))


def words(verdict: str) -> str:
    """A verdict as it is read: ``not qualified``."""
    return str(verdict).replace("_", " ")


def _title(panel: "Axes", text: str) -> None:
    panel.set_title(text, loc="left", fontweight="bold", fontsize=12)


def _mark(
    panel: "Axes", x: float, y: float, passed: bool | None, label: str = "", **given: Any
) -> None:
    """A point with its verdict; None for one that decides nothing. The label is right of it."""
    if not math.isfinite(x):
        return
    colour = _COLOURS[passed]
    style: dict[str, Any] = {"marker": "X" if passed is False else "o", "color": colour}
    if passed is None and not given:
        style["markerfacecolor"] = "white"
    panel.plot([x], [y], markersize=8, linestyle="none", zorder=4, **{**style, **given})
    if label:
        _beside(panel, x, y, label, colour)


def _beside(panel: "Axes", x: float, y: float, label: str, colour: str) -> None:
    panel.annotate(
        label,
        (x, y),
        (9, 0),
        textcoords="offset points",
        va="center",
        color=colour,
        bbox=_BEHIND,
        zorder=5,
    )


def _threshold(panel: "Axes", x: float, label: str) -> None:
    panel.axvline(x, color=_LIMIT, linewidth=1.2, linestyle="--", zorder=2)
    panel.annotate(
        label,
        (x, 1.0),
        (3, -2),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        va="top",
        fontsize=9,
        color=_LIMIT,
    )


def _rows(panel: "Axes", names: Sequence[str]) -> None:
    """Names along the vertical axis, the first on top, with room for the threshold's label."""
    panel.set_yticks(range(len(names)), names)
    panel.set_ylim(len(names) - 0.5, -0.9)
    panel.tick_params(axis="y", length=0)
    panel.grid(axis="x", color="#e5e7eb", zorder=0)
    panel.set_axisbelow(True)


def _span(panel: "Axes", values: Iterable[float], *, right: float) -> None:
    """Limits around the finite values, with a share of the width left free for labels."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite), max(finite)
    width = (high - low) or abs(high) or 1.0
    panel.set_xlim(low - 0.06 * width, high + right * width)


def _not_measured(panel: "Axes", row: float, place: float = 0.99) -> None:
    panel.annotate(
        "not measured",
        (place, row),
        xycoords=("axes fraction", "data"),
        ha="left" if place < 0.5 else "right",
        va="center",
        style="italic",
        color=_NEUTRAL,
    )


def _nothing(panel: "Axes", what: str) -> None:
    panel.set_axis_off()
    panel.text(0.5, 0.5, what, ha="center", va="center", transform=panel.transAxes, color=_NEUTRAL)


def _small_batch(
    panel: "Axes", category: Mapping[Any, Any], ratios: pd.DataFrame, protocol: Protocol
) -> None:
    """One category: a line for each repeat, with the median and single workloads."""
    mine = ratios[(ratios["kind"] == "small-batch") & (ratios["category"] == category["category"])]
    names: list[str] = []
    shown = [protocol.small_batch_ratio, 1.0]
    for repeat in range(1, protocol.repeats + 1):
        row, median = len(names), float(category[f"repeat_{repeat}"])
        names.append(f"{category['category']}, repeat {repeat}")
        planned = mine.loc[mine["repeat"] == repeat, "ratio"]
        values = planned.dropna().tolist()
        if not values:
            _not_measured(panel, row)
            continue
        shown += values
        panel.scatter(values, [row] * len(values), s=9, color=_NEUTRAL, alpha=0.45, linewidths=0)
        passed, count = None, f" ({len(values)} of {len(planned)})"
        if len(values) == len(planned):
            passed, count = at_least(median, protocol.small_batch_ratio, protocol), ""
        _mark(panel, median, row, passed)
        # beyond all single workloads, so that no dot lies under the text
        _beside(panel, max(values), row, f"{median:.3f}{count}", _COLOURS[passed])
    _rows(panel, names)
    _span(panel, shown, right=0.3)
    _threshold(panel, protocol.small_batch_ratio, f"at least {protocol.small_batch_ratio:g}")


def _production(panel: "Axes", table: pd.DataFrame, protocol: Protocol) -> None:
    _title(panel, "Production: candidate/native speed")
    if table.empty:
        return _nothing(panel, "the protocol has no production cases")
    shown = [protocol.production_ratio, 1.0]
    for row, case in enumerate(table.to_dict("records")):
        values = [float(case[f"repeat_{repeat}"]) for repeat in range(1, protocol.repeats + 1)]
        finite = [value for value in values if math.isfinite(value)]
        shown += finite
        for value in finite:
            _mark(panel, value, row, at_least(value, protocol.production_ratio, protocol))
        if not finite:
            _not_measured(panel, row)
            continue
        some = "" if len(finite) == len(values) else f" ({len(finite)} of {len(values)})"
        reached = at_least(min(finite), protocol.production_ratio, protocol)
        colour = _PASS if reached else _FAIL
        _beside(panel, max(finite), row, f"least {min(finite):.3f}{some}", colour)
    _rows(panel, [str(name).removesuffix("-production") for name in table["workload"]])
    _span(panel, shown, right=0.35)
    _threshold(panel, protocol.production_ratio, f"at least {protocol.production_ratio:g}")
    panel.set_xlabel("one mark per repeat")
    return None


def _numerical(panel: "Axes", worst: pd.DataFrame, protocol: Protocol) -> None:
    _title(panel, f"{protocol.numerical_updates} matched updates: the largest distances")
    columns = worst[[*COMPARISONS, "limit"]].to_numpy(dtype=float)
    positive = columns[np.isfinite(columns) & (columns > 0)]
    left, right = positive.min(initial=1.0) / 14, positive.max(initial=1.0) * 3
    panel.set_xscale("log")
    _rows(panel, [str(name) for name in worst["quantity"]])
    panel.set_xlim(left, right)
    for row, (candidate, control, limit) in enumerate(columns):
        passed = None
        if math.isfinite(limit):
            panel.plot([limit] * 2, [row - 0.3, row + 0.3], color=_LIMIT, linewidth=2, zorder=3)
            panel.annotate(
                f"{limit:g}", (limit, row), (5, 0), textcoords="offset points", va="center"
            )
            loss = limit == 1.0  # a share of its tolerance, all of which may be used
            within = (
                at_least(limit, candidate, protocol) if loss else below(candidate, limit, protocol)
            )
            passed = bool(within)  # NumPy's own is neither True nor False itself
        if not math.isfinite(candidate):
            _not_measured(panel, row, 0.02)  # away from the limits
        for value, height, verdict in ((candidate, -0.16, passed), (control, 0.18, None)):
            if math.isfinite(value):
                x = max(value, left * 2)  # zero has no place on this axis
                style = {"marker": "o"} if height < 0 else {"markerfacecolor": "white"}
                _mark(panel, x, row + height, verdict, **(style if verdict is None else {}))
                panel.annotate(
                    f"{value:.3g}",
                    (x, row + height),
                    (-8, 0),
                    textcoords="offset points",
                    ha="right",
                    va="center",
                    fontsize=9,
                    color=_COLOURS[verdict],
                )
    panel.set_xlabel(
        "relative L2, or share of the tolerance; bars: limits\n"
        "filled: candidate/native, hollow: native/native (no limit)"
    )


def _convergence(
    panel: "Axes", bounds: pd.DataFrame, pairs: pd.DataFrame, protocol: Protocol
) -> None:
    _title(panel, f"Final loss: mean difference, upper {protocol.confidence:.0%} bound")
    margin = protocol.convergence_margin
    shown = [0.0, margin]
    for row, recipe in enumerate(bounds.to_dict("records")):
        mine = pairs.loc[pairs["recipe"] == recipe["recipe"], "difference"]
        single = mine.dropna().tolist()
        panel.scatter(single, [row] * len(single), s=14, color=_NEUTRAL, alpha=0.7, zorder=3)
        mean, upper = float(recipe["difference"]), float(recipe["upper_bound"])
        shown += [*single, upper]
        if math.isnan(upper):
            if single:
                text = f"{len(single)} of {len(mine)} seeds"
                _beside(panel, max(single), row, text, _NEUTRAL)
            else:
                _not_measured(panel, row, 0.3)  # away from both lines
            continue
        passed = recipe["gate"] == Verdict.PASS.value
        colour = _PASS if passed else _FAIL
        panel.plot([mean, upper], [row, row], color=colour, linewidth=2.5, zorder=3)
        panel.plot([mean], [row], "|", color=colour, markersize=16, markeredgewidth=2.5, zorder=4)
        _mark(panel, upper, row, passed, f"{upper:+.6f}")
    _rows(panel, [str(name) for name in bounds["recipe"]])
    _span(panel, shown, right=0.3)
    panel.locator_params(axis="x", nbins=6)
    panel.axvline(0, color=_NEUTRAL, linewidth=0.8, zorder=1)
    _threshold(panel, margin, f"below {margin:g}")
    panel.set_xlabel("candidate - native in nats, mean to bound; grey: seeds")
