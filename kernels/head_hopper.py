"""The head's exponentials on Hopper GPUs: one tile's product runs while another's are taken.

A program keeps a tile of the embedding in shared memory and lets all rows of h pass by. A warp
brings them there with the copy engine, a slice of columns at a time. Two groups of four warps take
turns with tiles of 64 rows: while one's product is on the tensor cores, the other takes its own
exponentials, adds them up and sends them out. :mod:`tinyllm.kernels.head` has the mathematics, and
a kernel for other GPUs that does one after the other.
"""

# kernels are typed by Triton
# mypy: disable-error-code="no-untyped-def"

from functools import cache

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

ROWS = 64
"""Of a tile of h; the tensor cores take as many from four warps."""

DEPTH = 64
"""Columns of h in a slice."""

_TILE_BYTES = 164 * 1024
"""The largest tile of the embedding that leaves shared memory for slices and results."""

_FEW_ROWS = 8_192
"""Up to which h lies in the L2 cache, and a second buffer for results is worth more than slices."""


def fits(h: Tensor, columns: int) -> bool:
    """Whether the kernel can run where ``h`` lies, with tiles of so many columns."""
    return (
        h.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(h.device) == (9, 0)
        and columns * h.shape[-1] * h.element_size() <= _TILE_BYTES
    )


def exponentials(
    h: Tensor, embedding: Tensor, exps: Tensor, sums: Tensor, columns: int, offset_log2: float
) -> None:
    """Launches the kernel; see :data:`tinyllm.kernels.head.exponentials`.

    Args:
        h: ``[W, M, C]`` bf16.
        embedding: ``[W, V, C]`` bf16.
        exps: ``[W, M, Vp]`` bf16, written.
        sums: ``[W, ceil(V / columns), M]`` fp32, written.
        columns: Of a tile of the embedding.
        offset_log2: What is taken from every exponent of two.
    """
    workers, rows, width = h.shape
    vocab = embedding.shape[1]
    tiles_m, tiles_n = triton.cdiv(rows, ROWS), triton.cdiv(vocab, columns)
    stages, buffers = (4, 2) if workers * rows <= _FEW_ROWS else (6, 1)
    segments, starts = _on_device(workers * tiles_n, tiles_m, h.device)
    exponentials_kernel[(len(starts) - 1,)](
        descriptor(h, ROWS, DEPTH),
        descriptor(embedding, columns, DEPTH),
        descriptor(exps, ROWS, columns // 4),
        *(sums, segments, starts, rows, vocab, tiles_n),
        OFFSET_LOG2=offset_log2,
        C=width,
        COLUMNS=columns,
        STAGES=stages,
        BUFFERS=buffers,
        MASKED=vocab % columns != 0,
        num_warps=4,
    )


def descriptor(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """How the copy engine takes blocks of a tensor ``[W, ·, ·]``."""
    block = [1, rows, columns]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    return TensorDescriptor.from_tensor(tensor, block, layout)


# --- which tiles a program computes ---------------------------------------------------------------

Segment = tuple[int, int, int]
"""A tile of the embedding, and the first and last (exclusive) tile of h that go with it."""


def schedule(tiles_e: int, tiles_h: int, programs: int) -> list[list[Segment]]:
    """Deals products of tiles out to programs, each about as many.

    A program takes whole tiles of the embedding one after the other. If some are left over, as
    many programs take one more each, and leave its last products to those that have none. All
    begin with the first rows of h, so that these are read once for all of them.

    Args:
        tiles_e: Tiles of the embedding, of all workers.
        tiles_h: Tiles of h that go with each of them.
        programs: Number of programs.
    """
    shares: list[list[Segment]] = [
        [(tile, 0, tiles_h) for tile in range(program, tiles_e, programs)]
        for program in range(programs)
    ]
    over = tiles_e % programs
    if over == 0:
        return shares
    kept = triton.cdiv(over * tiles_h, programs)
    left = [(tile, row) for tile in range(tiles_e - over, tiles_e) for row in range(kept, tiles_h)]
    share = triton.cdiv(len(left), programs - over)
    if share + triton.cdiv(share, max(1, tiles_h - kept)) > tiles_h:
        return shares  # fetching a tile of the embedding takes as long as a product
    for program in range(over):
        tile, first, _ = shares[program][-1]
        shares[program][-1] = (tile, first, kept)
    for number, program in enumerate(range(over, programs)):
        own = left[number * share : (number + 1) * share]
        for tile in dict.fromkeys(tile for tile, _ in own):
            rows = [row for other, row in own if other == tile]
            shares[program].append((tile, rows[0], rows[-1] + 1))
    return shares


@cache
def _on_device(tiles_e: int, tiles_h: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Segments of all programs ``[·, 3]``, and where those of each begin and the last end."""
    programs = torch.cuda.get_device_properties(device).multi_processor_count
    shares = [share for share in schedule(tiles_e, tiles_h, programs) if share]
    starts = [0]
    for share in shares:
        starts.append(starts[-1] + len(share))
    segments = [segment for share in shares for segment in share]
    return (
        torch.tensor(segments, dtype=torch.int32, device=device),
        torch.tensor(starts, dtype=torch.int32, device=device),
    )


# --- the kernel -----------------------------------------------------------------------------------


@gluon.jit
def _segment(segments, number, tiles_n):
    """Worker, tile of its embedding, and the tiles of h from the first to the last."""
    place = segments + 3 * number
    tile = gl.load(place)
    return tile // tiles_n, tile % tiles_n, gl.load(place + 1), gl.load(place + 2)


@gluon.jit
def _produce(
    work,
    memory,
    h_desc,
    e_desc,
    COLUMNS: gl.constexpr,
):
    """Brings tiles of the embedding, and slices of h in a ring."""
    segments, starts, tiles_n = work
    slices, e_tile, filled, emptied, e_filled, e_emptied = memory
    STEPS: gl.constexpr = e_tile.shape[0]
    STAGES: gl.constexpr = slices.shape[0]
    ROWS: gl.constexpr = slices.shape[2]
    DEPTH: gl.constexpr = slices.shape[3]
    first = gl.load(starts + gl.program_id(0))
    count = gl.load(starts + gl.program_id(0) + 1) - first
    step = 0
    for number in range(count):
        worker, tile_n, low, high = _segment(segments, first + number, tiles_n)
        mbarrier.wait(e_emptied, (number & 1) ^ 1)
        mbarrier.expect(e_filled, STEPS * COLUMNS * DEPTH * 2)
        for k in gl.static_range(STEPS):
            place = [worker, tile_n * COLUMNS, k * DEPTH]
            tma.async_copy_global_to_shared(e_desc, place, e_filled, e_tile.index(k))
        for tile in range(low, high):
            for k in gl.static_range(STEPS):
                slot = step % STAGES
                mbarrier.wait(emptied.index(slot), ((step // STAGES) & 1) ^ 1)
                mbarrier.expect(filled.index(slot), ROWS * DEPTH * 2)
                place = [worker, tile * ROWS, k * DEPTH]
                tma.async_copy_global_to_shared(
                    h_desc, place, filled.index(slot), slices.index(slot)
                )
                step += 1


@gluon.jit
def _quarters(z):
    """A tile ``[M, N]`` as four ``[M, N/4]``."""
    M: gl.constexpr = z.shape[0]
    N: gl.constexpr = z.shape[1]
    left, right = z.reshape([M, 2, N // 2]).permute([0, 2, 1]).split()
    first, second = left.reshape([M, 2, N // 4]).permute([0, 2, 1]).split()
    third, fourth = right.reshape([M, 2, N // 4]).permute([0, 2, 1]).split()
    return first, second, third, fourth


@gluon.jit
def _send(z, vocab, exps_desc, worker, row, column, buffer, PENDING, MASKED, OFFSET_LOG2):
    """Stores exponentials of a part of a tile; returns their sums of rows."""
    LOG2_E: gl.constexpr = 1.4426950408889634
    M: gl.constexpr = z.shape[0]
    N: gl.constexpr = z.shape[1]
    e = gl.exp2(z * LOG2_E - OFFSET_LOG2)
    if MASKED:
        at = column + gl.arange(0, N, gl.SliceLayout(0, e.type.layout))
        e = gl.where((at < vocab)[None, :], e, 0.0)
    tma.store_wait(PENDING)  # what was sent from this buffer has left it
    debug_barrier()
    buffer.store(e.to(gl.bfloat16).reshape([1, M, N]))
    fence_async_shared()
    tma.async_copy_shared_to_global(exps_desc, [worker, row, column], buffer)
    return gl.sum(e, 1)


@gluon.jit
def _consume(
    work,
    memory,
    outputs,
    buffers,
    my_turn,
    others_turn,
    WHICH: gl.constexpr,
    COLUMNS: gl.constexpr,
    MASKED: gl.constexpr,
    OFFSET_LOG2: gl.constexpr,
):
    """Every other tile of h: the product, then exponentials and their sums."""
    segments, starts, tiles_n = work
    slices, e_tile, filled, emptied, e_filled, e_emptied = memory
    exps_desc, sums, rows, vocab = outputs
    STEPS: gl.constexpr = e_tile.shape[0]
    STAGES: gl.constexpr = slices.shape[0]
    ROWS: gl.constexpr = slices.shape[2]
    DEPTH: gl.constexpr = slices.shape[3]
    BUFFERS: gl.constexpr = buffers.shape[0]
    PART: gl.constexpr = COLUMNS // 4
    ACCUMULATOR: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16]
    )
    first = gl.load(starts + gl.program_id(0))
    count = gl.load(starts + gl.program_id(0) + 1) - first
    before = 0  # tiles of both consumers in earlier segments
    turns = 0
    for number in range(count):
        worker, tile_n, low, high = _segment(segments, first + number, tiles_n)
        place = sums + (worker.to(gl.int64) * tiles_n + tile_n) * rows
        mbarrier.wait(e_filled, number & 1)
        for tile in range((before + WHICH) & 1, high - low, 2):
            row = (low + tile) * ROWS
            step = (before + tile) * STEPS
            # the other consumer has given the tensor cores all of the tile before
            mbarrier.wait(my_turn, (turns & 1) ^ (1 - WHICH))
            z = warpgroup_mma_init(gl.zeros((ROWS, COLUMNS), gl.float32, ACCUMULATOR))
            for k in gl.static_range(STEPS):
                slot = (step + k) % STAGES
                mbarrier.wait(filled.index(slot), ((step + k) // STAGES) & 1)
                a = slices.index(slot).reshape([ROWS, DEPTH])
                b = e_tile.index(k).reshape([COLUMNS, DEPTH]).permute((1, 0))
                z = warpgroup_mma(a, b, z, use_acc=k > 0, is_async=True)
                if k == STEPS - 1:
                    mbarrier.arrive(others_turn)
                if k > 0:
                    z = warpgroup_mma_wait(1, deps=(z,))
                    mbarrier.arrive(emptied.index((step + k - 1) % STAGES))
            z = warpgroup_mma_wait(0, deps=(z,))
            mbarrier.arrive(emptied.index((step + STEPS - 1) % STAGES))
            turns += 1

            column = tile_n * COLUMNS
            parts = _quarters(z)
            total = gl.zeros((ROWS,), gl.float32, gl.SliceLayout(1, parts[0].type.layout))
            for part in gl.static_range(4):
                total += _send(
                    parts[part],
                    vocab,
                    exps_desc,
                    worker,
                    row,
                    column + part * PART,
                    buffers.index(part % BUFFERS),
                    BUFFERS - 1,
                    MASKED,
                    OFFSET_LOG2,
                )
            at = row + gl.arange(0, ROWS, total.type.layout)
            gl.store(place + at, total, mask=at < rows)
        mbarrier.arrive(e_emptied)
        before += high - low
    tma.store_wait(0)


@gluon.jit
def exponentials_kernel(
    h_desc,
    e_desc,
    exps_desc,
    sums,
    segments,
    starts,
    rows,
    vocab,
    tiles_n,
    OFFSET_LOG2: gl.constexpr,
    C: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
    MASKED: gl.constexpr,
):
    """A program: its segments, by a producer and two consumers."""
    ROWS: gl.constexpr = h_desc.block_type.shape[1]
    DEPTH: gl.constexpr = h_desc.block_type.shape[2]
    e_tile = gl.allocate_shared_memory(gl.bfloat16, [C // DEPTH, 1, COLUMNS, DEPTH], e_desc.layout)
    slices = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, ROWS, DEPTH], h_desc.layout)
    out: gl.constexpr = [BUFFERS, 1, ROWS, COLUMNS // 4]
    out_0 = gl.allocate_shared_memory(gl.bfloat16, out, exps_desc.layout)
    out_1 = gl.allocate_shared_memory(gl.bfloat16, out, exps_desc.layout)
    ring: gl.constexpr = [STAGES, 1]
    filled = gl.allocate_shared_memory(gl.int64, ring, mbarrier.MBarrierLayout())
    emptied = gl.allocate_shared_memory(gl.int64, ring, mbarrier.MBarrierLayout())
    e_filled = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    e_emptied = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    turn_0 = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    turn_1 = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(filled.index(slot), 1)
        mbarrier.init(emptied.index(slot), 1)
    mbarrier.init(e_filled, 1)
    mbarrier.init(e_emptied, 2)
    mbarrier.init(turn_0, 1)
    mbarrier.init(turn_1, 1)
    fence_async_shared()
    work = (segments, starts, tiles_n)
    memory = (slices, e_tile, filled, emptied, e_filled, e_emptied)
    outputs = (exps_desc, sums, rows, vocab)
    gl.warp_specialize(
        [
            (
                _consume,
                (work, memory, outputs, out_0, turn_0, turn_1, 0, COLUMNS, MASKED, OFFSET_LOG2),
            ),
            (
                _consume,
                (work, memory, outputs, out_1, turn_1, turn_0, 1, COLUMNS, MASKED, OFFSET_LOG2),
            ),
            (_produce, (work, memory, h_desc, e_desc, COLUMNS)),
        ],
        [4, 1],
        [240, 24],
    )
