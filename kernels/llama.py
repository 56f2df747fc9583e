"""Forward and backward of W Llamas as a list of kernel and matrix-product calls, without autograd.

The residual stream and its gradient hold 16 bits of fp32 numbers (:mod:`tinyllm.kernels.stream`);
what lies between two matrix products is computed in fp32 and rounded once, to the compute dtype of
the matrices. In float64 the same list is exact.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tinyllm.kernels import attention, head, norm
from tinyllm.kernels.attention import Attended
from tinyllm.kernels.embedding import embed, embed_backward
from tinyllm.kernels.gemm import input_gradient, linear, weight_gradient, weight_gradients
from tinyllm.kernels.rope import rotated_linear
from tinyllm.kernels.stream import Stream
from tinyllm.kernels.swiglu import swiglu_input_gradient, swiglu_linear
from tinyllm.kernels.views import at_even_distances

EMBEDDING = "embed_tokens"
FINAL_NORM = "norm"

_FEW_TOKENS = 8_192
"""Up to which copying what one worker attended to, so that it is one tensor for all layers, takes
less time than it saves in the weight gradients."""


@dataclass(frozen=True)
class LlamaTensors:
    """The parameters of W Llamas, and what does not change.

    Attributes:
        layers: Number of layers.
        heads: H.
        norm_eps: ε of every RMSNorm.
        weights: For each module's stock name (qkv and gate_up fused) ``[W, …]``: matrices in the
            compute dtype, norm scales in fp32.
        gradients: The same names, ``[W, …]`` fp32; empty where none are wanted.
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
    """A norm's input, rounded, its output and 1/rms."""

    x: Tensor
    out: Tensor
    rstd: Tensor


class _Layer(NamedTuple):
    """What the backward pass of a layer needs from its forward pass."""

    before_attention: _Normed
    attended: Attended
    before_feed_forward: _Normed


class _Factors(NamedTuple):
    """What the matrix products of all layers take and give, ``[L, W, M, ·]`` in the compute dtype.

    Weight gradients are products of them; so in the backward pass gradients of ``gate_up`` take its
    places, and those of ``qkv`` the places of the next layer, of which ``qkv`` has one more.
    """

    normed: Tensor  # before attention
    qkv: Tensor
    middle: Tensor  # normalized, before the feed-forward part
    gate_up: Tensor
    activated: Tensor


class _Branches(NamedTuple):
    """Gradients of what a layer's two parts add to the residual stream, as :class:`_Factors`."""

    attention: Tensor
    feed_forward: Tensor


class LlamaLosses:
    """One forward pass over batches of one shape, for their losses.

    Args:
        llama: The models.
        rows: ``[W, B, T+1]`` int64, read anew by every call.
        totals: Written, or added to.
        accumulate: Whether totals are added to what is there.
    """

    def __init__(self, llama: LlamaTensors, rows: Tensor, totals: Totals, accumulate: bool) -> None:
        self._llama = llama
        self._rows = rows
        self._totals = totals
        self._accumulate = accumulate
        self._workers, sequences, row = rows.shape
        self._length = row - 1
        self._tokens = sequences * self._length
        self._embedding = llama.weights[EMBEDDING]

    def __call__(self) -> None:
        """Runs the pass."""
        _, last = self._forward(self._new_factors(keep=False))
        self._loss(last)

    def _new_factors(self, keep: bool) -> _Factors:
        """Room for those of all layers, or for one that each of them takes over from the last."""
        width, layers = self._embedding.shape[2], self._llama.layers
        both = self._llama.weights["layers.0.mlp.gate_up_proj"].shape[1]

        def room(size: int, more: int = 0) -> Tensor:
            shape = (layers + more if keep else 1, self._workers, self._tokens, size)
            made = self._embedding.new_empty(shape)
            return made if keep else made.expand(layers, -1, -1, -1)

        return _Factors(
            room(width), room(3 * width, more=1), room(width), room(both), room(both // 2)
        )

    # --- forward ----------------------------------------------------------------------------------

    def _forward(self, factors: _Factors) -> tuple[list[_Layer], _Normed]:
        weights, heads, length = self._llama.weights, self._llama.heads, self._length
        cos, sin = self._llama.cos, self._llama.sin
        x = Stream.empty(factors.normed[0])
        embed(self._rows, self._llama.embedding, x)
        branch: Tensor | None = None
        layers: list[_Layer] = []
        for index in range(self._llama.layers):
            name = f"layers.{index}"
            qkv, gate_up = factors.qkv[index], factors.gate_up[index]
            out = factors.normed[index]
            x, before = self._norm(x, branch, f"{name}.input_layernorm", out)
            weight = weights[f"{name}.self_attn.qkv_proj"]
            rotated_linear(before.out, weight, cos, sin, heads, length, qkv)
            attended = attention.attend(qkv, heads, length)
            branch = linear(self._merged(attended), weights[f"{name}.self_attn.o_proj"])
            out = factors.middle[index]
            x, middle = self._norm(x, branch, f"{name}.post_attention_layernorm", out)
            activated = factors.activated[index]
            swiglu_linear(middle.out, weights[f"{name}.mlp.gate_up_proj"], gate_up, activated)
            branch = linear(activated, weights[f"{name}.mlp.down_proj"])
            layers.append(_Layer(before, attended, middle))
        _, last = self._norm(x, branch, FINAL_NORM, torch.empty_like(x.value))
        return layers, last

    def _norm(
        self, x: Stream, branch: Tensor | None, name: str, out: Tensor
    ) -> tuple[Stream, _Normed]:
        """The residual stream after ``branch`` is added to it, and its norm."""
        total = x if branch is None else x.beside(torch.empty_like(x.value))
        weight = self._llama.weights[name]
        rstd = weight.new_empty(out.shape[:2])
        norm.residual_rms_norm(x, branch, weight, self._llama.norm_eps, total, out, rstd)
        return total, _Normed(total.value, out, rstd)

    def _merged(self, attended: Attended) -> Tensor:
        """``[W·B, H, T, K]`` as ``[W, B·T, C]``."""
        return attended.out.transpose(1, 2).reshape(self._workers, self._tokens, -1)

    # --- head -----------------------------------------------------------------------------------

    def _loss(self, x: _Normed) -> tuple[Tensor, Tensor, Tensor]:
        """The logits' gradients but for a factor of each row, x times this factor, and itself."""
        embedding, tokens = self._embedding, self._tokens
        vocab = embedding.shape[1]
        exps = x.out.new_empty(self._workers, tokens, head.padded(vocab))
        sums = x.rstd.new_empty(self._workers, head.tiles(*embedding.shape[1:]), tokens)
        head.exponentials(x.out, embedding, exps, sums)
        inverse, scaled = torch.empty_like(x.rstd), torch.empty_like(x.out)
        tally = x.rstd.new_empty(self._workers, -(-tokens // head.FINISHED_ROWS), 2)
        head.finish(x.out, embedding, self._rows, exps, sums, inverse, scaled, tally)
        head.total(tally, *self._totals, self._accumulate)
        return exps[:, :, :vocab], scaled, inverse


class LlamaStep(LlamaLosses):
    """One forward and backward pass over micro-batches of one shape.

    Args:
        llama: The models.
        rows: ``[W, B, T+1]`` int64, read anew by every call.
        totals: Written, or added to.
        accumulate: Whether gradients and totals are added to what is there.
    """

    def __init__(self, llama: LlamaTensors, rows: Tensor, totals: Totals, accumulate: bool) -> None:
        super().__init__(llama, rows, totals, accumulate)
        self._partials = norm.partials(self._workers, self._tokens)
        self._norm_gradients = _rows_of([llama.gradients[name] for name in llama.norms])

    def __call__(self) -> None:
        """Runs both passes."""
        factors = self._new_factors(keep=True)
        layers, last = self._forward(factors)
        dnormed, row_scale = self._head(last)  # where the most memory is held
        self._backward(layers, last, factors, dnormed, row_scale)

    def _head(self, x: _Normed) -> tuple[Tensor, Tensor]:
        """The gradient of the normalized ``x`` but for a factor of each row."""
        dlogits, scaled, inverse = self._loss(x)
        weight_gradient(dlogits, scaled, self._llama.gradients[EMBEDDING], self._accumulate)
        return input_gradient(dlogits, self._embedding), inverse

    def _backward(
        self,
        layers: list[_Layer],
        last: _Normed,
        factors: _Factors,
        dnormed: Tensor,
        row_scale: Tensor,
    ) -> None:
        norms = self._llama.norms
        width = self._embedding.shape[2]
        dweights = last.rstd.new_empty(self._workers, len(norms), self._partials, width)
        dscales = dict(zip(norms, dweights.unbind(1), strict=True))
        branches = _Branches(*self._embedding.new_empty(2, *factors.normed.shape))
        dx = Stream.empty(last.x).beside(branches.feed_forward[-1])
        norm.rms_norm_backward(
            *(dnormed, row_scale, last.x, self._llama.weights[FINAL_NORM], last.rstd),
            *(None, dx, dscales[FINAL_NORM]),
        )
        for index in reversed(range(self._llama.layers)):
            dx = self._layer_backward(index, layers[index], factors, branches, dx, dscales)
        attended = [self._merged(layer.attended) for layer in layers]
        self._weight_gradients(factors, branches, attended)
        embed_backward(self._rows, dx, self._llama.gradients[EMBEDDING])
        for start, gradients in self._norm_gradients:
            part = dweights[:, start : start + gradients.shape[1]].contiguous()
            norm.sum_partials(part, gradients, self._accumulate)

    def _layer_backward(
        self,
        index: int,
        layer: _Layer,
        factors: _Factors,
        branches: _Branches,
        dx: Stream,
        dscales: Mapping[str, Tensor],
    ) -> Stream:
        """Of ``dx``, of the residual stream after a layer, makes that of the stream before it."""
        name, weights, llama = f"layers.{index}", self._llama.weights, self._llama
        dgate_up, qkv, dqkv = factors.gate_up[index], *factors.qkv[index : index + 2]
        down = weights[f"{name}.mlp.down_proj"]
        swiglu_input_gradient(dx.value, down, dgate_up, dgate_up)
        dmiddle = input_gradient(dgate_up, weights[f"{name}.mlp.gate_up_proj"])
        dx = self._norm_backward(
            *(f"{name}.post_attention_layernorm", dmiddle, layer.before_feed_forward),
            *(dx, branches.attention[index], dscales),
        )
        dattended = input_gradient(dx.value, weights[f"{name}.self_attn.o_proj"])
        attention.attend_backward(dattended, qkv, layer.attended, llama.cos, llama.sin, dqkv)
        dnormed = input_gradient(dqkv, weights[f"{name}.self_attn.qkv_proj"])
        below = branches.feed_forward[index - 1] if index > 0 else torch.empty_like(dx.value)
        return self._norm_backward(
            f"{name}.input_layernorm", dnormed, layer.before_attention, dx, below, dscales
        )

    def _norm_backward(
        self,
        name: str,
        dnormed: Tensor,
        forward: _Normed,
        dresidual: Stream,
        value: Tensor,
        dscales: Mapping[str, Tensor],
    ) -> Stream:
        """``dresidual`` with the norm's gradient added to it, rounded in ``value``."""
        dx = dresidual.beside(value)
        norm.rms_norm_backward(
            *(dnormed, None, forward.x, self._llama.weights[name], forward.rstd),
            *(dresidual, dx, dscales[name]),
        )
        return dx

    def _weight_gradients(
        self, factors: _Factors, branches: _Branches, attended: list[Tensor]
    ) -> None:
        few = self._workers == 1 and self._tokens <= _FEW_TOKENS
        products: tuple[tuple[str, Tensor, Tensor | list[Tensor]], ...] = (
            ("mlp.down_proj", branches.feed_forward, factors.activated),
            ("mlp.gate_up_proj", factors.gate_up, factors.middle),
            ("self_attn.o_proj", branches.attention, torch.stack(attended) if few else attended),
            ("self_attn.qkv_proj", factors.qkv[1:], factors.normed),
        )
        for kind, dys, xs in products:
            names = [f"layers.{index}.{kind}" for index in range(self._llama.layers)]
            outs = [self._llama.gradients[name] for name in names]
            weight_gradients(dys, xs, outs, self._accumulate)


def _rows_of(tensors: list[Tensor]) -> list[tuple[int, Tensor]]:
    """Views ``[W, C]`` as few views ``[W, L, C]``, each with the number of the first one in it.

    It is one, unless an optimizer's groups are unusual.
    """
    together = at_even_distances(tensors)
    if together is not None:
        return [(0, together)]
    return [(i, tensor[:, None]) for i, tensor in enumerate(tensors)]
