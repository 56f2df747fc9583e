"""An engine's state in checkpoints, in the format of ``torch.optim.AdamW``.

For one worker a checkpoint is what plain ``torch.optim.AdamW`` writes and reads. With more every
tensor has a leading worker axis ``[N, …]``, and each entry also keeps their weights.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from tinyllm.arena import Slot
from tinyllm.strategies.engine import Engine, Ranks
from tinyllm.strategies.tenant import Tenant

_Generator = tuple[Callable[[], Tensor], Callable[[Tensor], None]]


class EngineState:
    """Brings the state of all ranks together for a checkpoint, and deals it out again.

    Args:
        engine: Whose state it is.
        tenant: Whose buffers go with it.
        ranks: Which workers are where.
    """

    def __init__(self, engine: Engine, tenant: Tenant, ranks: Ranks) -> None:
        self._engine = engine
        self._tenant = tenant
        self._ranks = ranks

    def _arenas(self) -> dict[str, Tensor]:
        """The arenas that a checkpoint holds, by the name of their entry."""
        arena = self._engine.arena
        arenas = {"exp_avg": arena.exp_avg, "exp_avg_sq": arena.exp_avg_sq}
        if self._ranks.num_workers > 1:  # one worker's weights are the module's state dict
            arenas["weights"] = arena.weights
        if self._engine.pending:  # stopped between two batches of one update
            arenas["gradients"] = arena.gradients
        return arenas

    def _buffers(self) -> dict[str, Tensor]:
        """Buffers ``[1, …]`` that differ between ranks; others are in the module's state dict."""
        if not self._ranks.spread:
            return {}
        return {name: buffer[None] for name, buffer in self._tenant.buffers().items()}

    def save(self, optimizer: Optimizer) -> dict[str, Any]:
        """Everything needed to go on exactly: complete on every rank, which all must call this.

        Args:
            optimizer: Its hyperparameters are saved beside the engine's state.
        """
        engine, layout = self._engine, self._engine.arena.layout
        views = {
            name: list(layout.views(self._collect(flat, name == "gradients")).values())
            for name, flat in self._arenas().items()
        }
        step = torch.tensor(float(engine.updates))
        state = optimizer.state_dict()
        given = [p for group in optimizer.param_groups for p in group["params"]]
        state["state"] = {
            index: {
                "step": step.clone(),
                **{
                    name: self._plain(tensors[slot], given[index])
                    for name, tensors in views.items()
                },
            }
            for slot, index in enumerate(self._tenant.slots_in_optimizer)
        }
        if engine.pending:
            state["pending"] = {
                "nll": self._collect(engine.nll, sums=True),
                "targets": self._collect(engine.targets, sums=True),
            }
        if buffers := self._buffers():
            state["buffers"] = {name: self._ranks.gather(own) for name, own in buffers.items()}
        device = engine.arena.weights.device  # the one on which ranks can exchange
        state["rng"] = {
            name: self._ranks.stack(get().to(device)).cpu()
            for name, (get, _) in self._generators().items()
        }
        return state

    def _plain(self, rows: Tensor, parameter: Tensor) -> Tensor:
        """Rows ``[N, …]``; one worker's in the parameter's shape, which may lack that axis."""
        return rows.reshape(parameter.shape) if self._ranks.num_workers == 1 else rows

    @torch.no_grad()
    def load(self, optimizer: Optimizer, state: dict[str, Any], rank: int) -> None:
        """Takes up what :meth:`save` gave, or plain AdamW for one worker, on any number of ranks.

        Args:
            optimizer: Takes the saved hyperparameters.
            state: One of a checkpoint's ``optimizer_states``.
            rank: This process.

        Raises:
            ValueError: If the state belongs to another number of workers or another model.
        """
        engine, layout, entries = self._engine, self._engine.arena.layout, state["state"]
        in_optimizer = self._tenant.slots_in_optimizer
        slots = dict(zip(in_optimizer, layout.slots, strict=True))
        _check(slots, len(optimizer.param_groups), self._ranks.num_workers, state)
        for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        engine.pending = "pending" in state
        for name, flat in self._arenas().items():
            for index, view in zip(in_optimizer, layout.views(flat).values(), strict=True):
                rows = entries[index][name].reshape(-1, *view.shape[1:])
                view.copy_(self._share(rows, rank, name == "gradients"))
        if engine.pending:
            engine.nll.copy_(self._share(state["pending"]["nll"], rank, sums=True))
            engine.targets.copy_(self._share(state["pending"]["targets"], rank, sums=True))
        for name, buffer in self._buffers().items():
            if name in state.get("buffers", {}):
                buffer.copy_(self._share(state["buffers"][name], rank, sums=False))
        for name, (_, put) in self._generators().items():
            saved = state.get("rng", {}).get(name, ())
            if len(saved) == self._ranks.world_size:  # another layout has other generators
                put(saved[rank].clone())
        engine.updates = int(entries[in_optimizer[0]]["step"])

    def _generators(self) -> dict[str, _Generator]:
        """How to read and set this rank's random generators."""
        device = self._engine.arena.weights.device
        generators: dict[str, _Generator] = {"cpu": (torch.get_rng_state, torch.set_rng_state)}
        if device.type == "cuda":
            generators["cuda"] = (
                partial(torch.cuda.get_rng_state, device),
                partial(torch.cuda.set_rng_state, device=device),
            )
        return generators

    def _collect(self, rows: Tensor, sums: bool) -> Tensor:
        """Rows ``[N, …]``; ``sums`` are of the part of a batch that each rank has seen."""
        if sums and self._ranks.replicated:
            rows = rows.clone()
            dist.all_reduce(rows)
        return self._ranks.gather(rows)

    def _share(self, rows: Tensor, rank: int, sums: bool) -> Tensor:
        """This rank's rows ``[W, …]`` of ``[N, …]``; rank 0 takes over the sums of all copies."""
        if self._ranks.replicated:
            return torch.zeros_like(rows) if sums and rank else rows
        start = rank * self._ranks.local_workers
        return rows[start : start + self._ranks.local_workers]


def _check(
    slots: Mapping[int, Slot], num_groups: int, num_workers: int, state: Mapping[str, Any]
) -> None:
    entries, saved_groups = state["state"], len(state["param_groups"])
    if set(entries) != set(slots) or saved_groups != num_groups:
        raise ValueError(
            f"the checkpoint holds optimizer state of {len(entries)} parameters in {saved_groups} "
            f"groups and this model has {len(slots)} in {num_groups}; resume with the model that "
            "wrote it, or start from its weights alone"
        )
    for index, slot in slots.items():
        shape = entries[index]["exp_avg"].shape
        workers, remainder = divmod(shape.numel(), slot.numel)
        if remainder or tuple(shape[len(shape) - len(slot.shape) :]) != slot.shape:
            raise ValueError(
                f"the checkpoint's state of {slot.name} has shape {list(shape)} and this model "
                f"needs {list(slot.shape)} for each worker; resume with the configuration that "
                "wrote it"
            )
        if workers != num_workers:
            raise ValueError(
                f"the checkpoint holds {workers} workers and this run has {num_workers}; resume "
                f"with {workers}, or start from the average alone: export the checkpoint and give "
                "--model.init_from"
            )
