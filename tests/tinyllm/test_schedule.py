"""Learning-rate schedules by value."""

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
