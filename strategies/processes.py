"""One process per device: launching, ranks, the process group and reductions."""

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from typing_extensions import override

from tinyllm.strategies.roster import Roster

T = TypeVar("T")

_YEAR = 366 * 86_400  # seconds
# Variables in which launchers tell a process its place.
_LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID")
_NODE_RANKS = ("NODE_RANK", "GROUP_RANK", "SLURM_NODEID")


class ProcessStrategy(ParallelStrategy):
    """Runs one process per device, launched by Lightning, ``torchrun`` or Slurm.

    A single process needs no process group and gets none.

    Args:
        timeout_seconds: How long a collective may wait for another rank before the run fails.
    """

    def __init__(self, *, timeout_seconds: float = 1_800.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not 0 < timeout_seconds <= _YEAR:
            raise ValueError(
                f"timeout_seconds is {timeout_seconds}; it must be above 0 and at most a year, "
                f"{_YEAR:,}"
            )
        self.num_nodes = 1
        self._timeout = timedelta(seconds=timeout_seconds)
        self._roster: Roster | None = None

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices or [])

    @property
    def is_distributed(self) -> bool:
        """Tells the Trainer to give each rank its share of a plain DataLoader."""
        return self.num_nodes * self.num_processes > 1

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def set_world_ranks(self) -> None:
        """Tells the cluster environment where this process stands.

        Raises:
            ValueError: It stands outside of the Trainer's devices or nodes.
        """
        if self.cluster_environment is not None:
            _check_rank(self.local_rank, self.num_processes, "devices", _LOCAL_RANKS)
            _check_rank(self.node_rank, self.num_nodes, "num_nodes", _NODE_RANKS)
            rank = self.node_rank * self.num_processes + self.local_rank
            self.cluster_environment.set_global_rank(rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if self.is_distributed:
            self._launcher = _SubprocessScriptLauncher(
                self.cluster_environment, self.num_processes, self.num_nodes
            )

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self.set_world_ranks()
        if self.is_distributed:
            reset_seed()
            assert self.cluster_environment is not None
            device = self.root_device
            _init_dist_connection(
                self.cluster_environment,
                _get_default_process_group_backend_for_device(device),
                timeout=self._timeout,
                device_id=device if device.type != "cpu" else None,
            )
            self._roster = Roster()

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        explanation = self._roster and self._roster.explain(exception)
        if explanation:
            exception.add_note(explanation)

    @override
    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    @override
    def barrier(self, name: str | None = None) -> None:
        if dist.is_initialized():
            dist.barrier()

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        if not dist.is_initialized():
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if isinstance(tensor, Tensor):
            return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)
        return tensor


def _check_rank(rank: int, ranks: int, option: str, names: Sequence[str]) -> None:
    """Refuses what an earlier launcher has left behind, or one of more processes tells."""
    if 0 <= rank < ranks:
        return
    name = next((name for name in names if os.environ.get(name) == str(rank)), names[0])
    allowed = "0" if ranks == 1 else f"from 0 to {ranks - 1}"
    raise ValueError(
        f"the environment variable {name} is {rank}, and with {option}={ranks} of the Trainer it "
        f"must be {allowed}. If no launcher has started this process, unset {name}; otherwise set "
        f"{option} to the launcher's number."
    )
