import itertools

import numpy as np
import pytest

from tinyllm.strategies.topology import TOPOLOGIES, Topology, make_topology

EPS = np.finfo(np.float64).eps
WORKERS = (1, 2, 3, 5, 6, 8)
CASES = [
    (name, n)
    for name, n in itertools.product(TOPOLOGIES, WORKERS)
    if not (name == "one_peer_ring" and n in (3, 5))
]


def product(topology: Topology, updates: int) -> np.ndarray:
    result = np.eye(topology.num_workers)
    for t in range(updates):
        result = topology.matrix(t) @ result
    return result


@pytest.mark.parametrize(("name", "n"), CASES)
def test_rows_and_columns_sum_to_one(name: str, n: int) -> None:
    topology = make_topology(name, n)
    for t in range(topology.period):
        matrix = topology.matrix(t)
        assert matrix.shape == (n, n)
        assert (matrix >= 0).all()
        # A sum of n terms at most 1 is off by at most n roundings.
        np.testing.assert_allclose(matrix.sum(axis=0), 1.0, rtol=0, atol=n * EPS)
        np.testing.assert_allclose(matrix.sum(axis=1), 1.0, rtol=0, atol=n * EPS)


@pytest.mark.parametrize(("name", "n"), CASES)
def test_mean_is_preserved_to_rounding(name: str, n: int) -> None:
    topology = make_topology(name, n)
    x = np.random.default_rng(0).standard_normal((n, 100))
    mean = x.mean(axis=0)
    for t in range(topology.period):
        x = topology.matrix(t) @ x
    # Each update sums n products of numbers below 5: at most about 2n roundings of 5 each.
    np.testing.assert_allclose(x.mean(axis=0), mean, rtol=0, atol=10 * n * topology.period * EPS)


@pytest.mark.parametrize(("name", "n"), CASES)
def test_peers_are_the_other_workers_with_weight(name: str, n: int) -> None:
    topology = make_topology(name, n)
    for t, i in itertools.product(range(topology.period), range(n)):
        row = topology.matrix(t)[i]
        assert topology.peers(t, i) == tuple(j for j in range(n) if j != i and row[j] != 0)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_one_worker_is_plain_training(name: str) -> None:
    topology = make_topology(name, 1)
    assert topology.period == 1
    assert topology.matrix(0).tolist() == [[1.0]]
    assert topology.peers(0, 0) == ()
    assert topology.updates_to_exact_consensus() == 0
    assert topology.spectral_gap() == 1.0


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_two_workers_average(name: str) -> None:
    assert make_topology(name, 2).matrix(0).tolist() == [[0.5, 0.5], [0.5, 0.5]]


def test_phases_repeat_with_the_period() -> None:
    topology = make_topology("one_peer_exponential", 8)
    assert topology.period == 3
    for t in range(9):
        assert np.array_equal(topology.matrix(t), topology.matrix(t % 3))
        assert topology.peers(t, 5) == topology.peers(t % 3, 5)


def test_a_returned_matrix_is_a_copy() -> None:
    topology = make_topology("ring", 4)
    topology.matrix(0)[:] = 7.0
    assert topology.matrix(0).max() <= 0.5


# ---- each topology by hand ----------------------------------------------------------------------


def test_ring_weighs_self_and_both_neighbours_alike() -> None:
    third = 1 / 3
    expected = [
        [third, third, 0, third],
        [third, third, third, 0],
        [0, third, third, third],
        [third, 0, third, third],
    ]
    assert make_topology("ring", 4).matrix(0).tolist() == expected


def test_one_peer_ring_alternates_even_and_odd_edges() -> None:
    topology = make_topology("one_peer_ring", 6)
    assert [topology.peers(0, i) for i in range(6)] == [(1,), (0,), (3,), (2,), (5,), (4,)]
    assert [topology.peers(1, i) for i in range(6)] == [(5,), (2,), (1,), (4,), (3,), (0,)]


def test_one_peer_exponential_exchanges_in_pairs_for_powers_of_two() -> None:
    topology = make_topology("one_peer_exponential", 8)
    for t, i in itertools.product(range(3), range(8)):
        assert topology.peers(t, i) == (i ^ 2**t,)
        assert np.array_equal(topology.matrix(t), topology.matrix(t).T)


def test_one_peer_exponential_is_cyclic_otherwise() -> None:
    topology = make_topology("one_peer_exponential", 6)
    assert topology.period == 3
    for t, i in itertools.product(range(3), range(6)):
        assert topology.peers(t, i) == ((i + 2**t) % 6,)
        assert topology.matrix(t)[i, i] == 0.5


@pytest.mark.parametrize(("n", "degree"), [(2, 1), (3, 2), (5, 3), (6, 3), (8, 3), (9, 4)])
def test_exponential_has_ceil_log2_distinct_peers(n: int, degree: int) -> None:
    topology = make_topology("exponential", n)
    assert topology.period == 1
    assert all(len(topology.peers(0, i)) == degree for i in range(n))
    assert np.unique(topology.matrix(0)[topology.matrix(0) > 0]).tolist() == [1 / (1 + degree)]


def test_base_k_for_three_workers_by_hand() -> None:
    # 3 = 2 + 1: workers 0, 1 agree; 2 exchanges with 0 at weight 2/3; workers 0, 1 agree again.
    topology = make_topology("base_k", 3)
    pair = [[0.5, 0.5, 0], [0.5, 0.5, 0], [0, 0, 1]]
    assert topology.period == 3
    assert topology.matrix(0).tolist() == pair
    np.testing.assert_allclose(
        topology.matrix(1), [[1 / 3, 0, 2 / 3], [0, 1, 0], [2 / 3, 0, 1 / 3]], rtol=0, atol=EPS
    )
    assert topology.matrix(2).tolist() == pair


# ---- consensus ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "n", "updates"),
    [
        ("complete", 5, 1),
        ("ring", 3, 1),
        ("ring", 4, None),
        ("one_peer_ring", 4, 2),
        ("one_peer_ring", 6, None),
        ("one_peer_exponential", 4, 2),
        ("one_peer_exponential", 6, None),
        ("one_peer_exponential", 8, 3),
        ("exponential", 3, 1),
        ("exponential", 8, None),
        ("base_k", 3, 3),
        ("base_k", 5, 5),
        ("base_k", 6, 4),
        ("base_k", 7, 5),
        ("base_k", 8, 3),
    ],
)
def test_updates_to_exact_consensus(name: str, n: int, updates: int | None) -> None:
    topology = make_topology(name, n)
    assert topology.updates_to_exact_consensus() == updates
    if updates is not None:
        average = np.full((n, n), 1 / n)
        np.testing.assert_allclose(product(topology, updates), average, rtol=0, atol=1e-14)
        assert np.abs(product(topology, updates - 1) - average).max() > 0.01


@pytest.mark.parametrize("n", range(2, 33))
def test_base_k_agrees_exactly_within_a_period_for_every_n(n: int) -> None:
    topology = make_topology("base_k", n)
    np.testing.assert_allclose(product(topology, topology.period), 1 / n, rtol=0, atol=1e-14)
    assert topology.updates_to_exact_consensus() == topology.period
    assert topology.max_degree() == 1
    assert topology.period <= 2 * (n.bit_length() - 1) + 1  # floor(log2 N) phases, one, and again


def test_base_k_is_symmetric() -> None:
    topology = make_topology("base_k", 7)
    for t in range(topology.period):
        assert np.array_equal(topology.matrix(t), topology.matrix(t).T)


@pytest.mark.parametrize(
    ("name", "n", "gap"),
    [
        ("complete", 6, 1.0),
        ("ring", 4, 2 / 3),  # eigenvalues 1/3 + 2/3 cos(2πk/4)
        ("ring", 6, 1 / 3),  # 1/3 + 2/3 cos(2π/6) = 2/3
        ("one_peer_ring", 8, 0.5),  # per period of two: cos²(2π/8)
        ("exponential", 8, 0.5),  # 2 / (1 + log2 N) for even N, Ying et al., 2021
        ("one_peer_exponential", 3, 0.75),  # |1 + ω|² / 4 = 1/4
        ("base_k", 6, 1.0),
    ],
)
def test_spectral_gap(name: str, n: int, gap: float) -> None:
    assert make_topology(name, n).spectral_gap() == pytest.approx(gap, abs=1e-12)


def test_consensus_applies_phases_in_the_order_of_updates() -> None:
    near = make_topology("one_peer_exponential", 4).matrix(0)[[0, 2, 1, 3]]  # and swap 1, 2
    far = make_topology("one_peer_exponential", 4).matrix(1)
    # Far, then near agrees: near @ far. Near leaves (a, b, a, b), which far does not change.
    assert Topology("far first", np.stack([far, near])).updates_to_exact_consensus() == 2
    assert Topology("near first", np.stack([near, far])).updates_to_exact_consensus() is None


def test_workers_that_never_mix_have_no_spectral_gap() -> None:
    topology = Topology("alone", np.eye(4))
    assert topology.spectral_gap() == 0.0
    assert topology.updates_to_exact_consensus() is None
    assert topology.max_degree() == 0


# ---- files --------------------------------------------------------------------------------------


def test_matrix_from_npy(tmp_path) -> None:
    matrix = np.array([[0.7, 0.3], [0.3, 0.7]])
    np.save(tmp_path / "w.npy", matrix)
    topology = make_topology(str(tmp_path / "w.npy"), 2)
    assert topology.period == 1
    assert np.array_equal(topology.matrix(0), matrix)


def test_time_varying_matrices_from_npy(tmp_path) -> None:
    phases = np.stack([np.eye(3), np.eye(3)[[1, 2, 0]]])
    np.save(tmp_path / "w.npy", phases)
    topology = make_topology(str(tmp_path / "w.npy"), 3)
    assert topology.period == 2
    assert topology.peers(0, 0) == ()
    assert topology.peers(1, 0) == (1,)


def test_matrix_from_csv_with_fractions(tmp_path) -> None:
    (tmp_path / "w.csv").write_text("1/3, 2/3, 0\n2/3,1/3,0\n0,0,1.0\n\n")
    topology = make_topology(str(tmp_path / "w.csv"), 3)
    assert topology.matrix(0).tolist() == [[1 / 3, 2 / 3, 0], [2 / 3, 1 / 3, 0], [0, 0, 1]]


# ---- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [3, 5])
def test_odd_one_peer_ring_is_refused(n: int) -> None:
    with pytest.raises(ValueError, match=rf"N must be 1 or even, got N = {n}; use {n - 1} or"):
        make_topology("one_peer_ring", n)


def test_unknown_name_gives_the_nearest() -> None:
    with pytest.raises(ValueError, match="unknown topology 'one_peer_exp'; did you mean 'one_peer"):
        make_topology("one_peer_exp", 4)


def test_no_workers_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 worker, got num_workers=0"):
        make_topology("ring", 0)


def test_missing_file_is_named(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no mixing matrix at .*absent\.npy"):
        make_topology(str(tmp_path / "absent.npy"), 2)


def test_file_of_the_wrong_size_is_refused(tmp_path) -> None:
    np.save(tmp_path / "w.npy", np.eye(3))
    with pytest.raises(ValueError, match=r"shape \[3, 3\], but N = 4 workers need \[4, 4\]"):
        make_topology(str(tmp_path / "w.npy"), 4)


@pytest.mark.parametrize(
    "text", ["0.5,half\n0.5,0.5\n", "1/0,1\n1,0\n", "1,0\n1\n", "nan,1\n1,0\n"]
)
def test_unreadable_csv_is_refused(tmp_path, text: str) -> None:
    (tmp_path / "w.csv").write_text(text)
    with pytest.raises(ValueError, match=r"cannot read .*w\.csv.*2 rows of 2 real numbers"):
        make_topology(str(tmp_path / "w.csv"), 2)


@pytest.mark.parametrize("values", [np.eye(2) * 1j, np.array([[{}, 1], [1, {}]])])
def test_npy_without_real_numbers_is_refused(tmp_path, values: np.ndarray) -> None:
    np.save(tmp_path / "w.npy", values)
    with pytest.raises(ValueError, match=r"cannot read .*w\.npy"):
        make_topology(str(tmp_path / "w.npy"), 2)


def test_row_sum_is_refused_with_row_and_sum() -> None:
    with pytest.raises(ValueError, match=r"for N = 2, phase 0: row 1 sums to 0\.9, not 1"):
        Topology("mine", np.array([[0.5, 0.5], [0.5, 0.4]]))


def test_column_sum_is_refused_with_column_and_sum() -> None:
    with pytest.raises(ValueError, match=r"for N = 2, phase 1: column 0 sums to 1\.5, not 1"):
        Topology("mine", np.array([np.eye(2), [[1.0, 0.0], [0.5, 0.5]]]))


def test_sums_are_not_rescaled_but_refused() -> None:
    with pytest.raises(ValueError, match=r"row 0 sums to 0\.9999, not 1 .* fractions such as 1/3"):
        Topology("mine", np.full((3, 3), 0.3333))


def test_sums_may_miss_one_by_rounding_only() -> None:
    Topology("mine", np.full((2, 2), 0.5 + 4e-10))  # sums miss 1 by 8e-10
    with pytest.raises(ValueError, match="row 0 sums to"):
        Topology("mine", np.full((2, 2), 0.5 + 6e-10))


def test_negative_entry_is_refused() -> None:
    with pytest.raises(ValueError, match=r"entry \[0, 1\] is -0\.5; every weight must be non-neg"):
        Topology("mine", np.array([[1.5, -0.5], [-0.5, 1.5]]))


def test_non_finite_entry_is_refused() -> None:
    with pytest.raises(ValueError, match=r"entry \[1, 0\] is nan; every weight must be finite"):
        Topology("mine", np.array([[1.0, 0.0], [np.nan, 1.0]]))


@pytest.mark.parametrize("shape", [(2,), (2, 3), (0, 2, 2), (1, 0, 0)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"must be \[N, N\] or \[period, N, N\], got shape"):
        Topology("mine", np.zeros(shape))
