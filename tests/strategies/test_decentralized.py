"""DecentralizedStrategy on one rank: the update's formulas, mixing, γ and topology phases."""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from classifier import classifier, examples
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from simulation import (
    OPTIMIZER,
    SCHEDULE,
    UPDATES,
    batches,
    fit,
    gammas,
    largest_difference,
    learning_rates,
    new_trainer,
    simulate,
    tiny,
    worker_weights,
)
from torch import Tensor

from tinyllm import TinyLLM, TokenDataModule
from tinyllm.module import AdamWConfig
from tinyllm.schedule import WarmupCosine
from tinyllm.strategies import DecentralizedStrategy, SyncStrategy
from tinyllm.strategies.consensus import AdaptiveConsensus
from tinyllm.strategies.topology import make_topology

# Float64 rounding of two orders of summation, grown over 12 updates of weights of order 0.1; the
# differences seen are below 1e-14.
TOLERANCE = 1e-10

WORKERS = (1, 2, 3, 4, 5, 8)
TOPOLOGIES = (
    "complete",
    "ring",
    "one_peer_ring",
    "one_peer_exponential",
    "exponential",
    "base_k",
    "file",
)
CASES = [
    (topology, scheme, workers)
    for topology, scheme, workers in product(TOPOLOGIES, ("awc", "atc"), WORKERS)
    if not (topology == "one_peer_ring" and workers in (3, 5))  # needs an even N
]


def topology_file(folder: Path, workers: int) -> str:
    """Two phases of doubly stochastic matrices without any symmetry."""
    rng = np.random.default_rng(workers)
    eye = np.eye(workers)
    phases = [
        sum(share * eye[rng.permutation(workers)] for share in rng.dirichlet(np.ones(4)))
        for _ in range(2)
    ]
    path = folder / "matrices.npy"
    np.save(path, np.stack(phases))
    return str(path)


def difference_from_simulation(
    topology: str,
    scheme: Any,
    workers: int,
    clip: float | None,
    adaptive: tuple[float, float] | None,
) -> float:
    module, rows = tiny(), batches(workers)
    expected = simulate(
        module,
        rows,
        make_topology(topology, workers),
        scheme,
        clip=clip,
        gamma=None if adaptive is None else gammas(learning_rates(), *adaptive),
    )
    strategy = DecentralizedStrategy(
        workers,
        scheme=scheme,
        topology=topology,
        adaptive_consensus=None if adaptive is None else AdaptiveConsensus(*adaptive),
        compile=False,
    )
    actual = fit(module, strategy, rows, gradient_clip_val=clip)
    assert actual.gammas[3::4] == pytest.approx(expected.gammas[3::4], abs=1e-14)
    assert actual.rates == pytest.approx(expected.rates, rel=1e-14)
    return largest_difference(actual, expected)


@pytest.mark.parametrize(
    ("topology", "scheme", "workers", "index"),
    [(*case, index) for index, case in enumerate(CASES)],
)
def test_equals_the_simulation(
    tmp_path: Path, topology: str, scheme: str, workers: int, index: int
) -> None:
    # from case to case, clipping and adaptive consensus go through all four combinations
    clip = 0.5 if index % 2 else None
    adaptive = (0.1, 0.5) if index // 2 % 2 else None  # active from within the warm-up
    name = topology_file(tmp_path, workers) if topology == "file" else topology
    assert difference_from_simulation(name, scheme, workers, clip, adaptive) < TOLERANCE


@pytest.mark.parametrize("scheme", ["awc", "atc"])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("adaptive", [None, (0.5, 1.0), (0.1, 2.0)])
def test_equals_the_simulation_however_it_clips_and_adapts(
    scheme: str, clip: float | None, adaptive: tuple[float, float] | None
) -> None:
    d = difference_from_simulation("one_peer_exponential", scheme, 4, clip, adaptive)
    assert d < TOLERANCE


# --- mixing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["awc", "atc"])
def test_complete_mixing_of_identical_data_is_sync_training(scheme: Any) -> None:
    rows = batches(1, rows_per_worker=3)
    sync = fit(tiny(), SyncStrategy(compile=False), rows, gradient_clip_val=0.5)
    strategy = DecentralizedStrategy(4, scheme=scheme, topology="complete", compile=False)
    packed = fit(
        tiny(), strategy, [r.repeat_interleave(4, dim=0) for r in rows], gradient_clip_val=0.5
    )
    for one, four in zip(sync.weights, packed.weights, strict=True):
        torch.testing.assert_close(four, one.expand(4, -1), rtol=0, atol=1e-13)


class Scatter(Callback):
    """Starts the workers from different weights, and keeps those."""

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        arena = trainer.strategy.engine.arena  # type: ignore[attr-defined]
        for view in arena.layout.views(arena.weights).values():
            view += torch.randn_like(view)
        self.weights = worker_weights(trainer.strategy, module)  # type: ignore[arg-type]


def mix_only(workers: int, topology: str, scheme: Any = "atc") -> list[Tensor]:
    """Weights ``[N, …]`` before the first and after every update at a learning rate of 0."""
    scatter = Scatter()
    record = fit(
        tiny(AdamWConfig(lr=0.0)),
        DecentralizedStrategy(workers, scheme=scheme, topology=topology, compile=False),
        batches(workers),
        callbacks=[scatter],
        max_steps=6,
    )
    return [scatter.weights, *record.weights]


def disagreement(weights: Tensor) -> float:
    return float((weights - weights.mean(0)).abs().max())


@pytest.mark.parametrize(
    ("topology", "workers"),
    [
        (topology, workers)
        for topology, workers in product(TOPOLOGIES, (2, 3, 8))
        if (topology, workers) != ("one_peer_ring", 3)  # needs an even N
    ],
)
def test_mixing_preserves_the_mean(tmp_path: Path, topology: str, workers: int) -> None:
    name = topology_file(tmp_path, workers) if topology == "file" else topology
    weights = mix_only(workers, name)
    assert disagreement(weights[0]) > 1
    # 6 updates, each with N roundings of numbers of order 1
    torch.testing.assert_close(weights[-1].mean(0), weights[0].mean(0), rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("topology", "workers", "updates"),
    [
        ("complete", 5, 1),
        ("one_peer_exponential", 2, 1),
        ("one_peer_exponential", 4, 2),
        ("one_peer_exponential", 8, 3),
        ("base_k", 3, 3),
        ("base_k", 4, 2),
        ("base_k", 5, 5),
        ("base_k", 6, 4),
        ("base_k", 8, 3),
    ],
)
@pytest.mark.parametrize("scheme", ["awc", "atc"])
def test_workers_agree_after_the_stated_number_of_updates(
    topology: str, workers: int, updates: int, scheme: str
) -> None:
    assert make_topology(topology, workers).updates_to_exact_consensus() == updates
    apart = [disagreement(w) for w in mix_only(workers, topology, scheme)]
    assert min(apart[:updates]) > 0.1
    assert max(apart[updates:]) < 1e-14


def test_complete_mixing_leaves_no_disagreement_at_all() -> None:
    rows = batches(3)
    strategy = DecentralizedStrategy(3, scheme="atc", topology="complete", compile=False)
    for weights in fit(tiny(), strategy, rows).weights:
        assert torch.equal(weights, weights[:1].expand(3, -1))


def test_consensus_distance_is_that_of_the_weights() -> None:
    class Distances(Callback):
        def __init__(self) -> None:
            self.seen: list[tuple[Tensor, Tensor]] = []

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            metrics = trainer.strategy.update_metrics
            self.seen.append((metrics.consensus_distance, metrics.average_norm))

    distances = Distances()
    strategy = DecentralizedStrategy(4, topology="ring", compile=False)
    record = fit(tiny(), strategy, batches(4), callbacks=[distances], log_every_n_steps=1)
    for weights, (distance, norm) in zip(record.weights, distances.seen, strict=True):
        mean = weights.mean(0)
        torch.testing.assert_close(distance, (weights - mean).norm(dim=1))
        torch.testing.assert_close(norm, mean.norm()[None])


# --- γ and the topology's phase -----------------------------------------------------------------


class Logged(Callback):
    """What was logged at each update."""

    def __init__(self) -> None:
        self.values: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.values.append({k: float(v) for k, v in trainer.callback_metrics.items()})


def test_logs_gamma_losses_and_distances() -> None:
    class LastLogged(Logged):
        def on_train_end(self, trainer: Trainer, *_: Any) -> None:
            self.values.append({k: float(v) for k, v in trainer.callback_metrics.items()})

    logged = LastLogged()
    strategy = DecentralizedStrategy(
        2, adaptive_consensus=AdaptiveConsensus(0.5, 2.0), compile=False
    )
    record = fit(tiny(), strategy, batches(2), callbacks=[logged])
    last = logged.values[-1]
    assert last["train/gamma"] == pytest.approx(gammas(learning_rates(), 0.5, 2.0)[-1])
    assert last["train/lr"] == pytest.approx(0.1 * OPTIMIZER.lr)
    assert last["worker_loss/0"] == pytest.approx(record.losses[-1][0].item())
    assert last["train/loss"] == pytest.approx(record.losses[-1].mean().item())
    distance = (record.weights[-1] - record.weights[-1].mean(0)).norm(dim=1)
    assert last["worker_distance/1"] == pytest.approx(distance[1].item())
    assert last["consensus/distance"] == pytest.approx(distance.square().mean().sqrt().item())


def test_gamma_of_a_constant_learning_rate_is_one() -> None:
    class Constant(TinyLLM):
        def configure_optimizers(self) -> Any:
            return super().configure_optimizers()["optimizer"]

        def on_train_start(self) -> None:
            pass

    module = Constant(config=tiny().config, optimizer=OPTIMIZER)
    strategy = DecentralizedStrategy(
        2, adaptive_consensus=AdaptiveConsensus(0.0, 1.0), compile=False
    )
    assert fit(module, strategy, batches(2), log_every_n_steps=1).gammas == [1.0] * UPDATES


def test_a_window_of_zero_learning_rates_is_refused() -> None:
    module = tiny(schedule=WarmupCosine(warmup_fraction=0.25, final_fraction=0.0))
    strategy = DecentralizedStrategy(
        2, adaptive_consensus=AdaptiveConsensus(start_fraction=11 / 12), compile=False
    )
    with pytest.raises(ValueError, match="updates 11 to 11, and all of them are 0"):
        fit(module, strategy, batches(2))


@pytest.mark.parametrize("scheme", ["awc", "atc"])
def test_accumulated_and_micro_batches_count_as_one_update(scheme: Any) -> None:
    # Period 2: a phase that advanced per batch or per micro-batch would never see the odd one.
    small = batches(4, rows_per_worker=3, updates=2 * UPDATES)
    large = [torch.cat(pair) for pair in zip(small[::2], small[1::2], strict=True)]
    topology = make_topology("one_peer_exponential", 4)
    expected = simulate(tiny(), large, topology, scheme, clip=0.5)
    strategy = DecentralizedStrategy(4, scheme=scheme, micro_batch_size=2, compile=False)
    actual = fit(tiny(), strategy, small, accumulate_grad_batches=2, gradient_clip_val=0.5)
    assert largest_difference(actual, expected) < TOLERANCE


def test_partial_batches_and_workers_without_any_target() -> None:
    rows = batches(3, rows_per_worker=3)
    rows[2][1::3] = -100  # worker 1 has nothing
    rows[5][4:] = -100  # worker 0 has two rows, workers 1 and 2 have one
    rows[7][:, 5:] = -100  # short rows
    expected = simulate(tiny(), rows, make_topology("ring", 3), "awc", clip=0.5)
    strategy = DecentralizedStrategy(3, topology="ring", micro_batch_size=2, compile=False)
    actual = fit(tiny(), strategy, rows, gradient_clip_val=0.5)
    assert largest_difference(actual, expected) < TOLERANCE
    assert actual.losses[2][1] == 0
    assert actual.grad_norms[2][1] == 0


# --- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "workers is 0; it must be at least 1"),
        ({"scheme": "cta"}, "scheme is 'cta'; choose from awc, atc"),
        ({"buffers": "avg"}, "buffers is 'avg'; choose from local, average"),
        ({"topology": "rign"}, "unknown topology 'rign'; did you mean 'ring'"),
        ({"workers": 3, "topology": "one_peer_ring"}, "N must be 1 or even, got N = 3"),
        ({"backend": "cuda"}, "backend is 'cuda'; choose"),
        ({"micro_batch_size": 0}, "micro_batch_size is 0; it must be at least 1"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DecentralizedStrategy(**({"workers": 2} | options))


def test_fewer_rows_than_workers_are_refused(tmp_path: Path) -> None:
    data = TokenDataModule(str(tmp_path), 8, 3)
    trainer = new_trainer(DecentralizedStrategy(4, compile=False), max_steps=1)
    data.trainer = trainer
    with pytest.raises(
        ValueError, match=r"batch_size is 3 and 4 workers or ranks share .* least 4"
    ):
        data.train_dataloader()


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="5 rows cannot be shared out among 2 workers; pad it"):
        fit(tiny(), DecentralizedStrategy(2, compile=False), [torch.zeros(5, 9).long()] * UPDATES)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_clip_algorithm": "value", "gradient_clip_val": 1.0}, "is 'value'"),
        ({"precision": "bf16-true"}, "precision 'bf16-true' is not supported"),
        ({"precision": "16-true"}, "precision '16-true' is not supported"),
        ({"sync_batchnorm": True}, "sync_batchnorm is True"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(options: Any, message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        fit(tiny(), DecentralizedStrategy(2, compile=False), batches(2), **options)


class Manual(TinyLLM):
    """Optimizes by itself."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.automatic_optimization = False


class OwnBackward(TinyLLM):
    """Would scale every gradient."""

    def backward(self, loss: Tensor) -> None:
        (2 * loss).backward()


class OwnClipping(TinyLLM):
    """Would clip in another way."""

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        pass


class Sgd(TinyLLM):
    """Has another optimizer."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class PlateauRate(TinyLLM):
    """Has a learning rate that nobody knows ahead."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()["optimizer"]
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": scheduler,
                "interval": "step",
                "monitor": "train/loss",
                "strict": False,
            },
        }


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Manual, "automatic_optimization is False"),
        (OwnBackward, "OwnBackward overrides backward"),
        (OwnClipping, "OwnClipping overrides configure_gradient_clipping"),
        (Sgd, "needs configure_optimizers to return one torch.optim.AdamW; it returned SGD"),
        (PlateauRate, "per update, known ahead: got 1, the first a ReduceLROnPlateau"),
    ],
)
def test_modules_that_would_be_ignored_are_refused(kind: Any, message: str) -> None:
    module = kind(config=tiny().config, optimizer=OPTIMIZER, schedule=SCHEDULE)
    strategy = DecentralizedStrategy(2, adaptive_consensus=AdaptiveConsensus(0.5), compile=False)
    with pytest.raises(MisconfigurationException, match=message):
        fit(module, strategy, batches(2))


def test_adaptive_consensus_without_an_end_is_refused() -> None:
    strategy = DecentralizedStrategy(1, adaptive_consensus=AdaptiveConsensus(0.5), compile=False)
    with pytest.raises(MisconfigurationException, match="there is no limit; set"):
        fit(classifier(), strategy, examples(4), max_steps=-1, max_epochs=-1)


@pytest.mark.parametrize("name", ["packed2_awc", "packed4_atc", "packed8_awc"])
def test_short_names(name: str) -> None:
    strategy = new_trainer(name).strategy
    assert isinstance(strategy, DecentralizedStrategy)
    assert strategy.topology.num_workers == int(name[6])
    assert strategy.topology.name == "one_peer_exponential"
    assert strategy._scheme == name[-3:]
