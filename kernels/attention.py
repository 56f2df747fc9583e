"""Causal attention of packed queries, keys and values.

``y = softmax(q·kᵀ/√K + causal) · v`` for each head (Vaswani et al., "Attention is all you need",
2017, section 3.2.1), by :mod:`tinyllm.kernels.attention_forward` and
:mod:`tinyllm.kernels.attention_backward`, or by cuDNN for heads of a size that they do not have.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tinyllm.kernels.attention_backward import attention_backward
from tinyllm.kernels.attention_forward import attention_forward
from tinyllm.kernels.rope import rotate_back

_aten = torch.ops.aten


class Attended(NamedTuple):
    """What the backward pass needs again.

    Attributes:
        out: ``[N, H, T, K]`` for N sequences, in memory as ``[N, T, H, K]``.
        lse: ``[N, H, T, 1]`` stream dtype, logarithms of the sums of each row's exponentials.
        state: What cuDNN's backward pass wants beside them.
    """

    out: Tensor
    lse: Tensor
    state: tuple[Any, ...]


def heads_of(packed: Tensor, heads: int, length: int) -> Tensor:
    """``[W, B·T, G·K]`` as a view ``[W·B, G, T, K]`` of its G heads; T is ``length``."""
    return packed.view(-1, length, heads, packed.shape[-1] // heads).transpose(1, 2)


def fits(width: int) -> bool:
    """Whether the kernels have heads of this size."""
    return width in (16, 32, 64, 128)


def attend(qkv: Tensor, heads: int, length: int) -> Attended:
    """Attention of ``qkv`` ``[W, B·T, 3·H·K]``, rotated already; T is ``length``."""
    packed = heads_of(qkv, 3 * heads, length)
    sequences, _, _, width = packed.shape
    if qkv.is_cuda and not fits(width):
        q, k, v = packed.chunk(3, dim=1)
        out, lse, *state = _aten._scaled_dot_product_cudnn_attention(
            *(q, k, v, None, True, 0.0, True, False)
        )
        return Attended(out, lse, tuple(state))
    out = qkv.new_empty(sequences, length, heads, width).transpose(1, 2)
    high = torch.float64 if qkv.dtype == torch.float64 else torch.float32
    lse = qkv.new_empty(sequences, heads, length, 1, dtype=high)
    attention_forward(qkv, out, lse)
    return Attended(out, lse, ())


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
    out, lse, state = attended
    _, heads, length, width = out.shape
    if not qkv.is_cuda or fits(width):
        attention_backward(dout, qkv, out, lse, cos, sin, dqkv)
        return
    q, k, v = heads_of(qkv, 3 * heads, length).chunk(3, dim=1)
    starts_q, starts_k, max_q, max_k, seed, offset, _ = state
    dq, dk, dv = _aten._scaled_dot_product_cudnn_attention_backward(
        *(heads_of(dout, heads, length), q, k, v, out, lse, seed, offset, None),
        *(starts_q, starts_k, max_q, max_k, 0.0, True),
    )
    rotate_back(dq, dk, dv, cos, sin, dqkv)
