"""Attention's backward pass for heads of 64 on Hopper GPUs.

The mathematics is that of :mod:`tinyllm.kernels.attention_backward`, the machinery that of
:mod:`tinyllm.kernels.attention_hopper`.
"""

# kernels are typed by Triton
# mypy: disable-error-code="no-untyped-def"

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from tinyllm.kernels import attention_hopper as common
from tinyllm.kernels import hopper
from tinyllm.kernels.constants import LOG2_E

PROGRAMS = 2
"""On a multiprocessor."""


@gluon.jit
def _zeros():
    return warpgroup_mma_init(gl.zeros((common.TILE, common.TILE), gl.float32, common.PRODUCT))


@gluon.jit
def _positions(cos_ptr, sin_ptr, first, length):
    """Cosines and sines of a tile's tokens ``[64, 32]``."""
    half, _other = hopper.halves(gl.zeros((common.TILE, common.TILE), gl.float32, common.PRODUCT))
    layout: gl.constexpr = half.type.layout
    HALF: gl.constexpr = common.TILE // 2
    token = first + gl.arange(0, common.TILE, gl.SliceLayout(1, layout))
    at = token[:, None] * HALF + gl.arange(0, HALF, gl.SliceLayout(0, layout))[None, :]
    inside = (token < length)[:, None]
    cos = gl.load(cos_ptr + at, mask=inside, other=0.0)
    return cos, gl.load(sin_ptr + at, mask=inside, other=0.0)


# --- queries --------------------------------------------------------------------------------------


@gluon.jit
def _produce_for_queries(work, rings, signals, inputs, HEADS: gl.constexpr):
    """Queries and what comes back of a tile, its results, then keys and values, its own first."""
    qkv_desc, dy_desc, y_desc, lse_desc = inputs
    items, tiles, _length = work
    left, right, lses = rings
    unit = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        head, sequence, column, number = common.locate(item, tiles, HEADS)
        own = tiles - 1 - number  # those with most to do begin
        at = own * common.TILE
        slot, barrier = common.acquire(signals, unit, 2 * common.TILE_BYTES)
        common.fetch(qkv_desc, [sequence, at, column], barrier, left, slot)
        common.fetch(dy_desc, [sequence, at, column], barrier, right, slot)
        slot, barrier = common.acquire(signals, unit + 1, common.TILE_BYTES + common.ROW_BYTES)
        common.fetch(y_desc, [sequence, at, column], barrier, left, slot)
        common.fetch(lse_desc, [head, at], barrier, lses, slot)
        unit += 2
        unit = common.fetch_keys(
            qkv_desc, sequence, column, own, unit, rings, signals, HEADS * common.TILE
        )


@gluon.jit
def _queries_step(dq, q, dy, lse2, delta, rings, signals, unit, factor, OWN: gl.constexpr):
    """Adds what comes of a tile of keys and values."""
    left, right, _lses = rings
    slot = common.wait_for(signals, unit)
    s = common.product(q, common.tile(left, slot).permute((1, 0)))
    dp = common.product(dy, common.tile(right, slot).permute((1, 0)))
    s, dq = warpgroup_mma_wait(1, deps=(s, dq))
    common.release(signals, unit - 1)
    if OWN:
        common.release(signals, unit - 2)
        s = common.causal(s, 0)
    p = gl.exp2(s * factor - lse2[:, None])
    dp = warpgroup_mma_wait(0, deps=(dp,))
    ds = common.factor_of(p * (dp - delta[:, None]))
    return warpgroup_mma(ds, common.tile(left, slot), dq, is_async=True)


@gluon.jit
def _consume_for_queries(work, rings, signals, out, results, HEADS: gl.constexpr):
    """Gradients of tile after tile of queries; what :func:`keys_kernel` needs of each row."""
    dqkv_desc, rows_ptr, cos_ptr, sin_ptr, factor, scale = results
    items, tiles, length = work
    left, right, lses = rings
    unit = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        head, sequence, column, number = common.locate(item, tiles, HEADS)
        own = tiles - 1 - number
        slot = common.wait_for(signals, unit)
        q = common.tile(left, slot).load(common.FACTOR)
        dy = common.tile(right, slot).load(common.FACTOR)
        slot = common.wait_for(signals, unit + 1)
        y = common.tile(left, slot).load(common.FACTOR)
        lse2 = common.row(lses, slot, common.ROW) * LOG2_E
        delta = gl.convert_layout(gl.sum(dy.to(gl.float32) * y.to(gl.float32), 1), common.ROW)
        token = own * common.TILE + gl.arange(0, common.TILE, common.ROW)
        row = rows_ptr + head.to(gl.int64) * 2 * length + token
        gl.store(row, lse2, mask=token < length)
        gl.store(row + length, delta, mask=token < length)
        unit += 2
        dq = _queries_step(_zeros(), q, dy, lse2, delta, rings, signals, unit, factor, True)
        unit += 1
        for _other in range(own):
            dq = _queries_step(dq, q, dy, lse2, delta, rings, signals, unit, factor, False)
            unit += 1
        cos, sin = _positions(cos_ptr, sin_ptr, own * common.TILE, length)
        dq = warpgroup_mma_wait(0, deps=(dq,))
        common.release(signals, unit - 1)
        dq = hopper.turned(dq * scale, cos, -sin)
        hopper.send(dq, dqkv_desc, [sequence, own * common.TILE, column], out, 0)
    tma.store_wait(0)


@gluon.jit
def queries_kernel(
    qkv_desc, dy_desc, y_desc, lse_desc, dqkv_desc, rows_ptr, cos_ptr, sin_ptr,
    items, tiles, length, factor, scale, HEADS: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """A program: its items, by a warp that brings and four that multiply."""
    signals = common.barriers(SLOTS)
    left, right = common.tiles_ring(qkv_desc, SLOTS), common.tiles_ring(qkv_desc, SLOTS)
    rings = (left, right, common.rows_ring(lse_desc, SLOTS))
    out = common.tiles_ring(dqkv_desc, 1)
    work = (items, tiles, length)
    results = (dqkv_desc, rows_ptr, cos_ptr, sin_ptr, factor, scale)
    inputs = (qkv_desc, dy_desc, y_desc, lse_desc)
    gl.warp_specialize(
        [
            (_consume_for_queries, (work, rings, signals, out, results, HEADS)),
            (_produce_for_queries, (work, rings, signals, inputs, HEADS)),
        ],
        [1],
        [24],
    )


# --- keys and values ------------------------------------------------------------------------------


@gluon.jit
def _produce_for_keys(work, rings, signals, inputs, HEADS: gl.constexpr):
    """Keys and values of a tile, then queries and what comes back, its own first."""
    qkv_desc, dy_desc, rows_desc = inputs
    items, tiles, _length = work
    left, right, lse2s, deltas = rings
    WIDTH: gl.constexpr = HEADS * common.TILE
    unit = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        head, sequence, column, own = common.locate(item, tiles, HEADS)
        at = own * common.TILE
        slot, barrier = common.acquire(signals, unit, 2 * common.TILE_BYTES)
        common.fetch(qkv_desc, [sequence, at, column + WIDTH], barrier, left, slot)
        common.fetch(qkv_desc, [sequence, at, column + 2 * WIDTH], barrier, right, slot)
        unit += 1
        for other in range(own, tiles):
            at = other * common.TILE
            slot, barrier = common.acquire(
                signals, unit, 2 * common.TILE_BYTES + 2 * common.ROW_BYTES
            )
            common.fetch(qkv_desc, [sequence, at, column], barrier, left, slot)
            common.fetch(dy_desc, [sequence, at, column], barrier, right, slot)
            common.fetch(rows_desc, [2 * head, at], barrier, lse2s, slot)
            common.fetch(rows_desc, [2 * head + 1, at], barrier, deltas, slot)
            unit += 1


@gluon.jit
def _keys_step(dk, dv, k, v, rings, signals, unit, factor, OWN: gl.constexpr):
    """Adds what comes of a tile of queries."""
    left, right, lse2s, deltas = rings
    slot = common.wait_for(signals, unit)
    q, dy = common.tile(left, slot), common.tile(right, slot)
    s = common.product(k, q.permute((1, 0)))
    dp = common.product(v, dy.permute((1, 0)))
    lse2 = common.row(lse2s, slot, common.COLUMN)
    s, dk, dv = warpgroup_mma_wait(1, deps=(s, dk, dv))
    common.release(signals, unit - 1)
    if OWN:
        s = common.causal(s, 1)
    p = gl.exp2(s * factor - lse2[None, :])
    dv = warpgroup_mma(common.factor_of(p), dy, dv, is_async=True)
    delta = common.row(deltas, slot, common.COLUMN)
    dp = warpgroup_mma_wait(1, deps=(dp,))
    ds = common.factor_of(p * (dp - delta[None, :]))
    return warpgroup_mma(ds, q, dk, is_async=True), dv


@gluon.jit
def _consume_for_keys(work, rings, signals, out, results, HEADS: gl.constexpr):
    """Gradients of tile after tile of keys and values."""
    dqkv_desc, cos_ptr, sin_ptr, factor, scale = results
    items, tiles, length = work
    left, right, _lse2s, _deltas = rings
    WIDTH: gl.constexpr = HEADS * common.TILE
    unit = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        _head, sequence, column, own = common.locate(item, tiles, HEADS)
        slot = common.wait_for(signals, unit)
        k = common.tile(left, slot).load(common.FACTOR)
        v = common.tile(right, slot).load(common.FACTOR)
        unit += 1
        dk, dv = _keys_step(_zeros(), _zeros(), k, v, rings, signals, unit, factor, True)
        unit += 1
        for _other in range(own + 1, tiles):
            dk, dv = _keys_step(dk, dv, k, v, rings, signals, unit, factor, False)
            unit += 1
        at = own * common.TILE
        cos, sin = _positions(cos_ptr, sin_ptr, at, length)
        dk, dv = warpgroup_mma_wait(0, deps=(dk, dv))
        common.release(signals, unit - 1)
        hopper.send(dv, dqkv_desc, [sequence, at, column + 2 * WIDTH], out, 0)
        dk = hopper.turned(dk * scale, cos, -sin)
        hopper.send(dk, dqkv_desc, [sequence, at, column + WIDTH], out, 1)
    tma.store_wait(0)


@gluon.jit
def keys_kernel(
    qkv_desc, dy_desc, rows_desc, dqkv_desc, cos_ptr, sin_ptr,
    items, tiles, length, factor, scale, HEADS: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """A program: its items, by a warp that brings and four that multiply."""
    signals = common.barriers(SLOTS)
    left, right = common.tiles_ring(qkv_desc, SLOTS), common.tiles_ring(qkv_desc, SLOTS)
    rings = (left, right, common.rows_ring(rows_desc, SLOTS), common.rows_ring(rows_desc, SLOTS))
    out = common.tiles_ring(dqkv_desc, 2)
    work = (items, tiles, length)
    results = (dqkv_desc, cos_ptr, sin_ptr, factor, scale)
    inputs = (qkv_desc, dy_desc, rows_desc)
    gl.warp_specialize(
        [
            (_consume_for_keys, (work, rings, signals, out, results, HEADS)),
            (_produce_for_keys, (work, rings, signals, inputs, HEADS)),
        ],
        [1],
        [24],
    )


def backward(
    dout: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, cos: Tensor, sin: Tensor, dqkv: Tensor
) -> None:
    """See :data:`tinyllm.kernels.attention_backward.attention_backward`."""
    sequences, heads, length, width = out.shape
    packed, dy, y, gradient = (
        common.tiles_of(tensor.view(sequences, length, -1))
        for tensor in (qkv, dout, out.transpose(1, 2), dqkv)
    )
    programs, items, tiles = common.dealt(sequences * heads, length, PROGRAMS, qkv.device)
    # of each head: the lse to base 2, and delta
    rows = lse.new_empty(2 * sequences * heads, length)
    scale = width**-0.5
    of_all = (items, tiles, length, scale * LOG2_E.value, scale, heads, common.SLOTS)
    queries_kernel[(programs,)](
        *(packed, dy, y, common.rows_of(lse.view(-1, length)), gradient, rows, cos, sin, *of_all),
        **common.options(PROGRAMS),
    )
    keys_kernel[(programs,)](
        *(packed, dy, common.rows_of(rows), gradient, cos, sin, *of_all),
        **common.options(PROGRAMS),
    )
