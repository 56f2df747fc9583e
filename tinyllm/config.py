"""The shape of a model: ``LlamaConfig`` and the presets."""

from dataclasses import asdict, dataclass, fields
from math import inf
from numbers import Integral, Real
from typing import Any

from tinyllm.arguments import make_plain

MOST_POSITIONS = 1 << 24
"""Longest context: beyond it float32 cannot tell positions apart."""


@dataclass(frozen=True)
class LlamaConfig:
    """Architecture of a Llama-style decoder with a tied embedding and no biases.

    Args:
        layers: Number of decoder blocks.
        width: Model width C, the size of the residual stream.
        heads: Number of attention heads H; ``width / heads`` is the head dimension.
        ffn_width: Feed-forward width F of the SwiGLU.
        vocab_size: Vocabulary V; token ids are 0 … V-1.
        context: Longest sequence in tokens that positions are prepared for.
        rope_theta: Base of the rotary position embedding.
        norm_eps: ε of RMSNorm.
        init_std: Standard deviation of the initial matrices; norm scales start at 1.
    """

    layers: int
    width: int
    heads: int
    ffn_width: int
    vocab_size: int = 32_000
    context: int = 1_024
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    init_std: float = 0.02

    def __post_init__(self) -> None:
        make_plain(self)
        # before they are compared: a checkpoint may hold anything in their place
        for field in fields(self):
            value, kind = getattr(self, field.name), Integral if field.type is int else Real
            if isinstance(value, bool) or not isinstance(value, kind):
                number = "a whole number" if kind is Integral else "a number"
                raise ValueError(f"{field.name} is of {type(value).__name__}; it must be {number}")
        for name in ("layers", "width", "heads", "ffn_width", "vocab_size", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.context > MOST_POSITIONS:
            raise ValueError(f"context is {self.context}; it must be at most {MOST_POSITIONS}")
        for name in ("rope_theta", "norm_eps", "init_std"):
            if not 0 < getattr(self, name) < inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0 and finite")
        if self.width % self.heads or self.head_dim % 2:
            raise ValueError(
                f"width {self.width} over {self.heads} heads give no even head dimension; "
                "choose heads that divide width, for example width / 64"
            )

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.width // self.heads

    @property
    def num_parameters(self) -> int:
        """Unique parameters: the embedding (tied to the head), the blocks, the final norm."""
        block = 4 * self.width**2 + 3 * self.width * self.ffn_width + 2 * self.width
        return self.vocab_size * self.width + self.layers * block + self.width

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values, as checkpoints keep them."""
        return asdict(self)


PRESETS: dict[str, LlamaConfig] = {
    "20m": LlamaConfig(layers=8, width=320, heads=5, ffn_width=896),
    "50m": LlamaConfig(layers=10, width=512, heads=8, ffn_width=1_408),
    "90m": LlamaConfig(layers=14, width=640, heads=10, ffn_width=1_792),
}
