"""Rows of the embedding table for token ids, and their gradient added back into it.

    x[w, (b, t)] = weight[w, rows[w, b, t]],   dweight[w, rows[w, b, t]] += dx[w, (b, t)],
for t < T of rows that hold T + 1 tokens (the last one is only a target). A negative id marks a
missing token and stands for id 0. An id past the vocabulary gives NaN, and no gradient.
"""

from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinyllm.kernels import stream
from tinyllm.kernels.operation import Operation
from tinyllm.kernels.stream import Stream

_THREADS = 128


def _inputs(rows: Tensor, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """Worker numbers ``[W, 1]``, ids that can be read ``[W, B·T]``, which of them are past V."""
    ids = rows[..., :-1].flatten(1).clamp_min(0)
    workers = torch.arange(len(rows), device=rows.device)[:, None]
    return workers, ids.clamp_max(vocabulary - 1), ids >= vocabulary


def _embed(rows: Tensor, weight: Tensor, x: Stream) -> None:
    """Looks the inputs of token rows up.

    Args:
        rows: ``[W, B, T+1]`` int64, contiguous.
        weight: ``[W, V, C]`` with any stride between workers.
        x: ``[W, B·T, C]``, takes the rows found.
    """
    workers, ids, past = _inputs(rows, weight.shape[1])
    x.take(weight[workers, ids].masked_fill(past[..., None], torch.nan))


def _embed_backward(rows: Tensor, dx: Stream, dweight: Tensor) -> None:
    """Adds the gradient of the rows found to the table's, in no certain order on a GPU.

    Args:
        rows: ``[W, B, T+1]`` int64, contiguous.
        dx: ``[W, B·T, C]``.
        dweight: ``[W, V, C]`` with any stride between workers, is added to.
    """
    workers, ids, past = _inputs(rows, dweight.shape[1])
    added = dx.joined(dweight.dtype).masked_fill(past[..., None], 0)
    dweight.index_put_((workers, ids), added, accumulate=True)


@triton.jit
def _tile(
    rows_ptr: tl.tensor,
    length: tl.tensor,
    C: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SEGMENT: tl.constexpr,
) -> tl.tuple:
    """SEGMENTS segments of the inputs of one sequence n.

    Returns n, and of each segment its columns, whether it exists, its id and its token in all.
    """
    tiles = tl.cdiv(length * (C // SEGMENT), SEGMENTS)
    sequence = (tl.program_id(0) // tiles).to(tl.int64)
    segment = tl.program_id(0) % tiles * SEGMENTS + tl.arange(0, SEGMENTS)
    token = segment // (C // SEGMENT)
    inside = token < length
    ids = tl.load(rows_ptr + sequence * (length + 1) + token, mask=inside, other=0)
    column = (segment % (C // SEGMENT) * SEGMENT)[:, None] + tl.arange(0, SEGMENT)[None, :]
    return sequence, column, inside, tl.maximum(ids, 0), sequence * length + token


@triton.jit
def _embed_kernel(
    rows_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    weight_stride: tl.tensor,
    x_ptr: tl.tensor,
    x_rest_ptr: tl.tensor,
    batch: tl.tensor,
    length: tl.tensor,
    vocabulary: tl.tensor,
    C: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SEGMENT: tl.constexpr,
) -> None:
    """A program: SEGMENTS segments of SEGMENT columns of the tokens of one sequence."""
    sequence, column, inside, ids, token = _tile(rows_ptr, length, C, SEGMENTS, SEGMENT)
    weight_ptr += (sequence // batch) * weight_stride
    found = (inside & (ids < vocabulary))[:, None]
    x = tl.load(weight_ptr + ids[:, None] * C + column, mask=found, other=float("nan"))
    place = token[:, None] * C + column
    stream.store(x_ptr + place, x_rest_ptr + place, x, inside[:, None])


@triton.jit
def _embed_backward_kernel(
    rows_ptr: tl.tensor,
    dx_ptr: tl.tensor,
    dx_rest_ptr: tl.tensor,
    dweight_ptr: tl.tensor,
    dweight_stride: tl.tensor,
    batch: tl.tensor,
    length: tl.tensor,
    vocabulary: tl.tensor,
    C: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SEGMENT: tl.constexpr,
) -> None:
    """A program: SEGMENTS segments of SEGMENT columns of the tokens of one sequence."""
    sequence, column, inside, ids, token = _tile(rows_ptr, length, C, SEGMENTS, SEGMENT)
    dweight_ptr += (sequence // batch) * dweight_stride
    found = (inside & (ids < vocabulary))[:, None]
    place = token[:, None] * C + column
    value = tl.load(dx_ptr + place, mask=found, other=0.0)
    dx = stream.joined(value, tl.load(dx_rest_ptr + place, mask=found, other=0))
    tl.atomic_add(dweight_ptr + ids[:, None] * C + column, dx, mask=found, sem="relaxed")


def _launch_embed(rows: Tensor, weight: Tensor, x: Stream) -> None:
    workers, batch, length = rows.shape[0], rows.shape[1], rows.shape[2] - 1
    vocabulary, width = weight.shape[1:]
    segment = gcd(width, 128)
    tile = 8 * _THREADS // segment
    _embed_kernel[(workers * batch * triton.cdiv(length * (width // segment), tile),)](
        *(rows, weight, weight.stride(0), *x, batch, length, vocabulary),
        C=width,
        SEGMENTS=tile,
        SEGMENT=segment,
        num_warps=_THREADS // 32,
    )


def _launch_embed_backward(rows: Tensor, dx: Stream, dweight: Tensor) -> None:
    workers, batch, length = rows.shape[0], rows.shape[1], rows.shape[2] - 1
    vocabulary, width = dweight.shape[1:]
    segment = gcd(width, 128)
    tile = 8 * _THREADS // segment
    _embed_backward_kernel[(workers * batch * triton.cdiv(length * (width // segment), tile),)](
        *(rows, *dx, dweight, dweight.stride(0), batch, length, vocabulary),
        C=width,
        SEGMENTS=tile,
        SEGMENT=segment,
        num_warps=_THREADS // 32,
    )


embed = Operation(_embed, _launch_embed)
embed_backward = Operation(_embed_backward, _launch_embed_backward)
