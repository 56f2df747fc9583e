"""Learning-rate schedules: the factor on the peak learning rate at each update."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import lru_cache
from math import ceil, cos, pi
from typing import Any

from tinyllm.arguments import make_plain


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
        make_plain(self)
        if self.updates is not None and self.updates < 1:
            raise ValueError(f"updates is {self.updates}; it must be at least 1 or null")
        for name, value in asdict(self).items():
            if name.endswith("_fraction") and not 0 <= value <= 1:
                raise ValueError(f"{name} is {value}; it must be from 0 to 1")

    def factor(self, update: int, total_updates: int) -> float:
        """Factor on the peak learning rate.

        Args:
            update: 0-based update; past the last one the last factor holds.
            total_updates: Length of the schedule, at least 1.

        Returns:
            ``(update + 1) / warm-up updates`` while warming up, which takes
            :func:`share_of_updates`, then the schedule's own curve.
        """
        update = min(update, total_updates - 1)
        warmup = share_of_updates(total_updates, self.warmup_fraction)
        if update < warmup:
            return (update + 1) / warmup
        return self.after_warmup((update + 1 - warmup) / (total_updates - warmup))

    @abstractmethod
    def after_warmup(self, progress: float) -> float:
        """Factor at ``progress`` in (0, 1] of the updates after warm-up; 1 is the last one."""

    def to_dict(self) -> dict[str, Any]:
        """Class path and arguments, as configuration files name them."""
        return {"class_path": _class_path(type(self)), "init_args": asdict(self)}

    @classmethod
    def _subclasses(cls) -> Iterator[type["Schedule"]]:
        for child in cls.__subclasses__():
            yield child
            yield from child._subclasses()

    @staticmethod
    def from_dict(description: Mapping[str, Any]) -> "Schedule":
        """The schedule that :meth:`to_dict` described, of a class that has been imported.

        Raises:
            ValueError: There is no such class, or several have its name and none its path.
        """
        path = description["class_path"]
        known = {_class_path(cls): cls for cls in Schedule._subclasses()}
        # a class of __main__ is another module's for those who import it
        named = [name for name in known if name.rpartition(".")[2] == path.rpartition(".")[2]]
        if path not in known and len(named) != 1:
            hint = f"; there are {', '.join(named)}" if named else ""
            raise ValueError(
                f"there is no schedule {path!r} so far; import the module it is in first{hint}"
            )
        return known[path if path in known else named[0]](**description["init_args"])


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


def _class_path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


@lru_cache
def share_of_updates(updates: int, fraction: float) -> int:
    """A fraction of all updates, rounded up.

    It counts as the decimal that was written: 0.07 of 100 updates is 7, although ``0.07 * 100`` is
    a little more in floating point.
    """
    return ceil(Fraction(repr(float(fraction))) * updates)
