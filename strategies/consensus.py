"""Adaptive consensus: how strongly workers combine, as a function of the learning rate.

The mixing matrix of an update is relaxed towards no mixing, ``W' = γW + (1 − γ)I``. γ is 1 before
the active window ``[ceil(start_fraction · total_updates), total_updates)`` and
``(η / η_max)^power`` within it, η_max being the largest learning rate inside the window.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tinyllm.schedule import share_of_updates


@dataclass(frozen=True)
class AdaptiveConsensus:
    """When consensus starts to follow the learning rate, and how steeply.

    The rule is tinyllm's own. That training keeps the speed of centralized training where workers'
    disagreement stays below a critical value is a result of Kong et al., "Consensus Control for
    Decentralized Deep Learning" (2021).

    Attributes:
        start_fraction: Share of all updates, in [0, 1], that mix fully; 1 leaves γ at 1.
        power: Exponent of η / η_max, finite and >= 0; 0 leaves γ at 1.

    Raises:
        ValueError: If a value is outside its range.
    """

    start_fraction: float = 0.5
    power: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.start_fraction <= 1.0:
            raise ValueError(
                f"start_fraction is a share of all updates, from 0 to 1, got {self.start_fraction}"
            )
        if not (math.isfinite(self.power) and self.power >= 0.0):
            raise ValueError(f"power must be finite and at least 0, got {self.power}")

    def start_update(self, total_updates: int) -> int:
        """Return the first update (0-based) of the active window; total_updates if it is empty."""
        return share_of_updates(total_updates, self.start_fraction)


def gamma_schedule(
    consensus: AdaptiveConsensus, lrs: Sequence[float] | NDArray[np.floating]
) -> NDArray[np.float64]:
    """Return γ of every update, given the learning rate of every update.

    It needs the whole run's learning rates, 0 to total_updates − 1, also when resuming, because
    the largest one inside the window may lie ahead (a window that opens during warm-up) or behind.

    Args:
        consensus: Start and power.
        lrs: Learning rates ``[total_updates]``.

    Returns:
        γ in [0, 1], float64 ``[total_updates]``.

    Raises:
        ValueError: If a learning rate is negative or not finite, or if all learning rates of the
            active window are 0.
    """
    rates = np.asarray(lrs, dtype=np.float64)
    if rates.ndim != 1:
        raise ValueError(f"learning rates must be [total_updates], got shape {list(rates.shape)}")
    bad = np.flatnonzero(~(np.isfinite(rates) & (rates >= 0.0)))
    if bad.size:
        raise ValueError(
            f"the learning rate of update {bad[0]} is {rates[bad[0]]}; "
            f"adaptive consensus needs finite learning rates of at least 0"
        )
    gammas = np.ones_like(rates)
    start = consensus.start_update(rates.size)
    window = rates[start:]
    if window.size == 0 or consensus.power == 0.0:
        return gammas
    largest = window.max()
    if largest == 0.0:
        raise ValueError(
            f"adaptive consensus scales by the largest learning rate of updates {start} to "
            f"{rates.size - 1}, and all of them are 0; lower start_fraction "
            f"(now {consensus.start_fraction}) or let the schedule end above 0"
        )
    gammas[start:] = (window / largest) ** consensus.power
    return gammas


def mixed(matrix: NDArray[np.float64], gamma: float) -> NDArray[np.float64]:
    """Return γW + (1 − γ)I of a mixing matrix ``[N, N]``; doubly stochastic if W is.

    Raises:
        ValueError: If γ is outside [0, 1].
    """
    if not 0.0 <= gamma <= 1.0:
        raise ValueError(f"gamma must be from 0 to 1, got {gamma}")
    return gamma * matrix + (1.0 - gamma) * np.eye(len(matrix))
