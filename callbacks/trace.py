"""Everything about a run's first updates, to compare two backends number by number."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer
from typing_extensions import override

from tinyllm.extras import require
from tinyllm.files import replacing, write_json
from tinyllm.metrics import UpdateMetrics
from tinyllm.module import TinyLLM

FORMAT = 1
_IN_ARENA = {
    "parameters": "weights",
    "gradients": "gradients",
    "exp_avg": "exp_avg",
    "exp_avg_sq": "exp_avg_sq",
}


class UpdateTrace(Callback):
    """Traces the first updates of a fit: two files for each, and two for all.

    ``update-00000.safetensors`` holds float32 tensors ``[N, *shape]``, a row per worker:

    - ``gradients/<name>``: the mean gradient over each worker's targets, before clipping;
    - ``parameters/<name>``: after the update, mixing included;
    - ``updates/<name>``: the parameters' difference, taken before rounding to float32;
    - ``exp_avg/<name>``, ``exp_avg_sq/<name>``: both Adam moments after the update.

    ``rows-00000.safetensors`` holds the global batch, ``rows`` int64 ``[rows, T+1]``.
    ``initial.safetensors`` holds ``parameters/<name>`` as they were before the first traced update:
    a row per worker, or the only one ``[1, *shape]`` where all workers are equal.

    ``trace.json`` is ``{"format": 1, "updates": [{"update", "loss", "learning_rate",
    "rows_sha256", "step"}, …]}``: the update's number (a resumed run does not start at 0), the N
    workers' losses, the learning rate, Adam's step counter after the update, and the SHA-256 of
    the global batch's rows as little-endian int64, in the order of their global numbers, with
    accumulated batches one after the other; it does not depend on the number of ranks. An update
    is listed once its files are complete.

    A run that is resumed keeps a trace that is there, and traces nothing.

    It works with this library's strategies on any number of ranks, and on one device with plain
    Adam or AdamW, which is one worker. While updates are traced the host waits for the device;
    afterwards the callback does nothing.

    Args:
        folder: Where the files go; null takes ``trace`` in the Trainer's ``default_root_dir``.
        updates: How many updates are traced.

    Raises:
        ModuleNotFoundError: At the start of a fit, if safetensors is missing.
        MisconfigurationException: At the start of a fit, if the strategy or the optimizer cannot
            be traced.
    """

    def __init__(self, folder: str | Path | None = None, updates: int = 5) -> None:
        if updates < 1:
            raise ValueError(f"updates is {updates}; it must be at least 1")
        self._folder = folder
        self._updates = updates
        self._left = 0
        self._records: list[dict[str, Any]] = []
        self._begin_update()

    def _begin_update(self) -> None:
        self._rows: list[Tensor] = []
        self._loss = 0.0
        self._learning_rate = 0.0
        self._before: dict[str, Tensor] = {}
        self._gradients: dict[str, Tensor] = {}

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        require("safetensors.torch", "report")
        if trainer.world_size > 1 and not hasattr(trainer.strategy, "ranks"):
            raise MisconfigurationException(
                f"UpdateTrace cannot bring together what {trainer.world_size} ranks of "
                f"{type(trainer.strategy).__name__} hold; use one device, or SyncStrategy or "
                "DecentralizedStrategy"
            )
        self._left, self._records = self._updates, []
        self._begin_update()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if len(trainer.optimizers) != 1 or not isinstance(trainer.optimizers[0], Adam | AdamW):
            named = ", ".join(type(o).__name__ for o in trainer.optimizers) or "none"
            raise MisconfigurationException(
                f"UpdateTrace traces one optimizer with Adam's moments, and there is {named}; use "
                "torch.optim.AdamW or leave the callback out"
            )
        folder = self._place(trainer)
        if trainer.global_step and trainer.strategy.broadcast((folder / "trace.json").exists()):
            self._left = 0
            rank_zero_info(f"{folder} holds the trace of this run's first updates and is kept")

    def _place(self, trainer: Trainer) -> Path:
        return Path(self._folder or Path(trainer.default_root_dir) / "trace")

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._left:
            self._rows.append(_global_rows(trainer, batch).to("cpu", copy=True))

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        if self._left:
            self._before = _read(trainer, pl_module, "parameters")
            self._gradients = _read(trainer, pl_module, "gradients")
            self._learning_rate = float(optimizer.param_groups[0]["lr"])

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if not self._left:
            return
        self._loss += float(outputs["loss"])  # Lightning's share of this batch in the update
        if not self._before:
            return  # the batch is a part of an update
        tensors, rows = self._tensors(trainer, pl_module), torch.cat(self._rows)
        self._records.append(
            {
                "update": trainer.global_step - 1,
                "loss": _losses(trainer) or [self._loss],
                "learning_rate": self._learning_rate,
                "rows_sha256": hashlib.sha256(rows.numpy().astype("<i8").tobytes()).hexdigest(),
                "step": _step(trainer),
            }
        )
        if trainer.is_global_zero:
            self._write(self._place(trainer), tensors, rows)
        self._left -= 1
        self._begin_update()

    def _tensors(self, trainer: Trainer, module: LightningModule) -> dict[str, Tensor]:
        """What goes into an update's file."""
        after = _read(trainer, module, "parameters")
        kinds = {
            "parameters": after,
            "gradients": self._gradients,
            "updates": {name: value - self._before[name] for name, value in after.items()},
            "exp_avg": _read(trainer, module, "exp_avg"),
            "exp_avg_sq": _read(trainer, module, "exp_avg_sq"),
        }
        return {
            f"{kind}/{name}": value.to(torch.float32)
            for kind, values in kinds.items()
            for name, value in values.items()
        }

    def _write(self, folder: Path, tensors: dict[str, Tensor], rows: Tensor) -> None:
        if len(self._records) == 1:
            initial = {f"parameters/{n}": value.float() for n, value in self._before.items()}
            if all((value == value[:1]).all() for value in initial.values()):
                initial = {name: value[:1].clone() for name, value in initial.items()}
            _save(folder / "initial.safetensors", initial)
        number = f"{self._records[-1]['update']:05d}.safetensors"
        _save(folder / f"rows-{number}", {"rows": rows})
        _save(folder / f"update-{number}", tensors)
        write_json(folder / "trace.json", {"format": FORMAT, "updates": self._records})


def _save(path: Path, tensors: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    with replacing(path) as partial:
        save_file({name: value.contiguous() for name, value in tensors.items()}, partial)


def _read(trainer: Trainer, module: LightningModule, kind: str) -> dict[str, Tensor]:
    """One kind of tensor of all workers ``[N, *shape]`` by parameter, copied to the host."""
    strategy: Any = trainer.strategy
    if hasattr(strategy, "engine"):
        arena = strategy.engine.arena
        rows = strategy.ranks.gather(getattr(arena, _IN_ARENA[kind]))
        views: dict[str, Tensor] = arena.layout.views(rows.detach())
        return {name: _on_host(value) for name, value in views.items()}
    return {
        name: _on_host((value if isinstance(module, TinyLLM) else value[None]).detach())
        for name, value in _of_optimizer(trainer.optimizers[0], module, kind)
    }


def _on_host(value: Tensor) -> Tensor:
    """A copy in memory of its own, without gaps, as safetensors wants it."""
    return value.to("cpu", copy=True, memory_format=torch.contiguous_format)


def _of_optimizer(
    optimizer: Optimizer, module: LightningModule, kind: str
) -> Iterator[tuple[str, Tensor]]:
    names = {parameter: name for name, parameter in module.named_parameters()}
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if not parameter.requires_grad:
            continue
        if kind == "parameters":
            value = parameter
        elif kind == "gradients":
            value = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        else:
            value = optimizer.state[parameter].get(kind, torch.zeros_like(parameter))
        yield names[parameter], value


def _losses(trainer: Trainer) -> list[float]:
    """Losses of all N workers, where a strategy publishes them."""
    strategy: Any = trainer.strategy
    metrics: UpdateMetrics | None = getattr(strategy, "update_metrics", None)
    if metrics is None:
        return []
    loss = metrics.loss
    if len(loss) < strategy.ranks.num_workers:  # between log points there are only this rank's
        loss = strategy.ranks.gather(loss)
    values: list[float] = loss.tolist()
    return values


def _step(trainer: Trainer) -> int:
    """Adam's counter."""
    if hasattr(trainer.strategy, "engine"):
        return int(trainer.strategy.engine.updates)
    return max(int(state["step"]) for state in trainer.optimizers[0].state.values())


def _global_rows(trainer: Trainer, batch: Any) -> Tensor:
    """Rows of the global batch ``[rows, T+1]`` in the order of their numbers."""
    if not isinstance(batch, Tensor) or batch.ndim != 2 or batch.dtype != torch.int64:
        found = f"{list(batch.shape)} {batch.dtype}" if isinstance(batch, Tensor) else type(batch)
        raise ValueError(f"UpdateTrace traces batches of token rows [rows, T+1] int64, got {found}")
    if trainer.world_size == 1:
        return batch
    # row r belongs to group r mod G, and each rank has the rows of its own G / ranks groups
    strategy: Any = trainer.strategy
    local_groups = strategy.data_groups // trainer.world_size
    rows: Tensor = strategy.ranks.stack(batch)  # [ranks, rows of one, T+1]
    return rows.unflatten(1, (-1, local_groups)).transpose(0, 1).flatten(0, 2)
