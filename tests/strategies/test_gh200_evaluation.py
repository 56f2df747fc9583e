"""Validation by the kernels while fitting: the losses of the average of all workers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engines import Backend
from lightning.pytorch import Callback
from simulation import CONFIG, OPTIMIZER, SCHEDULE, Batches, batches, fit, new_trainer, tiny
from torch import Tensor
from torch.utils.data import DataLoader

from tinyllm import LlamaConfig, TinyLLM
from tinyllm.model import split_rows
from tinyllm.strategies import DecentralizedStrategy, SyncStrategy
from tinyllm.strategies.base import ArenaStrategy

BACKENDS: tuple[Backend, ...] = ("native", "gh200")


def sync(backend: Backend) -> ArenaStrategy:
    return SyncStrategy(backend=backend, compile=False)


def packed(backend: Backend) -> ArenaStrategy:
    return DecentralizedStrategy(3, backend=backend, compile=False)


class Seen(TinyLLM):
    """Keeps the kinds of what made losses of rows."""

    kinds: set[str]

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.kinds = {*getattr(self, "kinds", ()), type(self.token_losses).__name__}
        super().validation_step(batch, batch_idx)


class Validations(Callback):
    """Keeps every validation's loss; the module can be copied."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        assert "token_losses" not in vars(pl_module)

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        self.losses.append(trainer.callback_metrics["validation/loss"].item())


def ragged(device: str = "cpu", config: LlamaConfig = CONFIG) -> list[Tensor]:
    """Batches of 3, 3 and 1 rows with targets missing, and one of shorter rows."""
    rows = torch.randint(config.vocab_size, (7, config.context + 1)).to(device)
    rows[2, 3:5] = rows[6, -2:] = -100
    return [*rows.split(3), rows[:2, : config.context - 2]]


@pytest.mark.usefixtures("choosable")
@pytest.mark.parametrize("inference_mode", [True, False])
@pytest.mark.parametrize(("strategy", "workers"), [(sync, 1), (packed, 3)])
def test_validates_as_native_does(
    strategy: Callable[[Backend], ArenaStrategy], workers: int, inference_mode: bool
) -> None:
    validation, found = ragged(), {}
    for backend in BACKENDS:
        seen = found[backend] = Validations()
        torch.manual_seed(1)
        module = Seen(config=CONFIG, optimizer=OPTIMIZER, schedule=SCHEDULE).double()
        record = fit(
            *(module, strategy(backend), batches(workers)),
            callbacks=[seen],
            val_batches=validation,
            val_check_interval=4,
            num_sanity_val_steps=1,
            limit_val_batches=1.0,
            inference_mode=inference_mode,
        )
        assert len(record.losses) == 12
        assert "token_losses" not in vars(module)
        assert module.kinds == {"method" if backend == "native" else "Gh200Evaluation"}
    assert len(found["gh200"].losses) == 4  # the sanity check's, too
    assert found["gh200"].losses == pytest.approx(found["native"].losses, rel=1e-12)


@pytest.mark.usefixtures("choosable")
def test_rows_longer_than_the_context_are_refused() -> None:
    rows = torch.zeros(2, CONFIG.context + 2, dtype=torch.int64)
    with pytest.raises(ValueError, match=f"{CONFIG.context + 1} tokens exceed the model's context"):
        fit(
            *(tiny().double(), sync("gh200"), batches(1)),
            val_batches=[rows],
            num_sanity_val_steps=1,
            limit_val_batches=1.0,
        )


@pytest.mark.usefixtures("choosable")
def test_a_validation_step_of_ones_own_has_logits() -> None:
    """Only losses of rows are the kernels'; the module itself is the average, as ever."""

    class Own(TinyLLM):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            inputs, targets = split_rows(batch)
            logits = self(inputs).transpose(1, 2)
            summed = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
            nll, _ = self.token_losses(batch)
            torch.testing.assert_close(nll.squeeze(), summed, rtol=1e-12, atol=0)
            super().validation_step(batch, batch_idx)

    seen = Validations()
    module = Own(config=CONFIG).double()
    fit(
        *(module, packed("gh200"), batches(3)),
        callbacks=[seen],
        val_batches=ragged(),
        val_check_interval=6,
        limit_val_batches=1.0,
    )
    assert len(seen.losses) == 3  # the sanity check's, too


BIGGER = LlamaConfig(layers=2, width=128, heads=2, ffn_width=256, vocab_size=1_000, context=64)


@pytest.mark.gpu
@pytest.mark.parametrize("inference_mode", [True, False])
@pytest.mark.parametrize(("strategy", "workers"), [(sync, 1), (packed, 3)])
def test_validates_as_native_does_on_gpu(
    strategy: Callable[[Backend], ArenaStrategy], workers: int, inference_mode: bool
) -> None:
    """Weights stay as they are drawn, so both see the same; bf16 makes losses differ by little."""
    shape = (24, workers * 4, BIGGER.context + 1)
    training = list(torch.randint(BIGGER.vocab_size, shape).cuda())
    validation, found = ragged("cuda", BIGGER), {}
    for backend in BACKENDS:
        seen = found[backend] = Validations()
        torch.manual_seed(0)
        trainer = new_trainer(
            strategy(backend),
            callbacks=[seen],
            accelerator="gpu",
            precision="bf16-mixed",
            max_steps=24,
            val_check_interval=4,
            num_sanity_val_steps=2,
            limit_val_batches=1.0,
            inference_mode=inference_mode,
        )
        module = Seen(config=BIGGER)
        module.optimizer_config = type(module.optimizer_config)(lr=0.0, weight_decay=0.0)
        trainer.fit(module, Batches(training), DataLoader(validation, batch_size=None))
        assert module.kinds == {"method" if backend == "native" else "Gh200Evaluation"}
    _, first, *others = found["gh200"].losses  # eager, captured and replayed
    assert others == pytest.approx([first] * 5, rel=1e-6)
    assert found["gh200"].losses == pytest.approx(found["native"].losses, rel=1e-3)
