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

from tinyllm.kernels import attention_hopper as common
from tinyllm.kernels import hopper
from tinyllm.kernels.constants import LOG2_E

PROGRAMS = 3
"""On a multiprocessor."""


@gluon.jit
def _produce(work, rings, signals, qkv_desc, HEADS: gl.constexpr):
    """Queries of a tile, then keys and values, its own first."""
    items, tiles, _length = work
    unit = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        _head, sequence, column, number = common.locate(item, tiles, HEADS)
        own = tiles - 1 - number  # those with most to do begin
        slot, barrier = common.acquire(signals, unit, common.TILE_BYTES)
        common.fetch(qkv_desc, [sequence, own * common.TILE, column], barrier, rings[0], slot)
        unit += 1
        unit = common.fetch_keys(
            qkv_desc, sequence, column, own, unit, rings, signals, HEADS * common.TILE
        )


@gluon.jit
def _softmax(s, largest, total, factor):
    """Exponentials, what sums so far shrink by on their scale, and what is carried on."""
    new = gl.maximum(largest, gl.max(s, 1) * factor)
    p = gl.exp2(s * factor - new[:, None])
    shrink = gl.exp2(largest - new)
    return common.factor_of(p), shrink, new, total * shrink + gl.sum(p, 1)


@gluon.jit
def _consume(work, rings, signals, out, y_desc, lse_ptr, factor, HEADS: gl.constexpr):
    """Results of tile after tile."""
    items, tiles, length = work
    left, right = rings
    unit = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        head, sequence, column, number = common.locate(item, tiles, HEADS)
        own = tiles - 1 - number
        q = common.tile(left, common.wait_for(signals, unit)).load(common.FACTOR)
        unit += 1
        slot = common.wait_for(signals, unit)
        s = common.product(q, common.tile(left, slot).permute((1, 0)))
        s = warpgroup_mma_wait(0, deps=(s,))
        common.release(signals, unit - 1)
        y = gl.zeros((common.TILE, common.TILE), gl.float32, common.PRODUCT)
        largest = gl.full((common.TILE,), float("-inf"), gl.float32, common.ROW)
        total = gl.zeros((common.TILE,), gl.float32, common.ROW)
        p, shrink, largest, total = _softmax(common.causal(s, 0), largest, total, factor)
        for _other in range(own):
            following = common.wait_for(signals, unit + 1)
            s = common.product(q, common.tile(left, following).permute((1, 0)))
            sums = warpgroup_mma(p, common.tile(right, slot), warpgroup_mma_init(y), is_async=True)
            s = warpgroup_mma_wait(1, deps=(s,))
            p, shrink, largest, total = _softmax(s, largest, total, factor)
            y = warpgroup_mma_wait(0, deps=(sums,)) * shrink[:, None]
            common.release(signals, unit)
            unit += 1
            slot = following
        sums = warpgroup_mma(p, common.tile(right, slot), warpgroup_mma_init(y), is_async=True)
        token = own * common.TILE + gl.arange(0, common.TILE, common.ROW)
        lse = (largest + gl.log2(total)) / LOG2_E
        gl.store(lse_ptr + head.to(gl.int64) * length + token, lse, mask=token < length)
        y = warpgroup_mma_wait(0, deps=(sums,))
        common.release(signals, unit)
        unit += 1
        hopper.send(y / total[:, None], y_desc, [sequence, own * common.TILE, column], out, 0)
    tma.store_wait(0)


@gluon.jit
def kernel(
    qkv_desc, y_desc, lse_ptr, items, tiles, length, factor,
    HEADS: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """A program: its items, by a warp that brings and four that multiply."""
    signals = common.barriers(SLOTS)
    rings = (common.tiles_ring(qkv_desc, SLOTS), common.tiles_ring(qkv_desc, SLOTS))
    out = common.tiles_ring(y_desc, 1)
    work = (items, tiles, length)
    gl.warp_specialize(
        [
            (_consume, (work, rings, signals, out, y_desc, lse_ptr, factor, HEADS)),
            (_produce, (work, rings, signals, qkv_desc, HEADS)),
        ],
        [1],
        [24],
    )


def forward(qkv: Tensor, out: Tensor, lse: Tensor) -> None:
    """See :data:`tinyllm.kernels.attention_forward.attention_forward`."""
    sequences, heads, length, width = out.shape
    packed, y = (t.view(sequences, length, -1) for t in (qkv, out.transpose(1, 2)))
    programs, items, tiles = common.dealt(sequences * heads, length, PROGRAMS, qkv.device)
    kernel[(programs,)](
        *(common.tiles_of(packed), common.tiles_of(y), lse, items, tiles, length),
        width**-0.5 * LOG2_E.value,
        HEADS=heads,
        SLOTS=common.SLOTS,
        **common.options(PROGRAMS),
    )
