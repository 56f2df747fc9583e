import numpy as np
import pytest

from tinyllm.strategies.consensus import AdaptiveConsensus, gamma_schedule, mixed
from tinyllm.strategies.topology import make_topology


def test_gamma_follows_the_learning_rate_in_the_window() -> None:
    gammas = gamma_schedule(AdaptiveConsensus(0.5, 1.0), [8.0, 8.0, 8.0, 6.0, 3.0, 1.5])
    assert gammas.tolist() == [1, 1, 1, 1, 0.5, 0.25]


def test_power_is_the_exponent() -> None:
    gammas = gamma_schedule(AdaptiveConsensus(0.5, 2.0), [8.0, 8.0, 4.0, 1.0])
    assert gammas.tolist() == [1, 1, 1, 0.0625]


def test_the_window_starts_at_the_ceiling() -> None:
    # ceil(0.5 * 5) = 3: updates 0, 1, 2 mix fully.
    gammas = gamma_schedule(AdaptiveConsensus(0.5), [5.0, 4.0, 3.0, 2.0, 1.0])
    assert gammas.tolist() == [1, 1, 1, 1, 0.5]


@pytest.mark.parametrize(
    ("fraction", "total", "start"),
    # 0.07 * 100 and 0.28 * 25 are above 7 in floating point, and a plain ceiling gives 8.
    [(0.07, 100, 7), (0.28, 25, 7), (0.5, 7, 4), (0.0, 9, 0), (1.0, 9, 9), (1 / 3, 9, 3)],
)
def test_start_update(fraction: float, total: int, start: int) -> None:
    assert AdaptiveConsensus(fraction).start_update(total) == start


def test_activation_in_warm_up_looks_ahead_for_the_largest_rate() -> None:
    gammas = gamma_schedule(AdaptiveConsensus(0.25), [1.0, 2.0, 3.0, 4.0, 4.0, 2.0, 1.0, 1.0])
    assert gammas.tolist() == [1, 1, 0.75, 1, 1, 0.5, 0.25, 0.25]


def test_rates_before_the_window_do_not_count() -> None:
    gammas = gamma_schedule(AdaptiveConsensus(0.5), [100.0, 100.0, 2.0, 1.0])
    assert gammas.tolist() == [1, 1, 1, 0.5]


@pytest.mark.parametrize(
    "consensus", [AdaptiveConsensus(start_fraction=1.0), AdaptiveConsensus(power=0.0)]
)
def test_start_one_or_power_zero_always_mix_fully(consensus: AdaptiveConsensus) -> None:
    assert gamma_schedule(consensus, [3.0, 2.0, 1.0, 0.0]).tolist() == [1, 1, 1, 1]


def test_a_learning_rate_of_zero_stops_mixing() -> None:
    assert gamma_schedule(AdaptiveConsensus(0.5), [2.0, 2.0, 1.0, 0.0]).tolist() == [1, 1, 1, 0]


def test_a_window_of_zero_rates_is_refused() -> None:
    with pytest.raises(ValueError, match=r"updates 2 to 3, and all of them are 0; lower start_fr"):
        gamma_schedule(AdaptiveConsensus(0.5), [1.0, 1.0, 0.0, 0.0])


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_bad_learning_rates_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match=rf"learning rate of update 1 is {bad}"):
        gamma_schedule(AdaptiveConsensus(), [1.0, bad, 1.0])


def test_rates_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[total_updates\], got shape \[2, 2\]"):
        gamma_schedule(AdaptiveConsensus(), np.ones((2, 2)))


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan")])
def test_start_fraction_outside_zero_to_one_is_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match="start_fraction is a share of all updates"):
        AdaptiveConsensus(start_fraction=fraction)


@pytest.mark.parametrize("power", [-1.0, float("nan"), float("inf")])
def test_bad_power_is_refused(power: float) -> None:
    with pytest.raises(ValueError, match="power must be finite and at least 0"):
        AdaptiveConsensus(power=power)


def test_mixed_by_hand() -> None:
    matrix = np.array([[0.5, 0.5], [0.5, 0.5]])
    assert mixed(matrix, 0.5).tolist() == [[0.75, 0.25], [0.25, 0.75]]
    assert mixed(matrix, 1.0).tolist() == matrix.tolist()
    assert mixed(matrix, 0.0).tolist() == np.eye(2).tolist()


def test_mixed_stays_doubly_stochastic() -> None:
    relaxed = mixed(make_topology("one_peer_exponential", 6).matrix(1), 0.3)
    for axis in (0, 1):
        np.testing.assert_allclose(relaxed.sum(axis=axis), 1.0, rtol=0, atol=1e-15)


@pytest.mark.parametrize("gamma", [-0.1, 1.1, float("nan")])
def test_gamma_outside_zero_to_one_is_refused(gamma: float) -> None:
    with pytest.raises(ValueError, match="gamma must be from 0 to 1"):
        mixed(np.eye(2), gamma)
