"""What attention's kernels for Hopper GPUs share: programs that seldom wait for memory.

A program takes one tile of 64 tokens of a head after the other. A producer, one warp, brings all
that is needed by the copy engine into a ring, in the order in which it is used, so that the next
tile's first rows have come before this one's results have left. A consumer, four warps, multiplies.
Two or three programs share a multiprocessor, so that one has the tensor cores while another takes
its exponentials; where keys get their gradients, a program's own products run meanwhile, too. See
:mod:`tinyllm.kernels.attention_forward_hopper` and
:mod:`tinyllm.kernels.attention_backward_hopper`.
"""

# kernels are typed by Triton
# mypy: disable-error-code="no-untyped-def"

import math
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tinyllm.kernels.hopper import runs_on

TILE = gl.constexpr(64)
"""Tokens of a tile, and a head's width."""

TILE_BYTES = gl.constexpr(TILE.value * TILE.value * 2)
ROW_BYTES = gl.constexpr(TILE.value * 4)
"""Of a number for each token of a tile."""

PRODUCT = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
)
FACTOR = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=PRODUCT.value, k_width=2))
"""A left factor in registers."""

ROW = gl.constexpr(gl.SliceLayout(1, PRODUCT.value))
COLUMN = gl.constexpr(gl.SliceLayout(0, PRODUCT.value))

_REGISTERS = 65_536
_WARPS = 8
"""Of a program as the GPU counts them: the consumer's, the producer's, and three idle."""

SLOTS = 4
"""Of a ring."""


def fits(qkv: Tensor, width: int, length: int) -> bool:
    """Whether attention of heads as wide over so many tokens can run here."""
    # the copy engine counts rows in 16 bytes
    return runs_on(qkv) and width == TILE.value and length % 4 == 0


# --- launching ------------------------------------------------------------------------------------


def options(programs: int) -> dict[str, Any]:
    """Of a launch, so that as many programs share a multiprocessor's registers."""
    return {"num_warps": 4, "maxnreg": _REGISTERS // (programs * _WARPS * 32) // 8 * 8}


def dealt(heads: int, length: int, programs: int, device: torch.device) -> tuple[int, int, int]:
    """How many programs, items and tiles of a head there are.

    Args:
        heads: Of all sequences.
        length: T.
        programs: On a multiprocessor.
        device: The GPU.
    """
    tiles = triton.cdiv(length, TILE.value)
    most = programs * torch.cuda.get_device_properties(device).multi_processor_count
    return even_programs(heads * tiles, tiles, most), heads * tiles, tiles


def even_programs(items: int, tiles: int, most: int) -> int:
    """How many programs take items in turns, so that none gets tiles of one length only.

    Lengths come in turns as well, one for each tile of a head.
    """
    if items <= most:
        return items
    return next(count for count in range(most, 0, -1) if math.gcd(count, tiles) == 1)


def tiles_of(tensor: Tensor) -> TensorDescriptor:
    """How the copy engine takes tiles of ``[N, T, ·]``."""
    block = [1, TILE.value, TILE.value]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    return TensorDescriptor.from_tensor(tensor, block, layout)


def rows_of(tensor: Tensor) -> TensorDescriptor:
    """How the copy engine takes a number for each token of a tile, of ``[·, T]`` fp32."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return TensorDescriptor.from_tensor(tensor, [1, TILE.value], layout)


# --- rings ----------------------------------------------------------------------------------------


@gluon.jit
def tiles_ring(desc, SLOTS: gl.constexpr):
    """Room for tiles."""
    return gl.allocate_shared_memory(gl.bfloat16, [SLOTS, 1, TILE, TILE], desc.layout)


@gluon.jit
def rows_ring(desc, SLOTS: gl.constexpr):
    """Room for numbers of a tile's tokens."""
    return gl.allocate_shared_memory(gl.float32, [SLOTS, 1, TILE], desc.layout)


@gluon.jit
def barriers(SLOTS: gl.constexpr):
    """For slots that have been filled, and for those that have been emptied."""
    filled = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    emptied = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(filled.index(slot), 1)
        mbarrier.init(emptied.index(slot), 1)
    fence_async_shared()
    return filled, emptied


@gluon.jit
def acquire(signals, unit, BYTES: gl.constexpr):
    """Waits until a unit's slot is empty and says how much comes; the slot, and who is told."""
    filled, emptied = signals
    SLOTS: gl.constexpr = filled.shape[0]
    slot = unit % SLOTS
    mbarrier.wait(emptied.index(slot), ((unit // SLOTS) & 1) ^ 1)
    mbarrier.expect(filled.index(slot), BYTES)
    return slot, filled.index(slot)


@gluon.jit
def wait_for(signals, unit):
    """Waits until a unit has come; its slot."""
    filled, _emptied = signals
    SLOTS: gl.constexpr = filled.shape[0]
    slot = unit % SLOTS
    mbarrier.wait(filled.index(slot), (unit // SLOTS) & 1)
    return slot


@gluon.jit
def release(signals, unit):
    """A unit's slot may be filled anew.

    What was loaded from it to registers must have been used: the copy engine can overtake a load.
    """
    _filled, emptied = signals
    mbarrier.arrive(emptied.index(unit % emptied.shape[0]))


@gluon.jit
def fetch(desc, coordinates, barrier, ring, slot):
    """Begins to copy a tile, or numbers of its tokens, to a slot; the barrier is told."""
    tma.async_copy_global_to_shared(desc, coordinates, barrier, ring.index(slot))


@gluon.jit
def fetch_keys(qkv_desc, sequence, column, own, unit, rings, signals, WIDTH: gl.constexpr):
    """Keys and values of a tile and of those before it, the tile's own first; the next unit."""
    for other in range(own + 1):
        at = (own if other == 0 else other - 1) * TILE
        slot, barrier = acquire(signals, unit, 2 * TILE_BYTES)
        fetch(qkv_desc, [sequence, at, column + WIDTH], barrier, rings[0], slot)
        fetch(qkv_desc, [sequence, at, column + 2 * WIDTH], barrier, rings[1], slot)
        unit += 1
    return unit


# --- tiles ----------------------------------------------------------------------------------------


@gluon.jit
def locate(item, tiles, HEADS: gl.constexpr):
    """Of an item: the head's number, its sequence, its first column, and which tile."""
    head = item // tiles
    return head, head // HEADS, head % HEADS * TILE, item % tiles


@gluon.jit
def tile(ring, slot):
    """A slot's tile ``[64, 64]`` in shared memory."""
    return ring.index(slot).reshape([TILE, TILE])


@gluon.jit
def row(ring, slot, layout: gl.constexpr):
    """A slot's numbers ``[64]`` in registers."""
    return ring.index(slot).reshape([TILE]).load(layout)


@gluon.jit
def factor_of(x):
    """A tile in fp32 as the left factor of a product."""
    return gl.convert_layout(x.to(gl.bfloat16), FACTOR)


@gluon.jit
def product(a, b):
    """The tensor cores begin ``a · b``."""
    zero = gl.zeros((TILE, TILE), gl.float32, PRODUCT)
    return warpgroup_mma(a, b, warpgroup_mma_init(zero), use_acc=False, is_async=True)


@gluon.jit
def causal(s, QUERIES: gl.constexpr):
    """Scores of a tile with itself, −∞ for keys after their query.

    Args:
        s: The scores.
        QUERIES: Axis of the queries.
    """
    first = gl.arange(0, TILE, ROW)[:, None]
    second = gl.arange(0, TILE, COLUMN)[None, :]
    visible = first >= second if QUERIES == 0 else second >= first
    return gl.where(visible, s, float("-inf"))
