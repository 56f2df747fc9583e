"""What each rank keeps of a split's losses; test_evaluating.py has whole commands."""

from pathlib import Path

import numpy as np
from prediction_jobs import batches_kept
from ranks import run_on_ranks


def test_rank_zero_alone_keeps_the_losses_of_all_in_their_order(tmp_path: Path) -> None:
    assert run_on_ranks(batches_kept, 2, str(tmp_path)) == [1, 0]
    expected = [i for i in range(18) if i % 4]  # a row's first token has none
    np.testing.assert_array_equal(np.load(tmp_path / "predictions.npy"), expected)
