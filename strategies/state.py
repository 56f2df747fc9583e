"""An engine's state in checkpoints, in the format of ``torch.optim.AdamW``.

Every parameter's entry has a leading worker axis ``[N, …]``: for one worker it is what plain
``torch.optim.AdamW`` writes, so a checkpoint moves freely between plain strategies and these.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tinyllm.strategies.engine import Engine


def optimizer_state(engine: Engine, optimizer: Optimizer) -> dict[str, Any]:
    """Moments, update count and, in the middle of an accumulation window, gradients."""
    arena = engine.arena
    tensors: dict[str, Tensor] = {"exp_avg": arena.exp_avg, "exp_avg_sq": arena.exp_avg_sq}
    views = {key: list(arena.layout.views(flat).values()) for key, flat in tensors.items()}
    step = torch.tensor(float(engine.updates))
    packed = optimizer.state_dict()
    packed["state"] = {
        index: {"step": step.clone(), **{key: views[key][index] for key in views}}
        for index in range(len(arena.layout.slots))
    }
    return packed


def load_optimizer_state(engine: Engine, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Copies a saved state into the engine's arenas and the optimizer's groups."""
