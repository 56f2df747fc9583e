"""Draw the figures of decentralized.md into figures/: ``python docs/concepts/figures.py``."""

from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from tinyllm.strategies.consensus import AdaptiveConsensus, gamma_schedule
from tinyllm.strategies.topology import Topology, make_topology
from tinyllm.strategies.topology_report import draw_phase

FOLDER = Path(__file__).parent / "figures"
INK, MUTED, PALE = "#24292f", "#6e7781", "#eaeef2"
WORKERS = ("#1f6feb", "#2da44e", "#bf8700", "#8250df")  # a color per worker
COMPUTE, EXCHANGE, COMBINE = "#1f6feb", "#bf8700", "#2da44e"


def packing() -> Figure:
    """Token rows dealt to four workers, one batched product, and the arena that backs it."""
    figure, axes = _canvas(10.0, 4.9)
    for r in range(8):
        axes.add_patch(Rectangle((0, 4.35 - 0.3 * r), 1.5, 0.24, color=WORKERS[r % 4]))
        _text(axes, 0.75, 4.47 - 0.3 * r, f"row {r}", color="w", size=8)
    _text(axes, 0.75, 5.0, "global batch", weight="bold")
    _text(axes, 0.75, 4.75, "[N·B, T+1]", color=MUTED)
    _arrow(axes, (1.65, 3.4), (2.5, 3.4))
    _text(axes, 2.08, 3.58, "r mod N", color=MUTED, size=8)

    _stack(axes, 2.65, 2.35, 1.3, 1.3, "B sequences")
    _text(axes, 3.6, 5.0, "activations", weight="bold")
    _text(axes, 3.6, 4.75, "[W, B·T, C]", color=MUTED)
    _text(axes, 4.93, 3.4, r"$\times$", size=18)
    _stack(axes, 5.25, 2.35, 1.3, 1.3, "weights")
    _text(axes, 6.2, 5.0, "parameters", weight="bold")
    _text(axes, 6.2, 4.75, "[W, C, F]", color=MUTED)
    _text(axes, 7.53, 3.4, "=", size=18)
    _stack(axes, 7.85, 2.35, 1.3, 1.3, "output")
    _text(axes, 8.8, 2.05, "one batched GEMM for all", weight="bold")
    _text(axes, 8.8, 5.0, "output", weight="bold")
    _text(axes, 8.8, 4.75, "[W, B·T, F]", color=MUTED)

    _text(axes, 0.0, 1.72, "arena [W, D]", weight="bold", ha="left")
    _text(axes, 0.0, 1.45, "a row per worker", color=MUTED, size=8, ha="left")
    names = ("embedding", "layer 0", "layer 1", "…", "layer L-1", "norm")
    widths = (2.6, 1.5, 1.5, 0.6, 1.5, 0.6)
    for worker in range(4):
        x = 1.65
        for name, width in zip(names, widths, strict=True):
            y = 1.45 - 0.38 * worker
            axes.add_patch(Rectangle((x, y), width - 0.06, 0.3, color=WORKERS[worker]))
            _text(axes, x + width / 2 - 0.03, y + 0.15, name, color="w", size=8)
            x += width
    _arrow(axes, (5.9, 1.85), (5.9, 2.27))
    _text(axes, 6.02, 2.05, "views with a worker axis", color=MUTED, size=8, ha="left")
    axes.set(xlim=(-0.1, 10.0), ylim=(0.2, 5.2))
    return figure


def schemes() -> Figure:
    """Where the exchange and the combination fall within one update, for both schemes."""
    figure, axes = _canvas(9.0, 4.3)
    _text(axes, 0, 4.25, "awc: adapt while combine", weight="bold", ha="left", size=11)
    formula = r"$x_i \leftarrow (1-\eta\lambda)\sum_j W_{ij}\,x_j - \eta\,u_i$"
    _text(axes, 9.0, 4.25, formula, ha="right", size=11)
    _lane(axes, 3.4, "this worker", [(0, 5.0, "forward and backward at $x_i$", COMPUTE)])
    _lane(axes, 2.75, "exchange", [(0, 3.2, "read $x_j$ of the peers", EXCHANGE)])
    _box(axes, 5.1, 2.75, 1.7, 1.15, "combine $x_j$,\nadd own step $u_i$", COMBINE)
    _text(axes, 7.0, 3.32, "the exchange hides\nbehind the gradient", color=MUTED, ha="left")

    _text(axes, 0, 1.95, "atc: adapt then combine", weight="bold", ha="left", size=11)
    formula = r"$x_i \leftarrow \sum_j W_{ij}\,[(1-\eta\lambda)\,x_j - \eta\,u_j]$"
    _text(axes, 9.0, 1.95, formula, ha="right", size=11)
    compute = [
        (0, 5.0, "forward and backward at $x_i$", COMPUTE),
        (5.1, 1.1, "step $u_i$", COMPUTE),
    ]
    _lane(axes, 1.1, "this worker", compute)
    _lane(axes, 0.45, "exchange", [(6.3, 1.35, "read peers", EXCHANGE)])
    _box(axes, 7.75, 0.45, 1.25, 1.15, "combine", COMBINE)
    _arrow(axes, (0, 0.18), (9.0, 0.18))
    _text(axes, 9.0, 0.0, "time within one update", color=MUTED, size=8, ha="right")
    axes.set(xlim=(-1.25, 9.1), ylim=(-0.15, 4.5))
    return figure


def topologies() -> Figure:
    """The named topologies: the static ones in a row, then a row per time-varying one."""
    figure = Figure(figsize=(9.0, 10.2))
    grid = figure.subplots(4, 4)
    for axes in grid.flat:
        axes.set_axis_off()
    for axes, name in zip(grid[0], ("complete", "ring", "exponential"), strict=False):
        _panel(axes, make_topology(name, 8), 0, f"{name}, N = 8")
    rows = (("one_peer_ring", 8), ("one_peer_exponential", 8), ("base_k", 6))
    for row, (name, n) in zip(grid[1:], rows, strict=True):
        topology = make_topology(name, n)
        for phase in range(topology.period):
            _panel(row[phase], topology, phase, f"phase {phase}")
        row[0].set_ylabel(f"{name}, N = {n}", fontsize=9.5, color=INK)
    figure.tight_layout(h_pad=1.6)
    return figure


def mixing() -> Figure:
    """How fast mixing alone makes workers agree: the worst case over all starting points."""
    figure = Figure(figsize=(9.0, 3.6))
    cases = {
        8: ("ring", "one_peer_ring", "exponential", "one_peer_exponential"),
        6: ("ring", "one_peer_ring", "exponential", "one_peer_exponential", "base_k"),
    }
    left, right = figure.subplots(1, 2, sharey=True)
    colors = dict(zip(cases[6], (*WORKERS, "#cf222e"), strict=True))
    for axes, (n, names) in zip((left, right), cases.items(), strict=True):
        for name in names:
            topology, product, norms = make_topology(name, n), np.eye(n), []
            for t in range(11):
                norms.append(np.linalg.norm(product - 1 / n, 2))
                product = topology.matrix(t) @ product
            shown = [value if value > 1e-6 else np.nan for value in norms]
            last = int(np.count_nonzero(np.isfinite(shown))) - 1
            axes.semilogy(shown, marker="o", ms=3.5, color=colors[name], label=name)
            if last < 10:  # exact: the line falls off the chart
                axes.plot([last, last + 1], [shown[last], 1e-5], color=colors[name])
                axes.text(last + 0.9, 1.4e-3, f"exact after {last + 1}", fontsize=8, color=INK)
        axes.set(title=f"N = {n}", xlabel="updates", xlim=(0, 10), ylim=(1e-3, 1.3))
        _plain(axes)
    left.set_ylabel("distance to the mean,\nworst case")
    right.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(1.0, 0.3))
    figure.tight_layout()
    return figure


def adaptive() -> Figure:
    """The learning rate and gamma of the packed-4 adaptive recipe."""
    total, peak = 10_000, 0.0048
    share = np.arange(total) / total
    cosine = 0.1 + 0.45 * (1 + np.cos(np.pi * (share - 0.05) / 0.95))
    lrs = peak * np.where(share < 0.05, (np.arange(total) + 1) / (0.05 * total), cosine)
    gammas = gamma_schedule(AdaptiveConsensus(start_fraction=0.5, power=1.0), lrs)
    figure = Figure(figsize=(7.5, 4.4))
    top, bottom = figure.subplots(2, 1, sharex=True)
    top.plot(share, lrs, color=COMPUTE, lw=2)
    top.set(ylabel=r"learning rate $\eta$", ylim=(0, 0.0055), yticks=[0, 0.0024, 0.0048])
    top.plot(0.5, lrs[total // 2], "o", color=EXCHANGE)
    largest = rf"$\eta_{{\max}}$ of the window, {lrs[total // 2]:.4f}"
    top.annotate(largest, (0.515, 0.0030), va="bottom", color=INK)
    bottom.plot(share, gammas, color=COMBINE, lw=2)
    bottom.set(ylabel=r"$\gamma$", ylim=(0, 1.15), yticks=[0, 0.5, 1], xlim=(0, 1))
    bottom.set_xlabel("share of all updates")
    bottom.annotate(r"$\gamma = 1$: the matrix as it is", (0.25, 0.86), ha="center", color=INK)
    bottom.annotate(r"$\gamma = \eta\,/\,\eta_{\max}$", (0.7, 0.8), color=INK)
    bottom.annotate(f"{gammas[-1]:.2f}", (0.995, gammas[-1] + 0.06), ha="right", color=INK)
    for axes in (top, bottom):
        axes.axvspan(0.5, 1, color=PALE, zorder=0)
        _plain(axes)
    figure.align_ylabels()
    figure.tight_layout()
    return figure


def _canvas(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0.01, 0.01, 0.98, 0.98))
    axes.set_axis_off()
    return figure, axes


def _text(
    axes: Axes,
    x: float,
    y: float,
    text: str,
    color: str = INK,
    size: float = 9,
    ha: str = "center",
    weight: str = "normal",
) -> None:
    axes.text(x, y, text, color=color, fontsize=size, ha=ha, va="center", fontweight=weight)


def _arrow(axes: Axes, begin: tuple[float, float], end: tuple[float, float]) -> None:
    axes.annotate("", xy=end, xytext=begin, arrowprops={"arrowstyle": "-|>", "color": MUTED})


def _stack(axes: Axes, x: float, y: float, width: float, height: float, text: str) -> None:
    """Draw four sheets one behind the other, a worker each; the front one is worker 0."""
    for worker in reversed(range(4)):
        corner = (x + 0.2 * worker, y + 0.2 * worker)
        sheet = Rectangle(corner, width, height, facecolor=WORKERS[worker], edgecolor="w", lw=1.5)
        axes.add_patch(sheet)
    _text(axes, x + width / 2, y + height / 2, f"{text}\nof worker 0", color="w")


def _box(
    axes: Axes, x: float, y: float, width: float, height: float, text: str, color: str
) -> None:
    style = "round,pad=0,rounding_size=0.08"
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, color=color, lw=0))
    _text(axes, x + width / 2, y + height / 2, text, color="w")


def _lane(axes: Axes, y: float, name: str, boxes: list[tuple[float, float, str, str]]) -> None:
    _text(axes, -0.1, y + 0.25, name, ha="right", color=MUTED)
    for x, width, text, color in boxes:
        _box(axes, x, y, width, 0.5, text, color)


def _panel(axes: Axes, topology: Topology, phase: int, title: str) -> None:
    axes.set_axis_on()
    draw_phase(axes, topology, phase)
    axes.set_title(title, fontsize=9.5, color=INK)


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)


def main() -> None:
    """Write every figure; the same matplotlib gives the same bytes."""
    FOLDER.mkdir(exist_ok=True)
    with mpl.rc_context({"svg.hashsalt": "tinyllm"}):
        for draw in (packing, schemes, topologies, mixing, adaptive):
            draw().savefig(FOLDER / f"{draw.__name__}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
