"""The loss of a bigram count table: a scale for the validation loss of a small model."""

import numpy as np

from tinyllm.data.stream import TokenStream


def bigram_loss(train: TokenStream, validation: TokenStream, vocab_size: int) -> float:
    """Mean loss of an interpolated Kneser-Ney bigram model, in nats per token.

    Counted on `train`, scored on every token of `validation` but its first. With c(a, b) the
    count of the pair, c(a) its sum over b, and n(·) numbers of distinct pairs:

        p(b | a) = max(c(a, b) - d, 0) / c(a)  +  d n(a, *) / c(a) · q(b)
        q(b) = (n(*, b) + 1) / (n(*, *) + V)

    (Kneser & Ney 1995; the discount d = n1 / (n1 + 2 n2), with n1 and n2 the numbers of pairs
    that were seen once and twice, is Ney, Essen & Kneser 1994. The 1 in q keeps unseen ids
    possible.) A context that was never seen has p = q.

    Args:
        train: At least two tokens.
        validation: At least two tokens.
        vocab_size: V; every id is below it.

    Raises:
        ValueError: A stream has fewer than two tokens.
    """
    for name, stream in (("train", train), ("validation", validation)):
        if len(stream) < 2:
            raise ValueError(f"the {name} stream has {len(stream)} tokens; a pair needs 2")
    pairs, counts = np.unique(_pairs(train, vocab_size), return_counts=True)
    first, second = np.divmod(pairs, vocab_size)
    context_counts = np.bincount(first, weights=counts, minlength=vocab_size)
    context_kinds = np.bincount(first, minlength=vocab_size)
    lower = (np.bincount(second, minlength=vocab_size) + 1) / (len(pairs) + vocab_size)
    once, twice = int((counts == 1).sum()), int((counts == 2).sum())
    discount = once / (once + 2 * twice) if once else 0.5

    scored, weights = np.unique(_pairs(validation, vocab_size), return_counts=True)
    a, b = np.divmod(scored, vocab_size)
    place = np.minimum(np.searchsorted(pairs, scored), len(pairs) - 1)
    seen = np.where(pairs[place] == scored, counts[place], 0)
    total = context_counts[a]
    known = total > 0
    total = np.where(known, total, 1)
    lower_weight = np.where(known, discount * context_kinds[a] / total, 1.0)
    probability = np.maximum(seen - discount, 0) / total + lower_weight * lower[b]
    return float(-(weights * np.log(probability)).sum() / weights.sum())


def _pairs(stream: TokenStream, vocab_size: int) -> np.ndarray:
    """Each token and its follower as one number: int64, shape [tokens - 1]."""
    tokens = stream.read(0, len(stream)).astype(np.int64)
    return tokens[:-1] * vocab_size + tokens[1:]
