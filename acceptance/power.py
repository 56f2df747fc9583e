"""How likely the convergence gate passes a candidate that is truly equal, and with how many seeds.

The gate passes when ``mean + t · S / √n < margin`` over n paired differences. For a truly equal
candidate they are taken as independent and normal with mean 0 and standard deviation σ, so the mean
is normal, S is independent of it with ``(n − 1) S² / σ²`` chi-squared, and

    P(pass) = E[Φ((margin − t · S / √n) · √n / σ)],

which is the noncentral t distribution at −t with noncentrality ``−margin · √n / σ``. The
expectation over S is taken by quadrature. Student's t itself has a closed form for whole degrees of
freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4).
"""

import math
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(400)
_LEAST_SEEDS = 3  # as in every protocol
_MOST_SEEDS = 100_000  # a search that gets here has no practical answer


def student_t_cdf(value: float, degrees: int) -> float:
    """P(T ≤ value) of Student's t with a whole number of degrees of freedom, at least 1."""
    if degrees < 1:
        raise ValueError(f"degrees of freedom must be at least 1, not {degrees}")
    angle = math.atan(value / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    k = np.arange(2 + odd, degrees - 1, 2)
    later_terms = float(np.cumprod((k - 1) / k * cosine * cosine).sum())
    series = 0.0 if degrees == 1 else (cosine if odd else 1.0) * (1 + later_terms)
    inside = 2 / math.pi * (angle + sine * series) if odd else sine * series
    return (1 + inside) / 2


def student_t_quantile(probability: float, degrees: int) -> float:
    """The value that Student's t stays below with the given probability, from 0.5 up to 1."""
    if not 0.5 <= probability < 1:
        raise ValueError(f"the probability must be in [0.5, 1), not {probability}")
    low, high = 0.0, 1.0
    while student_t_cdf(high, degrees) < probability:
        low, high = high, 2 * high
    while (middle := (low + high) / 2) not in (low, high):
        if student_t_cdf(middle, degrees) < probability:
            low = middle
        else:
            high = middle
    return high


def pass_probability(
    paired_sd: float, *, seeds: int, margin: float, t_quantile: float | None = None
) -> float:
    """Probability that a truly equal candidate passes the convergence gate.

    Args:
        paired_sd: σ, the standard deviation of the paired differences, in nats.
        seeds: n, the number of pairs, at least 2.
        margin: What the upper bound must stay below, in nats.
        t_quantile: Multiplies ``S / √n``; None takes the one-sided 95% quantile.
    """
    if seeds < 2:
        raise ValueError(f"a spread needs at least 2 seeds, not {seeds}")
    if not (math.isfinite(paired_sd) and paired_sd >= 0):
        raise ValueError(f"the paired sd must be finite and at least 0, not {paired_sd}")
    if paired_sd == 0:
        return float(margin > 0)
    if t_quantile is None:
        t_quantile = student_t_quantile(0.95, seeds - 1)
    degrees = seeds - 1
    # The density of r = S / σ: twelve sigmas around its mode hold all that matters.
    centre, width = math.sqrt(max(degrees - 1, 0) / degrees), 12 / math.sqrt(2 * degrees)
    low, high = max(0.0, centre - width), centre + width
    r = low + (high - low) * (_NODES + 1) / 2
    log_density = (
        math.log(2)
        + degrees / 2 * math.log(degrees / 2)
        - math.lgamma(degrees / 2)
        + (degrees - 1) * np.log(r)
        - degrees * r * r / 2
    )
    passed = _normal_cdf(margin * math.sqrt(seeds) / paired_sd - t_quantile * r)
    integral = np.sum(_WEIGHTS * np.exp(log_density) * passed) * (high - low) / 2
    return float(min(integral, 1.0))


def seeds_needed(
    paired_sd: float,
    *,
    margin: float,
    confidence: float = 0.95,
    power: float = 0.9,
) -> int:
    """The smallest number of seeds, from 3, with which a truly equal candidate passes often enough.

    Each number of seeds is judged with the t quantile that belongs to it.

    Args:
        paired_sd: Standard deviation of the paired differences, in nats.
        margin: What the upper bound must stay below, in nats.
        confidence: Of the one-sided bound.
        power: Probability of passing that is asked for.

    Raises:
        ValueError: If no practical number of seeds reaches this probability.
    """
    if not margin > 0:
        raise ValueError(f"the margin must be above 0, not {margin}")
    # The normal approximation never asks for more than Student's t does.
    normal = NormalDist()
    # below 0 where even a margin of 0 is passed often enough
    quantiles = max(0.0, normal.inv_cdf(confidence) + normal.inv_cdf(power))
    least = (quantiles * paired_sd / margin) ** 2
    if least > _MOST_SEEDS:
        raise ValueError(
            f"a paired sd of {paired_sd:g} nats is too wide for a margin of {margin:g}: about "
            f"{least:.2g} seeds would be needed"
        )
    seeds = max(_LEAST_SEEDS, math.ceil(least))
    while (
        pass_probability(
            paired_sd,
            seeds=seeds,
            margin=margin,
            t_quantile=student_t_quantile(confidence, seeds - 1),
        )
        < power
    ):
        seeds += 1
    return seeds


def _normal_cdf(values: NDArray[np.float64]) -> NDArray[np.float64]:
    erf: Any = np.vectorize(math.erf, otypes=[np.float64])
    return np.asarray((1 + erf(values / math.sqrt(2))) / 2)
