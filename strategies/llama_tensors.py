"""Rows of an arena as the kernels' step wants them."""

from collections.abc import Mapping

from torch import Tensor

from tinyllm.arena import ArenaLayout
from tinyllm.kernels.llama import LlamaTensors
from tinyllm.model import Llama


def llama_tensors(
    llama: Llama,
    layout: ArenaLayout,
    weights: Tensor,
    matrices: Tensor,
    gradients: Tensor | None = None,
) -> LlamaTensors:
    """Views of W models.

    Args:
        llama: Of their architecture.
        layout: What lies where in a row.
        weights: ``[W, D]``.
        matrices: ``[W, D]``, the weights in the compute dtype, of which matrices are taken.
        gradients: ``[W, D]``, if there are any.
    """
    high, low = _by_module(layout.views(weights)), _by_module(layout.views(matrices))
    config = llama.config
    return LlamaTensors(
        layers=config.layers,
        heads=config.heads,
        norm_eps=config.norm_eps,
        weights={name: low[name] if w.ndim > 2 else w for name, w in high.items()},
        gradients={} if gradients is None else _by_module(layout.views(gradients)),
        embedding=high["embed_tokens"],
        cos=llama.cos.to(weights.dtype),
        sin=llama.sin.to(weights.dtype),
    )


def _by_module(views: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A TinyLLM's parameters by the name of the module inside its Llama."""
    return {name.removeprefix("model.").removesuffix(".weight"): v for name, v in views.items()}
