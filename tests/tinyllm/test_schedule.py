"""Learning-rate schedules by value."""

from dataclasses import dataclass
from itertools import pairwise
from math import cos, pi

import pytest

from tinyllm.schedule import WSD, Schedule, WarmupCosine


def test_cosine_warms_up_linearly_and_ends_at_its_final_fraction() -> None:
    schedule = WarmupCosine(warmup_fraction=0.05, final_fraction=0.1)
    factors = [schedule.factor(update, 100) for update in range(100)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert factors[5] == pytest.approx(0.1 + 0.9 * (1 + cos(pi / 95)) / 2)
    assert factors[-1] == pytest.approx(0.1)
    assert all(a >= b for a, b in pairwise(factors[4:]))


def test_wsd_is_flat_and_then_linear() -> None:
    schedule = WSD(warmup_fraction=0.1, final_fraction=0.0, decay_fraction=0.5)
    factors = [schedule.factor(update, 20) for update in range(20)]
    assert factors[:2] == pytest.approx([0.5, 1.0])
    assert factors[2:11] == pytest.approx([1.0] * 9)
    assert factors[11:] == pytest.approx([1 - k / 9 for k in range(1, 10)])


@pytest.mark.parametrize("schedule", [WarmupCosine(), WSD(), WSD(decay_fraction=0.0)])
def test_the_last_factor_holds_past_the_end(schedule: Schedule) -> None:
    assert schedule.factor(1_000, 10) == schedule.factor(9, 10)


@pytest.mark.parametrize("schedule", [WarmupCosine(0.0), WarmupCosine(1.0), WSD(0.0), WSD(1.0)])
@pytest.mark.parametrize("total", [1, 2, 7])
def test_edges_stay_in_range(schedule: Schedule, total: int) -> None:
    assert all(0 < schedule.factor(update, total) <= 1 for update in range(total))


def test_a_fraction_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"warmup_fraction is 1.5; it must be from 0 to 1"):
        WarmupCosine(warmup_fraction=1.5)
    with pytest.raises(ValueError, match="decay_fraction is -1"):
        WSD(decay_fraction=-1)


@dataclass(frozen=True)
class Power(WarmupCosine):
    """A user's schedule, which derives from one of the library's."""

    power: float = 1.0

    def after_warmup(self, progress: float) -> float:
        return float((1 - progress) ** self.power)


Elsewhere = dataclass(frozen=True)(
    type("Power", (Power,), {"__module__": "elsewhere", "__qualname__": "Power"})
)


def test_a_schedule_comes_back_from_what_it_says_of_itself() -> None:
    mine, other = Power(0.1, power=2.0), Elsewhere(0.1, power=3.0)
    for schedule in (WSD(0.2, 0.0, 7), mine, other):
        assert Schedule.from_dict(schedule.to_dict()) == schedule
        assert type(Schedule.from_dict(schedule.to_dict())) is type(schedule)
    # a class of a script is another module's when it is imported
    moved = Schedule.from_dict(WSD(0.2).to_dict() | {"class_path": "__main__.WSD"})
    assert moved == WSD(0.2)
    with pytest.raises(ValueError, match=r"no schedule '__main__.Power' so far.*elsewhere.Power"):
        Schedule.from_dict(mine.to_dict() | {"class_path": "__main__.Power"})
    with pytest.raises(ValueError, match=r"no schedule 'a.Nothing' so far; import the module"):
        Schedule.from_dict(mine.to_dict() | {"class_path": "a.Nothing"})
