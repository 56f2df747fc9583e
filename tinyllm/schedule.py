"""Learning-rate schedules: the factor on the peak learning rate at each update."""

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import lru_cache
from math import ceil, cos, pi
from typing import Any


@dataclass(frozen=True)
class Schedule(ABC):
    """A schedule with a linear warm-up.

    Args:
        warmup_fraction: Share of all updates spent warming up, 0 to 1.
        final_fraction: Factor on the peak learning rate at the last update, 0 to 1.
        updates: Length of the schedule in updates; null takes those that the run plans. Give it
            to stop a run early and go on later on the same curve.
    """

    warmup_fraction: float = 0.05
    final_fraction: float = 0.1
    updates: int | None = None

    def __post_init__(self) -> None:
        if self.updates is not None and self.updates < 1:
            raise ValueError(f"updates is {self.updates}; it must be at least 1 or null")
        for name, value in asdict(self).items():
            if name != "updates" and not 0 <= value <= 1:
                raise ValueError(f"{name} is {value}; it must be from 0 to 1")

    def factor(self, update: int, total_updates: int) -> float:
        """Factor on the peak learning rate.

        Args:
            update: 0-based update; past the last one the last factor holds.
            total_updates: Length of the schedule, at least 1.

        Returns:
            ``(update + 1) / warm-up updates`` while warming up, then the schedule's own curve.
            The fraction counts as the decimal that was written: 0.07 of 100 updates is 7, although
            ``0.07 * 100`` is a little more in floating point.
        """
        update = min(update, total_updates - 1)
        warmup = _share_of(total_updates, self.warmup_fraction)
        if update < warmup:
            return (update + 1) / warmup
        return self.after_warmup((update + 1 - warmup) / (total_updates - warmup))

    @abstractmethod
    def after_warmup(self, progress: float) -> float:
        """Factor at ``progress`` in (0, 1] of the updates after warm-up; 1 is the last one."""

    def to_dict(self) -> dict[str, Any]:
        """Class path and arguments, as configuration files name them."""
        cls = type(self)
        class_path = f"{cls.__module__}.{cls.__qualname__}"
        return {"class_path": class_path, "init_args": asdict(self)}


@dataclass(frozen=True)
class WarmupCosine(Schedule):
    """Linear warm-up, then half a cosine from the peak to ``final_fraction`` of it."""

    def after_warmup(self, progress: float) -> float:
        """See :class:`Schedule`."""
        return self.final_fraction + (1 - self.final_fraction) * (1 + cos(pi * progress)) / 2


@dataclass(frozen=True)
class WSD(Schedule):
    """Warm-up, stable, decay: constant at the peak, then linear to ``final_fraction``.

    Args:
        decay_fraction: Share of the updates after warm-up spent in the final decay, 0 to 1.
    """

    decay_fraction: float = 0.2

    def after_warmup(self, progress: float) -> float:
        """See :class:`Schedule`."""
        if self.decay_fraction == 0:
            return 1.0
        remaining = min(1.0, (1 - progress) / self.decay_fraction)
        return self.final_fraction + (1 - self.final_fraction) * remaining


@lru_cache
def _share_of(updates: int, fraction: float) -> int:
    return ceil(Fraction(repr(float(fraction))) * updates)
