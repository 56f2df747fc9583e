"""A LightningModule whose parameters live in an arena."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from tinyllm.arena import Arena, ArenaLayout, bind, bind_gradients
from tinyllm.model import Llama
from tinyllm.module import TinyLLM
from tinyllm.strategies.engine import Ranks
from tinyllm.strategies.losses import LossSums, llama_losses, module_losses


class Tenant:
    """Moves a module's parameters into an arena and between the workers and their average.

    A :class:`~tinyllm.TinyLLM` packs any number of workers. Any other module, and a subclass with a
    ``training_step`` of its own, trains as one worker per rank.

    Args:
        module: The module, on its device and in its precision.
        ranks: Which workers are where.

    Raises:
        MisconfigurationException: If several workers are to be packed and the module cannot.
    """

    def __init__(self, module: LightningModule, ranks: Ranks) -> None:
        self._module = module
        self._ranks = ranks
        self.llama: Llama | None = None
        if isinstance(module, TinyLLM) and not is_overridden("training_step", module, TinyLLM):
            self.llama = module.model
        elif ranks.local_workers > 1:
            raise MisconfigurationException(
                f"{type(module).__name__} is not a TinyLLM with its own training_step left as it "
                f"is, so {ranks.local_workers} workers cannot be packed on one rank; use as many "
                "ranks as workers"
            )
        self._parameters: dict[str, nn.Parameter] = {}
        self._arena: Arena | None = None
        self._average_bound = False

    def compile(self) -> None:
        """Lets ``torch.compile`` build a Llama's forward and backward."""
        if self.llama is not None:
            self.llama.compile(dynamic=False)

    def move_into_arena(self, groups: Sequence[Mapping[str, Any]]) -> Arena:
        """Lays the optimizer's parameters out, group after group, and makes them views.

        Args:
            groups: The optimizer's parameter groups.
        """
        names = {parameter: name for name, parameter in self._module.named_parameters()}
        self._parameters = {names[p]: p for group in groups for p in group["params"]}
        layout = ArenaLayout.of(
            [{names[p]: self._shape(p) for p in group["params"]} for group in groups]
        )
        first = next(iter(self._parameters.values()))
        arena = Arena(layout, self._ranks.local_workers, first.dtype, first.device)
        for name, view in layout.views(arena.weights).items():
            view.copy_(self._parameters[name].detach().reshape(self._shape(self._parameters[name])))
        self._arena = arena
        self._bind(arena.weights)
        return arena

    def _shape(self, parameter: nn.Parameter) -> torch.Size:
        return parameter.shape[1:] if self.llama is not None else parameter.shape

    def _rows(self, flat: Tensor) -> Tensor:
        """Rows as the parameters want them: a module of its own knows no worker axis."""
        return flat if self.llama is not None else flat[0]

    def _bind(self, flat: Tensor) -> None:
        assert self._arena is not None
        bind(self._parameters, self._arena.layout, self._rows(flat))

    def bind_gradients(self) -> None:
        """Makes each parameter's ``.grad`` a view of the gradient arena."""
        assert self._arena is not None
        bind_gradients(self._parameters, self._arena.layout, self._rows(self._arena.gradients))

    def losses(self, micro_batch_size: int | None) -> LossSums:
        """What an engine differentiates.

        Args:
            micro_batch_size: Sequences per worker in one forward and backward; None for all.
        """
        if self.llama is not None:
            return llama_losses(self.llama, self._ranks.local_workers, micro_batch_size)
        if micro_batch_size is not None:
            raise MisconfigurationException(
                f"micro_batch_size is {micro_batch_size}, but {type(self._module).__name__} has a "
                "training_step of its own; use trainer.accumulate_grad_batches"
            )
        return module_losses(self._module)

    @contextmanager
    def average_bound(self, average_buffers: bool) -> Generator[None, None, None]:
        """Within it the module is the average of all workers of all ranks.

        Args:
            average_buffers: Whether floating-point buffers are averaged over the ranks too.
        """
        if self._average_bound or self._arena is None:
            yield
            return
        self._average_bound = True
        self._bind(self._ranks.mean(self._arena.weights))
        buffers = self._averaged_buffers() if average_buffers and self._ranks.spread else {}
        try:
            yield
        finally:
            self._average_bound = False
            self._bind(self._arena.weights)
            for buffer, own in buffers.items():
                buffer.copy_(own)

    def _averaged_buffers(self) -> dict[Tensor, Tensor]:
        """Averages buffers in place; returns what each held before."""
        own = {b: b.clone() for b in self._module.buffers() if b.is_floating_point()}
        for buffer in own:
            dist.all_reduce(buffer)
            buffer /= self._ranks.world_size
        return own

    def leave(self, alone: bool) -> None:
        """Leaves the module with the average of all workers, in memory of its own.

        Args:
            alone: Takes only this rank's workers, and so waits for no other rank.
        """
        if self._arena is not None:
            rows = self._arena.weights
            self._bind(rows.mean(0, keepdim=True) if alone else self._ranks.mean(rows).clone())
            for parameter in self._parameters.values():
                parameter.grad = None
            self._arena = None
        if self.llama is not None:
            self.llama._compiled_call_impl = None
