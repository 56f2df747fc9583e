"""What ``tinyllm topology`` shows: a topology's matrices and facts as text, its graph as SVG."""

import math
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tinyllm.extras import require
from tinyllm.strategies.topology import Matrix, Topology, make_topology

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LARGEST_DENOMINATOR = 1024  # weights that are no such fraction to 1e-12 print as decimals
LARGEST_PRINTED_N = 16  # wider matrices wrap on a terminal; their peers are listed instead
PANELS_PER_ROW = 4
WORKER_COLOR, IDLE_COLOR, LINE_COLOR, TEXT_COLOR = "#1f6feb", "#b0b8c1", "#6e7781", "#24292f"


def topology(name: str, *, workers: int, svg: Path | None = None) -> None:
    """Print a topology's mixing matrices, peers, spectral gap and updates to exact consensus.

    Args:
        name: Topology (complete, ring, one_peer_ring, one_peer_exponential, exponential, base_k),
            or the path of a .npy or .csv matrix.
        workers: Number of workers, N, on all ranks together.
        svg: File to draw the graph to, one panel per phase. Needs matplotlib.

    Raises:
        ValueError: If the topology is unknown, or not doubly stochastic for this N.
        ModuleNotFoundError: If ``svg`` is given and matplotlib is missing.
    """
    chosen = make_topology(name, workers)
    print(describe(chosen))
    if svg is not None:
        save_svg(chosen, svg)
        print(f"\ndrawn to {svg}")


def describe(topology: Topology) -> str:
    """Return the report as text: facts first, then each phase with its matrix and peers."""
    n, period = topology.num_workers, topology.period
    exact = topology.updates_to_exact_consensus()
    updates = "update" if exact == 1 else "updates"
    per = "per update" if period == 1 else f"per period of {period} updates"
    facts = {
        "topology": topology.name,
        "workers": n,
        "phases": period,
        "degree": f"{topology.max_degree()} (most peers a worker reads in one update)",
        "doubly stochastic": f"yes (sums within {_largest_error(topology):.1e} of 1)",
        "symmetric": "yes" if _is_symmetric(topology) else "no",
        "spectral gap": f"{topology.spectral_gap():.6g} {per}",
        "exact consensus": "not within a period" if exact is None else f"after {exact} {updates}",
    }
    lines = [f"{key:<19}{value}" for key, value in facts.items()]
    for phase in range(period):
        lines += ["", f"phase {phase}"]
        if n <= LARGEST_PRINTED_N:
            lines += _matrix_lines(topology.matrix(phase))
        lines += _peer_lines(topology, phase)
    return "\n".join(lines)


def fraction(weight: float) -> str:
    """Return a weight as it reads best: ``1/3``, or a decimal where no small fraction is exact."""
    near = Fraction(weight).limit_denominator(LARGEST_DENOMINATOR)
    return str(near) if abs(float(near) - weight) < 1e-12 else f"{weight:.6f}"


def _matrix_lines(matrix: Matrix) -> list[str]:
    cells = [["." if weight == 0.0 else fraction(weight) for weight in row] for row in matrix]
    width = max(len(cell) for row in cells for cell in row)
    return ["  " + "  ".join(cell.rjust(width) for cell in row) for row in cells]


def _peer_lines(topology: Topology, phase: int) -> list[str]:
    peers = [topology.peers(phase, i) for i in range(topology.num_workers)]
    texts = [f"{i}: {', '.join(map(str, js)) or '-'}" for i, js in enumerate(peers)]
    lines, line = [], "  peers "
    for text in texts:
        if len(line) + len(text) > 96:
            lines.append(line.rstrip())
            line = "        "
        line += f" {text} "
    return [*lines, line.rstrip()]


def _largest_error(topology: Topology) -> float:
    matrices = [topology.matrix(t) for t in range(topology.period)]
    return max(float(np.abs(m.sum(axis=axis) - 1.0).max()) for m in matrices for axis in (0, 1))


def _is_symmetric(topology: Topology) -> bool:
    matrices = [topology.matrix(t) for t in range(topology.period)]
    return all(np.array_equal(matrix, matrix.T) for matrix in matrices)


# The drawing: workers on a circle; a line where two read each other, an arrow where one does.


def save_svg(topology: Topology, path: Path) -> None:
    """Draw a topology to an SVG file, one panel per phase.

    Raises:
        ModuleNotFoundError: If matplotlib is missing; says how to install it.
    """
    figure = draw(topology)
    path.parent.mkdir(parents=True, exist_ok=True)
    import matplotlib as mpl

    # No date and a fixed salt: the same topology gives the same bytes.
    with mpl.rc_context({"svg.hashsalt": "tinyllm"}):
        figure.savefig(path, format="svg", metadata={"Date": None})


def draw(topology: Topology) -> "Figure":
    """Return a matplotlib figure of a topology, one panel per phase.

    Raises:
        ModuleNotFoundError: If matplotlib is missing; says how to install it.
    """
    columns = min(topology.period, PANELS_PER_ROW)
    rows = math.ceil(topology.period / columns)
    side = 2.6 if topology.num_workers <= 12 else 3.8 if topology.num_workers <= 20 else 5.5
    figure: Figure = require("matplotlib.figure", "report").Figure(
        figsize=(max(side * columns, 3.2), (side + 0.3) * rows + 0.45)
    )
    figure.suptitle(f"{Path(topology.name).name}, N = {topology.num_workers}", color=TEXT_COLOR)
    for phase in range(topology.period):
        axes = figure.add_subplot(rows, columns, phase + 1)
        draw_phase(axes, topology, phase)
        if topology.period > 1:
            axes.set_title(f"phase {phase}", fontsize=10, color=TEXT_COLOR)
    figure.tight_layout(h_pad=2.0)
    return figure


def draw_phase(axes: "Axes", topology: Topology, phase: int) -> None:
    """Draw one phase: a line for a mutual exchange, an arrow from the worker read to the reader."""
    from matplotlib.patches import Circle

    n, matrix = topology.num_workers, topology.matrix(phase)
    angles = np.pi / 2 - 2 * np.pi * np.arange(n) / n  # worker 0 on top, then clockwise
    xy = np.stack([np.cos(angles), np.sin(angles)], axis=1) if n > 1 else np.zeros((1, 2))
    radius = 0.19 if n <= 12 else min(0.13, 2.4 / n)
    reads = [(i, j) for i in range(n) for j in topology.peers(phase, i)]
    weights = sorted({float(matrix[i, j]) for i, j in reads})
    for i, j in reads:
        mutual = matrix[j, i] == matrix[i, j]
        if mutual and j < i:
            continue
        width = (1.4 if n <= 12 else 0.9) * (0.5 + 0.5 * matrix[i, j] / weights[0])
        begin, end = _shorten(xy[j], xy[i], radius)
        axes.annotate(
            "",
            xy=(end[0], end[1]),
            xytext=(begin[0], begin[1]),
            arrowprops={
                "arrowstyle": "-" if mutual else "-|>",
                "color": LINE_COLOR,
                "linewidth": min(width, 4.0),  # heavier weights, thicker lines
                "shrinkA": 0,
                "shrinkB": 0,
            },
        )
    for worker, (x, y) in enumerate(xy):
        idle = n > 1 and not topology.peers(phase, worker)
        color = IDLE_COLOR if idle else WORKER_COLOR
        axes.add_patch(Circle((x, y), radius, color=color, zorder=3))
        size = 10 if n <= 12 else max(6, 110 / n)
        axes.text(x, y, str(worker), ha="center", va="center", color="w", fontsize=size, zorder=4)
    texts = list(dict.fromkeys(fraction(weight) for weight in weights))
    if 0 < len(texts) <= 4:
        word = "weight" if len(texts) == 1 else "weights"
        axes.set_xlabel(f"{word} {', '.join(texts)}", fontsize=9, color=TEXT_COLOR)
    axes.set(xlim=(-1.3, 1.3), ylim=(-1.3, 1.3), aspect="equal", xticks=[], yticks=[])
    axes.set_frame_on(False)


def _shorten(begin: Matrix, end: Matrix, radius: float) -> tuple[Matrix, Matrix]:
    direction = (end - begin) / np.linalg.norm(end - begin)
    return begin + radius * direction, end - radius * direction
