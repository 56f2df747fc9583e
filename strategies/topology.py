"""Mixing matrices: who combines with whom, at which weights, in each phase of a topology.

A topology is a periodic sequence of doubly stochastic matrices. Row i of the matrix of update t
holds the weights with which worker i combines the weights of all N workers, itself included:
``x_i ← Σ_j W_ij x_j``. Rows that sum to 1 leave agreeing workers alone; columns that sum to 1
preserve the mean of all workers. Everything here is float64 numpy.
"""

import difflib
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]
Pair = tuple[int, int, float]  # (i, j, w): i and j each give the weight w to the other

SUM_TOLERANCE = 1e-9  # of row and column sums; what misses it is refused, never rescaled
EXACT_TOLERANCE = 1e-12  # of the entries of a product; rounding stays orders below it


class Topology:
    """A periodic sequence of doubly stochastic mixing matrices for N workers.

    Args:
        name: What to call it in messages.
        matrices: One phase ``[N, N]``, or all of them ``[period, N, N]``.

    Attributes:
        name: What it is called in messages.
        num_workers: N, the number of workers on all ranks together.
        period: Number of phases; the matrix of update t is that of phase ``t mod period``.

    Raises:
        ValueError: If a matrix has another shape, an entry that is negative or not finite, or a
            row or column that does not sum to 1 within 1e-9.
    """

    def __init__(self, name: str, matrices: Sequence[Matrix] | Matrix) -> None:
        stack = np.array(matrices, dtype=np.float64)
        if stack.ndim == 2:
            stack = stack[None]
        _check_doubly_stochastic(name, stack)
        self.name = name
        self.period, self.num_workers = stack.shape[:2]
        self._stack_PNN = stack
        self._peers = [
            [tuple(int(j) for j in np.flatnonzero(row) if j != i) for i, row in enumerate(phase)]
            for phase in stack
        ]

    def __repr__(self) -> str:
        return f"Topology({self.name!r}, num_workers={self.num_workers}, period={self.period})"

    def matrix(self, t: int) -> Matrix:
        """Return the mixing matrix ``[N, N]`` of update t (0-based) as a copy."""
        return self._stack_PNN[t % self.period].copy()

    def peers(self, t: int, i: int) -> tuple[int, ...]:
        """Return the other workers j that worker i reads at update t: those with W_ij != 0."""
        return self._peers[t % self.period][i]

    def max_degree(self) -> int:
        """Return the largest number of other workers that any worker reads in one update."""
        return max(len(peers) for phase in self._peers for peers in phase)

    def spectral_gap(self) -> float:
        """Return 1 − |λ₂| of the product of one period's matrices, in [0, 1].

        For a static topology this is the usual spectral gap of its matrix; for a time-varying one
        it is per period, not per update. 1 is agreement in finite time, 0 no agreement at all.
        """
        deviation = self._product(self.period) - 1.0 / self.num_workers
        return float(np.clip(1.0 - np.abs(np.linalg.eigvals(deviation)).max(), 0.0, 1.0))

    def updates_to_exact_consensus(self) -> int | None:
        """Return the fewest updates, from phase 0, whose product is 11ᵀ/N (to 1e-12).

        It is 0 for N = 1, and None if one period does not suffice.
        """
        for updates in range(self.period + 1):
            deviation = self._product(updates) - 1.0 / self.num_workers
            if np.abs(deviation).max() <= EXACT_TOLERANCE:
                return updates
        return None

    def _product(self, updates: int) -> Matrix:
        product = np.eye(self.num_workers)
        for t in range(updates):
            product = self._stack_PNN[t % self.period] @ product
        return product


def make_topology(name_or_path: str, num_workers: int) -> Topology:
    """Build a topology by name, or from a matrix file of the user's.

    Args:
        name_or_path: One of ``TOPOLOGIES``, or the path of a ``.npy`` file ``[N, N]`` or
            ``[period, N, N]``, or of a ``.csv`` file ``[N, N]`` of decimals or fractions (``1/3``).
        num_workers: N, at least 1.

    Raises:
        ValueError: If the name is unknown, N is not allowed for it, or the file's matrices are
            not doubly stochastic ``[N, N]``.
        FileNotFoundError: If the path does not exist.
    """
    if num_workers < 1:
        raise ValueError(f"a topology needs at least 1 worker, got num_workers={num_workers}")
    if Path(name_or_path).suffix in (".npy", ".csv"):
        return _from_file(Path(name_or_path), num_workers)
    if name_or_path not in TOPOLOGIES:
        near = difflib.get_close_matches(name_or_path, TOPOLOGIES, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"unknown topology {name_or_path!r}; did you mean {near!r}? Allowed: "
            f"{', '.join(TOPOLOGIES)}, or a path to a .npy or .csv matrix"
        )
    if num_workers == 1:
        return Topology(name_or_path, np.ones((1, 1)))
    return Topology(name_or_path, TOPOLOGIES[name_or_path](num_workers))


def _from_file(path: Path, n: int) -> Topology:
    if not path.exists():
        raise FileNotFoundError(f"no mixing matrix at {path}; give an existing .npy or .csv file")
    try:
        if path.suffix == ".npy":
            # mapped, so that a header cannot ask for more memory than the file has bytes
            stored = np.asarray(np.lib.format.open_memmap(path, mode="r"))
            matrices = stored.astype(np.float64, casting="safe")
        else:
            rows = [r for r in path.read_text(encoding="utf-8-sig").splitlines() if r.strip()]
            matrices = np.array([[_number(e) for e in r.split(",")] for r in rows])
    except Exception as error:  # numpy reads a header as Python, which fails in many ways
        raise ValueError(
            f"cannot read a mixing matrix from {path}: {error}; give {n} rows of {n} real numbers"
        ) from error
    if matrices.ndim not in (2, 3) or matrices.shape[-2:] != (n, n):
        raise ValueError(
            f"{path} holds an array of shape {list(matrices.shape)}, but N = {n} workers need "
            f"[{n}, {n}] or, for a time-varying .npy, [period, {n}, {n}]; "
            f"change the file or the number of workers"
        )
    return Topology(str(path), matrices)


def _number(text: str) -> float:
    """A decimal, or a fraction of two whole numbers, rounded once."""
    # as a Fraction, 1e999999999 would be written out
    value = float(Fraction(text)) if "/" in text else float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is no finite number")
    return value


def _check_doubly_stochastic(name: str, stack: Matrix) -> None:
    if stack.ndim != 3 or stack.shape[1] != stack.shape[2] or 0 in stack.shape:
        shape = list(stack.shape)
        raise ValueError(f"topology {name!r} must be [N, N] or [period, N, N], got shape {shape}")
    n = stack.shape[1]
    for phase, matrix in enumerate(stack):
        where = f"topology {name!r} for N = {n}, phase {phase}"
        for bad, what in ((~np.isfinite(matrix), "finite"), (matrix < 0, "non-negative")):
            if bad.any():
                i, j = (int(index) for index in np.argwhere(bad)[0])
                raise ValueError(
                    f"{where}: entry [{i}, {j}] is {matrix[i, j]}; every weight must be {what}"
                )
        for axis, line in ((1, "row"), (0, "column")):
            sums = matrix.sum(axis=axis)
            worst = int(np.abs(sums - 1.0).argmax())
            if abs(sums[worst] - 1.0) > SUM_TOLERANCE:
                raise ValueError(
                    f"{where}: {line} {worst} sums to {sums[worst]:.12g}, not 1 (within "
                    f"{SUM_TOLERANCE:g}); every row and column of a mixing matrix must sum to 1, "
                    f"written with full digits or, in a .csv, as fractions such as 1/3"
                )


# The named topologies: N >= 2 -> the matrices of all phases.


def _complete(n: int) -> list[Matrix]:
    return [np.full((n, n), 1.0 / n)]


def _ring(n: int) -> list[Matrix]:
    return [_cyclic(n, (1, n - 1) if n > 2 else (1,))]


def _one_peer_ring(n: int) -> list[Matrix]:
    """Alternate between the ring's even edges (0-1, 2-3, …) and its odd ones (1-2, …, N-1 - 0)."""
    if n % 2:
        raise ValueError(
            f"one_peer_ring pairs all workers, so N must be 1 or even, got N = {n}; "
            f"use {n - 1} or {n + 1} workers, or the topology 'ring' or 'base_k'"
        )
    starts = (0,) if n == 2 else (0, 1)
    return [_pairwise(n, [(i, (i + 1) % n, 0.5) for i in range(s, n, 2)]) for s in starts]


def _one_peer_exponential(n: int) -> list[Matrix]:
    """Average with one peer at distance 2^k (Ying et al., 2021; Assran et al., 2019).

    For powers of two the peer is ``i XOR 2^k``, a pairwise exchange that is exact after log₂ N
    updates. Otherwise it is ``(i + 2^k) mod N``, which is doubly stochastic but not symmetric.
    """
    if n & (n - 1) == 0:
        return [_pairwise(n, pairs) for pairs in _hypercube(list(range(n)))]
    return [_cyclic(n, (offset,)) for offset in _powers_of_two_below(n)]


def _exponential(n: int) -> list[Matrix]:
    """Average with all peers at distances 2^k at once (Ying et al., 2021)."""
    return [_cyclic(n, _powers_of_two_below(n))]


def _base_k(n: int) -> list[Matrix]:
    """Build the Base-(k+1) Graph for k = 1: at most one peer, exact for every N.

    Takezawa et al., "Beyond Exponential Graph: Communication-Efficient Topologies for
    Decentralized Learning via Finite-time Convergence" (2023). With N = 2^s · q, q odd, it is the
    shorter of the simple graph over all N, and of s phases that make q groups of 2^s agree
    followed by the simple graph across those groups.
    """
    size = n & -n  # 2^s
    groups = [list(range(begin, begin + size)) for begin in range(0, n, size)]
    grouped = _side_by_side([_hypercube(group) for group in groups])
    grouped += _side_by_side([_simple_base_2(list(across)) for across in zip(*groups, strict=True)])
    simple = _simple_base_2(list(range(n)))
    return [_pairwise(n, pairs) for pairs in min(grouped, simple, key=len)]


def _side_by_side(graphs: list[list[list[Pair]]]) -> list[list[Pair]]:
    """Merge graphs over disjoint workers, phase by phase."""
    return [list(chain.from_iterable(phases)) for phases in zip(*graphs, strict=True)]


def _hypercube(workers: list[int]) -> list[list[Pair]]:
    """Return log₂ phases of pairwise averages after which 2^p workers agree exactly."""
    return [
        [(worker, workers[i ^ o], 0.5) for i, worker in enumerate(workers) if not i & o]
        for o in _powers_of_two_below(len(workers))
    ]


def _simple_base_2(workers: list[int]) -> list[list[Pair]]:
    """Return the phases of the Simple Base-2 Graph over these workers.

    Split the n workers by the binary digits of n into blocks of 2^p workers, the largest first.
    (1) Every block agrees by itself. (2) Block after block, each worker of the later blocks
    exchanges with a worker of its own in this block at the weight |block| / (|block| + |later|),
    after which this block and the later ones each have the mean of both, and later blocks still
    agree within themselves. (3) The block, now uneven, agrees by itself again, while the later
    ones go on with (2). A block that waits repeats its own averaging.
    """
    n = len(workers)
    blocks, begin = [], 0
    for bit in sorted(_powers_of_two_below(n + 1), reverse=True):
        if n & bit:
            blocks.append(workers[begin : begin + bit])
            begin += bit
    inner = [_hypercube(block) for block in blocks]
    first, exchanges = len(inner[0]), len(blocks) - 1
    phases = []
    for t in range(2 * first + 1 if exchanges else first):
        step = t - first  # the block that exchanges with the later ones, if there are any
        exchanging = 0 <= step < exchanges
        phase: list[Pair] = []
        for b, averaging in enumerate(inner[:step] if exchanging else inner):
            if averaging:
                phase += averaging[(t if t < first else step - b - 1) % len(averaging)]
        if exchanging:
            later = [worker for block in blocks[step + 1 :] for worker in block]
            weight = len(blocks[step]) / (len(blocks[step]) + len(later))
            phase += [(i, j, weight) for i, j in zip(blocks[step], later, strict=False)]
        phases.append(phase)
    return phases


def _powers_of_two_below(n: int) -> tuple[int, ...]:
    return tuple(1 << k for k in range((n - 1).bit_length()))


def _cyclic(n: int, offsets: Sequence[int]) -> Matrix:
    """Worker i reads ``(i + offset) mod n`` for distinct offsets, all and itself weighted alike."""
    matrix = np.zeros((n, n))
    for offset in (0, *offsets):
        matrix[np.arange(n), (np.arange(n) + offset) % n] += 1.0 / (1 + len(offsets))
    return matrix


def _pairwise(n: int, pairs: Sequence[Pair]) -> Matrix:
    matrix = np.eye(n)
    for i, j, weight in pairs:
        matrix[i, j] = matrix[j, i] = weight
        matrix[i, i] = matrix[j, j] = 1.0 - weight
    return matrix


TOPOLOGIES: dict[str, Callable[[int], list[Matrix]]] = {
    "complete": _complete,
    "ring": _ring,
    "one_peer_ring": _one_peer_ring,
    "one_peer_exponential": _one_peer_exponential,
    "exponential": _exponential,
    "base_k": _base_k,
}
