"""The matrix products of a linear layer ``y = x · Wᵀ``, for all workers at once.

Forward ``y = x · Wᵀ``, input gradient ``dx = dy · W`` and weight gradient ``dW (+)= dyᵀ · x``. They
are cuBLAS's: batched over workers, and plain for one, which has better kernels. Weights and weight
gradients are views of an arena, whose rows may be any stride apart; weight gradients leave the
tensor cores in the arena's own precision, without a rounding to the compute dtype on the way.
"""

import torch
from torch import Tensor

_aten = torch.ops.aten


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """``[W, M, I]`` and ``[W, O, I]`` give ``[W, M, O]``."""
    return _product(x, weight.transpose(1, 2))


def input_gradient(dy: Tensor, weight: Tensor) -> Tensor:
    """``[W, M, O]`` and ``[W, O, I]`` give ``[W, M, I]``."""
    return _product(dy, weight)


def _product(a: Tensor, b: Tensor) -> Tensor:
    if len(a) == 1:
        return torch.mm(a[0], b[0])[None]
    return torch.bmm(a, b)


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
