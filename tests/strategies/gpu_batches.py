"""A small model and batches of it, for tests on a GPU."""

import numpy as np
import torch
from torch import Tensor

from tinyllm import LlamaConfig

CONFIG = LlamaConfig(layers=2, width=128, heads=2, ffn_width=256, vocab_size=1_000, context=64)


def token_rows(workers: int, per_worker: int, count: int) -> list[Tensor]:
    """Batches on the GPU, of tokens that are frequent and rare, and some targets missing."""
    rng = np.random.default_rng(3)
    shape = (count, workers * per_worker, CONFIG.context + 1)
    rows = torch.from_numpy(rng.zipf(1.3, shape).clip(1, CONFIG.vocab_size - 1))
    rows[:, 0, 30:33] = -100
    rows[:, -1, -7:] = -100
    return list(rows.cuda())


def chained_rows(rows: int, count: int) -> list[Tensor]:
    """Batches on the GPU whose tokens follow from the ones before, but for chance.

    So contexts differ, and what a model predicts in each. After tokens that are independent it
    predicts the same everywhere, is rounded everywhere alike, and no sum averages that out.
    """
    rng = np.random.default_rng(3)
    steps = rng.zipf(1.5, (count, rows, CONFIG.context + 1))
    tokens = np.empty(steps.shape, np.int64)
    tokens[..., 0] = rng.integers(1, CONFIG.vocab_size, (count, rows))
    for t in range(1, CONFIG.context + 1):
        tokens[..., t] = (7 * tokens[..., t - 1] + steps[..., t]) % CONFIG.vocab_size
    return list(torch.from_numpy(tokens).cuda())
