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

from tinyllm.kernels import attention_hopper as on
from tinyllm.kernels import hopper

PROGRAMS = 2
"""On a multiprocessor."""


@gluon.jit
def _zeros():
    return warpgroup_mma_init(gl.zeros((on.TILE, on.TILE), gl.float32, on.PRODUCT))


@gluon.jit
def _positions(cos_ptr, sin_ptr, first, length):
    """Cosines and sines of a tile's tokens ``[64, 32]``."""
    half, _other = hopper.halves(gl.zeros((on.TILE, on.TILE), gl.float32, on.PRODUCT))
    layout: gl.constexpr = half.type.layout
    HALF: gl.constexpr = on.TILE // 2
    token = first + gl.arange(0, on.TILE, gl.SliceLayout(1, layout))
    at = token[:, None] * HALF + gl.arange(0, HALF, gl.SliceLayout(0, layout))[None, :]
    inside = (token < length)[:, None]
    cos = gl.load(cos_ptr + at, mask=inside, other=0.0)
    return cos, gl.load(sin_ptr + at, mask=inside, other=0.0)


@gluon.jit
def _turned_back(x, cos, sin):
    first, second = hopper.halves(x)
    both = gl.join(first * cos + second * sin, second * cos - first * sin)
    return both.permute([0, 2, 1]).reshape([on.TILE, on.TILE])


# --- queries --------------------------------------------------------------------------------------


@gluon.jit
def _bring_to_queries(work, rings, signals, inputs, HEADS: gl.constexpr):
    """Queries and what comes back of a tile, its results, then keys and values, its own first."""
    qkv_desc, dy_desc, y_desc, lse_desc = inputs
    items, tiles, _length = work
    left, right, logs = rings
    WIDTH: gl.constexpr = HEADS * on.TILE
    unit = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        head, sequence, column, number = on.place_of(item, tiles, HEADS)
        own = tiles - 1 - number  # those with most to do begin
        at = own * on.TILE
        slot, told = on.make_room(signals, unit, 2 * on.TILE_BYTES)
        on.bring(qkv_desc, [sequence, at, column], told, left, slot)
        on.bring(dy_desc, [sequence, at, column], told, right, slot)
        slot, told = on.make_room(signals, unit + 1, on.TILE_BYTES + on.ROW_BYTES)
        on.bring(y_desc, [sequence, at, column], told, left, slot)
        on.bring(lse_desc, [head, at], told, logs, slot)
        unit += 2
        for other in range(own + 1):
            at = (own if other == 0 else other - 1) * on.TILE
            slot, told = on.make_room(signals, unit, 2 * on.TILE_BYTES)
            on.bring(qkv_desc, [sequence, at, column + WIDTH], told, left, slot)
            on.bring(qkv_desc, [sequence, at, column + 2 * WIDTH], told, right, slot)
            unit += 1


@gluon.jit
def _queries_step(dq, q, dy, log, delta, rings, signals, unit, factor, OWN: gl.constexpr):
    """Adds what comes of a tile of keys and values."""
    left, right, _logs = rings
    slot = on.await_unit(signals, unit)
    s = on.product(q, on.tile(left, slot).permute((1, 0)))
    dp = on.product(dy, on.tile(right, slot).permute((1, 0)))
    s, dq = warpgroup_mma_wait(1, deps=(s, dq))
    on.free(signals, unit - 1)
    if OWN:
        on.free(signals, unit - 2)
        s = on.seen(s, 0)
    p = gl.exp2(s * factor - log[:, None])
    dp = warpgroup_mma_wait(0, deps=(dp,))
    ds = on.factor_of(p * (dp - delta[:, None]))
    return warpgroup_mma(ds, on.tile(left, slot), dq, is_async=True)


@gluon.jit
def _multiply_for_queries(work, rings, signals, out, results, HEADS: gl.constexpr):
    """Gradients of tile after tile of queries; what :func:`keys_kernel` needs of each row."""
    dqkv_desc, rows_ptr, cos_ptr, sin_ptr, factor, scale = results
    items, tiles, length = work
    left, right, logs = rings
    unit = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        head, sequence, column, number = on.place_of(item, tiles, HEADS)
        own = tiles - 1 - number
        slot = on.await_unit(signals, unit)
        q = on.tile(left, slot).load(on.FACTOR)
        dy = on.tile(right, slot).load(on.FACTOR)
        slot = on.await_unit(signals, unit + 1)
        y = on.tile(left, slot).load(on.FACTOR)
        log = on.row(logs, slot, on.ROW) * on.LOG2_E
        delta = gl.convert_layout(gl.sum(dy.to(gl.float32) * y.to(gl.float32), 1), on.ROW)
        token = own * on.TILE + gl.arange(0, on.TILE, on.ROW)
        row = rows_ptr + head.to(gl.int64) * 2 * length + token
        gl.store(row, log, mask=token < length)
        gl.store(row + length, delta, mask=token < length)
        unit += 2
        dq = _queries_step(_zeros(), q, dy, log, delta, rings, signals, unit, factor, True)
        unit += 1
        for _other in range(own):
            dq = _queries_step(dq, q, dy, log, delta, rings, signals, unit, factor, False)
            unit += 1
        cos, sin = _positions(cos_ptr, sin_ptr, own * on.TILE, length)
        dq = warpgroup_mma_wait(0, deps=(dq,))
        on.free(signals, unit - 1)
        dq = _turned_back(dq * scale, cos, sin)
        hopper.send(dq, dqkv_desc, [sequence, own * on.TILE, column], out, 0)
    tma.store_wait(0)


@gluon.jit
def queries_kernel(
    qkv_desc, dy_desc, y_desc, lse_desc, dqkv_desc, rows_ptr, cos_ptr, sin_ptr,
    items, tiles, length, factor, scale, HEADS: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """A program: its items, by a warp that brings and four that multiply."""
    signals = on.barriers(SLOTS)
    left, right = on.tiles_ring(qkv_desc, SLOTS), on.tiles_ring(qkv_desc, SLOTS)
    rings = (left, right, on.rows_ring(lse_desc, SLOTS))
    out = on.tiles_ring(dqkv_desc, 1)
    work = (items, tiles, length)
    results = (dqkv_desc, rows_ptr, cos_ptr, sin_ptr, factor, scale)
    inputs = (qkv_desc, dy_desc, y_desc, lse_desc)
    gl.warp_specialize(
        [
            (_multiply_for_queries, (work, rings, signals, out, results, HEADS)),
            (_bring_to_queries, (work, rings, signals, inputs, HEADS)),
        ],
        [1],
        [24],
    )


# --- keys and values ------------------------------------------------------------------------------


@gluon.jit
def _bring_to_keys(work, rings, signals, inputs, HEADS: gl.constexpr):
    """Keys and values of a tile, then queries and what comes back, its own first."""
    qkv_desc, dy_desc, rows_desc = inputs
    items, tiles, _length = work
    left, right, logs, deltas = rings
    WIDTH: gl.constexpr = HEADS * on.TILE
    unit = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        head, sequence, column, own = on.place_of(item, tiles, HEADS)
        at = own * on.TILE
        slot, told = on.make_room(signals, unit, 2 * on.TILE_BYTES)
        on.bring(qkv_desc, [sequence, at, column + WIDTH], told, left, slot)
        on.bring(qkv_desc, [sequence, at, column + 2 * WIDTH], told, right, slot)
        unit += 1
        for other in range(own, tiles):
            at = other * on.TILE
            slot, told = on.make_room(signals, unit, 2 * on.TILE_BYTES + 2 * on.ROW_BYTES)
            on.bring(qkv_desc, [sequence, at, column], told, left, slot)
            on.bring(dy_desc, [sequence, at, column], told, right, slot)
            on.bring(rows_desc, [2 * head, at], told, logs, slot)
            on.bring(rows_desc, [2 * head + 1, at], told, deltas, slot)
            unit += 1


@gluon.jit
def _keys_step(dk, dv, k, v, rings, signals, unit, factor, OWN: gl.constexpr):
    """Adds what comes of a tile of queries."""
    left, right, logs, deltas = rings
    slot = on.await_unit(signals, unit)
    q, dy = on.tile(left, slot), on.tile(right, slot)
    s = on.product(k, q.permute((1, 0)))
    dp = on.product(v, dy.permute((1, 0)))
    log = on.row(logs, slot, on.COLUMN)
    s, dk, dv = warpgroup_mma_wait(1, deps=(s, dk, dv))
    on.free(signals, unit - 1)
    if OWN:
        s = on.seen(s, 1)
    p = gl.exp2(s * factor - log[None, :])
    dv = warpgroup_mma(on.factor_of(p), dy, dv, is_async=True)
    delta = on.row(deltas, slot, on.COLUMN)
    dp = warpgroup_mma_wait(1, deps=(dp,))
    ds = on.factor_of(p * (dp - delta[None, :]))
    return warpgroup_mma(ds, q, dk, is_async=True), dv


@gluon.jit
def _multiply_for_keys(work, rings, signals, out, results, HEADS: gl.constexpr):
    """Gradients of tile after tile of keys and values."""
    dqkv_desc, cos_ptr, sin_ptr, factor, scale = results
    items, tiles, length = work
    left, right, _logs, _deltas = rings
    WIDTH: gl.constexpr = HEADS * on.TILE
    unit = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        _head, sequence, column, own = on.place_of(item, tiles, HEADS)
        slot = on.await_unit(signals, unit)
        k = on.tile(left, slot).load(on.FACTOR)
        v = on.tile(right, slot).load(on.FACTOR)
        unit += 1
        dk, dv = _keys_step(_zeros(), _zeros(), k, v, rings, signals, unit, factor, True)
        unit += 1
        for _other in range(own + 1, tiles):
            dk, dv = _keys_step(dk, dv, k, v, rings, signals, unit, factor, False)
            unit += 1
        at = own * on.TILE
        cos, sin = _positions(cos_ptr, sin_ptr, at, length)
        dk, dv = warpgroup_mma_wait(0, deps=(dk, dv))
        on.free(signals, unit - 1)
        hopper.send(dv, dqkv_desc, [sequence, at, column + 2 * WIDTH], out, 0)
        dk = _turned_back(dk * scale, cos, sin)
        hopper.send(dk, dqkv_desc, [sequence, at, column + WIDTH], out, 1)
    tma.store_wait(0)


@gluon.jit
def keys_kernel(
    qkv_desc, dy_desc, rows_desc, dqkv_desc, cos_ptr, sin_ptr,
    items, tiles, length, factor, scale, HEADS: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """A program: its items, by a warp that brings and four that multiply."""
    signals = on.barriers(SLOTS)
    left, right = on.tiles_ring(qkv_desc, SLOTS), on.tiles_ring(qkv_desc, SLOTS)
    rings = (left, right, on.rows_ring(rows_desc, SLOTS), on.rows_ring(rows_desc, SLOTS))
    out = on.tiles_ring(dqkv_desc, 2)
    work = (items, tiles, length)
    results = (dqkv_desc, cos_ptr, sin_ptr, factor, scale)
    inputs = (qkv_desc, dy_desc, rows_desc)
    gl.warp_specialize(
        [
            (_multiply_for_keys, (work, rings, signals, out, results, HEADS)),
            (_bring_to_keys, (work, rings, signals, inputs, HEADS)),
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
        on.tiles_of(tensor.view(sequences, length, -1))
        for tensor in (qkv, dout, out.transpose(1, 2), dqkv)
    )
    programs, items, tiles = on.dealt(sequences * heads, length, PROGRAMS, qkv.device)
    rows = lse.new_empty(2 * sequences * heads, length)  # of each row: log2 of its sum, delta
    scale = width**-0.5
    of_all = (items, tiles, length, scale * on.LOG2_E.value, scale, heads, on.SLOTS)
    queries_kernel[(programs,)](
        *(packed, dy, y, on.rows_of(lse.view(-1, length)), gradient, rows, cos, sin, *of_all),
        **on.options(PROGRAMS),
    )
    keys_kernel[(programs,)](
        *(packed, dy, on.rows_of(rows), gradient, cos, sin, *of_all),
        **on.options(PROGRAMS),
    )
