"""The matrix products of a linear layer ``y = x · Wᵀ``, for all workers at once.

Forward ``y = x · Wᵀ``, input gradient ``dx = dy · W`` and weight gradient ``dW (+)= dyᵀ · x``. They
are cuBLAS's: batched over workers, and plain for one, which has better kernels. Weights and weight
gradients are views of an arena, whose rows may be any stride apart; weight gradients leave the
tensor cores in the arena's own precision, without a rounding to the compute dtype on the way.

The weight gradient of one small layer has too few tiles of output to fill a GPU. Nobody waits for
it, so :func:`weight_gradients` makes one product of all layers'.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tinyllm.kernels.views import at_even_distances

_aten = torch.ops.aten

_LONG = 65_536
"""Tokens of a worker beyond which a layer's weight gradient is faster alone: cuBLAS then splits the
sum over tokens between programs, which it does not do in a batch."""


def linear(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """``[W, M, I]`` and ``[W, O, I]`` give ``[W, M, O]``, in ``out`` if it is given."""
    return _product(x, weight.transpose(1, 2), out)


def input_gradient(dy: Tensor, weight: Tensor) -> Tensor:
    """``[W, M, O]`` and ``[W, O, I]`` give ``[W, M, I]``."""
    return _product(dy, weight, None)


def _product(a: Tensor, b: Tensor, out: Tensor | None) -> Tensor:
    if len(a) == 1:
        return torch.mm(a[0], b[0], out=None if out is None else out[0])[None]
    return torch.bmm(a, b, out=out)


def weight_gradients(
    dys: Tensor, xs: Tensor | list[Tensor], outs: Sequence[Tensor], accumulate: bool
) -> None:
    """:func:`weight_gradient` of L layers.

    They are W products of L layers each where that is faster than L products of W workers each, if
    ``xs`` is one tensor and ``outs`` lie at even distances, as they do in an arena.

    Args:
        dys: ``[L, W, M, O]``.
        xs: ``[L, W, M, I]``, or a list of L tensors.
        outs: For each layer ``[W, O, I]``, of the same or a wider dtype.
        accumulate: Adds to what ``outs`` hold.
    """
    layers, workers, tokens, _ = dys.shape
    together = at_even_distances(outs) if workers < layers and tokens <= _LONG else None
    if together is not None and isinstance(xs, Tensor):
        for worker, out in enumerate(together):
            weight_gradient(dys[:, worker], xs[:, worker], out, accumulate)
        return
    for dy, x, out in zip(dys, xs, outs, strict=True):
        weight_gradient(dy, x, out, accumulate)


def weight_gradient(dy: Tensor, x: Tensor, out: Tensor, accumulate: bool) -> None:
    """Writes or adds ``dyᵀ · x`` to ``out``.

    Args:
        dy: ``[W, M, O]``.
        x: ``[W, M, I]``.
        out: ``[W, O, I]``, of the same or a wider dtype.
        accumulate: Adds to what ``out`` holds.
    """
    a, b = dy.transpose(1, 2), x
    if len(a) == 1:
        a, b, out = a[0], b[0], out[0]
    wider = out.dtype != a.dtype
    if accumulate:
        add = torch.addmm if out.ndim == 2 else torch.baddbmm
        if wider:
            into = _aten.addmm.dtype_out if out.ndim == 2 else _aten.baddbmm.dtype_out
            into(out, a, b, out.dtype, out=out)
        else:
            add(out, a, b, out=out)
    elif wider:
        (_aten.mm.dtype_out if out.ndim == 2 else _aten.bmm.dtype_out)(a, b, out.dtype, out=out)
    else:
        torch.matmul(a, b, out=out)
