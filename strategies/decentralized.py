"""Decentralized training: N workers, each with its own data and moments, mixing their weights."""

from functools import partial
from typing import Any, Literal

import numpy as np
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from numpy.typing import NDArray
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from tinyllm.arguments import check_choice
from tinyllm.metrics import UpdateMetrics
from tinyllm.strategies.backends import Backend
from tinyllm.strategies.base import ArenaStrategy, Buffers
from tinyllm.strategies.consensus import AdaptiveConsensus, gamma_schedule, mixed
from tinyllm.strategies.engine import Combine, Engine, Scheme
from tinyllm.strategies.gossip import Gossip
from tinyllm.strategies.tenant import Tenant
from tinyllm.strategies.topology import Matrix, make_topology


class DecentralizedStrategy(ArenaStrategy):
    """Trains N workers that see different rows of each batch and mix their weights every update.

    The ranks share the workers evenly: packed on one GPU, one per rank, or anything between; the
    trajectory is the same.

    Args:
        workers: Workers N on all ranks together.
        scheme: ``awc`` mixes the weights while the gradient is computed at the old ones, ``atc``
            mixes after each worker has adapted.
        topology: A name (complete, ring, one_peer_ring, one_peer_exponential, exponential, base_k)
            or a .npy or .csv file with a doubly stochastic matrix.
        adaptive_consensus: Lets mixing weaken as the learning rate falls; null mixes fully.
        backend: ``gh200`` runs fused kernels on Hopper GPUs, ``native`` plain PyTorch anywhere;
            ``auto`` takes gh200 where it can run.
        micro_batch_size: Sequences per worker in one forward and backward; null takes all at once.
        compile: Whether ``torch.compile`` builds the native backend's model.
        buffers: With one worker per rank, whether a module's floating-point buffers stay ``local``
            or evaluation takes their ``average``.
        timeout_seconds: How long a collective may wait for another rank before the run fails.

    Raises:
        ValueError: If the topology is unknown or not doubly stochastic for N workers.
    """

    def __init__(
        self,
        workers: int,
        *,
        scheme: Scheme = "awc",
        topology: str = "one_peer_exponential",
        adaptive_consensus: AdaptiveConsensus | None = None,
        backend: Backend = "auto",
        micro_batch_size: int | None = None,
        compile: bool = True,
        buffers: Buffers = "local",
        timeout_seconds: float = 1_800.0,
        **kwargs: Any,
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers is {workers}; it must be at least 1")
        check_choice("scheme", scheme, Scheme)
        super().__init__(
            num_workers=workers,
            backend=backend,
            micro_batch_size=micro_batch_size,
            compile=compile,
            buffers=buffers,
            timeout_seconds=timeout_seconds,
            **kwargs,
        )
        self.topology = make_topology(topology, workers)
        self._scheme: Scheme = scheme
        self._adaptive_consensus = adaptive_consensus
        self._gamma: NDArray[np.float64] | None = None
        self._gossip: Gossip | None = None

    @property
    @override
    def description(self) -> str:
        ranks = self.ranks
        where = f", {ranks.local_workers} on each of {ranks.world_size} ranks" * ranks.spread
        how = {"awc": "adapt while combine", "atc": "adapt then combine"}[self._scheme]
        adaptive = ", adaptive consensus" if self._adaptive_consensus is not None else ""
        return f"{ranks.num_workers}{where}: {self.topology.name}, {how}{adaptive}"

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        if self._adaptive_consensus is not None:
            # a module may plan a schedule that is longer than this run
            planned = getattr(self.lightning_module, "planned_updates", None)
            total = planned or trainer.estimated_stepping_batches
            if total == float("inf"):
                raise MisconfigurationException(
                    "adaptive_consensus needs to know how many updates are planned, and there is "
                    "no limit; set trainer.max_steps or trainer.max_epochs"
                )
            self._gamma = gamma_schedule(self._adaptive_consensus, self._learning_rates(int(total)))

    def _learning_rates(self, total_updates: int) -> list[float]:
        """The learning rate of every update of the run, by running the schedule ahead."""
        configs = self.lr_scheduler_configs
        if not configs:
            return [self._adamw.param_groups[0]["lr"]] * total_updates
        scheduler, every = configs[0].scheduler, (configs[0].interval, configs[0].frequency)
        is_foreseen = isinstance(scheduler, LRScheduler) and not configs[0].reduce_on_plateau
        if len(configs) > 1 or every != ("step", 1) or not is_foreseen:
            raise MisconfigurationException(
                "adaptive_consensus needs one learning-rate schedule per update, known ahead: "
                f"got {len(configs)}, the first a {type(scheduler).__name__} with interval "
                f"{every[0]!r} and frequency {every[1]}; use an LRScheduler with interval 'step'"
            )
        return _run_ahead(scheduler, total_updates)

    @override
    def _build_engine(self, tenant: Tenant, backend: Literal["gh200", "native"]) -> Engine:
        engine = super()._build_engine(tenant, backend)
        N, rank = self.ranks.num_workers, self.global_rank
        self._gossip = Gossip(N, rank, engine.arena.weights) if N > 1 else None
        return engine

    def gamma(self, update: int) -> float:
        """How much of the mixing is left at an update; 1 without adaptive consensus."""
        if self._gamma is None:
            return 1.0
        return float(self._gamma[min(update, len(self._gamma) - 1)])

    def _matrix(self) -> Matrix:
        """The coming update's mixing matrix ``[N, N]``."""
        update = self.engine.next_update
        return mixed(self.topology.matrix(update), self.gamma(update))

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Tensor | dict[str, Any]:
        # the peers' weights travel while this rank computes its gradient
        if self._scheme == "awc" and self.ranks.spread and not self.engine.pending:
            assert self._gossip is not None
            self._gossip.start(self.engine.arena.weights, self._matrix())
        return super().training_step(*args, **kwargs)

    @override
    def _combine(self) -> Combine | None:
        if self._gossip is None:
            return None
        matrix = self._matrix()
        return Combine(self._scheme, matrix, partial(self._gossip.combine, matrix=matrix))

    @override
    def _complete(self, metrics: UpdateMetrics) -> None:
        super()._complete(metrics)
        metrics.gamma = self.gamma(self.engine.next_update - 1)

    @override
    def teardown(self) -> None:
        self._gossip = None
        super().teardown()


def _run_ahead(scheduler: LRScheduler, total_updates: int) -> list[float]:
    """Learning rates of all updates; the schedule is left as it was."""
    optimizer = scheduler.optimizer
    state, groups = scheduler.state_dict(), [dict(group) for group in optimizer.param_groups]
    rates = []
    for _ in range(total_updates):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        scheduler.step()
    scheduler.load_state_dict(state)
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update(saved)
    return rates
