"""Rotary positions on packed queries and keys.

For token m at position t = m mod T, pairs (a, b) = (k, k + K/2) of a head turn by the angle θ:
    (a, b) → (a·cos θ − b·sin θ, b·cos θ + a·sin θ)
and turn back by −θ on gradients, where :mod:`tinyllm.kernels.attention_backward` makes them.
Su et al., "RoFormer" (2021), section 3.2.2, in the half-split form of stock Llama.

A program takes some of the (token, head) rows of one sequence; each of its threads holds vectors of
16 bytes from both halves of a row. Tables are read again for each head, from the L1 cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinyllm.kernels import hopper, rope_hopper
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
    if hopper.pays(x) and x.shape[2] == heads * rope_hopper.HEAD:
        rope_hopper.rotated(x, weight, cos, sin, heads, length, qkv)
    else:
        linear(x, weight, qkv)
        _launch_rotate(qkv, cos, sin, heads, length)


rotate = Operation(_rotate, _launch_rotate)
rotated_linear = Operation(_rotated_linear, _launch_rotated_linear)
