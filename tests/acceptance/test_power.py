"""Student's t against tables, and the probability of passing against simulations."""

import numpy as np
import pytest

from tinyllm.acceptance import pass_probability, seeds_needed
from tinyllm.acceptance.power import student_t_cdf, student_t_quantile

DRAWS = 200_000


@pytest.mark.parametrize(
    ("probability", "degrees", "quantile"),
    [  # printed tables, three decimals
        (0.95, 1, 6.314),
        (0.95, 2, 2.920),
        (0.95, 3, 2.353),
        (0.95, 10, 1.812),
        (0.95, 29, 1.699),
        (0.975, 2, 4.303),
        (0.975, 5, 2.571),
        (0.99, 4, 3.747),
        (0.95, 10_000, 1.645),
        (0.5, 3, 0.0),
    ],
)
def test_quantiles_of_printed_tables(probability: float, degrees: int, quantile: float) -> None:
    assert student_t_quantile(probability, degrees) == pytest.approx(quantile, abs=5e-4)


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 7, 30, 101])
def test_the_quantile_inverts_the_distribution(degrees: int) -> None:
    for probability in (0.5, 0.7, 0.95, 0.999):
        value = student_t_quantile(probability, degrees)
        assert student_t_cdf(value, degrees) == pytest.approx(probability, abs=1e-12)
        assert student_t_cdf(-value, degrees) == pytest.approx(1 - probability, abs=1e-12)


def simulated(paired_sd: float, seeds: int, t_quantile: float, margin: float = 0.005) -> float:
    differences = np.random.default_rng(0).normal(0, paired_sd, (DRAWS, seeds))
    upper = differences.mean(1) + t_quantile * differences.std(1, ddof=1) / np.sqrt(seeds)
    return float((upper < margin).mean())


@pytest.mark.parametrize(
    ("paired_sd", "seeds"),
    [(0.0055, 3), (0.0076, 3), (0.0024, 3), (0.0009, 3), (0.05, 3), (0.004, 2), (0.0076, 22)],
)
def test_agrees_with_a_simulation(paired_sd: float, seeds: int) -> None:
    t_quantile = student_t_quantile(0.95, seeds - 1)
    exact = pass_probability(paired_sd, seeds=seeds, margin=0.005)
    # four standard errors of the simulation, and a floor for the rarest outcomes
    tolerance = 4 * np.sqrt(exact * (1 - exact) / DRAWS) + 1e-5
    assert simulated(paired_sd, seeds, t_quantile) == pytest.approx(exact, abs=tolerance)


@pytest.mark.parametrize(
    ("paired_sd", "published"), [(0.0055, 0.29), (0.0076, 0.20), (0.0024, 0.74), (0.0009, 1.0)]
)
def test_published_probabilities(paired_sd: float, published: float) -> None:
    chance = pass_probability(paired_sd, seeds=3, margin=0.005, t_quantile=2.920)
    assert chance == pytest.approx(published, abs=0.01)


def test_without_spread_an_equal_candidate_always_passes() -> None:
    assert pass_probability(0.0, seeds=3, margin=0.005) == 1.0
    assert pass_probability(1e-7, seeds=3, margin=0.005) == pytest.approx(1.0, abs=1e-9)


def test_at_a_margin_of_zero_the_bound_errs_as_often_as_it_says() -> None:
    # P(mean + t S / sqrt(n) < 0) is the error rate of a 95% bound, whatever the spread
    for seeds in (2, 3, 8, 200):
        chance = pass_probability(0.3, seeds=seeds, margin=0.0)
        assert chance == pytest.approx(0.05, abs=1e-9)


@pytest.mark.parametrize("paired_sd", [0.0, 0.001, 0.0024, 0.0055, 0.0076, 0.02])
@pytest.mark.parametrize(("confidence", "power"), [(0.95, 0.9), (0.9, 0.5), (0.99, 0.99)])
def test_seeds_needed_is_the_smallest_number(
    paired_sd: float, confidence: float, power: float
) -> None:
    def chance(seeds: int) -> float:
        quantile = student_t_quantile(confidence, seeds - 1)
        return pass_probability(paired_sd, seeds=seeds, margin=0.005, t_quantile=quantile)

    seeds = seeds_needed(paired_sd, margin=0.005, confidence=confidence, power=power)
    assert chance(seeds) >= power
    assert all(chance(fewer) < power for fewer in range(3, seeds))


def test_the_least_number_is_enough_where_any_number_passes_often_enough() -> None:
    # an equal candidate passes a margin of 0 in 5 cases of 100, and this one more often
    assert seeds_needed(0.06, margin=0.005, power=0.01) == 3


def test_a_wide_spread_is_found_within_a_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step costs as much as there are seeds, so steps are counted, not seconds."""
    steps = []

    def counted(probability: float, degrees: int) -> float:
        steps.append(degrees)
        return student_t_quantile(probability, degrees)

    monkeypatch.setattr("tinyllm.acceptance.power.student_t_quantile", counted)
    # the normal approximation asks for 13702.2, and Student's t for the 1.4 more of 1.645² / 2
    assert seeds_needed(0.2, margin=0.005) == 13704
    assert len(steps) <= 3


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 seeds, not 1"):
        pass_probability(0.1, seeds=1, margin=0.005)
    with pytest.raises(ValueError, match="finite"):
        pass_probability(float("nan"), seeds=3, margin=0.005)
    with pytest.raises(ValueError, match="margin must be above 0"):
        seeds_needed(0.1, margin=0.0)
    with pytest.raises(ValueError, match="too wide"):
        seeds_needed(10.0, margin=0.005)
    with pytest.raises(ValueError, match="degrees of freedom"):
        student_t_cdf(1.0, 0)
    with pytest.raises(ValueError, match="probability"):
        student_t_quantile(1.0, 3)
