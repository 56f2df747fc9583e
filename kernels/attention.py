"""Causal attention of packed queries, keys and values, by cuDNN on a GPU.

``y = softmax(q·kᵀ/√K + causal) · v`` for each head. With ``p`` the softmax's rows and
``δ = Σ dy·y`` of each row: ``dv = pᵀ·dy``, ``ds = p∘(dy·vᵀ − δ)``, ``dq = ds·k/√K``,
``dk = dsᵀ·q/√K`` (Dao et al., "FlashAttention", 2022, section 3.1 and appendix B).
"""

from typing import NamedTuple

import torch
from torch import Tensor

_aten = torch.ops.aten


class Attended(NamedTuple):
    """What the backward pass needs again.

    Attributes:
        out: ``[N, H, T, K]`` for N sequences, in memory as ``[N, T, H, K]``.
        state: What the implementation keeps beside it.
    """

    out: Tensor
    state: tuple[object, ...]


def heads_of(packed: Tensor, heads: int, length: int) -> Tensor:
    """``[W, B·T, G·K]`` as a view ``[W·B, G, T, K]`` of its G heads; T is ``length``."""
    return packed.view(-1, length, heads, packed.shape[-1] // heads).transpose(1, 2)


def attend(qkv: Tensor, heads: int, length: int) -> Attended:
    """Attention of ``qkv`` ``[W, B·T, 3·H·K]``, rotated already; T is ``length``."""
    q, k, v = heads_of(qkv, 3 * heads, length).chunk(3, dim=1)
    if not qkv.is_cuda:
        p = _probabilities(q, k)
        return Attended((p @ v).transpose(1, 2).contiguous().transpose(1, 2), ())
    out, *state = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False)
    return Attended(out, tuple(state))


def attend_backward(
    dout: Tensor, qkv: Tensor, attended: Attended, heads: int, length: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v ``[W·B, H, T, K]``.

    Args:
        dout: ``[W, B·T, H·K]``.
        qkv: As it was attended to.
        attended: What :func:`attend` gave.
        heads: H.
        length: T.
    """
    q, k, v = heads_of(qkv, 3 * heads, length).chunk(3, dim=1)
    dy = heads_of(dout, heads, length)
    if not qkv.is_cuda:
        return _reference_backward(dy, q, k, v, attended.out)
    lse, starts_q, starts_k, max_q, max_k, seed, offset, _ = attended.state
    gradients: tuple[Tensor, Tensor, Tensor] = _aten._scaled_dot_product_cudnn_attention_backward(
        *(dy, q, k, v, attended.out, lse, seed, offset, None),
        *(starts_q, starts_k, max_q, max_k, 0.0, True),
    )
    return gradients


def _probabilities(q: Tensor, k: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    ahead = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
    return scores.masked_fill(ahead, float("-inf")).softmax(-1)


def _reference_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    p, scale = _probabilities(q, k), q.shape[-1] ** -0.5
    delta = (dy * y).sum(-1, keepdim=True)
    ds = p * (dy @ v.transpose(-1, -2) - delta) * scale
    return ds @ k, ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ dy
