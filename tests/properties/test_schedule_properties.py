"""Learning-rate schedules, for any length and any fractions."""

import math
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyllm.schedule import WSD, Schedule, WarmupCosine

fractions = st.floats(0, 1) | st.integers(0, 100).map(lambda percent: percent / 100)
lengths = st.integers(1, 500)
ROUNDING = 1e-12

Maker = Callable[[float, float, float], Schedule]
KINDS = pytest.mark.parametrize(
    "kind",
    [
        lambda warmup, final, decay: WarmupCosine(warmup, final),
        lambda warmup, final, decay: WSD(warmup, final, decay_fraction=decay),
    ],
    ids=["cosine", "wsd"],
)


def warmup_updates(schedule: Schedule, total: int) -> int:
    """``ceil(fraction · total)`` of the decimal that was written."""
    return math.ceil(Fraction(repr(schedule.warmup_fraction)) * total)


@KINDS
@given(fractions, fractions, fractions, lengths, st.integers(0, 600))
def test_factors_are_from_0_to_1(
    kind: Maker, warmup: float, final: float, decay: float, total: int, update: int
) -> None:
    assert 0 <= kind(warmup, final, decay).factor(update, total) <= 1


@KINDS
@given(fractions, fractions, fractions, lengths)
def test_warm_up_is_a_straight_line_to_the_peak(
    kind: Maker, warmup: float, final: float, decay: float, total: int
) -> None:
    schedule = kind(warmup, final, decay)
    length = warmup_updates(schedule, total)
    found = [schedule.factor(update, total) for update in range(length)]
    assert found == [(update + 1) / length for update in range(length)]


@given(st.integers(0, 100), st.integers(1, 50))
def test_a_decimal_share_of_warm_up_is_not_off_by_rounding(percent: int, hundreds: int) -> None:
    schedule, length = WarmupCosine(warmup_fraction=percent / 100), percent * hundreds
    found = [schedule.factor(update, 100 * hundreds) for update in range(length)]
    assert found == [(update + 1) / length for update in range(length)]


@KINDS
@given(fractions, fractions, fractions, lengths)
def test_after_warm_up_no_factor_is_above_the_one_before(
    kind: Maker, warmup: float, final: float, decay: float, total: int
) -> None:
    schedule = kind(warmup, final, decay)
    start = warmup_updates(schedule, total)
    found = [1.0, *(schedule.factor(update, total) for update in range(start, total))]
    assert all(b <= a + ROUNDING for a, b in pairwise(found))


@KINDS
@given(fractions, fractions, fractions, lengths)
def test_the_last_update_has_the_final_factor(
    kind: Maker, warmup: float, final: float, decay: float, total: int
) -> None:
    schedule = kind(warmup, final, decay)
    if warmup_updates(schedule, total) == total:  # nothing is left to decay
        assert schedule.factor(total - 1, total) == 1
    elif decay > 0 or isinstance(schedule, WarmupCosine):
        assert schedule.factor(total - 1, total) == pytest.approx(final, abs=ROUNDING)


@KINDS
@given(fractions, fractions, fractions, lengths, st.integers(1, 10_000))
def test_past_the_last_update_the_last_factor_holds(
    kind: Maker, warmup: float, final: float, decay: float, total: int, more: int
) -> None:
    schedule = kind(warmup, final, decay)
    last = schedule.factor(total - 1, total)
    assert schedule.factor(total - 1 + more, total) == last


@KINDS
@given(fractions, fractions, st.floats(0.05, 1), st.integers(2, 500))
def test_there_is_no_jump(
    kind: Maker, warmup: float, final: float, decay: float, total: int
) -> None:
    schedule = kind(warmup, final, decay)
    start = warmup_updates(schedule, total)
    # the steepest slope of each part, in units of one update
    rises = 1 / start if start else 0.0
    length = max(1, total - start)
    steepest = math.pi / 2 if isinstance(schedule, WarmupCosine) else 1 / decay
    falls = (1 - final) * min(1.0, steepest / length)
    found = [schedule.factor(update, total) for update in range(total)]
    for update, (a, b) in enumerate(pairwise(found), start=1):
        allowed = rises if update < start else falls
        assert abs(b - a) <= allowed + ROUNDING


@given(fractions, fractions, fractions, lengths)
def test_wsd_holds_the_peak_until_it_decays(
    warmup: float, final: float, decay: float, total: int
) -> None:
    schedule = WSD(warmup, final, decay_fraction=decay)
    start = warmup_updates(schedule, total)
    stable = math.floor((total - start) * (1 - Fraction(decay)))
    assert all(schedule.factor(update, total) == 1 for update in range(start, start + stable - 1))


@given(st.floats(), st.sampled_from(["warmup_fraction", "final_fraction", "decay_fraction"]))
def test_fractions_outside_0_to_1_are_refused(value: float, name: str) -> None:
    if 0 <= value <= 1:
        assert getattr(WSD(**{name: value}), name) == value
        return
    with pytest.raises(ValueError, match=f"{name} is .*; it must be from 0 to 1"):
        WSD(**{name: value})
