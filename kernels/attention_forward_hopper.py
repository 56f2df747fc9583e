"""Attention's forward pass for heads of 64 on Hopper GPUs.

The mathematics is that of :mod:`tinyllm.kernels.attention_forward`, the machinery that of
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

PROGRAMS = 3
"""On a multiprocessor."""


@gluon.jit
def _bring(work, rings, signals, qkv_desc, HEADS: gl.constexpr):
    """Queries of a tile, then keys and values, its own first."""
    items, tiles, _length = work
    left, right = rings
    WIDTH: gl.constexpr = HEADS * on.TILE
    unit = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        _head, sequence, column, number = on.place_of(item, tiles, HEADS)
        own = tiles - 1 - number  # those with most to do begin
        slot, told = on.make_room(signals, unit, on.TILE_BYTES)
        on.bring(qkv_desc, [sequence, own * on.TILE, column], told, left, slot)
        unit += 1
        for other in range(own + 1):
            at = (own if other == 0 else other - 1) * on.TILE
            slot, told = on.make_room(signals, unit, 2 * on.TILE_BYTES)
            on.bring(qkv_desc, [sequence, at, column + WIDTH], told, left, slot)
            on.bring(qkv_desc, [sequence, at, column + 2 * WIDTH], told, right, slot)
            unit += 1


@gluon.jit
def _softmax(s, largest, total, factor):
    """Exponentials, what sums so far shrink by on their scale, and what is carried on."""
    new = gl.maximum(largest, gl.max(s, 1) * factor)
    p = gl.exp2(s * factor - new[:, None])
    shrink = gl.exp2(largest - new)
    return on.factor_of(p), shrink, new, total * shrink + gl.sum(p, 1)


@gluon.jit
def _multiply(work, rings, signals, out, y_desc, lse_ptr, factor, HEADS: gl.constexpr):
    """Results of tile after tile."""
    items, tiles, length = work
    left, right = rings
    unit = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        head, sequence, column, number = on.place_of(item, tiles, HEADS)
        own = tiles - 1 - number
        q = on.tile(left, on.await_unit(signals, unit)).load(on.FACTOR)
        unit += 1
        slot = on.await_unit(signals, unit)
        s = on.product(q, on.tile(left, slot).permute((1, 0)))
        s = warpgroup_mma_wait(0, deps=(s,))
        on.free(signals, unit - 1)
        y = gl.zeros((on.TILE, on.TILE), gl.float32, on.PRODUCT)
        largest = gl.full((on.TILE,), float("-inf"), gl.float32, on.ROW)
        total = gl.zeros((on.TILE,), gl.float32, on.ROW)
        p, shrink, largest, total = _softmax(on.seen(s, 0), largest, total, factor)
        for _other in range(own):
            following = on.await_unit(signals, unit + 1)
            s = on.product(q, on.tile(left, following).permute((1, 0)))
            sums = warpgroup_mma(p, on.tile(right, slot), warpgroup_mma_init(y), is_async=True)
            s = warpgroup_mma_wait(1, deps=(s,))
            p, shrink, largest, total = _softmax(s, largest, total, factor)
            y = warpgroup_mma_wait(0, deps=(sums,)) * shrink[:, None]
            on.free(signals, unit)
            unit += 1
            slot = following
        sums = warpgroup_mma(p, on.tile(right, slot), warpgroup_mma_init(y), is_async=True)
        token = own * on.TILE + gl.arange(0, on.TILE, on.ROW)
        lse = (largest + gl.log2(total)) / on.LOG2_E
        gl.store(lse_ptr + head.to(gl.int64) * length + token, lse, mask=token < length)
        y = warpgroup_mma_wait(0, deps=(sums,))
        on.free(signals, unit)
        unit += 1
        hopper.send(y / total[:, None], y_desc, [sequence, own * on.TILE, column], out, 0)
    tma.store_wait(0)


@gluon.jit
def kernel(
    qkv_desc, y_desc, lse_ptr, items, tiles, length, factor,
    HEADS: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """A program: its items, by a warp that brings and four that multiply."""
    signals = on.barriers(SLOTS)
    rings = (on.tiles_ring(qkv_desc, SLOTS), on.tiles_ring(qkv_desc, SLOTS))
    out = on.tiles_ring(y_desc, 1)
    work = (items, tiles, length)
    gl.warp_specialize(
        [
            (_multiply, (work, rings, signals, out, y_desc, lse_ptr, factor, HEADS)),
            (_bring, (work, rings, signals, qkv_desc, HEADS)),
        ],
        [1],
        [24],
    )


def forward(qkv: Tensor, out: Tensor, lse: Tensor) -> None:
    """See :data:`tinyllm.kernels.attention_forward.attention_forward`."""
    sequences, heads, length, width = out.shape
    packed, y = (t.view(sequences, length, -1) for t in (qkv, out.transpose(1, 2)))
    programs, items, tiles = on.dealt(sequences * heads, length, PROGRAMS, qkv.device)
    kernel[(programs,)](
        *(on.tiles_of(packed), on.tiles_of(y), lse, items, tiles, length),
        width**-0.5 * on.LOG2_E.value,
        HEADS=heads,
        SLOTS=on.SLOTS,
        **on.options(PROGRAMS),
    )
