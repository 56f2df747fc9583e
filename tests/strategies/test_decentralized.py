"""DecentralizedStrategy on one rank, against an independent simulation."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from simulation import batches, fit, gammas, largest_difference, learning_rates, simulate, tiny

from tinyllm.strategies import DecentralizedStrategy
from tinyllm.strategies.consensus import AdaptiveConsensus
from tinyllm.strategies.topology import make_topology

# Float64 rounding of two orders of summation, grown over 12 updates of a model whose weights are
# of order 0.1: differences seen are below 1e-13.
TOLERANCE = 1e-10

WORKERS = (1, 2, 3, 4, 5, 8)
TOPOLOGIES = (
    "complete",
    "ring",
    "one_peer_ring",
    "one_peer_exponential",
    "exponential",
    "base_k",
    "file",
)
CASES = [
    (topology, scheme, workers)
    for topology, scheme, workers in product(TOPOLOGIES, ("awc", "atc"), WORKERS)
    if not (topology == "one_peer_ring" and workers in (3, 5))  # needs an even N
]


def topology_file(folder: Path, workers: int) -> str:
    """Two phases of doubly stochastic matrices without any symmetry."""
    rng = np.random.default_rng(workers)
    eye = np.eye(workers)
    shares = rng.dirichlet(np.ones(4), size=2)
    phases = [
        sum(share * eye[rng.permutation(workers)] for share in phase_shares)
        for phase_shares in shares
    ]
    path = folder / "matrices.npy"
    np.save(path, np.stack(phases))
    return str(path)


def against_simulation(
    topology: str,
    scheme: str,
    workers: int,
    clip: float | None,
    adaptive: tuple[float, float] | None,
) -> float:
    module, rows = tiny(), batches(workers)
    consensus = None if adaptive is None else AdaptiveConsensus(*adaptive)
    expected = simulate(
        module,
        rows,
        make_topology(topology, workers),
        scheme,
        clip=clip,
        gamma=None if adaptive is None else gammas(learning_rates(), *adaptive),
    )
    strategy = DecentralizedStrategy(
        workers, scheme=scheme, topology=topology, adaptive_consensus=consensus, compile=False
    )
    actual = fit(module, strategy, rows, gradient_clip_val=clip)
    assert actual.gammas == pytest.approx(expected.gammas, abs=1e-14)
    assert actual.rates == pytest.approx(expected.rates, rel=1e-14)
    return largest_difference(actual, expected)


@pytest.mark.parametrize(
    ("topology", "scheme", "workers", "index"),
    [(*case, index) for index, case in enumerate(CASES)],
)
def test_equals_the_simulation(
    tmp_path: Path, topology: str, scheme: str, workers: int, index: int
) -> None:
    # clipping and adaptive consensus go through all four combinations from case to case
    if topology == "file":
        topology = topology_file(tmp_path, workers)
    clip = 1.0 if index % 2 else None
    adaptive = (0.1, 0.5) if index // 2 % 2 else None  # active from within the warm-up
    d = against_simulation(topology, scheme, workers, clip, adaptive)
    print(d)
    assert d < TOLERANCE
