"""Gossip: combining rows on one rank, and exchanging them between ranks."""

import numpy as np
import pytest
import rank_jobs
import torch
from ranks import run_on_ranks

from tinyllm.strategies.gossip import Gossip
from tinyllm.strategies.topology import make_topology


def combine(matrix: np.ndarray, rows: torch.Tensor, failed: bool = False) -> torch.Tensor:
    combined = rows.clone()
    Gossip(len(rows), 0, combined).combine(combined, torch.tensor(failed), matrix)
    return combined


def test_is_a_product_with_the_matrix() -> None:
    rows = torch.randn(5, 7, dtype=torch.float64)
    matrix = make_topology("exponential", 5).matrix(0)
    expected = torch.from_numpy(matrix) @ rows
    torch.testing.assert_close(combine(matrix, rows), expected, rtol=0, atol=1e-15)


def test_single_precision_stays_within_its_rounding() -> None:
    rows = torch.randn(5, 1_000)
    matrix = make_topology("complete", 5).matrix(0)
    expected = torch.from_numpy(matrix) @ rows.double()
    error = (combine(matrix, rows).double() - expected).abs().max()
    # 5 products and 4 sums of numbers below 4: a TF32 product would be off by 1e-3
    assert error < 9 * 4 * 2**-24


def test_equal_rows_of_the_matrix_combine_to_equal_bits() -> None:
    combined = combine(make_topology("complete", 3).matrix(0), torch.randn(3, 1_000))
    assert torch.equal(combined, combined[:1].expand(3, -1))


def test_pairs_agree_to_the_last_bit() -> None:
    combined = combine(make_topology("one_peer_exponential", 4).matrix(1), torch.randn(4, 1_000))
    assert torch.equal(combined[0], combined[2])
    assert torch.equal(combined[1], combined[3])


def test_after_a_failure_rows_keep_their_bits() -> None:
    rows = torch.randn(4, 8)
    rows[1, 3], rows[2, 0], rows[3, 1] = float("nan"), float("inf"), -0.0
    combined = combine(make_topology("complete", 4).matrix(0), rows, failed=True)
    assert torch.equal(combined.view(torch.int32), rows.view(torch.int32))


def test_workers_without_a_weight_are_not_read() -> None:
    rows = torch.randn(4, 8)
    rows[3] = float("nan")
    combined = combine(make_topology("one_peer_ring", 4).matrix(0), rows)  # 0-1 and 2-3
    assert combined[:2].isfinite().all()
    assert combined[2:].isnan().all()


@pytest.mark.parametrize("ranks", [2, 4])
def test_between_ranks_equals_one_rank(ranks: int) -> None:
    """Random doubly stochastic matrices, some exchanges begun early, N = 8."""
    for results in run_on_ranks(rank_jobs.gossip, ranks, ranks):
        assert results == {"differences": [0.0] * 12, "unchanged": True}


def test_exchanges_only_what_is_needed() -> None:
    """One-peer, N = 8 on two ranks: rows travel only when the pairs are on different ranks."""
    first, second = run_on_ranks(rank_jobs.exchanged_rows, 2)
    # offsets 1 and 2 stay within a rank of four workers, offset 4 crosses
    assert first == second == [0, 0, 8]


def test_has_no_buffer_before_it_combines() -> None:
    """The gh200 engine mixes local workers itself, and rows are as large as the model."""
    rows = torch.randn(3, 1_000)
    gossip = Gossip(3, 0, rows)
    assert not any(isinstance(value, torch.Tensor) for value in vars(gossip).values())
