"""Attention's forward pass: a softmax of one pass over the keys.

With ``s = q·kᵀ/√K`` where a token sees another, a program owns some queries of a head. Keys and
values pass by; the largest ``s`` so far scales what is summed, and is told when it grows (Dao et
al., "FlashAttention", 2022, algorithm 1)::

    y = Σ exp(s − m)·v / Σ exp(s − m)        lse = m + log Σ exp(s − m)
"""

# kernels are typed by Triton
# mypy: disable-error-code="no-untyped-def"

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tinyllm.kernels import attention_forward_hopper, attention_hopper
from tinyllm.kernels.constants import LOG2_E
from tinyllm.kernels.operation import Operation

BLOCK_Q = BLOCK_K = 64


def blocks(width: int) -> dict[str, int]:
    """How kernels for heads of a width are launched, so that all fits into registers."""
    stages, warps = (3, 4) if width <= 64 else (2, 8)
    return {"BLOCK_Q": BLOCK_Q, "BLOCK_K": BLOCK_K, "STAGES": stages, "num_warps": warps}


def scores_of(
    qkv: Tensor, out: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and values ``[N, H, T, K]``, and scores ``[N, H, T, T]``, −∞ ahead of a token.

    Args:
        qkv: ``[W, M, 3·C]``.
        out: ``[N, H, T, K]``, of which only the shape is used.
        dtype: Of the results.
    """
    sequences, heads, length, width = out.shape
    q, k, v = qkv.view(sequences, length, 3, heads, width).permute(2, 0, 3, 1, 4).to(dtype)
    ahead = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    return q, k, v, (q @ k.transpose(-1, -2) * width**-0.5).masked_fill(ahead, -math.inf)


def _attention_forward(qkv: Tensor, out: Tensor, lse: Tensor) -> None:
    """Attention of each token to itself and those before it.

    Args:
        qkv: ``[W, M, 3·C]`` compute dtype, queries and keys turned.
        out: ``[N, H, T, K]`` compute dtype, in memory as ``[N, T, H, K]``, takes the result.
        lse: ``[N, H, T, 1]`` stream dtype, takes logarithms of the sums of rows' exponentials.
    """
    _, _, v, scores = scores_of(qkv, out, lse.dtype)
    torch.logsumexp(scores, -1, keepdim=True, out=lse)
    p = (scores - lse).exp().to(qkv.dtype).to(lse.dtype)  # as the tensor cores take them
    out.copy_(p @ v)


@triton.jit
def tile(desc, sequence, first, column, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Rows of one head ``[ROWS, WIDTH]``, zeros past the sequence's end, by the copy engine."""
    return desc.load([sequence, first, column]).reshape(ROWS, WIDTH)


@triton.jit
def offsets_of(sequence, tokens, length, stride, column, WIDTH: tl.constexpr):
    """Where rows of one head ``[·, WIDTH]`` lie in a tensor with ``stride`` elements a token."""
    row = sequence.to(tl.int64) * length + tokens
    return row[:, None] * stride + column + tl.arange(0, WIDTH)[None, :]


@triton.jit
def place_of_program(length, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """A program's head among those of all sequences, its sequence, its head there, its block."""
    tiles = tl.cdiv(length, BLOCK)
    of_all = tl.program_id(0) // tiles
    return of_all, of_all // HEADS, of_all % HEADS, tl.program_id(0) % tiles


@triton.jit
def _forward_kernel(
    qkv_ptr, keys_desc, y_ptr, lse_ptr, length, factor,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A program: BLOCK_Q queries of a head; keys pass by, the nearest ones last."""
    of_all, sequence, head, number = place_of_program(length, HEADS, BLOCK_Q)
    first = (tl.cdiv(length, BLOCK_Q) - 1 - number) * BLOCK_Q  # those with most to do begin
    column, value_column = (HEADS + head) * WIDTH, (2 * HEADS + head) * WIDTH
    queries = first + tl.arange(0, BLOCK_Q)
    inside = queries < length

    mine = offsets_of(sequence, queries, length, 3 * HEADS * WIDTH, head * WIDTH, WIDTH)
    q = tl.load(qkv_ptr + mine, mask=inside[:, None], other=0.0)
    y = tl.zeros((BLOCK_Q, WIDTH), tl.float32)
    largest = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    for start in tl.range(0, min(first + BLOCK_Q, length), BLOCK_K, num_stages=STAGES):
        k = tile(keys_desc, sequence, start, column, BLOCK_K, WIDTH)
        v = tile(keys_desc, sequence, start, value_column, BLOCK_K, WIDTH)
        keys = start + tl.arange(0, BLOCK_K)
        s = tl.where(queries[:, None] >= keys[None, :], tl.dot(q, tl.trans(k)), float("-inf"))
        new = tl.maximum(largest, tl.max(s, axis=1) * factor)
        p = tl.exp2(s * factor - new[:, None])
        shrink = tl.exp2(largest - new)
        y = tl.dot(p.to(v.dtype), v, y * shrink[:, None])
        total = total * shrink + tl.sum(p, axis=1)
        largest = new
    lse = (largest + tl.log2(total)) / LOG2_E
    tl.store(lse_ptr + of_all.to(tl.int64) * length + queries, lse, mask=inside)
    mine = offsets_of(sequence, queries, length, HEADS * WIDTH, head * WIDTH, WIDTH)
    y = (y / total[:, None]).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + mine, y, mask=inside[:, None])


def _launch(qkv: Tensor, out: Tensor, lse: Tensor) -> None:
    sequences, heads, length, width = out.shape
    if attention_hopper.fits(qkv, width, length):
        attention_forward_hopper.forward(qkv, out, lse)
        return
    packed = qkv.view(sequences, length, -1)
    _forward_kernel[(triton.cdiv(length, BLOCK_Q) * sequences * heads,)](
        *(qkv, TensorDescriptor.from_tensor(packed, [1, BLOCK_K, width])),
        *(out.transpose(1, 2), lse, length, width**-0.5 * LOG2_E.value, heads, width),
        **blocks(width),
    )


attention_forward = Operation(_attention_forward, _launch)
