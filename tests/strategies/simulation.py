"""An independent simulation of decentralized training, and a small run of the real thing.

The simulation is what the update's formulas say and nothing else: N ordinary models, autograd,
``torch.optim.AdamW`` and a dense matrix product, all in float64.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil, cos, pi
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import disable_possible_user_warnings
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader

from tinyllm import LlamaConfig, TinyLLM
from tinyllm.data.prepare import prepare
from tinyllm.module import AdamWConfig
from tinyllm.schedule import WarmupCosine
from tinyllm.strategies.base import ArenaStrategy
from tinyllm.strategies.topology import Topology

CONFIG = LlamaConfig(
    layers=1, width=8, heads=2, ffn_width=16, vocab_size=31, context=8, init_std=0.2
)
OPTIMIZER = AdamWConfig(lr=0.02, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2)
UPDATES = 12
WARMUP_UPDATES = 3
SCHEDULE = WarmupCosine(warmup_fraction=WARMUP_UPDATES / UPDATES, final_fraction=0.1)

disable_possible_user_warnings()


def tiny(
    optimizer: AdamWConfig = OPTIMIZER, schedule: Any = SCHEDULE, seed: int = 1, **kwargs: Any
) -> TinyLLM:
    """A model of 912 parameters."""
    torch.manual_seed(seed)
    return TinyLLM(config=CONFIG, optimizer=optimizer, schedule=schedule, **kwargs)


def token_cache(folder: Path, ids: Any, **options: Any) -> str:
    """A token cache of the ids, whose documents end with 0, in a folder; its path."""
    np.asarray(ids, "<u2").tofile(folder / "ids.u16")
    output, source = folder / "cache", str(folder / "ids.u16")
    prepare(output, "tokens", source, vocab_size=CONFIG.vocab_size, boundary_id=0, **options)
    return str(output)


def learning_rates(updates: int = UPDATES) -> list[float]:
    """``OPTIMIZER.lr`` under ``SCHEDULE``: a linear warm-up, then half a cosine down to a tenth."""
    rates = []
    for t in range(updates):
        if t < WARMUP_UPDATES:
            rates.append(OPTIMIZER.lr * (t + 1) / WARMUP_UPDATES)
        else:
            progress = (t + 1 - WARMUP_UPDATES) / (updates - WARMUP_UPDATES)
            rates.append(OPTIMIZER.lr * (0.1 + 0.9 * (1 + cos(pi * progress)) / 2))
    return rates


def gammas(rates: Sequence[float], start_fraction: float, power: float) -> list[float]:
    """γ of every update."""
    start = ceil(start_fraction * len(rates))
    return [
        1.0 if t < start else (rate / max(rates[start:])) ** power for t, rate in enumerate(rates)
    ]


def batches(workers: int, rows_per_worker: int = 2, updates: int = UPDATES) -> list[Tensor]:
    """Global batches ``[B·N, T+1]``; row r belongs to worker r mod N."""
    generator = torch.Generator().manual_seed(7)
    shape = (workers * rows_per_worker, CONFIG.context + 1)
    return [torch.randint(CONFIG.vocab_size, shape, generator=generator) for _ in range(updates)]


@dataclass
class Record:
    """What happened at every update: ``[updates, N, …]``."""

    weights: list[Tensor] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    grad_norms: list[Tensor] = field(default_factory=list)
    gammas: list[float | None] = field(default_factory=list)  # None between log points
    rates: list[float] = field(default_factory=list)


def simulate(
    module: TinyLLM,
    global_batches: Sequence[Tensor],
    topology: Topology,
    scheme: str,
    *,
    clip: float | None = None,
    gamma: Sequence[float] | None = None,
    rates: Sequence[float] | None = None,
) -> Record:
    """Trains N copies of ``module`` as the update's formulas say."""
    workers = topology.num_workers
    models = [tiny().double() for _ in range(workers)]
    optimizers = []
    for model in models:
        model.load_state_dict(module.state_dict())
        matrices = [p for name, p in model.named_parameters() if "norm" not in name]
        scales = [p for name, p in model.named_parameters() if "norm" in name]
        optimizers.append(
            torch.optim.AdamW(
                [{"params": matrices}, {"params": scales, "weight_decay": 0.0}],
                lr=OPTIMIZER.lr,
                betas=OPTIMIZER.betas,
                eps=OPTIMIZER.eps,
                weight_decay=OPTIMIZER.weight_decay,
            )
        )
    rates = rates or learning_rates(len(global_batches))
    weights = [list(model.parameters()) for model in models]
    record = Record()
    for t, rows in enumerate(global_batches):
        g = 1.0 if gamma is None else gamma[t]
        W = torch.from_numpy(g * topology.matrix(t) + (1 - g) * np.eye(workers))
        losses, norms = [], []
        for i, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            own = rows[i::workers]
            logits, targets = model(own[:, :-1].clamp_min(0)), own[:, 1:]
            scored = (targets != -100).sum().clamp_min(1)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
            (loss / scored).backward()
            losses.append((loss / scored).detach())
            limit = float("inf") if clip is None else clip
            norms.append(torch.nn.utils.clip_grad_norm_(weights[i], limit))
            for group in optimizer.param_groups:
                group["lr"] = rates[t]
        if scheme == "awc":
            _mix(weights, W)
        for optimizer in optimizers:
            optimizer.step()
        if scheme == "atc":
            _mix(weights, W)
        record.weights.append(_stack(weights))
        record.losses.append(torch.stack(losses))
        record.grad_norms.append(torch.stack(norms))
        record.gammas.append(g)
        record.rates.append(rates[t])
    return record


def _stack(weights: Sequence[Sequence[Tensor]]) -> Tensor:
    return torch.stack([parameters_to_vector(own).detach() for own in weights])


def _mix(weights: Sequence[Sequence[Tensor]], W: Tensor) -> None:
    for own, row in zip(weights, W @ _stack(weights), strict=True):
        vector_to_parameters(row, own)


class Recorder(Callback):
    """Records what a strategy really does, at every update."""

    def __init__(self) -> None:
        self.record = Record()

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, ArenaStrategy)
        metrics = strategy.update_metrics
        if metrics is None:  # a batch of an update that is not complete
            return
        record = self.record
        record.weights.append(worker_weights(strategy, module))
        ranks = strategy.ranks
        for values, own in (
            (record.losses, metrics.loss),
            (record.grad_norms, metrics.grad_norm),
        ):
            # between log points there are only this rank's
            values.append(own.clone() if len(own) == ranks.num_workers else ranks.gather(own))
        record.gammas.append(metrics.gamma)
        record.rates.append(metrics.learning_rate)


def worker_weights(strategy: ArenaStrategy, module: LightningModule) -> Tensor:
    """``[N, parameters]`` without padding, in the order of ``module.parameters()``."""
    arena = strategy.engine.arena
    rows = strategy.ranks.gather(arena.weights)
    views = arena.layout.views(rows)
    ordered = [views[name] for name, _ in module.named_parameters()]
    return torch.cat([view.reshape(len(rows), -1) for view in ordered], dim=1).clone()


class Batches:
    """A loader of given batches whose position goes into checkpoints."""

    def __init__(self, given: Sequence[Any]) -> None:
        self._given, self._position = list(given), 0

    def __len__(self) -> int:
        return len(self._given)

    def __iter__(self) -> Iterator[Any]:
        while self._position < len(self):
            self._position += 1
            yield self._given[self._position - 1]
        self._position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._position = state["position"] % len(self)


def new_trainer(strategy: Any, **options: Any) -> Trainer:
    """A Trainer that does nothing but train, in float64 on the CPU."""
    options = {
        "accelerator": "cpu",
        "devices": 1,
        "precision": "64-true",
        "max_steps": UPDATES,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 4,
        "limit_val_batches": 0,
    } | options
    return Trainer(strategy=strategy, **options)


def fit(
    module: LightningModule,
    strategy: ArenaStrategy,
    global_batches: Sequence[Any],
    *,
    callbacks: Sequence[Callback] = (),
    val_batches: Sequence[Any] | None = None,
    ckpt_path: str | Path | None = None,
    **options: Any,
) -> Record:
    """Trains with a real Trainer and returns what happened at each update."""
    recorder = Recorder()
    trainer = new_trainer(strategy, callbacks=[recorder, *callbacks], **options)
    validation = None if val_batches is None else DataLoader(list(val_batches), batch_size=None)
    trainer.fit(module, Batches(global_batches), validation, ckpt_path=ckpt_path)
    return recorder.record


def largest_difference(record: Record, other: Record) -> float:
    """Largest difference of any weight, loss or norm at any update."""
    pairs = [
        (torch.stack(a), torch.stack(b))
        for a, b in (
            (record.weights, other.weights),
            (record.losses, other.losses),
            (record.grad_norms, other.grad_norms),
        )
    ]
    return max(float((a - b).abs().max()) for a, b in pairs)
