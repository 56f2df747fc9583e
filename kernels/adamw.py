"""Clipping, AdamW, decoupled weight decay and mixing of all workers, over the arena ``[W, D]``.

Gradients G are sums over an update's n targets. Worker i is clipped at c by the norm of its own
mean gradient, and its moments stay its own; t counts updates from 1::

    ‖g‖ = sqrt(Σ G²) / n                   s = min(1, c / (‖g‖ + 1e-6)) / n        g = s G
    m ← m − (1-β1) m + (1-β1) g            v ← v − (1-β2) v + (1-β2) g²
    η u = η/(1-β1^t) · m / (sqrt(v) / sqrt(1-β2^t) + ε)

``none``: ``x_i ← (1-ηλ) x_i − η u_i``, and with the mixing matrix M of the local workers

- ``awc``, adapt while combine: ``x_i ← (1-ηλ) Σ_j M_ij x_j − η u_i``,
- ``atc``, adapt then combine: ``x_i ← Σ_j M_ij [(1-ηλ) x_j − η u_j]``.

Decay rates stand as 1-β and ηλ, not as β and 1-ηλ: those have no digits left in fp32, where
1 − 0.999999 is 1.013e-6. For the same reason a weight changes by one small sum, ηλ x + η u.

An update is :data:`gradient_squares`, :data:`prepare`, :data:`adamw`, in this order. All that
changes from one to the next lies on the device, so that a CUDA graph can replay them. With the
first loss or gradient that is not finite ``failed`` is set, and nothing is written after that.
Where workers are spread over ranks, each rank's ``failed`` is to be combined with the others'
between the last two. Sums have a fixed order: equal inputs give equal bits.
"""

# Kernels are typed by Triton, which knows no starred tuples.
# mypy: disable-error-code="no-untyped-def, assignment, misc"
# ruff: noqa: RUF005

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import sqrt
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinyllm.kernels.operation import Operation

Mixing = Literal["none", "awc", "atc"]

NUM_HYPERPARAMETERS = 6
"""Length of a :func:`hyperparameter_row`."""

_ROW = tl.constexpr(NUM_HYPERPARAMETERS)
_WARPS = 4


def hyperparameter_row(
    lr: float, betas: tuple[float, float], eps: float, weight_decay: float, step: int
) -> list[float]:
    """One group's row of ``hyperparameters``: ηλ, 1-β1, 1-β2, ε, η/(1-β1^t), 1/sqrt(1-β2^t).

    Computed in float64, to be rounded once, to the arena's dtype.

    Args:
        lr: η.
        betas: β1 and β2.
        eps: ε.
        weight_decay: λ.
        step: t, 1 for the first update.
    """
    beta1, beta2 = betas
    return [
        lr * weight_decay,
        1 - beta1,
        1 - beta2,
        eps,
        lr / (1 - beta1**step),
        1 / sqrt(1 - beta2**step),
    ]


def block_columns(workers: int) -> int:
    """Columns that one program of :data:`adamw` holds for all workers.

    A thread has four arrays of all workers in flight, 64 values at 4 and at 8 workers: in 16-byte
    accesses up to 4 workers, 8-byte ones up to 8, 4-byte ones beyond.
    """
    return _WARPS * 32 * (4 if workers <= 4 else 2 if workers <= 8 else 1)


def column_blocks(groups: Sequence[tuple[int, int]], workers: int) -> list[tuple[int, int, int]]:
    """Cuts column ranges into what the programs of :data:`adamw` hold.

    Args:
        groups: For each parameter group a half-open range of columns, at multiples of 64.
        workers: Rows W of the arena.

    Returns:
        Start column, stop column and group of each block.

    Raises:
        ValueError: If a range does not start or stop at a multiple of 64.
    """
    if any(bound % 64 for group in groups for bound in group):
        raise ValueError(f"column ranges must start and stop at multiples of 64, got {groups}")
    columns = block_columns(workers)
    return [
        (block, min(block + columns, stop), group)
        for group, (start, stop) in enumerate(groups)
        for block in range(start, stop, columns)
    ]


# --- sums of squares --------------------------------------------------------------------------


def _gradient_squares_reference(gradients: Tensor, partials: Tensor) -> None:
    """Sums the squares of each row's P parts.

    Args:
        gradients: ``[W, D]``.
        partials: ``[W, P]``, written; some are zero where P is more than D / 64.
    """
    row_numel, parts = gradients.shape[1], partials.shape[1]
    share = _share(row_numel, parts)
    bounds = [min(part * share, row_numel) for part in range(parts + 1)]
    for part, (start, stop) in enumerate(pairwise(bounds)):
        partials[:, part] = gradients[:, start:stop].square().sum(1)


def _share(row_numel: int, parts: int) -> int:
    """Columns of one part, a multiple of 64."""
    return triton.cdiv(triton.cdiv(row_numel, parts), 64) * 64


@triton.jit
def _gradient_squares_kernel(gradients, partials, row_numel, share, BLOCK: tl.constexpr):
    part = tl.program_id(0)
    worker = tl.program_id(1)
    stride = tl.multiple_of(row_numel.to(tl.int64), 64)
    start = part * tl.multiple_of(share.to(tl.int64), 64)
    stop = tl.multiple_of(tl.minimum(start + share, stride), 64)
    total = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(start, stop, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        g = tl.load(gradients + worker * stride + columns, mask=columns < stop, other=0.0)
        total += g * g
    tl.store(partials + worker * tl.num_programs(0) + part, tl.sum(total))


def _gradient_squares_launch(gradients: Tensor, partials: Tensor) -> None:
    (workers, row_numel), parts = gradients.shape, partials.shape[1]
    assert row_numel % 64 == 0
    assert gradients.is_contiguous()
    assert partials.is_contiguous()
    # eight 16-byte loads in flight per thread
    _gradient_squares_kernel[(parts, workers)](
        gradients, partials, row_numel, _share(row_numel, parts), BLOCK=4096, num_warps=4
    )


# --- decisions of each worker -----------------------------------------------------------------


def _prepare_reference(
    partials: Tensor,
    nll: Tensor,
    targets: Tensor,
    clip_norm: Tensor,
    failed: Tensor,
    failed_workers: Tensor,
    loss: Tensor,
    norm: Tensor,
    scale: Tensor,
) -> None:
    """Turns an update's sums into means, clipping factors and failures.

    Args:
        partials: ``[W, P]`` of :data:`gradient_squares`.
        nll: ``[W]`` summed loss.
        targets: ``[W]`` int64 number of targets; 0 counts as 1.
        clip_norm: Scalar c, infinite for no clipping.
        failed: Scalar, bool or int32: set where a loss or norm is not finite; never cleared.
        failed_workers: ``[W]``, bool or int32: set for those whose it is, unless ``failed`` was
            set before.
        loss: ``[W]`` mean loss, written.
        norm: ``[W]`` norm of the mean gradient, written.
        scale: ``[W]`` what gradients are to be multiplied by, written.
    """
    count = targets.clamp_min(1)
    loss.copy_(nll / count)
    norm.copy_(partials.sum(1).sqrt() / count)
    scale.copy_((clip_norm / (norm + 1e-6)).clamp_max(1.0) / count)
    bad = ~(loss.isfinite() & norm.isfinite()) & (failed == 0)
    failed_workers.copy_((failed_workers != 0) | bad)
    failed.copy_((failed != 0) | bad.any())


@triton.jit
def _prepare_kernel(
    partials,
    nll,
    targets,
    clip_norm,
    failed,
    failed_workers,
    loss,
    norm,
    scale,
    workers,
    parts,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.arange(0, ROWS)
    inside = row < workers
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in tl.range(0, parts, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        at = row[:, None] * parts + column[None, :]
        sums += tl.load(partials + at, mask=inside[:, None] & (column < parts)[None, :], other=0.0)
    count = tl.maximum(tl.load(targets + row, mask=inside, other=1), 1).to(tl.float32)
    mean = tl.load(nll + row, mask=inside, other=0.0) / count
    length = tl.sqrt(tl.sum(sums, 1)) / count
    tl.store(loss + row, mean, mask=inside)
    tl.store(norm + row, length, mask=inside)
    factor = tl.minimum(tl.load(clip_norm) / (length + 1e-6), 1.0) / count
    tl.store(scale + row, factor, mask=inside)
    finite = (tl.abs(mean) < float("inf")) & (tl.abs(length) < float("inf"))  # false for NaN
    bad = (finite == 0) & (tl.load(failed) == 0)  # rows beyond W are all zero
    tl.store(failed_workers + row, 1, mask=bad)
    tl.store(failed, 1, mask=tl.max(bad.to(tl.int32), 0) != 0)


def _prepare_launch(
    partials: Tensor,
    nll: Tensor,
    targets: Tensor,
    clip_norm: Tensor,
    failed: Tensor,
    failed_workers: Tensor,
    loss: Tensor,
    norm: Tensor,
    scale: Tensor,
) -> None:
    workers, parts = partials.shape
    assert partials.is_contiguous()
    rows = triton.next_power_of_2(workers)
    _prepare_kernel[(1,)](
        partials,
        nll,
        targets,
        clip_norm,
        failed,
        failed_workers,
        loss,
        norm,
        scale,
        workers,
        parts,
        ROWS=rows,
        COLUMNS=max(1, 4096 // rows),  # 32 values of a thread in flight
        num_warps=4,
    )


# --- the update -------------------------------------------------------------------------------


def _adamw_reference(
    weights: Tensor,
    gradients: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    shadow: Tensor | None,
    scale: Tensor,
    failed: Tensor,
    step: Tensor,
    hyperparameters: Tensor,
    matrix: Tensor | None,
    blocks: Tensor,
    spread: Tensor | None,
    mixing: Mixing,
) -> None:
    """Adapts and combines all workers in place; writes nothing where ``failed`` is set.

    Args:
        weights: ``[W, D]``.
        gradients: ``[W, D]`` sums over targets; only read.
        exp_avg: ``[W, D]``, m.
        exp_avg_sq: ``[W, D]``, v.
        shadow: ``[W, D]`` in the compute dtype, becomes the new weights; None for no copy.
        scale: ``[W]`` of :data:`prepare`.
        failed: Scalar, bool or int32.
        step: Scalar int64, updates applied: grows by one.
        hyperparameters: ``[G, 6]``, for each group its :func:`hyperparameter_row`.
        matrix: ``[W, W]``, M; not read without mixing.
        blocks: ``[num_blocks, 3]`` int64 of :func:`column_blocks` for W workers. Columns outside
            are left alone.
        spread: ``[num_blocks, W + 1]``, written unless None: sums over each block's columns of
            the new ``(x_i − x̄)²`` of each worker, then of ``x̄²``.
        mixing: ``none``, ``awc`` or ``atc``.
    """
    if failed.item():
        return
    for group, (start, stop) in _group_columns(blocks):
        decay, rate1, rate2, eps, step_size, correction = hyperparameters[group].unbind()
        x, g, m, v = (arena[:, start:stop] for arena in (weights, gradients, exp_avg, exp_avg_sq))
        g = g * scale[:, None]
        m += rate1 * g - rate1 * m
        v += rate2 * g * g - rate2 * v
        change = step_size * m / (v.sqrt() * correction + eps)
        if mixing == "awc":
            x.copy_(_mixed(x, matrix))
        x -= decay * x + change
        if mixing == "atc":
            x.copy_(_mixed(x, matrix))
        if shadow is not None:
            shadow[:, start:stop] = x
    if spread is not None:
        mean = weights.mean(0, keepdim=True)
        squares = torch.cat([weights - mean, mean]).square()
        for block, (start, stop, _) in enumerate(blocks.tolist()):
            spread[block] = squares[:, start:stop].sum(1)
    step += 1


def _group_columns(blocks: Tensor) -> Iterator[tuple[int, tuple[int, int]]]:
    """Each group in ``blocks`` with the columns it spans."""
    for group in blocks[:, 2].unique().tolist():
        own = blocks[blocks[:, 2] == group]
        yield group, (int(own[:, 0].min()), int(own[:, 1].max()))


def _mixed(rows: Tensor, matrix: Tensor | None) -> Tensor:
    """Σ_j M_ij x_j, added in the order of j; elementwise, since products may round to TF32."""
    assert matrix is not None
    return sum(
        (column[:, None] * row for column, row in zip(matrix.unbind(1), rows, strict=True)),
        start=torch.zeros_like(rows),
    )


@triton.jit
def _mix(rows, weights, WORKERS: tl.constexpr):
    """Σ_j w_j x_j; in one order for all workers, so that those who mix alike agree in bits."""
    mixed = tl.load(weights) * rows[0]
    for j in tl.static_range(1, WORKERS):
        mixed += tl.load(weights + j) * rows[j]
    return mixed


@triton.jit
def _adamw_kernel(
    weights,
    gradients,
    exp_avg,
    exp_avg_sq,
    shadow,
    scale,
    failed,
    step,
    hyperparameters,
    matrix,
    blocks,
    spread,
    row_numel,
    WORKERS: tl.constexpr,
    MIXING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    start = tl.multiple_of(tl.load(blocks + block * 3), 64)
    stop = tl.load(blocks + block * 3 + 1)
    group = tl.load(blocks + block * 3 + 2)
    # once an update failed blocks are empty; a branch would wait for the flag before it loads
    writes = tl.load(failed) == 0
    stop = tl.multiple_of(tl.where(writes, stop, start), 64)
    columns = start + tl.arange(0, BLOCK)
    inside = columns < stop
    stride = tl.multiple_of(row_numel.to(tl.int64), 64)

    # all loads come before the first store, behind which none could move
    x = ()
    g = ()
    m = ()
    v = ()
    for i in tl.static_range(WORKERS):
        at = i * stride + columns
        x = x + (tl.load(weights + at, mask=inside, other=0.0),)
        g = g + (tl.load(gradients + at, mask=inside, other=0.0),)
        m = m + (tl.load(exp_avg + at, mask=inside, other=0.0),)
        v = v + (tl.load(exp_avg_sq + at, mask=inside, other=0.0),)
    rates = hyperparameters + group * _ROW
    decay = tl.load(rates)
    rate1 = tl.load(rates + 1)
    rate2 = tl.load(rates + 2)
    eps = tl.load(rates + 3)
    step_size = tl.load(rates + 4)
    correction = tl.load(rates + 5)

    rows = ()
    changes = ()
    for i in tl.static_range(WORKERS):
        at = i * stride + columns
        gradient = g[i] * tl.load(scale + i)
        first = m[i] - rate1 * m[i] + rate1 * gradient
        second = v[i] - rate2 * v[i] + rate2 * gradient * gradient
        tl.store(exp_avg + at, first, mask=inside)
        tl.store(exp_avg_sq + at, second, mask=inside)
        # rounded to nearest: the approximate forms would add up over the updates
        change = tl.div_rn(step_size * first, tl.sqrt_rn(second) * correction + eps)
        rows = rows + (x[i] if MIXING == "awc" else x[i] - (decay * x[i] + change),)
        changes = changes + (change,)

    # the stores keep the next row's mixing weights from being loaded, and held, before them
    combined = ()
    for i in tl.static_range(WORKERS):
        at = i * stride + columns
        row = rows[i] if MIXING == "none" else _mix(rows, matrix + i * WORKERS, WORKERS)
        if MIXING == "awc":
            row -= decay * row + changes[i]
        tl.store(weights + at, row, mask=inside)
        if shadow is not None:
            tl.store(shadow + at, row.to(shadow.dtype.element_ty), mask=inside)
        combined = combined + (row,)

    if spread is not None:
        mean = combined[0]
        for i in tl.static_range(1, WORKERS):
            mean += combined[i]
        mean = mean * (1.0 / WORKERS)
        sums = spread + block.to(tl.int64) * (WORKERS + 1)
        for i in tl.static_range(WORKERS):
            difference = combined[i] - mean
            tl.store(sums + i, tl.sum(difference * difference), mask=writes)
        tl.store(sums + WORKERS, tl.sum(mean * mean), mask=writes)
    tl.store(step, tl.load(step) + 1, mask=writes & (block == 0))


def _adamw_launch(
    weights: Tensor,
    gradients: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    shadow: Tensor | None,
    scale: Tensor,
    failed: Tensor,
    step: Tensor,
    hyperparameters: Tensor,
    matrix: Tensor | None,
    blocks: Tensor,
    spread: Tensor | None,
    mixing: Mixing,
) -> None:
    workers, row_numel = weights.shape
    arenas = (weights, gradients, exp_avg, exp_avg_sq, shadow)
    assert all(arena is None or arena.is_contiguous() for arena in arenas)
    assert all(t is None or t.is_contiguous() for t in (hyperparameters, matrix, blocks, spread))
    assert row_numel % 64 == 0
    assert hyperparameters.shape[1] == NUM_HYPERPARAMETERS
    assert blocks.dtype == torch.int64
    _adamw_kernel[(len(blocks),)](
        weights,
        gradients,
        exp_avg,
        exp_avg_sq,
        shadow,
        scale,
        failed,
        step,
        hyperparameters,
        matrix,
        blocks,
        spread,
        row_numel,
        WORKERS=workers,
        MIXING=mixing,
        BLOCK=block_columns(workers),
        num_warps=_WARPS,
    )


def spread_norms(spread: Tensor) -> tuple[Tensor, Tensor]:
    """Norms from :data:`adamw`'s ``spread`` ``[num_blocks, W + 1]``.

    Returns:
        ``‖x_i − x̄‖`` of each worker ``[W]``, and ``‖x̄‖`` ``[1]``.
    """
    norms = spread.sum(0).sqrt()
    return norms[:-1], norms[-1:]


gradient_squares = Operation(_gradient_squares_reference, _gradient_squares_launch)
prepare = Operation(_prepare_reference, _prepare_launch)
adamw = Operation(_adamw_reference, _adamw_launch)
