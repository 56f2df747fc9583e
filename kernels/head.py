"""The tied head and its loss, with the logits' exponentials stored once and never recomputed.

For a token with hidden state h, logits ``z = E·h`` and target t, and any offset o that keeps
exponentials in range::

    e_v = exp(z_v − o)        S = Σ_v e_v        loss = log S + o − z_t
    dz_v = e_v / S − [v = t]

The forward GEMM's epilogue stores e in the compute dtype and sums each row of a tile; on Hopper
GPUs it is done while the next product runs (:mod:`tinyllm.kernels.head_hopper`).
:data:`finish` then completes S and the loss, and replaces e_t by ``−R``, where R is ``S − e_t`` in
the compute dtype; so ``dz = e / (R + e_t)`` with one factor per row, which the two backward GEMMs
leave to their neighbours::

    dh = (e · E) / (R + e_t)          dE = eᵀ · (h / (R + e_t))

Dividing by S itself would leave R's rounding in the largest entry of dz; so it lies in the others.

bf16 has the exponents of fp32, so one constant offset serves rows whose largest logit lies from
about -50 to 80. A row outside that is recomputed with its own largest logit as the offset. Targets
of V and above, and negative ones other than ``IGNORED``, make the loss NaN.
"""

# kernels are typed by Triton
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tinyllm.kernels import head_hopper
from tinyllm.kernels.constants import LOG2_E
from tinyllm.kernels.hopper import columns_of, fits
from tinyllm.kernels.operation import Operation

IGNORED = -100
"""A target that is not scored."""

OFFSET = 5.0
"""The offset o of most rows."""

SMALLEST_SUM, LARGEST_SUM = 1e-25, 1e35
"""Outside, a row is recomputed with an offset of its own: products of its exponentials with the
embedding would overflow, or lose digits as subnormal numbers."""

FINISHED_ROWS = 16
"""Rows behind one entry of the tally."""


def tiles(vocab: int, width: int) -> int:
    """Partial sums of a row."""
    return -(-vocab // columns_of(width))


def padded(vocab: int) -> int:
    """Length of a row of exponentials, of which the first V are used; in 16-byte units."""
    return -(-vocab // 64) * 64


# --- exponentials and their partial sums ------------------------------------------------------


def _exponentials_reference(h: Tensor, embedding: Tensor, exps: Tensor, sums: Tensor) -> None:
    """Stores ``exp(E·h − OFFSET)`` and its sums over tiles.

    Args:
        h: ``[W, M, C]``.
        embedding: ``[W, V, C]``.
        exps: ``[W, M, Vp]``, written; zero beyond V.
        sums: ``[W, tiles, M]`` fp32, written.
    """
    vocab = embedding.shape[1]
    values = torch.exp(torch.bmm(h, embedding.transpose(1, 2)).to(sums.dtype) - OFFSET)
    exps.zero_()
    exps[:, :, :vocab] = values
    for tile, part in enumerate(values.split(columns_of(h.shape[2]), dim=2)):
        sums[:, tile] = part.sum(2)


@triton.jit
def _exponentials_kernel(
    h_desc,
    e_desc,
    exps_desc,
    sums,
    M,
    V,
    tiles_m,
    tiles_n,
    num_tiles,
    OFFSET_LOG2: tl.constexpr,
    C: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PROGRAMS: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    HALF: tl.constexpr = BLOCK_N // 2
    for tile in tl.range(tl.program_id(0), num_tiles, PROGRAMS, flatten=FLATTEN):
        worker = tile // (tiles_m * tiles_n)
        m = (tile // tiles_n) % tiles_m * BLOCK_M
        tile_n = tile % tiles_n
        n = tile_n * BLOCK_N
        z = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, C, BLOCK_K):
            a = h_desc.load([worker, m, k]).reshape(BLOCK_M, BLOCK_K)
            b = e_desc.load([worker, n, k]).reshape(BLOCK_N, BLOCK_K)
            z = tl.dot(a, b.T, z)
        # in two halves, which need less shared memory on the way out
        left, right = tl.split(z.reshape(BLOCK_M, 2, HALF).permute(0, 2, 1))
        left = tl.exp2(left * LOG2_E - OFFSET_LOG2)
        right = tl.exp2(right * LOG2_E - OFFSET_LOG2)
        if MASKED:
            columns = n + tl.arange(0, HALF)
            left = tl.where(columns[None, :] < V, left, 0.0)
            right = tl.where(columns[None, :] + HALF < V, right, 0.0)
        exps_desc.store([worker, m, n], left.to(exps_desc.dtype).reshape(1, BLOCK_M, HALF))
        exps_desc.store([worker, m, n + HALF], right.to(exps_desc.dtype).reshape(1, BLOCK_M, HALF))
        rows = m + tl.arange(0, BLOCK_M)
        row_sums = tl.sum(left, 1) + tl.sum(right, 1)
        place = (worker.to(tl.int64) * tiles_n + tile_n) * M
        tl.store(sums + place + rows, row_sums, mask=rows < M)


def _launch_exponentials(h: Tensor, embedding: Tensor, exps: Tensor, sums: Tensor) -> None:
    workers, rows, width = h.shape
    vocab, columns = embedding.shape[1], columns_of(width)
    if fits(h):
        head_hopper.exponentials(h, embedding, exps, sums, OFFSET * LOG2_E.value)
        return
    block_m, block_k = 128, 64
    tiles_m, tiles_n = triton.cdiv(rows, block_m), tiles(vocab, width)
    num_tiles = workers * tiles_m * tiles_n
    programs = _multiprocessors(h)
    _exponentials_kernel[(min(programs, num_tiles),)](
        TensorDescriptor.from_tensor(h, [1, block_m, block_k]),
        TensorDescriptor.from_tensor(embedding, [1, columns, block_k]),
        TensorDescriptor.from_tensor(exps, [1, block_m, columns // 2]),
        sums,
        rows,
        vocab,
        tiles_m,
        tiles_n,
        num_tiles,
        OFFSET_LOG2=OFFSET * LOG2_E.value,
        C=width,
        MASKED=vocab % columns != 0,
        BLOCK_M=block_m,
        BLOCK_N=columns,
        BLOCK_K=block_k,
        PROGRAMS=programs,
        FLATTEN=True,
        num_warps=8,
        num_stages=4,
    )


def _multiprocessors(tensor: Tensor) -> int:
    if not tensor.is_cuda:
        return 4  # the interpreter
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count


# --- the loss, and what backward needs ----------------------------------------------------------


def _finish_reference(
    h: Tensor,
    embedding: Tensor,
    rows: Tensor,
    exps: Tensor,
    sums: Tensor,
    inverse: Tensor,
    scaled: Tensor,
    tally: Tensor,
) -> None:
    """Completes the loss, and turns exponentials into gradients up to a factor per row.

    Args:
        h: ``[W, M, C]``.
        embedding: ``[W, V, C]``.
        rows: ``[W, B, T+1]`` int64; the targets are ``rows[:, :, 1:]``.
        exps: ``[W, M, Vp]``, changed at each row's target.
        sums: ``[W, tiles, M]`` of :data:`exponentials`.
        inverse: ``[W, M]`` fp32, written: 1/(R + e_t), and 0 for a row without a target.
        scaled: ``[W, M, C]``, written: h times that, in h's dtype.
        tally: ``[W, ceil(M / FINISHED_ROWS), 2]`` fp32, written: summed losses, and how many.
    """
    vocab = embedding.shape[1]
    targets = rows[:, :, 1:].flatten(1)
    scored, known = targets != IGNORED, (targets >= 0) & (targets < vocab)
    place = torch.where(known, targets, 0)
    total = sums.sum(1)
    logits = torch.bmm(h, embedding.transpose(1, 2)).to(sums.dtype)
    offset = torch.full_like(total, OFFSET)
    far = ~((total >= SMALLEST_SUM) & (total <= LARGEST_SUM))
    offset[far] = logits[far].amax(-1)
    again = torch.exp(logits[far] - offset[far][:, None])
    exps[far] = torch.nn.functional.pad(again, (0, exps.shape[2] - vocab)).to(exps.dtype)
    total[far] = again.sum(-1)
    target_logit = logits.gather(2, place[:, :, None]).squeeze(2)
    loss = total.log() + offset - target_logit
    loss = torch.where(known, loss, torch.where(scored, torch.nan, 0.0))
    at_target = torch.exp(target_logit - offset)
    rest = (total - at_target).to(exps.dtype)
    at_place = torch.where(known, -rest, exps.gather(2, place[:, :, None]).squeeze(2))
    exps.scatter_(2, place[:, :, None], at_place[:, :, None])
    inverse.copy_(torch.where(scored, 1 / (rest + at_target), 0.0))
    scaled.copy_(h * inverse[:, :, None])
    for column, values in enumerate((loss, scored.to(loss.dtype))):
        for entry, part in enumerate(values.split(FINISHED_ROWS, dim=1)):
            tally[:, entry, column] = part.sum(1)


@triton.jit
def _finish_kernel(
    h,
    embedding,
    embedding_stride,
    rows,
    exps,
    sums,
    inverse,
    scaled,
    tally,
    M,
    V,
    VP,
    length,
    num_tiles,
    OFFSET: tl.constexpr,
    SMALLEST: tl.constexpr,
    LARGEST: tl.constexpr,
    IGNORED: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    worker = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = m < M
    h += worker * M * C
    scaled += worker * M * C
    embedding += worker * embedding_stride
    exps += worker * M * VP
    # row b·T + t of a worker has its target at b·(T+1) + t + 1
    target = tl.load(rows + worker * (M + M // length) + m + m // length + 1, inside, IGNORED)
    scored = target != IGNORED
    known = (target >= 0) & (target < V)
    target = tl.where(known, target, 0)

    part = tl.arange(0, TILES)
    parts = sums + worker * num_tiles * M + part[:, None].to(tl.int64) * M + m[None, :]
    total = tl.sum(tl.load(parts, (part < num_tiles)[:, None] & inside[None, :], 0.0), 0)
    far = ~((total >= SMALLEST) & (total <= LARGEST)) & inside
    offset = tl.full((ROWS,), OFFSET, tl.float32)
    at_row = m.to(tl.int64)[:, None] * C
    k = tl.arange(0, 64)
    if tl.max(far.to(tl.int32), 0) > 0:
        largest = tl.full((ROWS,), float("-inf"), tl.float32)
        for n in range(0, V, TILE):
            v = n + tl.arange(0, TILE)
            z = tl.zeros((ROWS, TILE), tl.float32)
            for c in range(0, C, 64):
                a = tl.load(h + at_row + c + k[None, :], inside[:, None], 0.0)
                b = tl.load(embedding + v[:, None] * C + c + k[None, :], (v < V)[:, None], 0.0)
                z = tl.dot(a, b.T, z)
            z = tl.where((v < V)[None, :], z, float("-inf"))
            largest = tl.maximum(largest, tl.max(z, 1))
        again = tl.zeros((ROWS,), tl.float32)
        for n in range(0, V, TILE):
            v = n + tl.arange(0, TILE)
            z = tl.zeros((ROWS, TILE), tl.float32)
            for c in range(0, C, 64):
                a = tl.load(h + at_row + c + k[None, :], inside[:, None], 0.0)
                b = tl.load(embedding + v[:, None] * C + c + k[None, :], (v < V)[:, None], 0.0)
                z = tl.dot(a, b.T, z)
            e = tl.exp2((z - largest[:, None]) * LOG2_E)
            e = tl.where((v < V)[None, :], e, 0.0)
            again += tl.sum(e, 1)
            place = exps + m.to(tl.int64)[:, None] * VP + v[None, :]
            tl.store(place, e.to(exps.dtype.element_ty), far[:, None] & (v < V)[None, :])
        total = tl.where(far, again, total)
        offset = tl.where(far, largest, offset)
        tl.debug_barrier()  # the targets' entries are written once more below

    target_logit = tl.zeros((ROWS,), tl.float32)
    for c in range(0, C, 64):
        a = tl.load(h + at_row + c + k[None, :], inside[:, None], 0.0).to(tl.float32)
        place = embedding + target[:, None] * C + c + k[None, :]
        b = tl.load(place, known[:, None], 0.0).to(tl.float32)
        target_logit += tl.sum(a * b, 1)
    loss = tl.log(total) + offset - target_logit
    loss = tl.where(known, loss, tl.where(scored, float("nan"), 0.0))
    at_target = tl.exp2((target_logit - offset) * LOG2_E)
    rest = (total - at_target).to(exps.dtype.element_ty)
    place = exps + m.to(tl.int64) * VP + target
    tl.store(place, -rest, inside & known)

    factor = tl.where(scored, 1.0 / (rest.to(tl.float32) + at_target), 0.0)
    tl.store(inverse + worker * M + m, factor, inside)
    for c in range(0, C, 64):
        a = tl.load(h + at_row + c + k[None, :], inside[:, None], 0.0).to(tl.float32)
        a = tl.where(scored[:, None], a * factor[:, None], 0.0)
        tl.store(scaled + at_row + c + k[None, :], a.to(scaled.dtype.element_ty), inside[:, None])
    place = (worker * tl.num_programs(0) + tl.program_id(0)) * 2
    tl.store(tally + place, tl.sum(loss, 0))
    tl.store(tally + place + 1, tl.sum(scored.to(tl.float32), 0))


def _launch_finish(
    h: Tensor,
    embedding: Tensor,
    rows: Tensor,
    exps: Tensor,
    sums: Tensor,
    inverse: Tensor,
    scaled: Tensor,
    tally: Tensor,
) -> None:
    workers, num_rows, width = h.shape
    _finish_kernel[(triton.cdiv(num_rows, FINISHED_ROWS), workers)](
        h,
        embedding,
        embedding.stride(0),
        rows,
        exps,
        sums,
        inverse,
        scaled,
        tally,
        num_rows,
        embedding.shape[1],
        exps.shape[2],
        rows.shape[2] - 1,
        sums.shape[1],
        OFFSET=OFFSET,
        SMALLEST=SMALLEST_SUM,
        LARGEST=LARGEST_SUM,
        IGNORED=IGNORED,
        C=width,
        ROWS=FINISHED_ROWS,
        TILES=triton.next_power_of_2(sums.shape[1]),
        TILE=16,  # of the rare recomputation; more would cost all rows registers
        num_warps=4,
        num_stages=1,
    )


# --- the update's sums ---------------------------------------------------------------------------


def _total_reference(
    tally: Tensor, nll: Tensor, targets: Tensor, loss: Tensor, accumulate: bool
) -> None:
    """Adds up a micro-batch's loss.

    Args:
        tally: ``[W, ·, 2]`` of :data:`finish`.
        nll: ``[W]``, summed loss; written, or added to.
        targets: ``[W]`` int64, number of targets; written, or added to.
        loss: ``[1]``, written: mean loss over all targets of all workers so far.
        accumulate: Adds.
    """
    sums = tally.sum(1)
    for out, new in ((nll, sums[:, 0]), (targets, sums[:, 1].to(targets.dtype))):
        out.add_(new) if accumulate else out.copy_(new)
    loss.copy_(nll.sum() / targets.sum().clamp_min(1))


@triton.jit
def _total_kernel(
    tally, nll, targets, loss, parts, W: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr
):
    all_nll = 0.0
    all_targets = 0.0
    for worker in range(W):
        sum_nll = tl.zeros((BLOCK,), tl.float32)
        count = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, parts, BLOCK):
            part = start + tl.arange(0, BLOCK)
            place = tally + (worker * parts + part).to(tl.int64) * 2
            sum_nll += tl.load(place, part < parts, 0.0)
            count += tl.load(place + 1, part < parts, 0.0).to(tl.int32)
        worker_nll = tl.sum(sum_nll, 0)
        worker_targets = tl.sum(count, 0).to(tl.int64)
        if ADD:
            worker_nll += tl.load(nll + worker)
            worker_targets += tl.load(targets + worker)
        tl.store(nll + worker, worker_nll)
        tl.store(targets + worker, worker_targets)
        all_nll += worker_nll
        all_targets += worker_targets.to(tl.float32)
    tl.store(loss, all_nll / tl.maximum(all_targets, 1.0))


def _launch_total(
    tally: Tensor, nll: Tensor, targets: Tensor, loss: Tensor, accumulate: bool
) -> None:
    _total_kernel[(1,)](
        tally, nll, targets, loss, tally.shape[1], W=len(tally), ADD=accumulate, BLOCK=1024
    )


exponentials = Operation(_exponentials_reference, _launch_exponentials)
finish = Operation(_finish_reference, _launch_finish)
total = Operation(_total_reference, _launch_total)
