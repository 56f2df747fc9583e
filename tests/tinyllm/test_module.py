"""TinyLLM in anybody's Trainer: exact validation, plain strategies, checkpoints."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from tinyllm import LlamaConfig, TinyLLM, TokenDataModule
from tinyllm.data.prepare import prepare
from tinyllm.metrics import TokenLoss
from tinyllm.model import IGNORED
from tinyllm.module import AdamWConfig
from tinyllm.schedule import WSD, WarmupCosine
from tinyllm.strategies import SyncStrategy

CONFIG = LlamaConfig(layers=1, width=16, heads=2, ffn_width=32, vocab_size=40, context=12)
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


def tiny(**options: Any) -> TinyLLM:
    torch.manual_seed(5)
    return TinyLLM(config=CONFIG, **options)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A validation split whose last row and last batch are partial."""
    folder = tmp_path_factory.mktemp("module")
    tokens = np.random.default_rng(1).integers(1, 40, 2_310, dtype=np.uint16)
    tokens[20::21] = 0
    tokens.tofile(folder / "tokens.bin")
    prepare(
        folder / "cache",
        "tokens",
        str(folder / "tokens.bin"),
        vocab_size=40,
        boundary_id=0,
        validation_fraction=0.15,
        test_fraction=0.1,
    )
    return folder / "cache"


def loss_by_hand(module: TinyLLM, stream: Any) -> float:
    """Σ loss / Σ targets: row by row, each from 12 tokens, in float64, nothing batched."""
    tokens = torch.from_numpy(stream.read(0, len(stream)).astype(np.int64))
    total, targets = 0.0, 0
    for start in range(0, len(tokens) - 1, CONFIG.context):
        row = tokens[start : start + CONFIG.context + 1]
        logits = module(row[None, :-1])[0].double()
        logp = logits.log_softmax(-1)
        total -= float(logp[torch.arange(len(row) - 1), row[1:]].sum())
        targets += len(row) - 1
    assert targets == len(tokens) - 1  # every target once
    return total / targets


@pytest.mark.parametrize("strategy", ["auto", "sync"])
@pytest.mark.parametrize("batch_size", [1, 3, 7])
def test_validation_is_the_loss_over_every_target(
    cache: Path, batch_size: int, strategy: str
) -> None:
    """PITFALL 16 and 17: whatever the batch size, partial rows and batches included once."""
    module = tiny().double()
    data = TokenDataModule(str(cache), context=12, batch_size=4, validation_batch_size=batch_size)
    chosen: Any = SyncStrategy(compile=False) if strategy == "sync" else strategy
    trainer = Trainer(precision="64-true", strategy=chosen, devices=1, **QUIET)
    metrics = trainer.validate(module, data, verbose=False)[0]
    stream = data.cache.split("validation")
    assert (len(stream) - 1) % 12 != 0  # the last row is partial
    assert metrics["validation/loss"] == pytest.approx(loss_by_hand(module, stream), rel=1e-9)
    assert metrics["validation/perplexity"] == pytest.approx(
        np.exp(metrics["validation/loss"]), rel=1e-6
    )
    test = trainer.test(module, data, verbose=False)[0]
    expected = loss_by_hand(module, data.cache.split("test"))
    assert test["test/loss"] == pytest.approx(expected, rel=1e-6)


def test_token_loss_is_no_mean_of_means() -> None:
    """PITFALL 16: mean 2 over 1 target and mean 10 over 9 are 9.2, not 6."""
    loss = TokenLoss()
    loss.update(torch.tensor([2.0]), torch.tensor([1]))
    loss.update(torch.tensor([90.0]), torch.tensor([9]))
    assert loss.compute().item() == pytest.approx(9.2)


def rows(count: int = 6) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(40, (4, 13), generator=generator) for _ in range(count)]


def test_a_plain_trainer_with_ones_own_dataloader_trains() -> None:
    """As another project would: strategy auto, a DataLoader of rows, its own checkpoints."""
    module = tiny(optimizer=AdamWConfig(lr=0.02))
    dataset = torch.cat(rows(1) * 4)
    losses = []
    for _ in range(2):
        trainer = Trainer(strategy="auto", devices=1, max_epochs=8, **QUIET)
        trainer.fit(module, DataLoader(dataset, batch_size=4))
        losses.append(trainer.callback_metrics["train/loss"].item())
    assert losses[1] < losses[0] < np.log(40)


def test_a_checkpoint_moves_between_plain_and_own_strategies(tmp_path: Path) -> None:
    """One worker's state is what torch.optim.AdamW writes, so either goes on from the other."""
    results = []
    for first, second in (("own", "own"), ("auto", "own"), ("own", "auto")):
        folder = tmp_path / f"{first}-{second}"
        for name, epochs, resume in ((first, 1, None), (second, 2, folder / "last.ckpt")):
            strategy: Any = SyncStrategy(compile=False) if name == "own" else "auto"
            module = tiny(schedule=WarmupCosine(updates=12))
            checkpoint = ModelCheckpoint(folder, save_top_k=0, save_last=True)
            trainer = Trainer(
                strategy=strategy,
                devices=1,
                max_epochs=epochs,
                callbacks=[checkpoint],
                **QUIET | {"enable_checkpointing": True},
            )
            trainer.fit(module, DataLoader(rows(), batch_size=None), ckpt_path=resume)
        results.append([p.detach() for p in module.parameters()])
    for other in results[1:]:
        for mine, expected in zip(other, results[0], strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-6)


def test_load_from_checkpoint_rebuilds_the_module(tmp_path: Path) -> None:
    module = tiny(
        # NumPy's numbers, as from a sweep, which a checkpoint of weights alone does not hold
        optimizer=AdamWConfig(lr=np.float64(0.3), betas=(np.float32(0.5), 0.6)),
        schedule=WSD(np.float64(0.2), 0.0, np.int64(3), decay_fraction=0.4),
    )
    trainer = Trainer(strategy=SyncStrategy(compile=False), devices=1, max_steps=1, **QUIET)
    trainer.fit(module, DataLoader(rows(), batch_size=None))
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    loaded = TinyLLM.load_from_checkpoint(tmp_path / "one.ckpt", weights_only=True)
    assert loaded.config == CONFIG
    assert loaded.optimizer_config == module.optimizer_config
    assert loaded.schedule == module.schedule
    tokens = rows(1)[0]
    assert torch.equal(loaded(tokens[:, :-1]), module(tokens[:, :-1]))


def test_a_module_that_was_validated_can_be_trained() -> None:
    """Evaluating alone happens in inference mode, whose tensors nothing may change elsewhere."""
    module, options = tiny(), {"devices": 1, "max_steps": 1, **QUIET}
    loader = DataLoader(rows(), batch_size=None)
    (before,) = Trainer(**options).validate(module, loader)
    (again,) = Trainer(**options).validate(module, loader)
    assert again == before
    Trainer(**options).fit(module, loader, loader)
    (after,) = Trainer(**options).validate(module, loader)
    assert after["validation/loss"] != before["validation/loss"]


def test_a_cache_of_more_ids_than_the_models_is_refused(text_cache: Path) -> None:
    data = TokenDataModule(str(text_cache), CONFIG.context, 4)
    module = TinyLLM(config=replace(CONFIG, vocab_size=data.vocab_size - 1))
    with pytest.raises(ValueError, match=rf"has {data.vocab_size} token ids and the model"):
        Trainer(devices=1, max_steps=1, **QUIET).fit(module, data)


def test_predictions_are_the_loss_of_every_target() -> None:
    module = tiny()
    batch = rows(1)[0]
    batch[1, 5:] = IGNORED
    losses = module.predict_step(batch, 0)
    nll, scored = module.token_losses(batch)
    assert losses.shape == (4, 12)
    assert losses[1, 4:].eq(0).all()
    assert losses.sum().item() == pytest.approx(nll.item(), rel=1e-6)
    assert losses.ne(0).sum().item() == scored.item()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "none of preset, config and init_from is given; give one of them"),
        ({"preset": "30m", "config": CONFIG}, "preset '30m' is unknown; choose from 20m"),
        ({"preset": "20m", "config": CONFIG}, "preset '20m' and a config are given; leave one out"),
        ({"preset": "30m"}, "preset '30m' is unknown; choose from 20m, 50m, 90m"),
    ],
)
def test_exactly_one_known_size(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TinyLLM(**options)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"lr": -1.0}, {"lr": float("inf")}, {"eps": 0.0}, {"betas": (0.9, 1.0)}),
        {"weight_decay": float("nan")},
    ],
)
def test_wrong_hyperparameters_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=str(next(iter(wrong.values()))).strip("()")):
        AdamWConfig(**wrong)


def test_a_schedule_without_an_end_is_refused() -> None:
    trainer = Trainer(devices=1, max_steps=-1, max_epochs=-1, **QUIET)
    with pytest.raises(ValueError, match=r"set trainer.max_steps"):
        trainer.fit(tiny(), DataLoader(rows(), batch_size=None))
