"""SwiGLU, the gated activation of the feed-forward network, and its backward.

With gate g and up-projection u, σ(g) = 1/(1 + exp(−g)) and silu(g) = g·σ(g):
    a = silu(g)·u,   dg = da·u·σ(g)·(1 + g·(1 − σ(g))),   du = da·silu(g).
Shazeer, "GLU variants improve Transformer" (2020).

Rows of F are cut into segments, powers of two that divide F, so that no lane idles on padding.
"""

from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinyllm.kernels import swiglu_hopper
from tinyllm.kernels.gemm import input_gradient, linear
from tinyllm.kernels.operation import Operation

_THREADS = 128


def _halves(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Gate and up, in fp32 at least."""
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, dim=-1)
    return gate, up


def _swiglu(gate_up: Tensor, activated: Tensor) -> None:
    """The activation.

    Args:
        gate_up: ``[W, M, 2·F]`` compute dtype, gates first.
        activated: ``[W, M, F]`` compute dtype, takes silu(gate)·up.
    """
    gate, up = _halves(gate_up)
    activated.copy_(gate * gate.sigmoid() * up)


def _swiglu_linear(x: Tensor, weight: Tensor, gate_up: Tensor, activated: Tensor) -> None:
    """Gate and up-projection ``x · Wᵀ``, and the activation.

    Args:
        x: ``[W, M, C]`` compute dtype.
        weight: ``[W, 2·F, C]`` compute dtype, gates first, with any stride between workers.
        gate_up: ``[W, M, 2·F]`` compute dtype, takes both.
        activated: ``[W, M, F]`` compute dtype, takes silu(gate)·up.
    """
    linear(x, weight, gate_up)
    _swiglu(gate_up, activated)


def _swiglu_backward(dactivated: Tensor, gate_up: Tensor, dgate_up: Tensor) -> None:
    """Gradients of gate and up.

    Args:
        dactivated: ``[W, M, F]`` compute dtype.
        gate_up: ``[W, M, 2·F]`` compute dtype, gates first.
        dgate_up: ``[W, M, 2·F]`` compute dtype, takes the gradients; may be ``gate_up``.
    """
    gate, up = _halves(gate_up)
    sigmoid, dactivated = gate.sigmoid(), dactivated.to(gate.dtype)
    dgate = dactivated * up * sigmoid * (1 + gate * (1 - sigmoid))
    dgate_up.copy_(torch.cat((dgate, dactivated * gate * sigmoid), dim=-1))


def _swiglu_input_gradient(dy: Tensor, weight: Tensor, gate_up: Tensor, dgate_up: Tensor) -> None:
    """Gradients of gate and up, of those of a linear layer's results after the activation.

    Args:
        dy: ``[W, M, C]`` compute dtype.
        weight: ``[W, C, F]`` compute dtype, with any stride between workers.
        gate_up: ``[W, M, 2·F]`` compute dtype, gates first.
        dgate_up: ``[W, M, 2·F]`` compute dtype, takes the gradients; may be ``gate_up``.
    """
    _swiglu_backward(input_gradient(dy, weight), gate_up, dgate_up)


@triton.jit
def _forward_kernel(
    gate_up_ptr: tl.tensor,
    activated_ptr: tl.tensor,
    segments_count: tl.tensor,
    F: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SEGMENT: tl.constexpr,
) -> None:
    """Program i: SEGMENTS segments of SEGMENT columns."""
    segment = tl.program_id(0) * SEGMENTS + tl.arange(0, SEGMENTS)
    mask = (segment < segments_count)[:, None]
    column = (segment % (F // SEGMENT) * SEGMENT)[:, None] + tl.arange(0, SEGMENT)[None, :]
    row = (segment // (F // SEGMENT)).to(tl.int64)[:, None]
    gate_up_ptr += row * (2 * F) + column
    gate = tl.load(gate_up_ptr, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + F, mask=mask, other=0.0).to(tl.float32)
    tl.store(activated_ptr + row * F + column, gate * tl.sigmoid(gate) * up, mask=mask)


@triton.jit
def _backward_kernel(
    dactivated_ptr: tl.tensor,
    gate_up_ptr: tl.tensor,
    dgate_up_ptr: tl.tensor,
    segments_count: tl.tensor,
    F: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SEGMENT: tl.constexpr,
) -> None:
    """Program i: SEGMENTS segments of SEGMENT columns."""
    segment = tl.program_id(0) * SEGMENTS + tl.arange(0, SEGMENTS)
    mask = (segment < segments_count)[:, None]
    column = (segment % (F // SEGMENT) * SEGMENT)[:, None] + tl.arange(0, SEGMENT)[None, :]
    row = (segment // (F // SEGMENT)).to(tl.int64)[:, None]
    offset = row * (2 * F) + column
    dactivated = tl.load(dactivated_ptr + row * F + column, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_up_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + offset + F, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    dgate = dactivated * up * (sigmoid + silu * (1 - sigmoid))
    tl.store(dgate_up_ptr + offset, dgate, mask=mask)
    tl.store(dgate_up_ptr + offset + F, dactivated * silu, mask=mask)


def _tile(elements: int, width: int) -> tuple[int, int, int]:
    """Segments in all, segments of a program (16 elements of a thread), columns of a segment."""
    segment = gcd(width, 128)
    return elements // segment, 16 * _THREADS // segment, segment


def _launch_forward(gate_up: Tensor, activated: Tensor) -> None:
    width = activated.shape[-1]
    count, tile, segment = _tile(activated.numel(), width)
    _forward_kernel[(triton.cdiv(count, tile),)](
        *(gate_up, activated, count),
        F=width,
        SEGMENTS=tile,
        SEGMENT=segment,
        num_warps=_THREADS // 32,
    )


def _launch_linear(x: Tensor, weight: Tensor, gate_up: Tensor, activated: Tensor) -> None:
    if swiglu_hopper.pays(x, activated.shape[2]):
        swiglu_hopper.swiglu(x, weight, gate_up, activated)
    else:
        linear(x, weight, gate_up)
        _launch_forward(gate_up, activated)


def _launch_backward(dactivated: Tensor, gate_up: Tensor, dgate_up: Tensor) -> None:
    width = dactivated.shape[-1]
    count, tile, segment = _tile(dactivated.numel(), width)
    _backward_kernel[(triton.cdiv(count, tile),)](
        *(dactivated, gate_up, dgate_up, count),
        F=width,
        SEGMENTS=tile,
        SEGMENT=segment,
        num_warps=_THREADS // 32,
    )


def _launch_input_gradient(dy: Tensor, weight: Tensor, gate_up: Tensor, dgate_up: Tensor) -> None:
    if swiglu_hopper.backward_pays(dy, weight.shape[2]):
        swiglu_hopper.swiglu_backward(dy, weight, gate_up, dgate_up)
    else:
        _launch_backward(input_gradient(dy, weight), gate_up, dgate_up)


swiglu = Operation(_swiglu, _launch_forward)
swiglu_linear = Operation(_swiglu_linear, _launch_linear)
swiglu_backward = Operation(_swiglu_backward, _launch_backward)
swiglu_input_gradient = Operation(_swiglu_input_gradient, _launch_input_gradient)
