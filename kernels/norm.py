"""Residual addition and RMSNorm in one pass, its backward, and the sum of its weight gradients.

Forward, for each row of C:      out = x + branch,  r = rsqrt(mean(out²) + ε),  y = out·r·weight.
Backward, with x̂ = x·r, g = s·dy·weight (s an optional factor of each row):
    dx = dresidual + r·(g − x̂·mean(g·x̂)),   dweight = Σ_rows s·dy·x̂.
Zhang & Sennrich, "Root mean square layer normalization" (2019).

A row is walked in chunks, the widest powers of two up to 128 that divide C, so no lane idles on
padding. All chunks of a tile of rows stay in registers between the two passes over them.
"""

from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinyllm.kernels import stream
from tinyllm.kernels.operation import Operation
from tinyllm.kernels.stream import Stream

_THREADS = 64
_MIN_ROWS = 8
"""Rows that make a program of the backward worth starting."""
_PROGRAMS = 1_056
"""Programs of the backward at most: eight for each of 132 SMs, which run at once."""


def _residual_rms_norm(
    x: Stream,
    branch: Tensor | None,
    weight: Tensor,
    eps: float,
    out: Stream | None,
    normed: Tensor,
    rstd: Tensor,
) -> None:
    """Adds a branch to the residual stream and normalizes the sum.

    Args:
        x: ``[W, M, C]``.
        branch: ``[W, M, C]`` compute dtype, or None for nothing to add.
        weight: ``[W, C]`` with any stride between workers.
        eps: ε.
        out: ``[W, M, C]``, takes the sum; its parts may be those of ``x``; unused without a branch.
        normed: ``[W, M, C]`` compute dtype, takes the normalized sum.
        rstd: ``[W, M]`` stream dtype, takes 1/rms.
    """
    total = x.joined(rstd.dtype)
    if branch is not None:
        assert out is not None
        total = total + branch
        out.take(total)
    torch.rsqrt(total.square().mean(-1) + eps, out=rstd)
    normed.copy_(total * rstd[..., None] * weight[:, None])


def _rms_norm_backward(
    dnormed: Tensor,
    row_scale: Tensor | None,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    dresidual: Stream | None,
    dx: Stream,
    dweight: Tensor,
) -> None:
    """Gradients of the normalized rows with respect to the residual stream and the weight.

    Args:
        dnormed: ``[W, M, C]`` compute dtype.
        row_scale: ``[W, M]`` factors on dnormed's rows, or None for 1. A row whose factor is 0
            counts as zeros whatever it holds.
        x: ``[W, M, C]`` compute dtype, what was normalized.
        weight: ``[W, C]`` with any stride between workers.
        rstd: ``[W, M]`` stream dtype, 1/rms from the forward.
        dresidual: ``[W, M, C]``, the gradient on the residual path, or None for 0.
        dx: ``[W, M, C]``, takes the gradient; either part may be that of ``dresidual``.
        dweight: ``[W, P, C]`` with any strides of W and P, takes partial sums over rows: their sum
            over P is the gradient. See ``partials`` for a good P.
    """
    dy = dnormed.to(rstd.dtype)
    if row_scale is not None:
        scale = row_scale[..., None].to(rstd.dtype)
        dy = torch.where(scale == 0, 0, dy * scale)
    normal = x * rstd[..., None]
    g = dy * weight[:, None]
    gradient = rstd[..., None] * (g - normal * (g * normal).mean(-1, keepdim=True))
    if dresidual is not None:
        gradient = dresidual.joined(rstd.dtype) + gradient
    dx.take(gradient)
    dweight.zero_()
    dweight[:, 0].copy_((dy * normal).sum(1))


def _sum_partials(partials: Tensor, out: Tensor, accumulate: bool) -> None:
    """Finishes the weight gradients of L norms.

    Args:
        partials: ``[W, L, P, C]`` contiguous.
        out: ``[W, L, C]`` with any strides of W and L.
        accumulate: Adds to ``out`` instead of overwriting it.
    """
    total = partials.sum(2)
    out.copy_(out + total if accumulate else total)


def partials(workers: int, rows: int) -> int:
    """Partial sums P per worker that keep a GPU busy in the backward of ``rows`` rows each."""
    return max(1, min(triton.cdiv(rows, _MIN_ROWS), _PROGRAMS // workers))


@triton.jit
def _forward_kernel(
    x_ptr: tl.tensor,
    x_rest_ptr: tl.tensor,
    branch_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    weight_stride: tl.tensor,
    eps: tl.tensor,
    out_ptr: tl.tensor,
    out_rest_ptr: tl.tensor,
    normed_ptr: tl.tensor,
    rstd_ptr: tl.tensor,
    rows_count: tl.tensor,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Program (i, w): ROWS rows of worker w."""
    worker, start = tl.program_id(1).to(tl.int64), tl.program_id(0) * ROWS
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, CHUNK)[None, :]
    mask = start + row < rows_count
    before = worker * rows_count + start
    offset = before * C + (row * C + column)
    # read by every thread where it needs it: a row of weights would travel through shared memory
    weight_ptr += worker * weight_stride + tl.broadcast_to(column, (ROWS, CHUNK))

    sums: tl.tuple = ()
    weighted: tl.tuple = ()  # at once, so that no load waits behind the stores
    squares = tl.zeros((ROWS, CHUNK), tl.float32)
    for c in tl.static_range(0, C, CHUNK):
        value = tl.load(x_ptr + offset + c, mask=mask, other=0.0)
        rest = tl.load(x_rest_ptr + offset + c, mask=mask, other=0)
        total = stream.joined(value, rest)
        if branch_ptr is not None:
            total += tl.load(branch_ptr + offset + c, mask=mask, other=0.0).to(tl.float32)
        sums += (total,)
        weighted += (total * tl.load(weight_ptr + c).to(tl.float32),)
        squares += total * total
    rstd = tl.rsqrt(tl.sum(squares, 1) / C + eps)[:, None]
    tl.store(rstd_ptr + before + row, rstd, mask=mask)
    for c in tl.static_range(0, C, CHUNK):
        if branch_ptr is not None:
            place = offset + c
            stream.store(out_ptr + place, out_rest_ptr + place, sums[c // CHUNK], mask)
        tl.store(normed_ptr + offset + c, weighted[c // CHUNK] * rstd, mask=mask)


@triton.jit
def _backward_kernel(
    dnormed_ptr: tl.tensor,
    row_scale_ptr: tl.tensor,
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    weight_stride: tl.tensor,
    rstd_ptr: tl.tensor,
    dresidual_ptr: tl.tensor,
    dresidual_rest_ptr: tl.tensor,
    dx_ptr: tl.tensor,
    dx_rest_ptr: tl.tensor,
    dweight_ptr: tl.tensor,
    dweight_stride_w: tl.tensor,
    dweight_stride_p: tl.tensor,
    rows_count: tl.tensor,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Program (p, w): every P-th tile of ROWS rows of worker w, from the p-th on."""
    program, worker = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, CHUNK)[None, :]
    weight_ptr += worker * weight_stride + tl.broadcast_to(column, (ROWS, CHUNK))

    dweights: tl.tuple = ()
    for _ in tl.static_range(0, C, CHUNK):
        dweights += (tl.zeros((ROWS, CHUNK), tl.float32),)
    for start in range(tl.program_id(0) * ROWS, rows_count, tl.num_programs(0) * ROWS):
        mask = start + row < rows_count
        before = worker * rows_count + start
        offset = before * C + (row * C + column)
        rstd = tl.load(rstd_ptr + before + row, mask=mask, other=0.0).to(tl.float32)
        if row_scale_ptr is not None:
            scale = tl.load(row_scale_ptr + before + row, mask=mask, other=0.0)

        # the part of dx that needs no mean is added up at once, so that all loads come first
        parts: tl.tuple = ()
        normals: tl.tuple = ()
        sums: tl.tuple = ()
        products = tl.zeros((ROWS, CHUNK), tl.float32)
        for c in tl.static_range(0, C, CHUNK):
            dy = tl.load(dnormed_ptr + offset + c, mask=mask, other=0.0).to(tl.float32)
            if row_scale_ptr is not None:
                dy = tl.where(scale == 0, 0.0, dy * scale)
            normal = tl.load(x_ptr + offset + c, mask=mask, other=0.0).to(tl.float32) * rstd
            g = dy * tl.load(weight_ptr + c).to(tl.float32)
            part = g * rstd
            if dresidual_ptr is not None:
                value = tl.load(dresidual_ptr + offset + c, mask=mask, other=0.0)
                rest = tl.load(dresidual_rest_ptr + offset + c, mask=mask, other=0)
                part += stream.joined(value, rest)
            products += g * normal
            sums += (dweights[c // CHUNK] + dy * normal,)
            parts += (part,)
            normals += (normal,)
        dweights = sums
        factor = rstd * (tl.sum(products, 1) / C)[:, None]
        for c in tl.static_range(0, C, CHUNK):
            dx = parts[c // CHUNK] - normals[c // CHUNK] * factor
            place = offset + c
            stream.store(dx_ptr + place, dx_rest_ptr + place, dx, mask)
    dweight_ptr += worker * dweight_stride_w + program * dweight_stride_p + tl.arange(0, CHUNK)
    for c in tl.static_range(0, C, CHUNK):
        tl.store(dweight_ptr + c, tl.sum(dweights[c // CHUNK], 0))


@triton.jit
def _sum_kernel(
    partials_ptr: tl.tensor,
    out_ptr: tl.tensor,
    out_stride_w: tl.tensor,
    out_stride_l: tl.tensor,
    partials_count: tl.tensor,
    ACCUMULATE: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Program (c, l, w): CHUNK columns of one worker's norm l."""
    norm, worker = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    column = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    row = tl.arange(0, ROWS)
    partials_ptr += (worker * tl.num_programs(1) + norm) * partials_count * C
    total = tl.zeros((ROWS, CHUNK), tl.float32)
    for start in range(0, partials_count, ROWS):
        mask = (start + row < partials_count)[:, None]
        offset = (start + row)[:, None] * C + column[None, :]
        total += tl.load(partials_ptr + offset, mask=mask, other=0.0)
    result = tl.sum(total, 0)
    out_ptr += worker * out_stride_w + norm * out_stride_l + column
    if ACCUMULATE:
        result += tl.load(out_ptr)
    tl.store(out_ptr, result)


def _tile(width: int) -> tuple[int, int]:
    """Rows and columns that give a thread four neighbours: 16 bytes of fp32, stored in full."""
    chunk = gcd(width, 128)
    return 4 * _THREADS // chunk, chunk


def _launch_forward(
    x: Stream,
    branch: Tensor | None,
    weight: Tensor,
    eps: float,
    out: Stream | None,
    normed: Tensor,
    rstd: Tensor,
) -> None:
    workers, rows, width = normed.shape
    tile, chunk = _tile(width)
    _forward_kernel[(triton.cdiv(rows, tile), workers)](
        *(*x, branch, weight, weight.stride(0), eps),
        *(out if out is not None and branch is not None else (None, None)),
        *(normed, rstd, rows),
        C=width,
        ROWS=tile,
        CHUNK=chunk,
        num_warps=_THREADS // 32,
    )


def _launch_backward(
    dnormed: Tensor,
    row_scale: Tensor | None,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    dresidual: Stream | None,
    dx: Stream,
    dweight: Tensor,
) -> None:
    workers, rows, width = x.shape
    tile, chunk = _tile(width)
    _backward_kernel[(dweight.shape[1], workers)](
        *(dnormed, row_scale, x, weight, weight.stride(0), rstd),
        *(dresidual or (None, None)),
        *(*dx, dweight, dweight.stride(0), dweight.stride(1), rows),
        C=width,
        ROWS=tile,
        CHUNK=chunk,
        num_warps=_THREADS // 32,
    )


def _launch_sum(partials: Tensor, out: Tensor, accumulate: bool) -> None:
    workers, norms, count, width = partials.shape
    chunk = gcd(width, 32)
    _sum_kernel[(width // chunk, norms, workers)](
        *(partials, out, out.stride(0), out.stride(1), count),
        ACCUMULATE=accumulate,
        C=width,
        ROWS=128,
        CHUNK=chunk,
        num_warps=8,
    )


residual_rms_norm = Operation(_residual_rms_norm, _launch_forward)
rms_norm_backward = Operation(_rms_norm_backward, _launch_backward)
sum_partials = Operation(_sum_partials, _launch_sum)
