"""Forward and backward of W Llamas as a list of kernel and matrix-product calls, without autograd.

The residual stream and its gradient are fp32; what lies between two matrix products is computed in
fp32 and rounded once, to the compute dtype of the matrices. In float64 the same list is exact.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tinyllm.kernels import attention, head, norm
from tinyllm.kernels.attention import Attended
from tinyllm.kernels.embedding import embed, embed_backward
from tinyllm.kernels.gemm import input_gradient, linear, weight_gradient
from tinyllm.kernels.rope import rotate, rotate_back
from tinyllm.kernels.swiglu import swiglu, swiglu_backward

EMBEDDING = "embed_tokens"
FINAL_NORM = "norm"


@dataclass(frozen=True)
class LlamaTensors:
    """The parameters of W Llamas, and what does not change.

    Attributes:
        layers: Number of layers.
        heads: H.
        norm_eps: ε of every RMSNorm.
        weights: For each module's stock name (qkv and gate_up fused) ``[W, …]``: matrices in the
            compute dtype, norm scales in fp32.
        gradients: The same names, ``[W, …]`` fp32.
        embedding: ``[W, V, C]`` fp32, from which tokens are looked up.
        cos, sin: Of rotary positions, ``[≥T, K/2]`` fp32.
    """

    layers: int
    heads: int
    norm_eps: float
    weights: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    embedding: Tensor
    cos: Tensor
    sin: Tensor

    @property
    def norms(self) -> list[str]:
        """Names of all norms, in forward order."""
        kinds = ("input_layernorm", "post_attention_layernorm")
        return [f"layers.{i}.{kind}" for i in range(self.layers) for kind in kinds] + [FINAL_NORM]


class Totals(NamedTuple):
    """What a step reports.

    Attributes:
        nll: ``[W]`` fp32, summed loss.
        targets: ``[W]`` int64, number of targets behind it.
        loss: ``[1]`` fp32, mean loss over all of them.
    """

    nll: Tensor
    targets: Tensor
    loss: Tensor


class _Normed(NamedTuple):
    """A norm's input, output and 1/rms."""

    x: Tensor
    out: Tensor
    rstd: Tensor


class _Layer(NamedTuple):
    """What the backward pass of a layer needs from its forward pass."""

    before_attention: _Normed
    qkv: Tensor
    attended: Attended
    before_feed_forward: _Normed
    gate_up: Tensor
    activated: Tensor


class LlamaStep:
    """One forward and backward over micro-batches of one shape.

    Args:
        llama: The models.
        rows: ``[W, B, T+1]`` int64, read anew by every call.
        totals: Written, or added to.
        accumulate: Whether gradients and totals are added to what is there.
    """

    def __init__(self, llama: LlamaTensors, rows: Tensor, totals: Totals, accumulate: bool) -> None:
        self._llama = llama
        self._rows = rows
        self._totals = totals
        self._accumulate = accumulate
        self._workers, sequences, row = rows.shape
        self._length = row - 1
        self._tokens = sequences * self._length
        self._low = llama.weights[EMBEDDING].dtype
        self._partials = norm.partials(self._workers, self._tokens)
        self._norm_gradients = _rows_of([llama.gradients[name] for name in llama.norms])

    def __call__(self) -> None:
        """Runs both passes."""
        layers, x = self._forward()
        norms = self._llama.norms
        dweights = x.x.new_empty(self._workers, len(norms), self._partials, x.x.shape[2])
        dscales = dict(zip(norms, dweights.unbind(1), strict=True))
        dx, dx_low = self._head(x, dscales)
        for index in reversed(range(self._llama.layers)):
            dx, dx_low = self._layer_backward(index, layers.pop(), dx, dx_low, dscales)
        embed_backward(self._rows, dx, self._llama.gradients[EMBEDDING])
        for start, gradients in self._norm_gradients:
            part = dweights[:, start : start + gradients.shape[1]].contiguous()
            norm.sum_partials(part, gradients, self._accumulate)

    # --- forward ----------------------------------------------------------------------------------

    def _forward(self) -> tuple[list[_Layer], _Normed]:
        weights, heads, length = self._llama.weights, self._llama.heads, self._length
        embedding = self._llama.embedding
        x = embedding.new_empty(self._workers, self._tokens, embedding.shape[2])
        embed(self._rows, embedding, x)
        branch: Tensor | None = None
        layers: list[_Layer] = []
        for index in range(self._llama.layers):
            name = f"layers.{index}"
            before = self._norm(x, branch, f"{name}.input_layernorm")
            qkv = linear(before.out, weights[f"{name}.self_attn.qkv_proj"])
            rotate(qkv, self._llama.cos, self._llama.sin, heads, length)
            attended = attention.attend(qkv, heads, length)
            branch = linear(self._merged(attended), weights[f"{name}.self_attn.o_proj"])
            middle = self._norm(before.x, branch, f"{name}.post_attention_layernorm")
            gate_up = linear(middle.out, weights[f"{name}.mlp.gate_up_proj"])
            activated = gate_up.new_empty(*gate_up.shape[:2], gate_up.shape[2] // 2)
            swiglu(gate_up, activated)
            branch = linear(activated, weights[f"{name}.mlp.down_proj"])
            layers.append(_Layer(before, qkv, attended, middle, gate_up, activated))
            x = middle.x
        return layers, self._norm(x, branch, FINAL_NORM)

    def _norm(self, x: Tensor, branch: Tensor | None, name: str) -> _Normed:
        """The norm of the residual stream after ``branch`` is added to it."""
        total = x if branch is None else torch.empty_like(x)
        out = torch.empty_like(x, dtype=self._low)
        rstd = x.new_empty(x.shape[:2])
        weight = self._llama.weights[name]
        norm.residual_rms_norm(x, branch, weight, self._llama.norm_eps, total, out, rstd)
        return _Normed(total, out, rstd)

    def _merged(self, attended: Attended) -> Tensor:
        """``[W·B, H, T, K]`` as ``[W, B·T, C]``."""
        return attended.out.transpose(1, 2).reshape(self._workers, self._tokens, -1)

    # --- head -----------------------------------------------------------------------------------

    def _head(self, x: _Normed, dscales: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """The loss, and the gradient of the residual stream before the last norm."""
        embedding, tokens = self._llama.weights[EMBEDDING], self._tokens
        vocab = embedding.shape[1]
        exps = x.out.new_empty(self._workers, tokens, head.padded(vocab))
        sums = x.x.new_empty(self._workers, head.tiles(vocab), tokens)
        head.exponentials(x.out, embedding, exps, sums)
        inverse, scaled = torch.empty_like(x.rstd), torch.empty_like(x.out)
        tally = x.x.new_empty(self._workers, -(-tokens // head.FINISHED_ROWS), 2)
        head.finish(x.out, embedding, self._rows, exps, sums, inverse, scaled, tally)
        head.total(tally, *self._totals, self._accumulate)
        dlogits = exps[:, :, :vocab]  # but for each row's factor `inverse`
        self._weight_gradient(EMBEDDING, dlogits, scaled)
        dnormed = input_gradient(dlogits, embedding)
        return self._norm_backward(FINAL_NORM, dnormed, x, None, dscales, row_scale=inverse)

    # --- backward ---------------------------------------------------------------------------------

    def _layer_backward(
        self,
        index: int,
        layer: _Layer,
        dx: Tensor,
        dx_low: Tensor | None,
        dscales: Mapping[str, Tensor],
    ) -> tuple[Tensor, Tensor | None]:
        """Gradients of a layer's parameters, and of the residual stream before it."""
        name, heads, length = f"layers.{index}", self._llama.heads, self._length
        assert dx_low is not None
        dactivated = self._linear_backward(f"{name}.mlp.down_proj", dx_low, layer.activated)
        dgate_up = layer.gate_up
        swiglu_backward(dactivated, layer.gate_up, dgate_up)
        middle = layer.before_feed_forward
        dnormed = self._linear_backward(f"{name}.mlp.gate_up_proj", dgate_up, middle.out)
        dx, dx_low = self._norm_backward(
            f"{name}.post_attention_layernorm", dnormed, middle, dx, dscales
        )
        assert dx_low is not None
        attended = self._merged(layer.attended)
        dattended = self._linear_backward(f"{name}.self_attn.o_proj", dx_low, attended)
        dq, dk, dv = attention.attend_backward(dattended, layer.qkv, layer.attended, heads, length)
        dqkv = layer.qkv
        rotate_back(dq, dk, dv, self._llama.cos, self._llama.sin, dqkv)
        before = layer.before_attention
        dnormed = self._linear_backward(f"{name}.self_attn.qkv_proj", dqkv, before.out)
        return self._norm_backward(
            f"{name}.input_layernorm", dnormed, before, dx, dscales, low=index > 0
        )

    def _linear_backward(self, name: str, dy: Tensor, x: Tensor) -> Tensor:
        self._weight_gradient(name, dy, x)
        return input_gradient(dy, self._llama.weights[name])

    def _weight_gradient(self, name: str, dy: Tensor, x: Tensor) -> None:
        weight_gradient(dy, x, self._llama.gradients[name], self._accumulate)

    def _norm_backward(
        self,
        name: str,
        dnormed: Tensor,
        forward: _Normed,
        dresidual: Tensor | None,
        dscales: Mapping[str, Tensor],
        *,
        row_scale: Tensor | None = None,
        low: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """Gradient of the residual stream, and with ``low`` also in the compute dtype."""
        dx = torch.empty_like(forward.x) if dresidual is None else dresidual
        dx_low = torch.empty_like(dnormed) if low else None
        norm.rms_norm_backward(
            *(dnormed, row_scale, forward.x, self._llama.weights[name], forward.rstd),
            *(dresidual, dx, dx_low, dscales[name]),
        )
        return dx, dx_low


def _rows_of(tensors: list[Tensor]) -> list[tuple[int, Tensor]]:
    """Views ``[W, C]`` as few views ``[W, L, C]``, each with the number of the first one in it.

    They lie one behind the other in an arena, unless an optimizer's groups are unusual.
    """
    first, (workers, width) = tensors[0], tensors[0].shape
    starts = [tensor.storage_offset() - first.storage_offset() for tensor in tensors]
    if starts == [i * width for i in range(len(tensors))]:
        size, stride = (workers, len(tensors), width), (first.stride(0), width, 1)
        return [(0, first.as_strided(size, stride))]
    return [(i, tensor[:, None]) for i, tensor in enumerate(tensors)]
