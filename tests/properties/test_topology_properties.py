"""Topologies, for every number of workers up to 64; and how adaptive consensus relaxes them."""

import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyllm.strategies.consensus import AdaptiveConsensus, gamma_schedule, mixed
from tinyllm.strategies.topology import TOPOLOGIES, Topology, make_topology

NAMES = pytest.mark.parametrize("name", TOPOLOGIES)
workers = st.integers(1, 64)
ROUNDING = 1e-12
MOST_UPDATES = 20  # of a finite-time topology with up to 64 workers: 2 log2(64) + 1 and some


def topology_or_none(name: str, n: int) -> Topology | None:
    """The topology, or None where N is refused; then the message says what to do."""
    if name == "one_peer_ring" and n % 2 and n > 1:
        with pytest.raises(ValueError, match=rf"got N = {n}; use {n - 1} or {n + 1} workers"):
            make_topology(name, n)
        return None
    return make_topology(name, n)


def values_of(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, 3))


@NAMES
@given(workers)
def test_every_phase_is_doubly_stochastic(name: str, n: int) -> None:
    topology = topology_or_none(name, n)
    if topology is None:
        return
    for t in range(topology.period):
        matrix = topology.matrix(t)
        assert matrix.shape == (n, n)
        assert (matrix >= 0).all()
        np.testing.assert_allclose(matrix.sum(0), 1, rtol=0, atol=ROUNDING)
        np.testing.assert_allclose(matrix.sum(1), 1, rtol=0, atol=ROUNDING)


@NAMES
@given(workers, st.integers(0, 1_000_000), st.integers(0, 99))
def test_the_mean_is_preserved_and_nobody_leaves_the_range(
    name: str, n: int, t: int, seed: int
) -> None:
    topology = topology_or_none(name, n)
    if topology is None:
        return
    before = values_of(n, seed)
    after = topology.matrix(t) @ before
    np.testing.assert_allclose(after.mean(0), before.mean(0), rtol=0, atol=ROUNDING)
    assert (after.max(0) <= before.max(0) + ROUNDING).all()
    assert (after.min(0) >= before.min(0) - ROUNDING).all()


@NAMES
@given(workers, st.integers(0, 99))
def test_exact_consensus_in_the_stated_number_of_updates_and_not_before(
    name: str, n: int, seed: int
) -> None:
    topology = topology_or_none(name, n)
    if topology is None:
        return
    stated = topology.updates_to_exact_consensus()
    values = values_of(n, seed)
    mean = values.mean(0)
    agrees_after = None
    for t in range(MOST_UPDATES):
        if np.abs(values - mean).max() < 1e-10:
            agrees_after = t
            break
        values = topology.matrix(t) @ values
    if stated is not None:
        assert agrees_after == stated
    elif agrees_after is not None:  # by more than one period, which is not what is stated
        assert agrees_after > topology.period


@given(workers)
def test_base_k_agrees_exactly_for_every_number(n: int) -> None:
    updates = make_topology("base_k", n).updates_to_exact_consensus()
    assert updates is not None
    assert updates <= 2 * math.ceil(math.log2(n)) + 1 if n > 1 else updates == 0


@NAMES
@given(workers, st.integers(0, 1_000))
def test_peers_are_where_the_weights_are(name: str, n: int, t: int) -> None:
    topology = topology_or_none(name, n)
    if topology is None:
        return
    matrix = topology.matrix(t)
    most = {"ring": 2, "one_peer_ring": 1, "one_peer_exponential": 1, "base_k": 1}.get(name, n - 1)
    for i in range(n):
        peers = topology.peers(t, i)
        assert i not in peers
        assert len(peers) <= most
        assert set(peers) | {i} >= set(np.flatnonzero(matrix[i]).tolist())
        assert all(matrix[i, j] > 0 for j in peers)


@st.composite
def doubly_stochastic(draw: st.DrawFn) -> list[list[Fraction]]:
    """A convex combination of permutations, exactly."""
    n = draw(st.integers(1, 6))
    parts = draw(st.lists(st.tuples(st.integers(1, 9), st.permutations(range(n))), min_size=1))
    total = sum(weight for weight, _ in parts)
    matrix = [[Fraction(0)] * n for _ in range(n)]
    for weight, permutation in parts:
        for i, j in enumerate(permutation):
            matrix[i][j] += Fraction(weight, total)
    return matrix


@given(doubly_stochastic(), st.sampled_from([".npy", ".csv", "period"]))
def test_a_file_gives_the_matrix_that_was_written(
    tmp_path_factory: pytest.TempPathFactory, exact: list[list[Fraction]], kind: str
) -> None:
    wanted = np.array([[float(entry) for entry in row] for row in exact])
    path: Path = tmp_path_factory.mktemp("matrix") / ("m.csv" if kind == ".csv" else "m.npy")
    if kind == ".csv":
        path.write_text("\n".join(",".join(map(str, row)) for row in exact))
    else:
        np.save(path, wanted if kind == ".npy" else np.stack([wanted, np.eye(len(wanted))]))
    topology = make_topology(str(path), len(wanted))
    assert topology.period == (2 if kind == "period" else 1)
    np.testing.assert_array_equal(topology.matrix(0), wanted)


# --- adaptive consensus -----------------------------------------------------------------------

rates = st.lists(st.floats(0, 10) | st.just(0.0), min_size=1, max_size=60)
shares = st.floats(0, 1) | st.integers(0, 100).map(lambda percent: percent / 100)
powers = st.floats(0, 8)


def gammas_or_none(start: float, power: float, lrs: list[float]) -> np.ndarray | None:
    """γ of every update, or None where all rates of the window are 0, which is refused."""
    consensus = AdaptiveConsensus(start, power)
    window = lrs[consensus.start_update(len(lrs)) :]
    if window and power > 0 and not any(window):
        with pytest.raises(ValueError, match="all of them are 0; lower start_fraction"):
            gamma_schedule(consensus, lrs)
        return None
    return gamma_schedule(consensus, lrs)


@given(shares, powers, rates)
def test_gamma_is_1_before_the_window_and_reaches_1_within(
    start: float, power: float, lrs: list[float]
) -> None:
    gammas = gammas_or_none(start, power, lrs)
    if gammas is None:
        return
    assert len(gammas) == len(lrs)
    assert ((gammas >= 0) & (gammas <= 1)).all()
    first = math.ceil(Fraction(repr(start)) * len(lrs))
    assert (gammas[:first] == 1).all()
    assert gammas[first:].size == 0 or gammas[first:].max() == 1


@given(shares, powers, rates)
def test_within_the_window_gamma_follows_the_learning_rate(
    start: float, power: float, lrs: list[float]
) -> None:
    gammas = gammas_or_none(start, power, lrs)
    if gammas is None:
        return
    first = AdaptiveConsensus(start, power).start_update(len(lrs))
    order = np.argsort(lrs[first:], kind="stable")
    assert (np.diff(gammas[first:][order]) >= 0).all()


@given(shares, powers, rates, st.integers(-20, 20))
def test_gamma_does_not_depend_on_the_unit_of_the_rate(
    start: float, power: float, lrs: list[float], exponent: int
) -> None:
    lrs = [0.0 if rate < 1e-200 else rate for rate in lrs]  # the smallest lose digits
    gammas = gammas_or_none(start, power, lrs)
    scaled = gammas_or_none(start, power, [rate * 2.0**exponent for rate in lrs])
    if gammas is None:
        assert scaled is None
        return
    np.testing.assert_array_equal(gammas, scaled)


@NAMES
@given(workers, st.floats(0, 1), st.integers(0, 99))
def test_a_relaxed_matrix_is_doubly_stochastic(name: str, n: int, gamma: float, t: int) -> None:
    topology = topology_or_none(name, n)
    if topology is None:
        return
    Topology("relaxed", mixed(topology.matrix(t), gamma))  # which checks it


@given(st.floats())
def test_gamma_outside_0_to_1_is_refused(gamma: float) -> None:
    if 0 <= gamma <= 1:
        np.testing.assert_allclose(mixed(np.eye(2), gamma), np.eye(2), rtol=0, atol=ROUNDING)
        return
    with pytest.raises(ValueError, match="gamma must be from 0 to 1"):
        mixed(np.eye(2), gamma)
