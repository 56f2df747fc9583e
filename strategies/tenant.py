"""A LightningModule whose parameters live in an arena."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from tinyllm.arena import Arena, ArenaLayout, bind
from tinyllm.extras import cpp_compiler
from tinyllm.model import Llama
from tinyllm.module import TinyLLM
from tinyllm.strategies.engine import Ranks
from tinyllm.strategies.losses import LossSums, llama_losses, module_losses


class Tenant:
    """Moves a module's parameters into an arena and between the workers and their average.

    A :class:`~tinyllm.TinyLLM` packs any number of workers. Any other module, and a subclass with a
    loss of its own, trains as one worker per rank.

    Args:
        module: The module, on its device and in its precision.
        ranks: Which workers are where.
        average_buffers: Whether the average of all workers has the average of their floating-point
            buffers, too, and not this rank's.

    Attributes:
        slots_in_optimizer: For each slot of the arena, which of the optimizer's parameters it is;
            frozen ones have no slot.
        extras: What a module's own ``training_step`` last returned beside its loss.
        average: ``[1, D]``, what the module is while it is the average of all workers.

    Raises:
        MisconfigurationException: If several workers are to be packed and the module cannot.
    """

    def __init__(
        self, module: LightningModule, ranks: Ranks, average_buffers: bool = False
    ) -> None:
        self._module = module
        self._ranks = ranks
        self._average_buffers = average_buffers
        self.llama = _llama_of(module)
        if self.llama is None and ranks.local_workers > 1:
            raise MisconfigurationException(
                f"{type(module).__name__} is not a TinyLLM with its own loss and parameters left "
                f"as they are, so {ranks.local_workers} workers cannot be packed on one rank; use "
                "as many ranks as workers"
            )
        self.slots_in_optimizer: tuple[int, ...] = ()
        self.extras: dict[str, Any] = {}
        self.average: Tensor | None = None
        self._parameters: dict[str, nn.Parameter] = {}
        self._addresses: list[tuple[str, int]] = []
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []
        self._gradient_rows: list[tuple[Tensor, ...]] = []
        self._arena: Arena | None = None
        self._has_said = False  # that a parameter without a gradient decays

    def compile(self) -> None:
        """Lets ``torch.compile`` build a Llama's forward and backward."""
        if self.llama is None:
            return
        if cpp_compiler() is None:
            rank_zero_warn(
                "torch.compile needs a C++ compiler and finds none, so the model is not compiled "
                "and trains slower; install one (apt install g++), or set the strategy's compile "
                "to false to silence this"
            )
        else:
            # rows of logits stay in cache, where a second pass costs less than online rescaling
            self.llama.compile(dynamic=False, options={"online_softmax": False})

    def move_into_arena(self, groups: Sequence[Mapping[str, Any]]) -> Arena:
        """Lays the optimizer's parameters out, group after group, and makes them views.

        Frozen parameters stay where they are, as ``torch.optim`` would leave them alone.

        Args:
            groups: The optimizer's parameter groups.

        Raises:
            MisconfigurationException: If parameters have several dtypes, or a packed model leaves
                some out.
        """
        names = {parameter: name for name, parameter in self._module.named_parameters()}
        trained = [[p for p in group["params"] if p.requires_grad] for group in groups]
        given = [p for group in groups for p in group["params"]]
        if strange := [p for p in given if p not in names]:
            raise MisconfigurationException(
                f"the optimizer has a parameter of shape {list(strange[0].shape)} that is not the "
                "module's, and this strategy trains the module's: make it an attribute of it"
            )
        self.slots_in_optimizer = tuple(i for i, p in enumerate(given) if p.requires_grad)
        self._parameters = {names[p]: p for group in trained for p in group}
        self._check_parameters(names)
        layout = ArenaLayout.of([{names[p]: self._shape(p) for p in group} for group in trained])
        first = next(iter(self._parameters.values()))
        arena = Arena(layout, self._ranks.local_workers, first.dtype, first.device)
        for name, view in layout.views(arena.weights).items():
            view.copy_(self._parameters[name].detach().reshape(self._shape(self._parameters[name])))
        self._arena = arena
        self._bind(arena.weights)
        gradients = layout.views(self._rows(arena.gradients))
        self._gradients = [(self._parameters[name], view) for name, view in gradients.items()]
        self._gradient_rows = [self._dense(view) for view in gradients.values()]
        return arena

    def _check_parameters(self, names: Mapping[nn.Parameter, str]) -> None:
        dtypes = {str(parameter.dtype) for parameter in self._parameters.values()}
        if len(dtypes) > 1:
            raise MisconfigurationException(
                f"parameters have the dtypes {', '.join(sorted(dtypes))}; this strategy trains "
                "parameters of one dtype: convert the module, for example with module.float()"
            )
        left_out = set(names.values()) - set(self._parameters)
        if left_out and self._ranks.local_workers > 1:
            raise MisconfigurationException(
                f"packed workers train all parameters, and {min(left_out)} is frozen or not in the "
                "optimizer; train it, or use as many ranks as workers"
            )

    def broadcast(self) -> None:
        """Starts all ranks from rank 0's weights, frozen parameters and buffers."""
        assert self._arena is not None
        frozen = [p for n, p in self._module.named_parameters() if n not in self._parameters]
        for tensor in (self._arena.weights, *frozen, *self._module.buffers()):
            dist.broadcast(tensor.detach(), src=0)

    def _shape(self, parameter: nn.Parameter) -> torch.Size:
        return parameter.shape[1:] if self.llama is not None else parameter.shape

    def _rows(self, flat: Tensor) -> Tensor:
        """Rows as the parameters want them: a module of its own knows no worker axis."""
        return flat if self.llama is not None else flat[0]

    def _bind(self, flat: Tensor) -> None:
        assert self._arena is not None
        bind(self._parameters, self._arena.layout, self._rows(flat))
        self._addresses = [(name, p.data_ptr()) for name, p in self._parameters.items()]

    def check_memory(self) -> None:
        """Refuses parameters whose memory somebody has replaced: nothing would come of that.

        Raises:
            MisconfigurationException: Names the first one.
        """
        for name, address in self._addresses:
            if self._parameters[name].data_ptr() != address:
                raise MisconfigurationException(
                    f"something has put other memory in place of {name}.data, and this strategy "
                    "trains and evaluates what lies in its own; change the parameter in place: "
                    "`with torch.no_grad(): parameter.copy_(values)`"
                )

    def bind_gradients(self) -> None:
        """Makes each parameter's ``.grad`` a view of the gradient arena."""
        for parameter, gradient in self._gradients:
            parameter.grad = gradient

    def take_replaced_gradients(self) -> None:
        """Copies what a hook has put in place of a ``.grad``; none counts as zero."""
        for parameter, view in self._gradients:
            if parameter.grad is not view:
                view.zero_() if parameter.grad is None else view.copy_(parameter.grad)
                parameter.grad = view

    def release_gradients(self) -> None:
        """Takes each ``.grad`` away, so that a ``zero_grad`` cannot reach the gradient arena."""
        for parameter in self._parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def collect_gradients(self, add: bool) -> None:
        """Moves what autograd left in each ``.grad`` into the gradient arena.

        That is a launch or two for all parameters, where autograd would add to a ``.grad`` in the
        arena with one launch for each.

        Args:
            add: Adds to the arena and does not replace what it holds.
        """
        rows: list[Tensor] = []
        fresh: list[Tensor] = []
        for (parameter, view), own in zip(self._gradients, self._gradient_rows, strict=True):
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:
                rows += own
                fresh += self._dense(gradient.to_dense() if gradient.is_sparse else gradient)
            elif not add:
                self._say_that_it_counts_as_zero(parameter)
                view.zero_()
        (torch._foreach_add_ if add else torch._foreach_copy_)(rows, fresh)

    def _say_that_it_counts_as_zero(self, parameter: nn.Parameter) -> None:
        if not self._has_said:
            self._has_said = True
            name = next(n for n, p in self._parameters.items() if p is parameter)
            rank_zero_warn(
                f"{name} got no gradient; here that counts as a gradient of zero, so its weight "
                "decays, while torch.optim would skip it. If nothing uses it, freeze it or leave "
                "it out of the optimizer."
            )

    def _dense(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """A tensor as pieces without gaps: the workers' rows of an arena are apart."""
        return tensor.unbind() if self.llama is not None else (tensor,)

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
        return module_losses(self._module, self.extras)

    def buffers(self) -> dict[str, Tensor]:
        """The buffers that a state dict holds; each rank has its own."""
        return {
            f"{prefix}.{name}" if prefix else name: buffer
            for prefix, module in self._module.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        }

    @contextmanager
    def average_bound(self) -> Generator[None, None, None]:
        """Within it the module is the average of all workers of all ranks."""
        if self.average is not None or self._arena is None:
            yield
            return
        self.check_memory()
        self.average = self._ranks.mean(self._arena.weights)
        self._bind(self.average)
        own = self._bind_averaged_buffers()
        try:
            yield
        finally:
            self.average = None
            self._bind(self._arena.weights)
            for buffer, memory in own:
                buffer.data = memory

    @contextmanager
    def token_losses_by(
        self, losses: Callable[[Tensor], tuple[Tensor, Tensor]]
    ) -> Generator[None, None, None]:
        """Within it a TinyLLM's losses of token rows are made by ``losses``."""
        vars(self._module)["token_losses"] = losses
        try:
            yield
        finally:
            del vars(self._module)["token_losses"]

    def _bind_averaged_buffers(self) -> list[tuple[Tensor, Tensor]]:
        """Gives averaged buffers memory of their own; returns each with what it had before."""
        if not (self._average_buffers and self._ranks.spread):
            return []
        own = [(b, b.data) for b in self._module.buffers() if b.is_floating_point()]
        for buffer, memory in own:
            buffer.data = memory.clone()
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
            if not alone:
                self._bind_averaged_buffers()
            self.release_gradients()
            self._arena = None
        if self.llama is not None:
            self.llama._compiled_call_impl = None


def _llama_of(module: LightningModule) -> Llama | None:
    """The Llama of a TinyLLM that trains it, and nothing else, with the usual loss."""
    if not isinstance(module, TinyLLM) or not isinstance(module.model, Llama):
        return None
    own_loss = any(is_overridden(m, module, TinyLLM) for m in ("training_step", "token_losses"))
    others = [name for name, _ in module.named_parameters() if not name.startswith("model.")]
    return None if own_loss or others else module.model
