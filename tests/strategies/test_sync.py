"""Synchronous training against a plain PyTorch loop, and what the strategy refuses."""

from collections.abc import Sequence
from math import ceil
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from simulation import CONFIG, OPTIMIZER, SCHEDULE, tiny
from torch import Tensor
from torch.utils.data import DataLoader

from tinyllm import TinyLLM
from tinyllm.model import IGNORED
from tinyllm.strategies import SyncStrategy


def rows(count: int, seed: int = 0) -> Tensor:
    """Token rows, of which a quarter of the targets is missing, unevenly."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(CONFIG.vocab_size, (count, CONFIG.context + 1), generator=generator)
    for row, length in enumerate(torch.randint(2, CONFIG.context + 2, (count,)).tolist()):
        if row % 2:
            tokens[row, length:] = IGNORED
    return tokens


def plain_loop(updates: Sequence[Tensor], clip: float | None) -> list[Tensor]:
    """What training means: mean loss over an update's targets, clipping, AdamW, schedule."""
    model = tiny().double().model
    matrices = [p for p in model.parameters() if p.ndim > 2]
    scales = [p for p in model.parameters() if p.ndim <= 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": scales, "weight_decay": 0.0}],
        lr=OPTIMIZER.lr,
        betas=OPTIMIZER.betas,
        eps=OPTIMIZER.eps,
        weight_decay=OPTIMIZER.weight_decay,
    )
    for update, batch in enumerate(updates):
        for group in optimizer.param_groups:
            group["lr"] = OPTIMIZER.lr * SCHEDULE.factor(update, len(updates))
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(
            model(batch[None, :, :-1].clamp_min(0)).flatten(0, 2),
            batch[:, 1:].flatten(),
            ignore_index=IGNORED,
        )
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def fit(module: LightningModule, batches: Sequence[Any], strategy: Any, **options: Any) -> Trainer:
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"precision": "64-true", "max_epochs": 1} | options,
    )
    trainer.fit(module, DataLoader(list(batches), batch_size=None))
    return trainer


def assert_same(module: TinyLLM, expected: Sequence[Tensor]) -> None:
    for (name, mine), plain in zip(module.model.named_parameters(), expected, strict=True):
        torch.testing.assert_close(mine.detach(), plain, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("micro_batch_size", [None, 1, 4, 11, 64])
def test_micro_batches_with_a_remainder_equal_a_plain_loop(
    micro_batch_size: int | None, clip: float | None
) -> None:
    """11 rows by 4 are 4 + 4 + 3, each weighted by its targets (PITFALLS 1 and 2)."""
    updates = [rows(11, seed) for seed in range(4)]
    module = tiny()
    trainer = fit(
        module,
        updates,
        SyncStrategy(micro_batch_size=micro_batch_size, compile=False),
        gradient_clip_val=clip,
    )
    assert trainer.global_step == 4
    assert_same(module, plain_loop(updates, clip))


@pytest.mark.parametrize("k", [3, 4, 16])
def test_accumulated_batches_equal_one_larger_batch(k: int) -> None:
    """11 batches by 3 are windows of 3 + 3 + 3 + 2, the last by what it holds (PITFALL 1)."""
    batches = [rows(2, seed) for seed in range(11)]
    module = tiny()
    trainer = fit(
        module, batches, SyncStrategy(micro_batch_size=1, compile=False), accumulate_grad_batches=k
    )
    assert trainer.global_step == ceil(11 / k)
    assert_same(module, plain_loop([torch.cat(batches[i : i + k]) for i in range(0, 11, k)], None))


def test_one_batch_of_everything_equals_the_accumulated_ones() -> None:
    """The three ways to make one update of 12 rows agree."""
    everything = rows(12)
    results = []
    for batches, options in (
        ([everything], {}),
        (list(everything.split(5)), {"accumulate_grad_batches": 8}),
        (list(everything.split(1)), {"accumulate_grad_batches": 12}),
    ):
        module = tiny()
        fit(module, batches, SyncStrategy(micro_batch_size=2, compile=False), **options)
        results.append([p.detach() for p in module.model.parameters()])
    for other in results[1:]:
        for mine, first in zip(other, results[0], strict=True):
            torch.testing.assert_close(mine, first, rtol=1e-12, atol=1e-12)


def test_loss_of_windows_of_one_and_nine_targets() -> None:
    """PITFALL 2: the gradient is that of Σ loss / Σ targets, not of the mean of means."""
    one = torch.full((1, CONFIG.context + 1), IGNORED)
    one[0, :2] = torch.tensor([3, 4])
    eight = torch.arange(CONFIG.context + 1)[None]
    module = tiny()
    fit(module, [one, eight], SyncStrategy(compile=False), accumulate_grad_batches=2)
    assert_same(module, plain_loop([torch.cat((one, eight))], None))


class Steps(Callback):
    def __init__(self) -> None:
        self.global_steps: list[int] = []
        self.rates: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.global_steps.append(trainer.global_step)
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def test_global_step_and_schedule_advance_once_per_update() -> None:
    """PITFALL 3: also with micro-batches and accumulation; ``max_steps`` counts updates."""
    steps = Steps()
    trainer = fit(
        tiny(),
        [rows(4, seed) for seed in range(11)],
        SyncStrategy(micro_batch_size=1, compile=False),
        accumulate_grad_batches=3,
        max_steps=3,
        max_epochs=-1,
        callbacks=[steps],
    )
    assert steps.global_steps == [0, 0, 1, 1, 1, 2, 2, 2, 3]
    assert trainer.global_step == 3
    expected = [OPTIMIZER.lr * SCHEDULE.factor(done, 3) for done in steps.global_steps]
    assert steps.rates == pytest.approx(expected)


def test_a_compiled_model_trains_alike() -> None:
    updates = [rows(5, seed) for seed in range(3)]
    module = tiny()
    precision, tolerance = "64-true", 1e-9
    if torch.__version__.startswith("2.11."):  # it compiles no attention in fp64 on a CPU
        precision, tolerance = "32-true", 3e-5
    fit(module, updates, SyncStrategy(micro_batch_size=3, compile=True), precision=precision)
    for mine, plain in zip(module.model.parameters(), plain_loop(updates, None), strict=True):
        torch.testing.assert_close(mine.detach().double(), plain, rtol=1e-9, atol=tolerance)
    assert module.model._compiled_call_impl is None  # later calls of any shape are not compiled


class Unclipped(TinyLLM):
    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None: ...


class Manual(TinyLLM):
    def __init__(self) -> None:
        super().__init__(config=CONFIG)
        self.automatic_optimization = False


class WithBatchNorm(TinyLLM):
    def __init__(self) -> None:
        super().__init__(config=CONFIG)
        self.normalized = torch.nn.BatchNorm1d(3)


class Unfreezing(BaseFinetuning):
    def freeze_before_training(self, *_: Any) -> None: ...

    def finetune_function(self, *_: Any) -> None: ...


class Foreign(TinyLLM):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        strange = torch.nn.Parameter(torch.zeros(3))
        return torch.optim.AdamW([*self.parameters(), strange])


class Grows(Callback):
    """Gives the optimizer another group after the first update."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        new = torch.nn.Parameter(torch.zeros(3))
        trainer.optimizers[0].add_param_group({"params": [new]})


def test_an_optimizer_that_grows_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match="has 3 parameter groups and had 2 when"):
        fit(tiny(), [rows(2), rows(2)], SyncStrategy(compile=False), callbacks=[Grows()])


class Sgd(TinyLLM):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (lambda: tiny(), {"gradient_clip_algorithm": "value"}, "gradient_clip_algorithm='norm'"),
        (lambda: Unclipped(config=CONFIG), {}, "Unclipped overrides configure_gradient_clipping"),
        (lambda: Manual(), {}, "automatic_optimization is False"),
        (lambda: Sgd(config=CONFIG), {}, r"one torch.optim.AdamW; it returned SGD"),
        (lambda: tiny(), {"precision": "bf16-true"}, "precision 'bf16-true' is not supported"),
        (
            lambda: WithBatchNorm(),
            {"callbacks": [StochasticWeightAveraging(0.1)]},
            "ends with an epoch that computes batch norm and updates nothing",
        ),
        (
            lambda: tiny(),
            {"callbacks": [ModelPruning("l1_unstructured")]},
            "ModelPruning puts masked copies in the place of parameters",
        ),
        (lambda: tiny(), {"callbacks": [Unfreezing()]}, "Unfreezing gives the optimizer more"),
        (lambda: tiny(), {"callbacks": [LearningRateFinder()]}, "its rate in `model.optimizer.lr`"),
        (
            lambda: Foreign(config=CONFIG),
            {},
            r"shape \[3\] that is not the module's",
        ),
    ],
)
def test_what_would_be_ignored_is_refused(
    module: Any, options: dict[str, Any], message: str
) -> None:
    """PITFALL 6: a strategy that owns the update honours a flag or refuses it at the start."""
    with pytest.raises(MisconfigurationException, match=message):
        fit(module(), [rows(2)], SyncStrategy(compile=False), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "fast"}, "backend is 'fast'; choose from auto, gh200, native"),
        ({"timeout_seconds": -5}, "timeout_seconds is -5; it must be above 0"),
        ({"timeout_seconds": float("inf")}, "timeout_seconds is inf; .* at most a year"),
        ({"micro_batch_size": 0}, "micro_batch_size is 0; it must be at least 1"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SyncStrategy(**options)


@pytest.mark.parametrize("batch", [torch.zeros(4), torch.zeros(2, 9), torch.zeros(0, 9).long()])
def test_what_is_no_batch_of_token_rows_is_refused(batch: Tensor) -> None:
    with pytest.raises(ValueError, match="a batch of"):
        fit(tiny(), [batch], SyncStrategy(compile=False))


def test_the_module_leaves_the_arena_with_its_weights() -> None:
    """After the fit the module is an ordinary one: its own memory, no gradients."""
    module = tiny()
    fit(module, [rows(4)], SyncStrategy(compile=False))
    storages = {p.untyped_storage().data_ptr() for p in module.parameters()}
    assert all(p.grad is None for p in module.parameters())
    again = tiny().double()
    again.load_state_dict(module.state_dict())
    tokens = rows(2)[:, :-1].clamp_min(0)
    assert torch.equal(again(tokens), module(tokens))
    assert len(storages) == 1  # one row, which nothing else holds


def test_no_clipping_below_zero() -> None:
    """Lightning's meaning; a negative factor would turn updates around."""
    states = []
    for clip in (None, 0.0, -1.0):
        module = tiny()
        fit(module, rows(12).split(4), SyncStrategy(compile=False), gradient_clip_val=clip)
        states.append([p.detach().clone() for p in module.parameters()])
    for state in states[1:]:
        torch.testing.assert_close(state, states[0], rtol=0, atol=0)
