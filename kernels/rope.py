"""Rotary positions on packed queries and keys, and the way back into one packed gradient.

For token m at position t = m mod T, pairs (a, b) = (k, k + K/2) of a head turn by the angle θ:
    rotate:       (a, b) → (a·cos θ − b·sin θ, b·cos θ + a·sin θ)
    rotate_back:  (a, b) → (a·cos θ + b·sin θ, b·cos θ − a·sin θ), the transpose, on gradients.
Su et al., "RoFormer" (2021), section 3.2.2, in the half-split form of stock Llama.

A program takes some of the (token, head) rows of one sequence; each of its threads holds vectors of
16 bytes from both halves of a row. Tables are read again for each head, from the L1 cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinyllm.kernels import linear_hopper
from tinyllm.kernels.gemm import linear
from tinyllm.kernels.operation import Operation

_THREADS = 128


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns ``x`` ``[N, T, H, K]`` in the tables' dtype."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _rotate(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, length: int) -> None:
    """Turns queries and keys in place.

    Args:
        qkv: ``[W, M, 3·C]`` compute dtype: H query heads, H key heads, H value heads (untouched).
        cos: ``[≥ T, K/2]`` stream dtype.
        sin: The same.
        heads: H; K is C / H.
        length: T; M is a multiple of it.
    """
    qk = qkv.view(-1, length, 3 * heads, qkv.shape[-1] // (3 * heads))[:, :, : 2 * heads]
    qk.copy_(turn(qk, cos[:length], sin[:length]))


def _rotate_back(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, dqkv: Tensor
) -> None:
    """Turns the gradients of queries and keys back, and packs them with those of values.

    Args:
        dq: ``[W·B, H, T, K]`` compute dtype, contiguous along K, any other strides.
        dk: The same.
        dv: The same.
        cos: ``[≥ T, K/2]`` stream dtype.
        sin: The same.
        dqkv: ``[W, M, 3·C]`` compute dtype, takes the result.
    """
    sequences, heads, length, width = dq.shape
    packed = dqkv.view(sequences, length, 3, heads, width)
    for part, gradient in enumerate((dq, dk)):
        turned = turn(gradient.transpose(1, 2), cos[:length], -sin[:length])
        packed[:, :, part].copy_(turned)
    packed[:, :, 2].copy_(dv.transpose(1, 2))


def _rotated_linear(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, heads: int, length: int, qkv: Tensor
) -> None:
    """Packed queries, keys and values ``x · Wᵀ``, of which queries and keys are turned.

    Args:
        x: ``[W, M, C]`` compute dtype.
        weight: ``[W, 3·C, C]`` compute dtype, with any stride between workers.
        cos: ``[≥ T, K/2]`` stream dtype.
        sin: The same.
        heads: H; K is C / H.
        length: T; M is a multiple of it.
        qkv: ``[W, M, 3·C]`` compute dtype, takes the result.
    """
    linear(x, weight, qkv)
    _rotate(qkv, cos, sin, heads, length)


@triton.jit
def _rotate_kernel(
    qkv_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    length: tl.tensor,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """A program: ROWS (token, query or key head) rows of one sequence."""
    tiles = tl.cdiv(length * 2 * HEADS, ROWS)
    sequence = (tl.program_id(0) // tiles).to(tl.int64)
    row = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    token, head = row // (2 * HEADS), row % (2 * HEADS)
    mask = (token < length)[:, None]
    column = tl.arange(0, HALF)[None, :]
    table = token[:, None] * HALF + column
    cos = tl.load(cos_ptr + table, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + table, mask=mask, other=0.0).to(tl.float32)

    qkv_ptr += sequence * length * (6 * HEADS * HALF)
    first_ptr = qkv_ptr + (token * (6 * HEADS * HALF) + head * (2 * HALF))[:, None] + column
    second_ptr = first_ptr + HALF
    first = tl.load(first_ptr, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(second_ptr, mask=mask, other=0.0).to(tl.float32)
    tl.store(first_ptr, first * cos - second * sin, mask=mask)
    tl.store(second_ptr, second * cos + first * sin, mask=mask)


@triton.jit
def _rotate_back_kernel(
    dq_ptr: tl.tensor,
    dk_ptr: tl.tensor,
    dv_ptr: tl.tensor,
    dq_strides: tl.tensor,
    dk_strides: tl.tensor,
    dv_strides: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    dqkv_ptr: tl.tensor,
    length: tl.tensor,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """A program: ROWS (token, head) rows of one sequence, of all three gradients."""
    tiles = tl.cdiv(length * HEADS, ROWS)
    sequence = (tl.program_id(0) // tiles).to(tl.int64)
    row = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    token, head = row // HEADS, row % HEADS
    mask = (token < length)[:, None]
    column = tl.arange(0, HALF)[None, :]
    table = token[:, None] * HALF + column
    cos = tl.load(cos_ptr + table, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + table, mask=mask, other=0.0).to(tl.float32)

    dqkv_ptr += sequence * length * (6 * HEADS * HALF)
    dqkv_ptr += (token * (6 * HEADS * HALF) + head * (2 * HALF))[:, None] + column
    dq_ptr += _rows(sequence, head, token, dq_strides)[:, None] + column
    dk_ptr += _rows(sequence, head, token, dk_strides)[:, None] + column
    dv_ptr += _rows(sequence, head, token, dv_strides)[:, None] + column
    dq_first = tl.load(dq_ptr, mask=mask, other=0.0).to(tl.float32)
    dq_second = tl.load(dq_ptr + HALF, mask=mask, other=0.0).to(tl.float32)
    dk_first = tl.load(dk_ptr, mask=mask, other=0.0).to(tl.float32)
    dk_second = tl.load(dk_ptr + HALF, mask=mask, other=0.0).to(tl.float32)
    dv_first = tl.load(dv_ptr, mask=mask, other=0.0)
    dv_second = tl.load(dv_ptr + HALF, mask=mask, other=0.0)

    tl.store(dqkv_ptr, dq_first * cos + dq_second * sin, mask=mask)
    tl.store(dqkv_ptr + HALF, dq_second * cos - dq_first * sin, mask=mask)
    dqkv_ptr += 2 * HEADS * HALF
    tl.store(dqkv_ptr, dk_first * cos + dk_second * sin, mask=mask)
    tl.store(dqkv_ptr + HALF, dk_second * cos - dk_first * sin, mask=mask)
    dqkv_ptr += 2 * HEADS * HALF
    tl.store(dqkv_ptr, dv_first, mask=mask)
    tl.store(dqkv_ptr + HALF, dv_second, mask=mask)


@triton.jit
def _rows(sequence: tl.tensor, head: tl.tensor, token: tl.tensor, strides: tl.tuple) -> tl.tensor:
    """Offsets of rows in a tensor with strides of (sequence, head, token)."""
    return sequence * strides[0] + head.to(tl.int64) * strides[1] + token.to(tl.int64) * strides[2]


def _launch_rotate(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, length: int) -> None:
    workers, tokens, width = qkv.shape
    half = width // (6 * heads)
    rows = 16 * _THREADS // half
    _rotate_kernel[(workers * tokens // length * triton.cdiv(length * 2 * heads, rows),)](
        *(qkv, cos, sin, length),
        HEADS=heads,
        HALF=half,
        ROWS=rows,
        num_warps=_THREADS // 32,
    )


def _launch_rotated_linear(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, heads: int, length: int, qkv: Tensor
) -> None:
    if linear_hopper.pays(x) and x.shape[2] == heads * linear_hopper.HEAD:
        linear_hopper.rotated(x, weight, cos, sin, heads, length, qkv)
    else:
        linear(x, weight, qkv)
        _launch_rotate(qkv, cos, sin, heads, length)


def _launch_rotate_back(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, dqkv: Tensor
) -> None:
    sequences, heads, length, width = dq.shape
    rows = 8 * _THREADS // (width // 2)
    _rotate_back_kernel[(sequences * triton.cdiv(length * heads, rows),)](
        *(dq, dk, dv, dq.stride()[:3], dk.stride()[:3], dv.stride()[:3], cos, sin, dqkv, length),
        HEADS=heads,
        HALF=width // 2,
        ROWS=rows,
        num_warps=_THREADS // 32,
    )


rotate = Operation(_rotate, _launch_rotate)
rotated_linear = Operation(_rotated_linear, _launch_rotated_linear)
rotate_back = Operation(_rotate_back, _launch_rotate_back)
