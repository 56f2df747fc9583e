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
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tinyllm.kernels.operation import Operation
from tinyllm.kernels.rope import turn

LOG2_E = math.log2(math.e)
QUERIES: dict[str, Any] = {"BLOCK_Q": 64, "BLOCK_K": 64, "STAGES": 3, "num_warps": 4}
KEYS: dict[str, Any] = {"BLOCK_Q": 64, "BLOCK_K": 64, "STAGES": 3, "num_warps": 4}
WIDE: dict[str, Any] = {"BLOCK_Q": 64, "BLOCK_K": 64, "STAGES": 2, "num_warps": 8}
"""Of heads of 128."""


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
    dq, q, dy, lse, delta, keys_desc, row, column, value_column, start, queries, length, factor,
    BLOCK_K: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    k = keys_desc.load([row + start, column])
    v = keys_desc.load([row + start, value_column])
    s = tl.dot(q, tl.trans(k))
    p = tl.exp2(s * factor - lse[:, None])
    if MASKED:
        keys = start + tl.arange(0, BLOCK_K)
        p = tl.where(queries[:, None] >= keys[None, :], p, 0.0)
    dp = tl.dot(dy, tl.trans(v))
    ds = p * (dp - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, dq)


@triton.jit
def _queries_kernel(
    queries_desc, keys_desc, dy_desc, y_desc, lse_ptr, rows_ptr, cos_ptr, sin_ptr, dq_ptr,
    length, factor, scale,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A program: the gradient of BLOCK_Q queries of a head; keys pass by, the nearest ones last."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # those with most to do begin
    sequence, head = tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    first = tile * BLOCK_Q
    row = sequence * length
    column, value_column = (HEADS + head) * WIDTH, (2 * HEADS + head) * WIDTH
    queries = first + tl.arange(0, BLOCK_Q)
    inside = queries < length

    q = queries_desc.load([row + first, head * WIDTH])
    dy = dy_desc.load([row + first, head * WIDTH])
    y = y_desc.load([row + first, head * WIDTH])
    delta = tl.sum(dy.to(tl.float32) * y.to(tl.float32), axis=1)
    place = (sequence * HEADS + head).to(tl.int64) * length + queries
    lse = tl.load(lse_ptr + place, mask=inside, other=0.0) * 1.4426950408889634
    rows = tl.num_programs(1).to(tl.int64) * length
    tl.store(rows_ptr + place, lse, mask=inside)
    tl.store(rows_ptr + rows + place, delta, mask=inside)

    dq = tl.zeros((BLOCK_Q, WIDTH), tl.float32)
    below = first // BLOCK_K * BLOCK_K
    for start in tl.range(0, below, BLOCK_K, num_stages=STAGES):
        dq = _queries_step(
            dq, q, dy, lse, delta, keys_desc, row, column, value_column, start, queries, length,
            factor, BLOCK_K, False,
        )  # fmt: skip
    for start in tl.range(below, min(first + BLOCK_Q, length), BLOCK_K, num_stages=1):
        dq = _queries_step(
            dq, q, dy, lse, delta, keys_desc, row, column, value_column, start, queries, length,
            factor, BLOCK_K, True,
        )  # fmt: skip
    dq = _turned_back(dq * scale, cos_ptr, sin_ptr, queries, length, BLOCK_Q, WIDTH)
    pointer = dq_ptr + (row + queries).to(tl.int64)[:, None] * (3 * HEADS * WIDTH)
    pointer += head * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(pointer, dq.to(dq_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _keys_step(
    dk, dv, k, v, queries_desc, dy_desc, rows_ptr, rows, place, row, column, start, keys, length,
    factor, BLOCK_Q: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    q = queries_desc.load([row + start, column])
    dy = dy_desc.load([row + start, column])
    queries = start + tl.arange(0, BLOCK_Q)
    if MASKED:
        inside = queries < length
        lse = tl.load(rows_ptr + place + queries, mask=inside, other=0.0)
        delta = tl.load(rows_ptr + rows + place + queries, mask=inside, other=0.0)
    else:
        lse = tl.load(rows_ptr + place + queries)
        delta = tl.load(rows_ptr + rows + place + queries)
    s = tl.dot(k, tl.trans(q))
    p = tl.exp2(s * factor - lse[None, :])
    if MASKED:
        seen = (queries[None, :] >= keys[:, None]) & inside[None, :]
        p = tl.where(seen, p, 0.0)
    dv = tl.dot(p.to(dy.dtype), dy, dv)
    dp = tl.dot(v, tl.trans(dy))
    ds = p * (dp - delta[None, :])
    if MASKED:
        ds = tl.where(seen, ds, 0.0)
    dk = tl.dot(ds.to(q.dtype), q, dk)
    return dk, dv


@triton.jit
def _keys_kernel(
    queries_desc, keys_desc, dy_desc, rows_ptr, cos_ptr, sin_ptr, dqkv_ptr,
    length, factor, scale,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A program: the gradients of BLOCK_K keys and values of a head; queries pass by."""
    first = tl.program_id(0) * BLOCK_K
    sequence, head = tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    row = sequence * length
    column = head * WIDTH
    keys = first + tl.arange(0, BLOCK_K)
    place = (sequence * HEADS + head).to(tl.int64) * length
    rows = tl.num_programs(1).to(tl.int64) * length

    k = keys_desc.load([row + first, HEADS * WIDTH + column])
    v = keys_desc.load([row + first, 2 * HEADS * WIDTH + column])
    dk = tl.zeros((BLOCK_K, WIDTH), tl.float32)
    dv = tl.zeros((BLOCK_K, WIDTH), tl.float32)
    begin = first // BLOCK_Q * BLOCK_Q
    above = tl.cdiv(first + BLOCK_K, BLOCK_Q) * BLOCK_Q
    whole = length // BLOCK_Q * BLOCK_Q
    for start in tl.range(begin, min(above, length), BLOCK_Q, num_stages=1):
        dk, dv = _keys_step(
            dk, dv, k, v, queries_desc, dy_desc, rows_ptr, rows, place, row, column, start, keys,
            length, factor, BLOCK_Q, True,
        )  # fmt: skip
    for start in tl.range(above, whole, BLOCK_Q, num_stages=STAGES):
        dk, dv = _keys_step(
            dk, dv, k, v, queries_desc, dy_desc, rows_ptr, rows, place, row, column, start, keys,
            length, factor, BLOCK_Q, False,
        )  # fmt: skip
    for start in tl.range(max(above, whole), length, BLOCK_Q, num_stages=1):
        dk, dv = _keys_step(
            dk, dv, k, v, queries_desc, dy_desc, rows_ptr, rows, place, row, column, start, keys,
            length, factor, BLOCK_Q, True,
        )  # fmt: skip
    inside = (keys < length)[:, None]
    pointer = dqkv_ptr + (row + keys).to(tl.int64)[:, None] * (3 * HEADS * WIDTH)
    pointer += HEADS * WIDTH + column + tl.arange(0, WIDTH)[None, :]
    dk = _turned_back(dk * scale, cos_ptr, sin_ptr, keys, length, BLOCK_K, WIDTH)
    tl.store(pointer, dk.to(dqkv_ptr.dtype.element_ty), mask=inside)
    tl.store(pointer + HEADS * WIDTH, dv.to(dqkv_ptr.dtype.element_ty), mask=inside)


def fits(width: int) -> bool:
    """Whether the kernels have heads of this size."""
    return width in (16, 32, 64, 128)


def _launch(
    dout: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, cos: Tensor, sin: Tensor, dqkv: Tensor
) -> None:
    sequences, heads, length, width = out.shape
    scale = width**-0.5
    flat_qkv, flat_dy = qkv.view(-1, 3 * heads * width), dout.view(-1, heads * width)
    flat_y = out.transpose(1, 2).reshape(flat_dy.shape)
    rows = lse.new_empty(2, sequences * heads, length)
    of_heads = (length, scale * LOG2_E, scale, heads, width)
    queries, keys = QUERIES if width <= 64 else WIDE, KEYS if width <= 64 else WIDE

    def tiles(tensor: Tensor, block: int) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(tensor, [block, width])

    _queries_kernel[(triton.cdiv(length, queries["BLOCK_Q"]), sequences * heads)](
        *(tiles(flat_qkv, queries["BLOCK_Q"]), tiles(flat_qkv, queries["BLOCK_K"])),
        *(tiles(flat_dy, queries["BLOCK_Q"]), tiles(flat_y, queries["BLOCK_Q"])),
        *(lse, rows, cos, sin, dqkv, *of_heads),
        **queries,
    )
    _keys_kernel[(triton.cdiv(length, keys["BLOCK_K"]), sequences * heads)](
        *(tiles(flat_qkv, keys["BLOCK_Q"]), tiles(flat_qkv, keys["BLOCK_K"])),
        *(tiles(flat_dy, keys["BLOCK_Q"]), rows, cos, sin, dqkv, *of_heads),
        **keys,
    )


attention_backward = Operation(_attention_backward, _launch)
