"""Causal attention of packed queries, keys and values, and its way back.

``y = softmax(q·kᵀ/√K + causal) · v`` for each head (Vaswani et al., "Attention is all you need",
2017, section 3.2.1), by :mod:`tinyllm.kernels.attention_forward` and
:mod:`tinyllm.kernels.attention_backward`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tinyllm.kernels.attention_backward import attention_backward
from tinyllm.kernels.attention_forward import attention_forward


class Attended(NamedTuple):
    """What the backward pass needs again.

    Attributes:
        out: ``[N, H, T, K]`` for N sequences, in memory as ``[N, T, H, K]``.
        lse: ``[N, H, T, 1]`` stream dtype, logarithms of the sums of each row's exponentials.
    """

    out: Tensor
    lse: Tensor


def attend(qkv: Tensor, heads: int, length: int) -> Attended:
    """Attention of ``qkv`` ``[W, B·T, 3·H·K]``, rotated already; T is ``length``."""
    sequences, width = qkv.shape[0] * qkv.shape[1] // length, qkv.shape[2] // (3 * heads)
    out = qkv.new_empty(sequences, length, heads, width).transpose(1, 2)
    stream = torch.float64 if qkv.dtype == torch.float64 else torch.float32
    lse = qkv.new_empty(sequences, heads, length, 1, dtype=stream)
    attention_forward(qkv, out, lse)
    return Attended(out, lse)


def attend_backward(
    dout: Tensor, qkv: Tensor, attended: Attended, cos: Tensor, sin: Tensor, dqkv: Tensor
) -> None:
    """Gradients of queries, keys and values before queries and keys were turned.

    Args:
        dout: ``[W, B·T, H·K]``.
        qkv: As it was attended to.
        attended: What :func:`attend` gave.
        cos: Of rotary positions, ``[≥ T, K/2]``.
        sin: The same.
        dqkv: As ``qkv``, takes the result; not ``qkv`` itself.
    """
    attention_backward(dout, qkv, attended.out, attended.lse, cos, sin, dqkv)
