"""Other LightningModules, and TinyLLMs with a loss of their own, as tenants of an arena."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from classifier import DECAYED, UPDATES, Classifier, classifier, examples, simulate
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from simulation import (
    OPTIMIZER,
    SCHEDULE,
    Batches,
    batches,
    fit,
    largest_difference,
    new_trainer,
    tiny,
)
from torch import Tensor, nn

from tinyllm import TinyLLM
from tinyllm.strategies import DecentralizedStrategy, SyncStrategy
from tinyllm.strategies.base import ArenaStrategy
from tinyllm.strategies.engine import Ranks
from tinyllm.strategies.tenant import Tenant


def strategies() -> list[ArenaStrategy]:
    return [SyncStrategy(compile=False), DecentralizedStrategy(1, compile=False)]


@pytest.mark.parametrize("strategy", strategies(), ids=["sync", "decentralized"])
def test_trains_any_module_as_plain_pytorch_does(strategy: ArenaStrategy) -> None:
    module, given = classifier(), examples(5)
    trainer = new_trainer(strategy, max_steps=UPDATES, gradient_clip_val=0.5)
    trainer.fit(module, Batches(given))
    (expected,) = simulate([[b] for b in given], [torch.eye(1).double()] * UPDATES, clip=0.5)
    for (name, value), want in zip(
        module.state_dict().items(), expected.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(value, want, rtol=0, atol=1e-12, msg=name)
    assert torch.equal(module.frozen.weight, classifier().double().frozen.weight)
    assert trainer.callback_metrics["train/loss"].item() > 0


def test_a_module_resumes_bit_for_bit(tmp_path: Path) -> None:
    class Save(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                trainer.save_checkpoint(tmp_path / "saved.ckpt")

    class Noisy(Classifier):
        """Draws random numbers, as dropout does."""

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + 0.1 * torch.randn_like(x))

    whole, resumed = Noisy(), Noisy()
    trainer = new_trainer(SyncStrategy(compile=False), max_steps=UPDATES, callbacks=[Save()])
    trainer.fit(whole, Batches(examples(5)))
    trainer = new_trainer(SyncStrategy(compile=False), max_steps=UPDATES)
    trainer.fit(resumed, Batches(examples(5)), ckpt_path=tmp_path / "saved.ckpt")
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_a_modules_outputs_reach_its_hooks() -> None:
    class Watching(Classifier):
        hits: list[int]

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.hits.append(int(outputs["hits"]))

    module = Watching()
    module.hits = []
    trainer = new_trainer(SyncStrategy(compile=False), max_steps=UPDATES)
    trainer.fit(module, Batches(examples(5)))
    assert len(module.hits) == UPDATES


def test_a_module_cannot_be_packed() -> None:
    trainer = new_trainer(DecentralizedStrategy(2, compile=False), max_steps=UPDATES)
    with pytest.raises(MisconfigurationException, match="2 workers cannot be packed on one rank"):
        trainer.fit(classifier(), Batches(examples(4)))


def test_a_modules_batches_cannot_be_split() -> None:
    strategy = SyncStrategy(compile=False, micro_batch_size=2)
    trainer = new_trainer(strategy, max_steps=UPDATES)
    with pytest.raises(MisconfigurationException, match=r"use trainer\.accumulate_grad"):
        trainer.fit(classifier(), Batches(examples(4)))


def test_a_step_without_a_loss_is_refused() -> None:
    class Skipping(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None

    trainer = new_trainer(SyncStrategy(compile=False), max_steps=UPDATES)
    with pytest.raises(TypeError, match="training_step returned NoneType; this strategy needs"):
        trainer.fit(Skipping(), Batches(examples(4)))


def test_parameters_of_several_dtypes_are_refused() -> None:
    class Mixed(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(16, 3, dtype=torch.bfloat16)

    trainer = new_trainer(SyncStrategy(compile=False), precision="32-true")
    with pytest.raises(MisconfigurationException, match=r"torch\.bfloat16, torch\.float32"):
        trainer.fit(Mixed(), Batches(examples(4)))


class OwnStep(TinyLLM):
    """Adds a penalty to the usual loss, in training_step."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        penalty = sum(p.square().sum() for p in self.parameters())
        return super().training_step(batch, batch_idx) + 0.1 * penalty


class OwnLoss(TinyLLM):
    """Counts every target's loss twice."""

    def token_losses(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        nll, targets = super().token_losses(rows)
        return 2 * nll, targets


class OwnParameter(TinyLLM):
    """Learns a temperature on top."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def token_losses(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        nll, targets = super().token_losses(rows)
        return nll * self.temperature, targets

    def configure_optimizers(self) -> Any:
        configured: Any = super().configure_optimizers()
        configured["optimizer"].param_groups[1]["params"].append(self.temperature)
        return configured


SUBCLASSES = (OwnStep, OwnLoss, OwnParameter)


def make(kind: type[TinyLLM]) -> TinyLLM:
    module = kind(config=tiny().config, optimizer=OPTIMIZER, schedule=SCHEDULE)
    module.load_state_dict(tiny().state_dict(), strict=False)
    return module


@pytest.mark.parametrize("kind", SUBCLASSES)
def test_a_subclass_trains_on_its_own_loss(kind: type[TinyLLM]) -> None:
    rows = batches(1)
    model = make(kind).double()
    model.log = lambda *_, **__: None  # type: ignore[method-assign, assignment]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in model.named_parameters() if p.ndim > 2]},
            {"params": [p for n, p in model.named_parameters() if p.ndim <= 2], "weight_decay": 0},
        ],
        lr=OPTIMIZER.lr,
        betas=OPTIMIZER.betas,
        eps=OPTIMIZER.eps,
        weight_decay=OPTIMIZER.weight_decay,
    )
    model.training_step(rows[0], 0).backward()
    optimizer.step()
    # a run of one update has warmed up with it
    record = fit(make(kind), SyncStrategy(compile=False), rows, max_steps=1)
    assert record.rates == [OPTIMIZER.lr]
    flat = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.testing.assert_close(record.weights[0][0], flat, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", SUBCLASSES)
def test_a_subclass_with_its_own_loss_cannot_be_packed(kind: type[TinyLLM]) -> None:
    with pytest.raises(MisconfigurationException, match=f"{kind.__name__} is not a TinyLLM with"):
        fit(make(kind), DecentralizedStrategy(2, compile=False), batches(2))


def test_a_subclass_with_the_usual_loss_is_packed() -> None:
    class Named(TinyLLM):
        def on_train_epoch_start(self) -> None:
            assert self.model.workers == 2

    plain = fit(tiny(), DecentralizedStrategy(2, compile=False), batches(2))
    named = fit(make(Named), DecentralizedStrategy(2, compile=False), batches(2))
    assert largest_difference(plain, named) == 0


def test_a_frozen_part_of_a_packed_model_is_refused() -> None:
    module = tiny()
    module.model.norm.requires_grad_(False)
    with pytest.raises(MisconfigurationException, match=r"model\.norm\.weight is frozen or not"):
        fit(module, DecentralizedStrategy(2, compile=False), batches(2))


def test_without_a_compiler_the_model_trains_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    module = tiny()
    with pytest.warns(UserWarning, match=r"needs a C\+\+ compiler and finds none"):
        Tenant(module, Ranks(1, 1, 1)).compile()
    assert module.model._compiled_call_impl is None


class Idle(Classifier):
    """Has a layer that nothing uses, and a loss of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(2, 2)

    def groups(self) -> list[dict[str, Any]]:
        return [*super().groups(), {"params": list(self.idle.parameters()), **DECAYED}]

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        step = super().training_step(batch, batch_idx)
        return step | {"loss": step["loss"][None]}


def test_a_parameter_without_a_gradient_decays_and_that_is_said_once() -> None:
    module = Idle()
    before = module.idle.weight.detach().clone()
    trainer = new_trainer(SyncStrategy(compile=False), max_steps=3)
    with pytest.warns(UserWarning, match="idle.weight got no gradient") as said:
        trainer.fit(module, Batches(examples(5)))
    assert sum("got no gradient" in str(warning.message) for warning in said) == 1
    assert (module.idle.weight.abs() < before.abs()).all()


class After(Callback):
    def on_after_backward(self, *_: Any) -> None:
        """Looks at gradients."""


def test_it_is_said_what_on_after_backward_sees() -> None:
    trainer = new_trainer(SyncStrategy(compile=False), max_steps=1, callbacks=[After()])
    with pytest.warns(UserWarning, match="on_after_backward sees gradients summed"):
        trainer.fit(Classifier(), Batches(examples(5)))


def test_one_worker_goes_on_in_plain_lightning_and_back(tmp_path: Path) -> None:
    """A checkpoint of one worker is what plain AdamW writes and reads, of any module."""

    def fit(strategy: Any, updates: int, start: Path | None = None) -> Classifier:
        module = classifier()
        trainer = new_trainer(strategy, max_steps=updates)
        trainer.fit(module, Batches(examples(8)), ckpt_path=start)
        trainer.save_checkpoint(tmp_path / f"{updates}.ckpt")
        return module

    whole = fit("auto", 6)
    fit(DecentralizedStrategy(1, compile=False), 2)
    fit("auto", 4, tmp_path / "2.ckpt")
    last = fit(SyncStrategy(compile=False), 6, tmp_path / "4.ckpt")
    for mine, expected in zip(last.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine, expected)


class Replacing(Classifier):
    """Puts other tensors in place of its gradients, in a hook."""

    def _replace(self) -> None:
        self.conv.weight.grad = torch.full_like(self.conv.weight, 0.3)
        assert self.head.weight.grad is not None
        self.head.weight.grad = self.head.weight.grad * 0.5 + 1
        self.log_scale.grad = torch.zeros_like(self.log_scale)


class ReplacingBefore(Replacing):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._replace()


class ReplacingAfter(Replacing):
    def on_after_backward(self) -> None:
        self._replace()


class LeavingOut(Classifier):
    """Leaves every second update out, as Lightning's manual shows."""

    def optimizer_step(self, epoch: int, index: int, optimizer: Any, closure: Any) -> None:  # type: ignore[override]
        if index % 2 == 0:
            optimizer.step(closure=closure)
        else:
            closure()


def trained_by(kind: type[Classifier], strategy: Any, **options: Any) -> Tensor:
    torch.manual_seed(1)
    module = kind().double()
    trainer = new_trainer(strategy, max_steps=-1, max_epochs=1, **options)
    trainer.fit(module, Batches(examples(8)))
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


@pytest.mark.filterwarnings("ignore:on_after_backward sees gradients")
@pytest.mark.parametrize("kind", [ReplacingBefore, ReplacingAfter, LeavingOut])
@pytest.mark.parametrize(
    "strategy",
    [partial(SyncStrategy, compile=False), partial(DecentralizedStrategy, 1, compile=False)],
)
def test_hooks_do_what_they_do_elsewhere(kind: type[Classifier], strategy: Any) -> None:
    expected, untouched = trained_by(kind, "auto"), trained_by(Classifier, "auto")
    assert (expected - untouched).abs().max() > 1e-3
    torch.testing.assert_close(trained_by(kind, strategy()), expected, rtol=0, atol=1e-10)


class OtherMemory(Callback):
    """Gives a parameter other memory."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self._replace)

    def _replace(self, trainer: Any, module: Any, *_: Any) -> None:
        module.head.weight.data = module.head.weight.data * 0.5


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_start"])
def test_other_memory_for_a_parameter_is_refused(hook: str) -> None:
    trainer = new_trainer(
        SyncStrategy(compile=False),
        max_steps=4,
        callbacks=[OtherMemory(hook)],
        limit_val_batches=1,
        val_check_interval=2,
    )
    validation = torch.utils.data.DataLoader(examples(8, 1), batch_size=None)
    with pytest.raises(MisconfigurationException, match=r"in place of head\.weight\.data, .*copy_"):
        trainer.fit(classifier(), Batches(examples(8, 4)), validation)


@pytest.mark.parametrize(
    "averaging", [EMAWeightAveraging, partial(StochasticWeightAveraging, 0.1, 1)]
)
def test_weight_averaging_of_packed_workers_is_refused(averaging: Callable[[], Callback]) -> None:
    strategy, callbacks = DecentralizedStrategy(4, compile=False), [averaging()]
    trainer = new_trainer(strategy, max_steps=1, callbacks=callbacks)
    with pytest.raises(MisconfigurationException, match="WeightAveraging keeps one model"):
        trainer.fit(tiny(), Batches(batches(1)))
    trainer = new_trainer(SyncStrategy(compile=False), max_steps=1, callbacks=callbacks)
    trainer.fit(tiny(), Batches(batches(1)))
