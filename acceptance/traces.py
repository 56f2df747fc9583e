"""Compares two traces of the same updates, worker by worker and parameter by parameter.

A trace is a folder with ``trace.json`` and a safetensors file per update.

``trace.json`` holds ``{"format": 1, "updates": [{"update": 0, "loss": [N floats],
"learning_rate": float, "rows_sha256": str}, …]}``: the update's number, counted from 0 at the start
of training, the mean loss of each of the N workers, the learning rate, and a hash of the global
batch's rows. Other keys are ignored.

``update-00000.safetensors``, with five digits, holds float32 tensors ``[N, *shape]``, a row per
worker, the same parameters under each of:

- ``gradients/<parameter>``: of each worker's mean loss, before clipping;
- ``parameters/<parameter>``: after the update;
- ``updates/<parameter>``: parameters after the update minus parameters before it;
- ``exp_avg/<parameter>``, ``exp_avg_sq/<parameter>``: both Adam moments after the update.

The relative L2 of b against the reference a is ``‖b − a‖ / ‖a‖`` in float64, over all parameters of
a worker together, and for the diagnostics over each parameter. It is 0 where both are zero, save
that a worker without any gradient or weight compares as NaN: there is nothing to tell apart.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from tinyllm.acceptance.json_text import parse_json

FORMAT = 1
QUANTITIES = ("gradients", "parameters", "updates", "exp_avg", "exp_avg_sq")
"""Kinds of tensors in a trace, each compared by itself."""

_PART = 1 << 13
"""Numbers compared at a time: they stay in a core's cache, where whole tensors do not, and are too
few for OpenBLAS to share a sum of them out among threads, which takes many times as long."""
_Vector: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]


class TraceError(ValueError):
    """A trace cannot be read, or two traces cannot be compared."""


@dataclass(frozen=True)
class TracedUpdate:
    """One entry of ``trace.json``; ``loss`` has a value per worker."""

    update: int
    loss: tuple[float, ...]
    learning_rate: float
    rows_sha256: str
    path: Path


@dataclass(frozen=True)
class TraceComparison:
    """What ``compare_traces`` found.

    Attributes:
        rows: A row per update and worker, as ``numerical_gate`` reads them.
        parameters: Diagnostics: a row per update, worker, quantity and parameter, with its relative
            L2 and the reference's norm.
    """

    rows: pd.DataFrame
    parameters: pd.DataFrame


def read_trace(folder: Path) -> list[TracedUpdate]:
    """The updates that a trace lists, in order.

    Raises:
        TraceError: If there is no trace, it is of another format, or it is incomplete.
    """
    try:
        content = parse_json((folder / "trace.json").read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise TraceError(f"{folder}: format {content['format']!r}; this reads {FORMAT}")
        updates = [
            TracedUpdate(
                update=int(entry["update"]),
                loss=tuple(float(value) for value in entry["loss"]),
                learning_rate=float(entry["learning_rate"]),
                rows_sha256=str(entry["rows_sha256"]),
                path=folder / f"update-{int(entry['update']):05d}.safetensors",
            )
            for entry in content["updates"]
        ]
    except TraceError:
        raise
    except (OSError, ArithmeticError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise TraceError(f"{folder} holds no readable trace: {error!r}") from error
    if not updates:
        raise TraceError(f"{folder}: the trace lists no update")
    numbers = [update.update for update in updates]
    if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        raise TraceError(f"{folder}: the updates are not consecutive: {numbers}")
    if len({len(update.loss) for update in updates}) != 1 or not updates[0].loss:
        raise TraceError(f"{folder}: the number of workers' losses changes between updates")
    if absent := [update.path.name for update in updates if not update.path.is_file()]:
        raise TraceError(f"{folder}: listed but absent: {absent}")
    return updates


def compare_traces(
    reference: str | Path,
    other: str | Path,
    *,
    workload: str = "",
    comparison: str = "candidate/native",
    protocol: str = "",
    updates: int = 5,
) -> TraceComparison:
    """Compares the first updates of two traces.

    Where the hashes of the input rows differ, the tensors are not compared: the rows of that update
    and of all later ones hold NaN beside both hashes, which ``numerical_gate`` calls failed.

    Args:
        reference: Folder of the native trace, a.
        other: Folder of the trace under test, b; of a second native one for a control.
        workload: Goes into the tables.
        comparison: ``candidate/native`` or ``native/native``; goes into the tables.
        protocol: The protocol's hash; goes into the tables.
        updates: How many updates to compare.

    Raises:
        TraceError: If a trace cannot be read, has fewer updates, or the two differ in workers,
            numbers of updates, learning rates, or names and shapes of parameters.
        ModuleNotFoundError: If safetensors is missing.
    """
    reference, other = Path(reference), Path(other)
    if reference.resolve() == other.resolve():
        raise TraceError(f"{reference} would be compared with itself")
    traces = [read_trace(folder) for folder in (reference, other)]
    for folder, trace in zip((reference, other), traces, strict=True):
        if len(trace) < updates:
            raise TraceError(f"{folder}: {len(trace)} updates are traced; {updates} are needed")
    rows: list[dict[str, Any]] = []
    diagnostics: list[dict[str, Any]] = []
    same_rows = True
    for a, b in zip(*(trace[:updates] for trace in traces), strict=True):
        _check_matched(a, b)
        same_rows = same_rows and a.rows_sha256 == b.rows_sha256
        tensors = _Tensors(a.path, b.path, len(a.loss)) if same_rows else None
        for worker, (loss_a, loss_b) in enumerate(zip(a.loss, b.loss, strict=True)):
            key = {"workload": workload, "comparison": comparison, "update": a.update}
            distances = dict.fromkeys((*QUANTITIES, "before"), math.nan)
            if tensors is not None:
                distances, details = tensors.compare(worker)
                diagnostics += [{**key, "worker": worker, **detail} for detail in details]
            rows.append(
                {
                    **key,
                    "worker": worker,
                    "reference_loss": loss_a if same_rows else math.nan,
                    "loss": loss_b if same_rows else math.nan,
                    **distances,
                    "reference_rows_sha256": a.rows_sha256,
                    "rows_sha256": b.rows_sha256,
                    "protocol": protocol,
                }
            )
    return TraceComparison(pd.DataFrame(rows), pd.DataFrame(diagnostics))


def _check_matched(a: TracedUpdate, b: TracedUpdate) -> None:
    """Refuses updates that are not the same step of the same schedule."""
    if a.update != b.update:
        raise TraceError(f"{a.path} is matched with another update: {b.path}")
    if len(a.loss) != len(b.loss):
        raise TraceError(f"{a.path} has {len(a.loss)} workers and {b.path} has {len(b.loss)}")
    # a device may hold it as float32
    if not math.isclose(a.learning_rate, b.learning_rate, rel_tol=1e-6, abs_tol=1e-12):
        raise TraceError(
            f"learning rates differ: {a.learning_rate} at {a.path}, {b.learning_rate} at {b.path}"
        )


class _Tensors:
    """Two files of one update, read a worker's parameter at a time."""

    def __init__(self, reference: Path, other: Path, workers: int) -> None:
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError as error:
            raise ModuleNotFoundError(
                "traces need safetensors, which is missing: pip install 'tinyllm[report]'"
            ) from error
        try:
            self._files = [safe_open(path, framework="numpy") for path in (reference, other)]
        except (OSError, SafetensorError) as error:
            raise TraceError(f"cannot read {reference} or {other}: {error}") from error
        shapes = [
            _shapes(file, path, workers)
            for file, path in zip(self._files, (reference, other), strict=True)
        ]
        if shapes[0] != shapes[1]:
            unlike = {name for name, _ in set(shapes[0].items()) ^ set(shapes[1].items())}
            raise TraceError(
                f"{reference} and {other} differ in the names or shapes of {sorted(unlike)[:4]}"
            )
        self._shapes = shapes[0]

    def compare(self, worker: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Relative L2 of each quantity, and the same of each parameter."""
        details = []
        sums = {kind: np.zeros(2) for kind in (*QUANTITIES, "before")}
        for name, shape in self._shapes.items():
            mine = {kind: np.zeros(2) for kind in sums}
            for part in _parts(shape):
                pieces = {kind: self._piece(f"{kind}/{name}", worker, part) for kind in QUANTITIES}
                after, change = pieces["parameters"], pieces["updates"]
                pieces["before"] = (after[0] - change[0], after[1] - change[1])
                for kind, (a, b) in pieces.items():
                    mine[kind] += _squares(a, b)
            for kind in sums:
                sums[kind] += mine[kind]
            details += [
                {
                    "quantity": quantity,
                    "parameter": name,
                    "relative_l2": _relative(mine[quantity]),
                    "reference_norm": math.sqrt(mine[quantity][1]),
                }
                for quantity in QUANTITIES
            ]
        distances = {kind: _relative(squares) for kind, squares in sums.items()}
        for quantity in ("gradients", "parameters"):
            if sums[quantity][1] == 0:
                distances[quantity] = math.nan
        return distances, details

    def _piece(self, key: str, worker: int, part: slice) -> tuple[_Vector, _Vector]:
        """A part of one tensor's row in both files."""
        a, b = (_float64(file.get_slice(key), worker, part) for file in self._files)
        return a, b


def _shapes(file: Any, path: Path, workers: int) -> dict[str, tuple[int, ...]]:
    """Shapes by parameter, of tensors that are as the format wants them."""
    shapes: dict[str, dict[str, tuple[int, ...]]] = {quantity: {} for quantity in QUANTITIES}
    for key in file.keys():  # noqa: SIM118 (not a mapping)
        quantity, _, name = key.partition("/")
        if quantity not in shapes or not name:
            continue
        part = file.get_slice(key)
        shape = tuple(part.get_shape())
        if part.get_dtype() != "F32" or not shape or shape[0] != workers:
            raise TraceError(
                f"{path}: {key} is {part.get_dtype()} {list(shape)}; it must be F32 with a row for "
                f"each of {workers} workers"
            )
        shapes[quantity][name] = shape
    for quantity in QUANTITIES:
        if shapes[quantity] != shapes["parameters"]:
            raise TraceError(f"{path}: {quantity} and parameters differ in names or shapes")
    if not shapes["parameters"]:
        raise TraceError(f"{path}: there are no tensors named parameters/…")
    return shapes["parameters"]


def _parts(shape: tuple[int, ...]) -> Iterator[slice]:
    """Slices of a tensor's second dimension that each hold about as much as a cache does."""
    if len(shape) == 1:
        yield slice(None)
        return
    rows = max(1, _PART // max(1, math.prod(shape[2:])))
    for start in range(0, shape[1], rows):
        yield slice(start, min(start + rows, shape[1]))


def _float64(tensor: Any, worker: int, part: slice) -> _Vector:
    index = worker if part == slice(None) else (worker, part)
    return np.asarray(tensor[index], dtype=np.float64).ravel()


def _squares(a: _Vector, b: _Vector) -> _Vector:
    """Sums of squares: of the difference, and of the reference."""
    with np.errstate(invalid="ignore", over="ignore"):  # what is not finite is seen by the gate
        difference = b - a
        return np.array([difference @ difference, a @ a])


def _relative(squares: Sequence[float] | _Vector) -> float:
    difference, reference = float(squares[0]), float(squares[1])
    if reference == 0:
        return 0.0 if difference == 0 else math.inf
    return math.sqrt(difference / reference) if difference >= 0 else math.nan
