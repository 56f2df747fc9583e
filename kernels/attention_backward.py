"""Attention's backward pass on Hopper GPUs, from rotated queries and keys to their packed gradient.

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

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tinyllm.kernels.attention_forward import LOG2_E, tile
from tinyllm.kernels.operation import Operation
from tinyllm.kernels.rope import turn

BLOCK_Q = BLOCK_K = 64
"""Queries and keys of a tile: few enough for three programs to share a multiprocessor, of which one
is at its exponentials while another has the tensor cores."""


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
    q, k, v = qkv.view(sequences, length, 3, heads, width).permute(2, 0, 3, 1, 4).to(wide)
    dy = dout.view(sequences, length, heads, width).transpose(1, 2).to(wide)
    ahead = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    p = (q @ k.transpose(-1, -2) * scale - lse).masked_fill(ahead, -math.inf).exp()
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
def _queries_step(
    dq, q, dy, log, delta, keys_desc, sequence, column, value_column, start, queries, factor,
    WIDTH: tl.constexpr, BLOCK_K: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    k = tile(keys_desc, sequence, start, column, BLOCK_K, WIDTH)
    v = tile(keys_desc, sequence, start, value_column, BLOCK_K, WIDTH)
    s = tl.dot(q, tl.trans(k))
    if MASKED:
        keys = start + tl.arange(0, BLOCK_K)
        s = tl.where(queries[:, None] >= keys[None, :], s, float("-inf"))
    p = tl.exp2(s * factor - log[:, None])
    dp = tl.dot(dy, tl.trans(v))
    ds = p * (dp - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, dq)


@triton.jit
def _queries_kernel(
    queries_desc, keys_desc, dy_desc, y_desc, log_ptr, log2_ptr, delta_ptr, cos_ptr, sin_ptr,
    dqkv_ptr, room, length, factor, scale,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A program: the gradient of BLOCK_Q queries of a head; keys pass by, the nearest ones last."""
    tiles = tl.cdiv(length, BLOCK_Q)
    place, number = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    sequence, head = place // HEADS, place % HEADS
    first = (tiles - 1 - number) * BLOCK_Q  # those with most to do begin
    column, value_column = (HEADS + head) * WIDTH, (2 * HEADS + head) * WIDTH
    queries = first + tl.arange(0, BLOCK_Q)
    inside = queries < length

    q = tile(queries_desc, sequence, first, head * WIDTH, BLOCK_Q, WIDTH)
    dy = tile(dy_desc, sequence, first, head * WIDTH, BLOCK_Q, WIDTH)
    y = tile(y_desc, sequence, first, head * WIDTH, BLOCK_Q, WIDTH)
    delta = tl.sum(dy.to(tl.float32) * y.to(tl.float32), axis=1)
    log = tl.load(log_ptr + place.to(tl.int64) * length + queries, mask=inside, other=0.0) * LOG2_E
    row = place.to(tl.int64) * room + queries  # with zeros past the sequence's end
    tl.store(log2_ptr + row, log, mask=queries < room)
    tl.store(delta_ptr + row, delta, mask=queries < room)

    dq = tl.zeros((BLOCK_Q, WIDTH), tl.float32)
    nearest = first // BLOCK_K * BLOCK_K
    for start in tl.range(0, nearest, BLOCK_K, num_stages=STAGES):
        dq = _queries_step(
            dq, q, dy, log, delta, keys_desc, sequence, column, value_column, start, queries,
            factor, WIDTH, BLOCK_K, False,
        )  # fmt: skip
    for start in tl.range(nearest, min(first + BLOCK_Q, length), BLOCK_K, num_stages=1):
        dq = _queries_step(
            dq, q, dy, log, delta, keys_desc, sequence, column, value_column, start, queries,
            factor, WIDTH, BLOCK_K, True,
        )  # fmt: skip
    dq = _turned_back(dq * scale, cos_ptr, sin_ptr, queries, length, BLOCK_Q, WIDTH)
    row = sequence.to(tl.int64) * length + queries
    pointer = dqkv_ptr + row[:, None] * (3 * HEADS * WIDTH) + head * WIDTH
    pointer += tl.arange(0, WIDTH)[None, :]
    tl.store(pointer, dq.to(dqkv_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _keys_step(
    dk, dv, k, v, queries_desc, dy_desc, log_desc, delta_desc, sequence, place, column, start, keys,
    factor, WIDTH: tl.constexpr, BLOCK_Q: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    q = tile(queries_desc, sequence, start, column, BLOCK_Q, WIDTH)
    dy = tile(dy_desc, sequence, start, column, BLOCK_Q, WIDTH)
    s = tl.dot(k, tl.trans(q))
    log = log_desc.load([place, start]).reshape(BLOCK_Q)
    delta = delta_desc.load([place, start]).reshape(BLOCK_Q)
    if MASKED:
        queries = start + tl.arange(0, BLOCK_Q)
        s = tl.where(queries[None, :] >= keys[:, None], s, float("-inf"))
    p = tl.exp2(s * factor - log[None, :])
    dv = tl.dot(p.to(dy.dtype), dy, dv)
    dp = tl.dot(v, tl.trans(dy))
    ds = p * (dp - delta[None, :])
    return tl.dot(ds.to(q.dtype), q, dk), dv


@triton.jit
def _keys_kernel(
    queries_desc, keys_desc, dy_desc, log_desc, delta_desc, cos_ptr, sin_ptr, dqkv_ptr,
    length, factor, scale,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A program: the gradients of BLOCK_K keys and values of a head; queries pass by.

    Past the sequence's end queries and gradients are zeros, of which nothing comes.
    """
    tiles = tl.cdiv(length, BLOCK_K)
    place, first = tl.program_id(0) // tiles, tl.program_id(0) % tiles * BLOCK_K
    sequence, head = place // HEADS, place % HEADS
    column = head * WIDTH
    keys = first + tl.arange(0, BLOCK_K)

    k = tile(keys_desc, sequence, first, HEADS * WIDTH + column, BLOCK_K, WIDTH)
    v = tile(keys_desc, sequence, first, 2 * HEADS * WIDTH + column, BLOCK_K, WIDTH)
    dk = tl.zeros((BLOCK_K, WIDTH), tl.float32)
    dv = tl.zeros((BLOCK_K, WIDTH), tl.float32)
    nearest = first // BLOCK_Q * BLOCK_Q
    far = tl.cdiv(first + BLOCK_K, BLOCK_Q) * BLOCK_Q
    for start in tl.range(far, length, BLOCK_Q, num_stages=STAGES):
        dk, dv = _keys_step(
            dk, dv, k, v, queries_desc, dy_desc, log_desc, delta_desc, sequence, place, column,
            start, keys, factor, WIDTH, BLOCK_Q, False,
        )  # fmt: skip
    for start in tl.range(nearest, min(far, length), BLOCK_Q, num_stages=1):
        dk, dv = _keys_step(
            dk, dv, k, v, queries_desc, dy_desc, log_desc, delta_desc, sequence, place, column,
            start, keys, factor, WIDTH, BLOCK_Q, True,
        )  # fmt: skip
    inside = (keys < length)[:, None]
    row = sequence.to(tl.int64) * length + keys
    pointer = dqkv_ptr + row[:, None] * (3 * HEADS * WIDTH) + HEADS * WIDTH + column
    pointer += tl.arange(0, WIDTH)[None, :]
    dk = _turned_back(dk * scale, cos_ptr, sin_ptr, keys, length, BLOCK_K, WIDTH)
    tl.store(pointer, dk.to(dqkv_ptr.dtype.element_ty), mask=inside)
    tl.store(pointer + HEADS * WIDTH, dv.to(dqkv_ptr.dtype.element_ty), mask=inside)


def _launch(
    dout: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, cos: Tensor, sin: Tensor, dqkv: Tensor
) -> None:
    sequences, heads, length, width = out.shape
    scale = width**-0.5
    qkv, dy, y = (tensor.view(sequences, length, -1) for tensor in (qkv, dout, out.transpose(1, 2)))
    room = triton.cdiv(length, 4) * 4  # the copy engine counts rows in 16 bytes
    log2, delta = lse.new_empty(2, sequences * heads, room)
    of_heads = (length, scale * LOG2_E.value, scale, heads, width)
    blocks = {"BLOCK_Q": BLOCK_Q, "BLOCK_K": BLOCK_K, "STAGES": 3 if width <= 64 else 2}
    registers = {"maxnreg": 168} if width <= 64 else {}  # a third of all, of which it needs 171

    def tiles(tensor: Tensor, block: int) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(tensor, [1, block, width])

    def parts(tensor: Tensor, block: int) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(tensor, [1, block])

    _queries_kernel[(triton.cdiv(length, BLOCK_Q) * sequences * heads,)](
        *(tiles(qkv, BLOCK_Q), tiles(qkv, BLOCK_K), tiles(dy, BLOCK_Q), tiles(y, BLOCK_Q)),
        *(lse, log2, delta, cos, sin, dqkv, room, *of_heads),
        **blocks,
    )
    _keys_kernel[(triton.cdiv(length, BLOCK_K) * sequences * heads,)](
        *(tiles(qkv, BLOCK_Q), tiles(qkv, BLOCK_K), tiles(dy, BLOCK_Q)),
        *(parts(log2, BLOCK_Q), parts(delta, BLOCK_Q), cos, sin, dqkv, *of_heads),
        **(blocks | registers),
    )


attention_backward = Operation(_attention_backward, _launch)
