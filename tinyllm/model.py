"""The worker-axis Llama: W models in one, each batched GEMM serving all of them.

Shape letters: W workers, B sequences per worker, T tokens, C width, H heads, K head dimension,
F feed-forward width, V vocabulary.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinyllm.config import LlamaConfig

IGNORED = -100
"""Marks a missing token: as a target it is not scored, as an input it stands for id 0."""

_FUSED = {
    "self_attn.qkv_proj.weight": ("q_proj", "k_proj", "v_proj"),
    "mlp.gate_up_proj.weight": ("gate_proj", "up_proj"),
}
"""Stored fused, so that one GEMM makes them; split in state dicts, which speak stock names."""


def split_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and next-token targets of token rows.

    Args:
        rows: ``[..., T+1]`` int64; ``IGNORED`` where there is no token.

    Returns:
        Inputs ``[..., T]`` with ids only, and targets ``[..., T]`` with ``IGNORED`` kept.
    """
    return rows[..., :-1].clamp_min(0), rows[..., 1:]


def check_length(tokens: int, config: LlamaConfig) -> None:
    """Refuses rows with more tokens than the model knows positions.

    Raises:
        ValueError: If they are more than its context.
    """
    if tokens > config.context:
        raise ValueError(
            f"{tokens} tokens exceed the model's context of {config.context}; "
            "use shorter rows or a model with a longer context"
        )


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weightᵀ`` for each worker: ``[W, M, I]`` and ``[W, O, I]`` give ``[W, M, O]``."""
    if weight.shape[0] == 1:  # a plain GEMM has better kernels than a batch of one
        return F.linear(x.squeeze(0), weight.squeeze(0)).unsqueeze(0)
    return torch.bmm(x, weight.transpose(1, 2))


def rope_tables(config: LlamaConfig) -> tuple[Tensor, Tensor]:
    """Cosine and sine ``[context, K/2]`` of rotary positions.

    Source: Su et al., "RoFormer" (2021), section 3.2.2.
    """
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    angle = torch.outer(torch.arange(config.context), config.rope_theta**-exponent)
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on ``x`` ``[W·B, T, H, K]``, computed in the tables' dtype, returned in x's.

    Pairs are (k, k + K/2), the half-split form of stock Llama.
    """
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(rotated, dim=-1).to(x.dtype)


class KeyValueCache:
    """Keys and values of the tokens already seen, per layer, for generation."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def length(self) -> int:
        """Tokens seen."""
        return self.layers[0][0].shape[-2] if self.layers else 0

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Appends keys and values ``[W·B, H, T, K]`` and returns all of them."""
        if layer in self.layers:
            old_k, old_v = self.layers[layer]
            k, v = torch.cat((old_k, k), dim=-2), torch.cat((old_v, v), dim=-2)
        self.layers[layer] = (k, v)
        return k, v


class Weight(nn.Module):
    """Holds one parameter ``[W, *shape]`` under the name that stock Llama gives its module."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, *shape))


class RMSNorm(Weight):
    """``x / rms(x) · weight`` over the last axis, for each worker. Zhang & Sennrich (2019)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__(width)
        self.eps = eps

    def forward(self, x_WMC: Tensor) -> Tensor:
        """Same shape and dtype as the input."""
        scale = torch.rsqrt(x_WMC.square().mean(-1, keepdim=True) + self.eps)
        return x_WMC * scale * self.weight[:, None]


class Attention(nn.Module):
    """Causal multi-head self-attention with rotary positions."""

    def __init__(self, config: LlamaConfig, index: int) -> None:
        super().__init__()
        self.heads, self.index = config.heads, index
        self.qkv_proj = Weight(3 * config.width, config.width)
        self.o_proj = Weight(config.width, config.width)

    def forward(
        self, x_WMC: Tensor, batch: int, cos: Tensor, sin: Tensor, cache: KeyValueCache | None
    ) -> Tensor:
        """``[W, B·T, C]`` in and out; ``batch`` is B."""
        workers, _, width = x_WMC.shape
        qkv = linear(x_WMC, self.qkv_proj.weight)
        qkv = qkv.view(workers * batch, -1, 3 * self.heads, width // self.heads)
        qk, v = qkv.split([2 * self.heads, self.heads], dim=2)
        # rotated together, which makes fewer and simpler kernels than apart
        q, k = rotate(qk, cos, sin).transpose(1, 2).chunk(2, dim=1)  # each [W·B, H, T, K]
        v = v.transpose(1, 2)
        causal = cache is None or self.index not in cache.layers
        if cache is not None:
            k, v = cache.extend(self.index, k, v)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        y = y.transpose(1, 2).reshape(x_WMC.shape)
        return linear(y, self.o_proj.weight)


class FeedForward(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) · up(x))``. Shazeer, "GLU variants" (2020)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_up_proj = Weight(2 * config.ffn_width, config.width)
        self.down_proj = Weight(config.width, config.ffn_width)

    def forward(self, x_WMC: Tensor) -> Tensor:
        """``[W, B·T, C]`` in and out."""
        gate, up = linear(x_WMC, self.gate_up_proj.weight).chunk(2, dim=-1)
        return linear(F.silu(gate) * up, self.down_proj.weight)


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: LlamaConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.width, config.norm_eps)
        self.self_attn = Attention(config, index)
        self.post_attention_layernorm = RMSNorm(config.width, config.norm_eps)
        self.mlp = FeedForward(config)

    def forward(
        self, x_WMC: Tensor, batch: int, cos: Tensor, sin: Tensor, cache: KeyValueCache | None
    ) -> Tensor:
        """``[W, B·T, C]`` in and out."""
        x_WMC = x_WMC + self.self_attn(self.input_layernorm(x_WMC), batch, cos, sin, cache)
        return x_WMC + self.mlp(self.post_attention_layernorm(x_WMC))


class Llama(nn.Module):
    """W Llama models side by side.

    Parameters have a leading worker axis of size 1; a strategy that packs workers makes them
    views ``[W, …]`` of its arena. State dicts hold one ordinary model under stock Llama names,
    the average of the workers, and loading one fills every worker with it.

    Args:
        config: The architecture.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Weight(config.vocab_size, config.width)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.layers))
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.cos: Tensor
        self.sin: Tensor
        cos, sin = rope_tables(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.register_state_dict_post_hook(_to_stock)
        self.register_load_state_dict_pre_hook(_from_stock)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws matrices from N(0, init_std²), alike for all workers; norm scales start at 1."""
        for parameter in self.parameters():
            if is_matrix(parameter):
                parameter.copy_(torch.empty_like(parameter[:1]).normal_(std=self.config.init_std))
            else:
                parameter.fill_(1.0)

    @property
    def workers(self) -> int:
        """Worker axis W."""
        return self.embed_tokens.weight.shape[0]

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, cache: KeyValueCache | None = None
    ) -> Any:
        """Logits, or the loss of each worker when targets are given.

        Args:
            tokens: ``[W, B, T]`` int64 ids.
            targets: ``[W, B, T]`` int64 ids, ``IGNORED`` where nothing is to be predicted.
            cache: Holds the tokens before these ones, and is extended by them.

        Returns:
            Without targets, logits ``[W, B, T, V]``. With targets, the summed negative
            log-likelihood in nats ``[W]`` and the number of targets scored ``[W]`` int64.

        Raises:
            ValueError: If the worker axis is not W or the sequence exceeds the context.
        """
        workers, batch, length = tokens.shape
        start = cache.length if cache is not None else 0
        if workers != self.workers:
            raise ValueError(
                f"tokens hold {workers} workers; the model holds {self.workers}. While workers "
                "train, `with trainer.strategy.average_bound():` makes it their average"
            )
        if start and length > 1:
            raise ValueError(f"{length} tokens follow a cache; after the prompt give one at a time")
        check_length(start + length, self.config)
        embedding = self.embed_tokens.weight
        x = torch.stack([F.embedding(tokens[w], embedding[w]) for w in range(workers)])
        x = x.view(workers, batch * length, -1)
        cos, sin = self.cos[start : start + length], self.sin[start : start + length]
        for block in self.layers:
            x = block(x, batch, cos, sin, cache)
        logits = linear(self.norm(x), embedding)  # the head is tied to the embedding
        if targets is None:
            return logits.view(workers, batch, length, -1)
        loss = F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none"
        )
        scored = (targets != IGNORED).flatten(1).sum(1)
        return loss.view(workers, -1).sum(1), scored


def is_matrix(parameter: Tensor) -> bool:
    """Whether ``[W, …]`` is a matrix per worker (decayed, drawn at random) and not a norm scale."""
    return parameter.ndim > 2


def _fused_keys(keys: Iterable[str]) -> Iterable[tuple[str, str, tuple[str, ...]]]:
    for key in keys:
        for fused, parts in _FUSED.items():
            if key.endswith(fused):
                yield key, key.removesuffix(fused.split(".", 1)[1]), parts


def _to_stock(module: nn.Module, state: dict[str, Tensor], prefix: str, _metadata: Any) -> None:
    for key in [key for key in state if key.startswith(prefix)]:
        tensor = state[key]
        state[key] = tensor[0] if tensor.shape[0] == 1 else tensor.mean(0)
    for key, stem, parts in list(_fused_keys(k for k in state if k.startswith(prefix))):
        for part, tensor in zip(parts, state.pop(key).chunk(len(parts)), strict=True):
            state[f"{stem}{part}.weight"] = tensor


def _from_stock(module: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    for key, stem, parts in _fused_keys(prefix + name for name, _ in module.named_parameters()):
        stock = [f"{stem}{part}.weight" for part in parts]
        if all(name in state for name in stock):
            state[key] = torch.cat([state.pop(name) for name in stock])
    for name, parameter in module.named_parameters():
        key = prefix + name
        if key in state and state[key].shape == parameter.shape[1:]:
            state[key] = state[key].expand_as(parameter)
