"""Engines of both backends from one state, driven without a Trainer."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tinyllm import LlamaConfig, TinyLLM
from tinyllm.arena import Arena
from tinyllm.metrics import UpdateMetrics
from tinyllm.model import Llama
from tinyllm.module import parameter_groups
from tinyllm.strategies.consensus import mixed
from tinyllm.strategies.engine import Combine, Engine, GroupHyperparameters, Ranks, Scheme
from tinyllm.strategies.gh200 import Gh200Engine
from tinyllm.strategies.gossip import Gossip
from tinyllm.strategies.native import NativeEngine
from tinyllm.strategies.tenant import Tenant
from tinyllm.strategies.topology import Topology

Backend = Literal["gh200", "native"]
BETAS, EPS, WEIGHT_DECAY = (0.8, 0.9), 1e-6, 0.2


class Update(NamedTuple):
    """What an update left behind."""

    weights: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    loss: Tensor
    grad_norm: Tensor
    targets: Tensor
    spread: Tensor
    next_update: int


class Run:
    """W workers under one engine.

    Args:
        backend: Which engine.
        config: Of the model.
        workers: W.
        micro_batch_size: Sequences per worker in one forward and backward.
        dtype: Of the arena.
        device: Where all of it lies.
        low: Compute dtype of the native engine, where it is not the arena's.
    """

    def __init__(
        self,
        backend: Backend,
        config: LlamaConfig,
        workers: int,
        micro_batch_size: int | None = None,
        dtype: torch.dtype = torch.float64,
        device: str = "cpu",
        low: torch.dtype | None = None,
    ) -> None:
        torch.manual_seed(1)
        module = TinyLLM(config=config).to(device, dtype)
        ranks = Ranks(workers, workers, 1)
        tenant = Tenant(module, ranks)
        assert tenant.llama is not None
        self.llama: Llama = tenant.llama
        groups = parameter_groups(self.llama)
        self.arena: Arena = tenant.move_into_arena([{"params": group} for group in groups])
        generator = torch.Generator().manual_seed(2)
        for view in self.arena.layout.views(self.arena.weights).values():
            noise = torch.randn(view.shape, generator=generator, dtype=torch.float64)
            view += config.init_std * noise.to(view)
        self.engine: Engine
        if backend == "gh200":
            self.engine = Gh200Engine(
                self.arena, self.llama, micro_batch_size=micro_batch_size, ranks=ranks
            )
        else:
            self.engine = NativeEngine(
                self.arena,
                tenant.losses(micro_batch_size),
                collect_gradients=tenant.collect_gradients,
                forward_context=partial(_forward_context, low),
                ranks=ranks,
            )
        self.gossip = Gossip(workers, 0, self.arena.weights)

    def supply(self, gradients: Tensor, targets: int) -> None:
        """Mean gradients ``[W, D]`` and a loss, as if batches had been accumulated."""
        self.arena.gradients.copy_(gradients * targets)
        self.engine.nll.fill_(targets * 1.5)
        self.engine.targets.fill_(targets)
        self.engine.pending = True

    def update(
        self,
        batches: Sequence[Tensor],
        lr: float,
        clip: float | None = None,
        topology: Topology | None = None,
        scheme: Scheme = "awc",
        gamma: float = 1.0,
        visible: bool = False,
    ) -> UpdateMetrics:
        """One update over all of ``batches``."""
        for batch in batches:
            self.engine.accumulate(batch)
        self.engine.finish_gradients(visible)
        groups = [
            GroupHyperparameters(lr, BETAS, EPS, WEIGHT_DECAY),
            GroupHyperparameters(lr, BETAS, EPS, 0.0),
        ]
        combine = None
        if topology is not None:
            matrix = mixed(topology.matrix(self.engine.next_update), gamma)
            combine = Combine(scheme, matrix, partial(self.gossip.combine, matrix=matrix))
        return self.engine.update(groups, clip, combine)

    def recorded(self, *args: Any, **kwargs: Any) -> Update:
        """As ``update``, with a copy of everything after it."""
        metrics, arena = self.update(*args, **kwargs), self.arena
        return Update(
            *(t.clone() for t in (arena.weights, arena.exp_avg, arena.exp_avg_sq)),
            metrics.loss,
            metrics.grad_norm,
            metrics.targets,
            torch.cat(self.engine.consensus_distance()),
            self.engine.next_update,
        )


def _forward_context(low: torch.dtype | None) -> AbstractContextManager[Any]:
    return nullcontext() if low is None else torch.autocast("cuda", low)


def assert_same(mine: Update, other: Update, tolerance: float) -> None:
    """Equal, each tensor to a tolerance relative to its largest element."""
    assert mine.next_update == other.next_update
    assert torch.equal(mine.targets, other.targets)
    names = ("weights", "exp_avg", "exp_avg_sq", "loss", "grad_norm", "spread")
    for name in names:
        found, expected = getattr(mine, name), getattr(other, name)
        atol = tolerance * expected.abs().max().item()
        torch.testing.assert_close(
            found, expected, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )


def choose_on_cpu(backend: str, *_: Any) -> tuple[Backend, str]:
    """Stands for ``choose_backend``, which takes gh200 only on GPUs that its kernels run on."""
    return ("native", "asked for") if backend == "native" else ("gh200", "tested on a CPU")


def train_gh200(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """``rank_jobs.train`` on the gh200 engine, in a process of its own."""
    import rank_jobs

    from tinyllm.strategies import base

    base.choose_backend = choose_on_cpu  # type: ignore[assignment]
    base.NativeEngine = None  # type: ignore[assignment,misc]
    return rank_jobs.train(*args, **kwargs)
