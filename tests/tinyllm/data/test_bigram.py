"""The bigram scale: a proper distribution, and right on cases that can be counted by hand."""

import math

import numpy as np
import pytest

from tinyllm.data.bigram import bigram_loss
from tinyllm.data.stream import TokenStream


def stream(ids: object) -> TokenStream:
    return TokenStream.from_array(np.asarray(ids, np.uint16))


def test_probabilities_sum_to_one_for_every_context() -> None:
    rng = np.random.default_rng(0)
    vocab_size = 12
    train = stream(rng.integers(0, 10, 60))  # 10 and 11 are never seen
    for context in range(vocab_size):
        total = sum(
            math.exp(-bigram_loss(train, stream([context, b]), vocab_size))
            for b in range(vocab_size)
        )
        assert total == pytest.approx(1)


def test_value_counted_by_hand() -> None:
    """Train 0 1 0 1 0 2: pairs 01 twice, 10 twice, 02 once; V = 3.

    n1 = 1, n2 = 2, so d = 1/5; q(1) = (1 + 1) / (3 + 3) = 1/3;
    p(1 | 0) = (2 - 1/5) / 3 + (1/5 · 2 / 3) · 1/3 = 3/5 + 2/45.
    """
    loss = bigram_loss(stream([0, 1, 0, 1, 0, 2]), stream([0, 1]), 3)
    assert loss == pytest.approx(-math.log(3 / 5 + 2 / 45))


def test_mean_is_over_tokens() -> None:
    train = stream([0, 1, 0, 1, 0, 2])
    one, two = (bigram_loss(train, stream(pair), 3) for pair in ([0, 1], [1, 0]))
    assert bigram_loss(train, stream([0, 1, 0, 1]), 3) == pytest.approx((2 * one + two) / 3)


def test_random_tokens_cost_the_logarithm_of_the_vocabulary() -> None:
    rng = np.random.default_rng(0)
    train, validation = (stream(rng.integers(0, 16, n)) for n in (200_000, 20_000))
    assert bigram_loss(train, validation, 16) == pytest.approx(math.log(16), abs=0.003)


def test_a_cycle_costs_nothing() -> None:
    cycle = stream(np.arange(50_000) % 7)
    assert bigram_loss(cycle, cycle, 7) == pytest.approx(0, abs=0.001)


def test_too_short_streams_are_refused() -> None:
    with pytest.raises(ValueError, match="the validation stream has 1 tokens"):
        bigram_loss(stream([0, 1]), stream([0]), 2)
