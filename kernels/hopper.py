"""Products ``x · Wᵀ`` on Hopper GPUs whose results are worked on while the next product runs.

A program keeps a tile of the weight in shared memory and lets all rows of x pass by. A warp brings
them there with the copy engine, a slice of columns at a time. Two groups of four warps take turns
with tiles of 64 rows: while one's product is on the tensor cores, the other finishes its own, in
registers, and sends results out. That pays where a product's inner length is short, so that results
outweigh the operands: :mod:`tinyllm.kernels.head_hopper`, :mod:`tinyllm.kernels.rope_hopper` and
:mod:`tinyllm.kernels.swiglu_hopper`.
"""

# kernels are typed by Triton
# mypy: disable-error-code="no-untyped-def"

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import debug_barrier

from tinyllm.kernels.hopper_schedule import segments_and_starts

ROWS = 64
"""Of a tile of x; the tensor cores take as many from four warps."""

DEPTH = 64
"""Columns of x in a slice."""

PART = 64
"""Columns of a result that are worked on together."""

_SHARED_BYTES = 227 * 1024
_SLICE_BYTES = ROWS * DEPTH * 2
_BARRIER_BYTES = 1_024
"""Enough for all barriers."""

_EXCHANGE_BYTES = 4 * 1024
"""Enough for what the threads of both consumers exchange when a part changes its layout."""

_MOST_SLICES = 12
"""Of x; more are no faster."""

_MANY_SLICES = 7
"""Of x, beside which two buffers for whole parts are worth their room."""

_ENOUGH_ROWS = {320: 2_048, 512: 4_096, 640: 16_384}
"""Of all workers, for layers up to a width: with fewer, fetching weights takes too long."""


def columns_of(width: int) -> int:
    """Of a tile of results of inputs of a width, as many as shared memory has room for."""
    return 256 if width <= 320 else 128


def runs_on(x: Tensor) -> bool:
    """Whether kernels for Hopper GPUs can take a tensor where it lies."""
    return (
        x.dtype == torch.bfloat16
        and x.is_cuda
        and torch.cuda.get_device_capability(x.device) == (9, 0)
    )


def fits(x: Tensor) -> bool:
    """Whether products can run where ``x`` lies, and with inputs as wide."""
    width = x.shape[-1]
    return runs_on(x) and width % DEPTH == 0 and _room(width, columns_of(width), False) >= 8


def pays(x: Tensor) -> bool:
    """Whether a layer of these inputs can run here, and takes less time than its parts apart."""
    workers, rows, width = x.shape
    if not fits(x):  # wider ones do not
        return False
    return workers * rows >= next(rows for most, rows in _ENOUGH_ROWS.items() if width <= most)


def _room(width: int, columns: int, exchange: bool) -> int:
    """How many slices there is room for beside a tile of the weight, if there were no results."""
    taken = 2 * columns * width + _BARRIER_BYTES + (_EXCHANGE_BYTES if exchange else 0)
    return (_SHARED_BYTES - taken) // _SLICE_BYTES


class Memory(NamedTuple):
    """What a program holds beside a tile of the weight.

    Attributes:
        slices: Of x.
        buffers: For results of each of both consumers.
        sent: Columns of a buffer.
    """

    slices: int
    buffers: int
    sent: int


def memory(width: int, columns: int, exchange: bool) -> Memory:
    """The division of shared memory that takes the least time.

    Args:
        width: C.
        columns: Of a tile of results.
        exchange: Whether parts change their layout.
    """
    room = _room(width, columns, exchange)
    if room >= _MANY_SLICES + 4:
        return Memory(min(_MOST_SLICES, room - 4), buffers=2, sent=PART)
    # parts leave by halves: a buffer of each consumer takes as much as one slice in all
    buffers = 2 if 2 * columns > width else 1  # with few results a slice is worth more
    return Memory(room - buffers, buffers, sent=PART // 2)


@gluon.jit
def prepare_nothing(z, worker, row, tile_n, extra):
    """For what needs its product only."""
    return ()


@dataclass(frozen=True)
class Product:
    """What is done with a product, and in which tiles.

    Attributes:
        finish: A Gluon function that works on a tile; see :func:`_consume`.
        prepare: A Gluon function that loads what ``finish`` needs, while the product runs.
        boxes: From as many equal pieces of the weight a tile is put together.
        columns: Of a tile of results, if not those of :func:`columns_of`.
        exchange: Whether ``finish`` changes the layout of parts.
    """

    finish: Any
    prepare: Any = prepare_nothing
    boxes: int = 1
    columns: int | None = None
    exchange: bool = False

    def constants(self, width: int) -> dict[str, Any]:
        """Of :func:`product_kernel`, for inputs of a width."""
        columns = self.columns or columns_of(width)
        slices, buffers, sent = memory(width, columns, self.exchange)
        return {
            "PREPARE": self.prepare,
            "FINISH": self.finish,
            "C": width,
            "COLUMNS": columns,
            "BOXES": self.boxes,
            "STAGES": slices,
            "BUFFERS": buffers,
            "SENT": sent,
        }


def launch(
    product: Product,
    x: Tensor,
    weight: Tensor,
    outputs: Sequence[Tensor],
    extra: tuple[Any, ...],
) -> None:
    """Launches products of all workers.

    Args:
        product: What is done with them.
        x: ``[W, M, C]`` bf16.
        weight: ``[W, N, C]`` bf16.
        outputs: One or two ``[W, M, ·]`` bf16, which ``finish`` sends results to.
        extra: What ``prepare`` and ``finish`` take beside.
    """
    workers, rows, width = x.shape
    constants = product.constants(width)
    columns, piece = constants["COLUMNS"] // product.boxes, weight.shape[1] // product.boxes
    tiles_m, tiles_n = triton.cdiv(rows, ROWS), triton.cdiv(piece, columns)
    segments, starts = segments_and_starts(workers * tiles_n, tiles_m, x.device)
    product_kernel[(len(starts) - 1,)](
        _descriptor(x, ROWS, DEPTH),
        _descriptor(weight, columns, DEPTH),
        _descriptor(outputs[0], ROWS, constants["SENT"]),
        _descriptor(outputs[-1], ROWS, constants["SENT"]),
        *(segments, starts, tiles_n, piece, extra),
        **constants,
        num_warps=4,
    )


def _descriptor(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """How the copy engine takes blocks of a tensor ``[W, ·, ·]``."""
    block = [1, rows, columns]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    return TensorDescriptor.from_tensor(tensor, block, layout)


# --- the kernel -----------------------------------------------------------------------------------


@gluon.jit
def _segment(segments, number, tiles_n):
    """Worker, tile of its weight, and the tiles of x from the first to the last."""
    place = segments + 3 * number
    tile = gl.load(place)
    return tile // tiles_n, tile % tiles_n, gl.load(place + 1), gl.load(place + 2)


@gluon.jit
def _produce(work, memory, x_desc, w_desc, piece):
    """Brings tiles of the weight, and slices of x in a ring."""
    segments, starts, tiles_n = work
    slices, w_tile, filled, emptied, w_filled, w_emptied = memory
    STEPS: gl.constexpr = w_tile.shape[0]
    BOXES: gl.constexpr = w_tile.shape[1]
    BOX: gl.constexpr = w_tile.shape[2]
    STAGES: gl.constexpr = slices.shape[0]
    ROWS: gl.constexpr = slices.shape[2]
    DEPTH: gl.constexpr = slices.shape[3]
    first = gl.load(starts + gl.program_id(0))
    count = gl.load(starts + gl.program_id(0) + 1) - first
    step = 0
    for number in range(count):
        worker, tile_n, low, high = _segment(segments, first + number, tiles_n)
        mbarrier.wait(w_emptied, (number & 1) ^ 1)
        mbarrier.expect(w_filled, STEPS * BOXES * BOX * DEPTH * 2)
        for k in gl.static_range(STEPS):
            for box in gl.static_range(BOXES):
                place = [worker, box * piece + tile_n * BOX, k * DEPTH]
                into = w_tile.index(k).slice(box, 1, dim=0)
                tma.async_copy_global_to_shared(w_desc, place, w_filled, into)
        for tile in range(low, high):
            for k in gl.static_range(STEPS):
                slot = step % STAGES
                mbarrier.wait(emptied.index(slot), ((step // STAGES) & 1) ^ 1)
                mbarrier.expect(filled.index(slot), ROWS * DEPTH * 2)
                place = [worker, tile * ROWS, k * DEPTH]
                tma.async_copy_global_to_shared(
                    x_desc, place, filled.index(slot), slices.index(slot)
                )
                step += 1


@gluon.jit
def halves(z):
    """A tile ``[M, N]`` as two ``[M, N/2]``."""
    return z.reshape([z.shape[0], 2, z.shape[1] // 2]).permute([0, 2, 1]).split()


@gluon.jit
def turned(head, cos, sin):
    """A head ``[M, K]`` turned by angles ``[M, K/2]``; with −sin turned back."""
    first, second = halves(head)
    both = gl.join(first * cos - second * sin, second * cos + first * sin)
    return both.permute([0, 2, 1]).reshape([head.shape[0], head.shape[1]])


@gluon.jit
def parts(z):
    """A tile of 128 or 256 columns as two or four of 64."""
    result = halves(z)
    if z.shape[1] == 256:
        result = halves(result[0]) + halves(result[1])
    return result


@gluon.jit
def send(z, out_desc, place, buffers, NUMBER: gl.constexpr):
    """Stores part ``NUMBER`` (0, 1, …) of a tile's results at ``place``, by way of buffers."""
    SENT: gl.constexpr = buffers.shape[3]
    if z.shape[1] == SENT:
        _send(z, out_desc, place, buffers, NUMBER)
    else:
        worker, row, column = place
        first, second = halves(z)
        _send(first, out_desc, [worker, row, column], buffers, 2 * NUMBER)
        _send(second, out_desc, [worker, row, column + SENT], buffers, 2 * NUMBER + 1)


@gluon.jit
def _send(z, out_desc, place, buffers, NUMBER: gl.constexpr):
    BUFFERS: gl.constexpr = buffers.shape[0]
    # the tile before may have ended with any buffer
    PENDING: gl.constexpr = 0 if NUMBER == 0 else BUFFERS - 1
    buffer = buffers.index(NUMBER % BUFFERS)
    tma.store_wait(PENDING)  # what was sent from this buffer has left it
    debug_barrier()
    buffer.store(z.to(gl.bfloat16).reshape([1, z.shape[0], z.shape[1]]))
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, place, buffer)


@gluon.jit
def _consume(
    work,
    memory,
    outputs,
    buffers,
    my_turn,
    others_turn,
    extra,
    WHICH: gl.constexpr,
    PREPARE: gl.constexpr,
    FINISH: gl.constexpr,
):
    """Every other tile of x: the product z ``[64, COLUMNS]`` in fp32, then ``FINISH``.

    That takes z, what ``PREPARE`` made, the worker, the first row, the number of the weight's tile
    and how many there are, output descriptors, buffers for :func:`send`, and what was given as
    extra. ``PREPARE`` is called before the product begins, with zeros laid out as z will be.
    """
    segments, starts, tiles_n = work
    slices, w_tile, filled, emptied, w_filled, w_emptied = memory
    STEPS: gl.constexpr = w_tile.shape[0]
    COLUMNS: gl.constexpr = w_tile.shape[1] * w_tile.shape[2]
    STAGES: gl.constexpr = slices.shape[0]
    ROWS: gl.constexpr = slices.shape[2]
    DEPTH: gl.constexpr = slices.shape[3]
    ACCUMULATOR: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16]
    )
    first = gl.load(starts + gl.program_id(0))
    count = gl.load(starts + gl.program_id(0) + 1) - first
    before = 0  # tiles of both consumers in earlier segments
    turns = 0
    for number in range(count):
        worker, tile_n, low, high = _segment(segments, first + number, tiles_n)
        mbarrier.wait(w_filled, number & 1)
        for tile in range((before + WHICH) & 1, high - low, 2):
            step = (before + tile) * STEPS
            row = (low + tile) * ROWS
            zeros = gl.zeros((ROWS, COLUMNS), gl.float32, ACCUMULATOR)
            prepared = PREPARE(zeros, worker, row, tile_n, extra)
            # the other consumer has given the tensor cores all of the tile before
            mbarrier.wait(my_turn, (turns & 1) ^ (1 - WHICH))
            z = warpgroup_mma_init(zeros)
            for k in gl.static_range(STEPS):
                slot = (step + k) % STAGES
                mbarrier.wait(filled.index(slot), ((step + k) // STAGES) & 1)
                a = slices.index(slot).reshape([ROWS, DEPTH])
                b = w_tile.index(k).reshape([COLUMNS, DEPTH]).permute((1, 0))
                z = warpgroup_mma(a, b, z, use_acc=k > 0, is_async=True)
                if k == STEPS - 1:
                    mbarrier.arrive(others_turn)
                if k > 0:
                    z = warpgroup_mma_wait(1, deps=(z,))
                    mbarrier.arrive(emptied.index((step + k - 1) % STAGES))
            z = warpgroup_mma_wait(0, deps=(z,))
            mbarrier.arrive(emptied.index((step + STEPS - 1) % STAGES))
            turns += 1
            FINISH(z, prepared, worker, row, tile_n, tiles_n, outputs, buffers, extra)
        mbarrier.arrive(w_emptied)
        before += high - low
    tma.store_wait(0)


@gluon.jit
def product_kernel(
    x_desc,
    w_desc,
    out_desc,
    other_desc,
    segments,
    starts,
    tiles_n,
    piece,
    extra,
    PREPARE: gl.constexpr,
    FINISH: gl.constexpr,
    C: gl.constexpr,
    COLUMNS: gl.constexpr,
    BOXES: gl.constexpr,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
    SENT: gl.constexpr,
):
    """A program: its segments, by a producer and two consumers."""
    ROWS: gl.constexpr = x_desc.block_type.shape[1]
    DEPTH: gl.constexpr = x_desc.block_type.shape[2]
    w_shape: gl.constexpr = [C // DEPTH, BOXES, COLUMNS // BOXES, DEPTH]
    w_tile = gl.allocate_shared_memory(gl.bfloat16, w_shape, w_desc.layout)
    slices = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, ROWS, DEPTH], x_desc.layout)
    out: gl.constexpr = [BUFFERS, 1, ROWS, SENT]
    out_0 = gl.allocate_shared_memory(gl.bfloat16, out, out_desc.layout)
    out_1 = gl.allocate_shared_memory(gl.bfloat16, out, out_desc.layout)
    ring: gl.constexpr = [STAGES, 1]
    filled = gl.allocate_shared_memory(gl.int64, ring, mbarrier.MBarrierLayout())
    emptied = gl.allocate_shared_memory(gl.int64, ring, mbarrier.MBarrierLayout())
    w_filled = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    w_emptied = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    turn_0 = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    turn_1 = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(filled.index(slot), 1)
        mbarrier.init(emptied.index(slot), 1)
    mbarrier.init(w_filled, 1)
    mbarrier.init(w_emptied, 2)
    mbarrier.init(turn_0, 1)
    mbarrier.init(turn_1, 1)
    fence_async_shared()
    work = (segments, starts, tiles_n)
    memory = (slices, w_tile, filled, emptied, w_filled, w_emptied)
    outputs = (out_desc, other_desc)
    gl.warp_specialize(
        [
            (_consume, (work, memory, outputs, out_0, turn_0, turn_1, extra, 0, PREPARE, FINISH)),
            (_consume, (work, memory, outputs, out_1, turn_1, turn_0, extra, 1, PREPARE, FINISH)),
            (_produce, (work, memory, x_desc, w_desc, piece)),
        ],
        [4, 1],
        [240, 24],
    )
