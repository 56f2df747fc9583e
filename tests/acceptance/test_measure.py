"""What is measured: the number of targets of a run, against the loader that serves them."""

from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest
from torch import Tensor

from tinyllm.acceptance.configure import trained_targets
from tinyllm.data.loader import TokenLoader
from tinyllm.data.stream import TokenStream
from tinyllm.model import IGNORED


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize(
    ("tokens", "context", "rows"),
    [
        (161, 8, 4),  # five whole updates
        (160, 8, 4),  # a target too few for the last row
        (137, 8, 4),  # one row in the last update
        (30, 8, 4),  # less than an update
        (9, 8, 4),  # one row
        (150, 7, 6),  # not a multiple of the workers
    ],
)
def test_trained_targets_are_those_that_the_loader_serves(
    tokens: int, context: int, rows: int, workers: int
) -> None:
    loader = TokenLoader(
        TokenStream.from_array(np.arange(tokens, dtype=np.uint16)),
        context=context,
        batch_size=rows,
        shuffle=True,
        groups=workers,
        local_groups=range(workers),
    )
    served = 0
    for update, batch in enumerate(islice(_endless(loader), 13), start=1):
        served += int((batch[:, 1:] != IGNORED).sum())
        assert trained_targets(tokens, update, context=context, rows=rows) == served


def _endless(loader: TokenLoader) -> Iterator[Tensor]:
    while True:
        yield from loader
