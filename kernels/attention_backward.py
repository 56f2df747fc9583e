"""Attention's backward pass, from rotated queries and keys to their packed gradient.

With ``s = q·kᵀ/√K``, ``p = exp(s − lse)`` where a token sees another, ``δ = Σ dy·y`` of a row and
``ds = p∘(dy·vᵀ − δ)``::

    dq = ds·k/√K        dk = dsᵀ·q/√K        dv = pᵀ·dy

(Dao et al., "FlashAttention", 2022, appendix B). Two kernels, each of which computes ``p`` anew
from the logarithms of the forward pass: a program of the first owns some queries of a head, and
keys and values pass by; one of the second owns keys and values, and queries pass by. That is seven
products in place of five, but nothing is added up in memory: results are the same each time, and
are turned back where they are. Who owns keys has ``sᵀ`` and ``dsᵀ``, so that the tensor cores take
each factor of a product from where it is.
"""

# kernels are typed by Triton
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tinyllm.kernels import attention_backward_hopper, attention_hopper
from tinyllm.kernels.attention_forward import (
    BLOCK_K,
    BLOCK_Q,
    blocks,
    offsets_of,
    place_of_program,
    scores_of,
    tile,
)
from tinyllm.kernels.constants import LOG2_E
from tinyllm.kernels.operation import Operation
from tinyllm.kernels.rope import turn


def _attention_backward(
    dout: Tensor,
    qkv: Tensor,
    out: Tensor,
    lse: Tensor,
    cos: Tensor,
    sin: Tensor,
    dqkv: Tensor,
) -> None:
    """Gradients of queries, keys and values before they were turned.

    Args:
        dout: ``[W, M, C]`` compute dtype.
        qkv: ``[W, M, 3·C]`` compute dtype, queries and keys turned.
        out: ``[N, H, T, K]`` compute dtype, in memory as ``[N, T, H, K]``.
        lse: ``[N, H, T, 1]`` stream dtype, logarithms of the sums of each row's exponentials.
        cos: ``[≥ T, K/2]`` stream dtype.
        sin: The same.
        dqkv: ``[W, M, 3·C]`` compute dtype, takes the result; not ``qkv`` itself.
    """
    sequences, heads, length, width = out.shape
    wide, scale = lse.dtype, width**-0.5
    q, k, v, scores = scores_of(qkv, out, wide)
    dy = dout.view(sequences, length, heads, width).transpose(1, 2).to(wide)
    p = (scores - lse).exp()
    delta = (dy * out.to(wide)).sum(-1, keepdim=True)
    ds = p * (dy @ v.transpose(-1, -2) - delta)
    p, ds = (factor.to(qkv.dtype).to(wide) for factor in (p, ds))  # as the tensor cores take them
    packed = dqkv.view(sequences, length, 3, heads, width).permute(2, 0, 1, 3, 4)
    for part, gradient in enumerate((ds @ k, ds.transpose(-1, -2) @ q)):
        packed[part].copy_(turn(gradient.transpose(1, 2) * scale, cos[:length], -sin[:length]))
    packed[2].copy_((p.transpose(-1, -2) @ dy).transpose(1, 2))


@triton.jit
def _turned_back(x, cos_ptr, sin_ptr, token, length, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Rows ``[ROWS, WIDTH]`` of gradients, turned back by their positions."""
    HALF: tl.constexpr = WIDTH // 2
    first, second = tl.split(tl.permute(tl.reshape(x, (ROWS, 2, HALF)), (0, 2, 1)))
    place = token[:, None] * HALF + tl.arange(0, HALF)[None, :]
    inside = (token < length)[:, None]
    cos = tl.load(cos_ptr + place, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + place, mask=inside, other=0.0)
    turned = tl.join(first * cos + second * sin, second * cos - first * sin)
    return tl.reshape(tl.permute(turned, (0, 2, 1)), (ROWS, WIDTH))


@triton.jit
def _queries_kernel(
    qkv_ptr, keys_desc, dy_ptr, y_ptr, lse_ptr, rows_ptr, cos_ptr, sin_ptr,
    dqkv_ptr, room, length, factor, scale,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A program: the gradient of BLOCK_Q queries of a head; keys pass by, the nearest ones last."""
    of_all, sequence, head, number = place_of_program(length, HEADS, BLOCK_Q)
    first = (tl.cdiv(length, BLOCK_Q) - 1 - number) * BLOCK_Q  # those with most to do begin
    column, value_column = (HEADS + head) * WIDTH, (2 * HEADS + head) * WIDTH
    queries = first + tl.arange(0, BLOCK_Q)
    inside = queries < length

    mine = offsets_of(sequence, queries, length, HEADS * WIDTH, head * WIDTH, WIDTH)
    packed = offsets_of(sequence, queries, length, 3 * HEADS * WIDTH, head * WIDTH, WIDTH)
    q = tl.load(qkv_ptr + packed, mask=inside[:, None], other=0.0)
    dy = tl.load(dy_ptr + mine, mask=inside[:, None], other=0.0)
    y = tl.load(y_ptr + mine, mask=inside[:, None], other=0.0)
    at = of_all.to(tl.int64) * length + queries
    lse2 = tl.load(lse_ptr + at, mask=inside, other=0.0) * LOG2_E
    delta = tl.sum(dy.to(tl.float32) * y.to(tl.float32), axis=1)
    row = rows_ptr + of_all.to(tl.int64) * 2 * room + queries  # zeros past the sequence's end
    tl.store(row, lse2, mask=queries < room)
    tl.store(row + room, delta, mask=queries < room)

    dq = tl.zeros((BLOCK_Q, WIDTH), tl.float32)
    for start in tl.range(0, min(first + BLOCK_Q, length), BLOCK_K, num_stages=STAGES):
        k = tile(keys_desc, sequence, start, column, BLOCK_K, WIDTH)
        v = tile(keys_desc, sequence, start, value_column, BLOCK_K, WIDTH)
        keys = start + tl.arange(0, BLOCK_K)
        s = tl.where(queries[:, None] >= keys[None, :], tl.dot(q, tl.trans(k)), float("-inf"))
        p = tl.exp2(s * factor - lse2[:, None])
        ds = p * (tl.dot(dy, tl.trans(v)) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    dq = _turned_back(dq * scale, cos_ptr, sin_ptr, queries, length, BLOCK_Q, WIDTH)
    tl.store(dqkv_ptr + packed, dq.to(dqkv_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _keys_kernel(
    qkv_ptr, queries_desc, dy_desc, rows_desc, cos_ptr, sin_ptr, dqkv_ptr,
    length, factor, scale,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A program: the gradients of BLOCK_K keys and values of a head; queries pass by.

    Past the sequence's end queries and gradients are zeros, of which nothing comes.
    """
    of_all, sequence, head, number = place_of_program(length, HEADS, BLOCK_K)
    first, column = number * BLOCK_K, head * WIDTH
    keys = first + tl.arange(0, BLOCK_K)
    inside = (keys < length)[:, None]

    packed = offsets_of(sequence, keys, length, 3 * HEADS * WIDTH, HEADS * WIDTH + column, WIDTH)
    k = tl.load(qkv_ptr + packed, mask=inside, other=0.0)
    v = tl.load(qkv_ptr + packed + HEADS * WIDTH, mask=inside, other=0.0)
    dk = tl.zeros((BLOCK_K, WIDTH), tl.float32)
    dv = tl.zeros((BLOCK_K, WIDTH), tl.float32)
    for start in tl.range(first // BLOCK_Q * BLOCK_Q, length, BLOCK_Q, num_stages=STAGES):
        q = tile(queries_desc, sequence, start, column, BLOCK_Q, WIDTH)
        dy = tile(dy_desc, sequence, start, column, BLOCK_Q, WIDTH)
        queries = start + tl.arange(0, BLOCK_Q)
        s = tl.where(queries[None, :] >= keys[:, None], tl.dot(k, tl.trans(q)), float("-inf"))
        lse2 = rows_desc.load([2 * of_all, start]).reshape(BLOCK_Q)
        p = tl.exp2(s * factor - lse2[None, :])
        dv = tl.dot(p.to(dy.dtype), dy, dv)
        delta = rows_desc.load([2 * of_all + 1, start]).reshape(BLOCK_Q)
        ds = p * (tl.dot(v, tl.trans(dy)) - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk)
    dk = _turned_back(dk * scale, cos_ptr, sin_ptr, keys, length, BLOCK_K, WIDTH)
    tl.store(dqkv_ptr + packed, dk.to(dqkv_ptr.dtype.element_ty), mask=inside)
    packed += HEADS * WIDTH
    tl.store(dqkv_ptr + packed, dv.to(dqkv_ptr.dtype.element_ty), mask=inside)


def _launch(
    dout: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, cos: Tensor, sin: Tensor, dqkv: Tensor
) -> None:
    sequences, heads, length, width = out.shape
    if attention_hopper.fits(qkv, width, length):
        attention_backward_hopper.backward(dout, qkv, out, lse, cos, sin, dqkv)
        return
    scale = width**-0.5
    packed, dy = (tensor.view(sequences, length, -1) for tensor in (qkv, dout))
    room = triton.cdiv(length, 4) * 4  # the copy engine counts rows in 16 bytes
    # of each head: the lse to base 2, and delta
    rows = lse.new_empty(2 * sequences * heads, room)
    of_heads = (length, scale * LOG2_E.value, scale, heads, width)

    def tiles(tensor: Tensor, block: int) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(tensor, [1, block, width])

    _queries_kernel[(triton.cdiv(length, BLOCK_Q) * sequences * heads,)](
        *(qkv, tiles(packed, BLOCK_K), dout, out.transpose(1, 2)),
        *(lse, rows, cos, sin, dqkv, room, *of_heads),
        **blocks(width),
    )
    _keys_kernel[(triton.cdiv(length, BLOCK_K) * sequences * heads,)](
        *(qkv, tiles(packed, BLOCK_Q), tiles(dy, BLOCK_Q)),
        *(TensorDescriptor.from_tensor(rows, [1, BLOCK_Q]), cos, sin, dqkv, *of_heads),
        **blocks(width),
    )


attention_backward = Operation(_attention_backward, _launch)
