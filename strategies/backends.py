"""Which engine runs the updates, and why."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Literal

import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim import Optimizer

from tinyllm.model import Llama

Backend = Literal["auto", "gh200", "native"]

HOPPER = (9, 0)
"""Compute capability of GH200, H200 and H100."""


def choose_backend(
    backend: Backend,
    llama: Llama | None,
    precision: Precision,
    device: torch.device,
    optimizers: Sequence[Optimizer] = (),
) -> tuple[Literal["gh200", "native"], str]:
    """The engine for a run, with the reason for it.

    Args:
        backend: What was asked for.
        llama: What is to be trained; None for a module that is not a Llama.
        precision: The run's.
        device: Where it runs.
        optimizers: That train it; none for a run that does not train.

    Raises:
        MisconfigurationException: If gh200 was asked for and cannot run.
    """
    if backend == "native":
        return "native", "asked for"
    obstacle = _obstacle(llama, precision, device, optimizers)
    if obstacle is None:
        return "gh200", f"{torch.cuda.get_device_name(device)} is a Hopper GPU"
    if backend == "gh200":
        raise MisconfigurationException(
            f"backend gh200 cannot run here: {obstacle}; pass backend: auto or native"
        )
    return "native", obstacle


def _obstacle(
    llama: Llama | None,
    precision: Precision,
    device: torch.device,
    optimizers: Sequence[Optimizer],
) -> str | None:
    """Why gh200 cannot run; None if it can."""
    if device.type != "cuda":
        return f"it needs a Hopper GPU, and this run is on the {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability != HOPPER:
        name = torch.cuda.get_device_name(device)
        return f"it needs compute capability 9.0, and {name} has {capability[0]}.{capability[1]}"
    if find_spec("triton") is None:
        return "it needs Triton, which is not installed"
    if llama is None:
        return "it trains a TinyLLM with its own loss, and this is another module"
    if not isinstance(precision, MixedPrecision) or precision.precision != "bf16-mixed":
        return f"it computes in bf16-mixed, and the precision is {precision.precision}"
    config = llama.config
    if config.width % 64 or config.ffn_width % 64 or config.head_dim not in (64, 128):
        return (
            "it needs widths in multiples of 64 and heads of 64 or 128, and the model has width "
            f"{config.width}, ffn_width {config.ffn_width} and heads of {config.head_dim}"
        )
    if not all(parameter.requires_grad for parameter in llama.parameters()):
        return "it trains all parameters, and some are frozen"
    trained = {p for o in optimizers for group in o.param_groups for p in group["params"]}
    if optimizers and not trained.issuperset(llama.parameters()):
        return "it trains all parameters, and some are not in the optimizer"
    dtypes = {str(parameter.dtype) for parameter in llama.parameters()}
    if dtypes != {"torch.float32"}:
        return f"it keeps parameters in torch.float32, and the model has {', '.join(dtypes)}"
    return None
