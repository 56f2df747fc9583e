"""TokenDataModule under a real Trainer: resuming, limits, groups, and clear errors."""

from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tinyllm.data.cache import TokenCache
from tinyllm.data.manifest import CacheError
from tinyllm.data.module import TokenDataModule
from tinyllm.data.prepare import prepare

BATCHES = 5  # in an epoch of the fixture's train split, at BATCH_SIZE
CONTEXT, BATCH_SIZE = 8, 4


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("module")
    rng = np.random.default_rng(0)
    documents = [[*rng.integers(1, 100, 15).tolist(), 0] for _ in range(14)]
    np.array([i for d in documents for i in d], "<u2").tofile(folder / "ids.u16")
    path = folder / "cache"
    prepare(
        path,
        "tokens",
        str(folder / "ids.u16"),
        vocab_size=100,
        boundary_id=0,
        validation_fraction=0.2,
        test_fraction=0.1,
    )
    return path


def new_data(cache: Path, **options: Any) -> TokenDataModule:
    options = {"context": CONTEXT, "batch_size": BATCH_SIZE, "validation_batch_size": 3} | options
    return TokenDataModule(str(cache), **options)


class Recorder(lightning.LightningModule):
    """Trains one number and keeps every batch that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.train_batches: list[torch.Tensor] = []
        self.targets: list[int] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.train_batches.append(batch.clone())
        return self.weight * batch.float().mean()

    def _score(self, batch: torch.Tensor) -> None:
        targets = batch[:, 1:]
        self.targets += targets[targets != -100].tolist()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self._score(batch)

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self._score(batch)

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self._score(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Scheduled(Recorder):
    """Reads the number of steps, as schedules do, before Lightning restores anything."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=int(steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def new_trainer(folder: Path, **options: Any) -> lightning.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
        "default_root_dir": folder,
    }
    return lightning.Trainer(**(defaults | options))


def run(
    cache: Path,
    folder: Path,
    ckpt_path: Path | None = None,
    kind: type[Recorder] = Recorder,
    **options: Any,
) -> tuple[list[torch.Tensor], lightning.Trainer]:
    module, trainer = kind(), new_trainer(folder, **options)
    trainer.fit(module, datamodule=new_data(cache), ckpt_path=ckpt_path)
    return module.train_batches, trainer


STEPS = 2 * BATCHES + 3


@pytest.mark.parametrize("limits", [{}, {"limit_train_batches": 4}, {"limit_train_batches": 0.6}])
@pytest.mark.parametrize("validate", [0, 1, 2])
@pytest.mark.parametrize("stop", [2, 4, 5, 8, 10])
def test_pitfalls_4_5_19_resume_sees_the_uninterrupted_batches(
    cache: Path, tmp_path: Path, stop: int, validate: int, limits: dict[str, Any]
) -> None:
    """In the middle of any epoch, and with `max_steps` on an epoch's end.

    Without validation, and with one after every or every second epoch.
    """
    options = {**limits, "limit_val_batches": 1.0 if validate else 0}
    options["check_val_every_n_epoch"] = validate or 1
    expected, _ = run(cache, tmp_path, max_steps=STEPS, **options)
    first, trainer = run(cache, tmp_path, max_steps=stop, **options)
    trainer.save_checkpoint(tmp_path / "stop.ckpt")
    rest, _ = run(cache, tmp_path, tmp_path / "stop.ckpt", max_steps=STEPS, **options)
    assert len(first) == stop
    assert len(expected) == STEPS
    torch.testing.assert_close(torch.stack(first + rest), torch.stack(expected))


@pytest.mark.parametrize("validate", [False, True])
@pytest.mark.parametrize("stop", [1, 2])
def test_pitfall_4_resume_a_run_that_ended_with_an_epoch(
    cache: Path, tmp_path: Path, stop: int, validate: bool
) -> None:
    options: dict[str, Any] = {"limit_val_batches": 1.0 if validate else 0}
    expected, uninterrupted = run(cache, tmp_path, max_epochs=4, **options)
    first, trainer = run(cache, tmp_path, max_epochs=stop, **options)
    trainer.save_checkpoint(tmp_path / "stop.ckpt")
    rest, trainer = run(cache, tmp_path, tmp_path / "stop.ckpt", max_epochs=4, **options)
    assert len(first) + len(rest) == len(expected) == 4 * BATCHES
    torch.testing.assert_close(torch.stack(first + rest), torch.stack(expected))
    assert trainer.current_epoch == uninterrupted.current_epoch


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("stop", [2, BATCHES + 1])
def test_resume_a_run_that_ended_inside_an_epoch(
    cache: Path, tmp_path: Path, stop: int, every: int
) -> None:
    """No epoch is lost, and no validation."""
    options: dict[str, Any] = {"limit_val_batches": 1.0, "check_val_every_n_epoch": every}
    expected, uninterrupted = run(cache, tmp_path, max_epochs=4, **options)
    first, trainer = run(cache, tmp_path, max_epochs=4, max_steps=stop, **options)
    trainer.save_checkpoint(tmp_path / "stop.ckpt")
    validated: list[int] = []
    log = lightning.pytorch.callbacks.LambdaCallback(
        on_validation_end=lambda trainer, _: validated.append(trainer.global_step)
    )
    path = tmp_path / "stop.ckpt"
    rest, trainer = run(cache, tmp_path, path, max_epochs=4, callbacks=[log], **options)
    torch.testing.assert_close(torch.stack(first + rest), torch.stack(expected))
    assert trainer.current_epoch == uninterrupted.current_epoch == 4
    ends = range(every * BATCHES, 4 * BATCHES + 1, every * BATCHES)
    assert validated == [end for end in ends if end > stop]


@pytest.mark.parametrize("ended", [False, True])
def test_resume_again_inside_the_epoch_after_the_first_resume(
    cache: Path, tmp_path: Path, ended: bool
) -> None:
    """From a checkpoint of its middle, and of its orderly end there."""
    expected, uninterrupted = run(cache, tmp_path, max_epochs=3)
    first, trainer = run(cache, tmp_path, max_epochs=3, max_steps=BATCHES)
    trainer.save_checkpoint(tmp_path / "first.ckpt")
    save = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=1)
    options: dict[str, Any] = {"callbacks": [save], "enable_checkpointing": True}
    steps = BATCHES + 2
    second, trainer = run(
        cache, tmp_path, tmp_path / "first.ckpt", max_epochs=3, max_steps=steps, **options
    )
    path = tmp_path / f"step={steps}.ckpt"
    if ended:
        path = tmp_path / "second.ckpt"
        trainer.save_checkpoint(path)
    rest, trainer = run(cache, tmp_path, path, max_epochs=3)
    torch.testing.assert_close(torch.stack(first + second + rest), torch.stack(expected))
    assert trainer.current_epoch == uninterrupted.current_epoch == 3


def test_a_checkpoint_after_a_validation_holds_where_the_fit_has_come_to(
    cache: Path, tmp_path: Path
) -> None:
    expected, _ = run(cache, tmp_path, max_steps=STEPS)
    module, trainer = Recorder(), new_trainer(tmp_path, max_steps=3, limit_val_batches=1.0)
    trainer.fit(module, datamodule=new_data(cache))
    trainer.validate(module, datamodule=trainer.datamodule, verbose=False)
    trainer.save_checkpoint(tmp_path / "stop.ckpt")
    rest, _ = run(cache, tmp_path, tmp_path / "stop.ckpt", max_steps=STEPS)
    torch.testing.assert_close(torch.stack(module.train_batches + rest), torch.stack(expected))


EPOCH_END: dict[str, Any] = {"every_n_epochs": 1, "save_on_train_epoch_end": True}
VALIDATION_END: dict[str, Any] = {"every_n_epochs": 1, "save_on_train_epoch_end": False}
MOMENTS: dict[str, tuple[dict[str, Any], bool]] = {
    "after a step": ({"every_n_train_steps": 1}, False),
    "after a step, validating": ({"every_n_train_steps": 1}, True),
    "after an epoch": (EPOCH_END, False),
    "after an epoch, validating": (EPOCH_END, True),
    "after validation": (VALIDATION_END, True),
}


@pytest.mark.parametrize("kind", [Recorder, Scheduled])
@pytest.mark.parametrize("end", [{"max_steps": STEPS}, {"max_epochs": 3}], ids=["steps", "epochs"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_resume_from_every_checkpoint_of_a_run(
    cache: Path,
    tmp_path: Path,
    moment: str,
    end: dict[str, Any],
    kind: type[Recorder],
) -> None:
    when, validate = MOMENTS[moment]
    checkpoints = ModelCheckpoint(tmp_path / "all", "{step}", save_top_k=-1, **when)
    options: dict[str, Any] = {
        **end,
        "kind": kind,
        "limit_val_batches": 1.0 if validate else 0,
    }
    expected, uninterrupted = run(
        cache, tmp_path, callbacks=[checkpoints], enable_checkpointing=True, **options
    )
    files = sorted((tmp_path / "all").glob("*.ckpt"))
    assert len(files) >= 2
    for file in files:
        done = int(file.stem.removeprefix("step="))
        rest, trainer = run(cache, tmp_path, file, **options)
        assert len(rest) == len(expected) - done, file.name
        if rest:
            torch.testing.assert_close(torch.stack(rest), torch.stack(expected[done:]))
            assert trainer.current_epoch == uninterrupted.current_epoch, file.name
        assert trainer.global_step == uninterrupted.global_step


def test_reloading_the_loader_keeps_the_epochs(cache: Path, tmp_path: Path) -> None:
    expected, _ = run(cache, tmp_path, max_epochs=3)
    reloaded, _ = run(cache, tmp_path, max_epochs=3, reload_dataloaders_every_n_epochs=1)
    torch.testing.assert_close(torch.stack(reloaded), torch.stack(expected))


def test_overfit_batches_repeats_the_same_batches(cache: Path, tmp_path: Path) -> None:
    seen, _ = run(cache, tmp_path, max_epochs=3, overfit_batches=2)
    assert len(seen) == 6
    torch.testing.assert_close(torch.stack(seen[:2] * 3), torch.stack(seen))


def test_resume_with_another_batch_size_is_refused(cache: Path, tmp_path: Path) -> None:
    _, trainer = run(cache, tmp_path, max_steps=2)
    trainer.save_checkpoint(tmp_path / "stop.ckpt")
    with pytest.raises(ValueError, match=r"batch_size=4.*batch_size=2"):
        new_trainer(tmp_path, max_steps=4).fit(
            Recorder(), datamodule=new_data(cache, batch_size=2), ckpt_path=tmp_path / "stop.ckpt"
        )


@pytest.mark.parametrize(
    ("function", "split"),
    [("validate", "validation"), ("test", "test"), ("predict", "validation")],
)
def test_evaluation_scores_every_target_once(
    cache: Path, tmp_path: Path, function: str, split: Any
) -> None:
    module = Recorder()
    getattr(new_trainer(tmp_path, limit_val_batches=1.0), function)(
        module, datamodule=new_data(cache)
    )
    stream = TokenCache.open(cache).split(split)
    assert module.targets == stream.read(1, len(stream) - 1).tolist()


class FakeStrategy:
    root_device = torch.device("cpu")


class FakeTrainer:
    """What the data module reads of a Trainer, on a rank of several."""

    def __init__(self, world_size: int, rank: int, groups: int | None = None) -> None:
        self.world_size, self.global_rank, self.current_epoch = world_size, rank, 0
        self.limit_train_batches = 1.0
        self.strategy = FakeStrategy()
        if groups is not None:
            self.strategy.data_groups = groups  # type: ignore[attr-defined]


def loader_of_rank(data: TokenDataModule, kind: str, *setting: Any) -> Any:
    data.trainer = FakeTrainer(*setting)  # type: ignore[assignment]
    return getattr(data, f"{kind}_dataloader")()


@pytest.mark.parametrize("groups", [None, 2, 4])
def test_ranks_share_the_batch_of_one_rank(cache: Path, groups: int | None) -> None:
    whole = list(new_data(cache).train_dataloader())
    shares = [list(loader_of_rank(new_data(cache), "train", 2, rank, groups)) for rank in (0, 1)]
    n = groups or 2
    for number, batch in enumerate(whole):
        for rank in (0, 1):
            local = [r for r in range(BATCH_SIZE) if (r % n) * 2 // n == rank]
            torch.testing.assert_close(shares[rank][number], batch[local])


def test_evaluation_is_dealt_to_ranks_and_not_to_workers(cache: Path) -> None:
    loader = loader_of_rank(new_data(cache), "val", 2, 1, 8)
    assert next(iter(loader)).shape == (2, CONTEXT + 1)  # 3 rows, padded to 4, on 2 ranks


def test_workers_that_do_not_fit_the_ranks_are_refused(cache: Path) -> None:
    with pytest.raises(ValueError, match="3 workers cannot be placed evenly on 2 ranks"):
        loader_of_rank(new_data(cache), "train", 2, 0, 3)


def test_device_residency_serves_the_same_batches(cache: Path) -> None:
    host = list(new_data(cache, residency="host").train_dataloader())
    device = list(new_data(cache, residency="device").train_dataloader())
    torch.testing.assert_close(torch.stack(host), torch.stack(device))


def test_unknown_residency_is_refused(cache: Path) -> None:
    with pytest.raises(ValueError, match="residency is 'gpu'; choose from auto, host, device"):
        new_data(cache, residency="gpu")


def test_missing_cache_says_how_to_make_one(tmp_path: Path) -> None:
    data = new_data(tmp_path / "none")
    with pytest.raises(CacheError, match=r"does not exist(.|\n)*tinyllm prepare --output .*none"):
        new_trainer(tmp_path, max_steps=1).fit(Recorder(), datamodule=data)


def test_one_changed_byte_is_an_error_at_the_start_of_fit(cache: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in cache.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    shard = copy / "train-00000.bin"
    data = bytearray(shard.read_bytes())
    data[10] ^= 1
    shard.write_bytes(data)
    module = Recorder()
    with pytest.raises(CacheError, match=r"train-00000\.bin was changed: its SHA-256 is"):
        new_trainer(tmp_path, max_steps=1).fit(module, datamodule=new_data(copy))
    assert module.train_batches == []


def test_properties(cache: Path) -> None:
    data = new_data(cache)
    assert data.vocab_size == 100
    assert data.cache.boundary_id == 0
    with pytest.raises(CacheError, match="without a tokenizer"):
        data.tokenizer()


def text_cache(folder: Path, name: str, words: list[str], **options: Any) -> Path:
    """A cache of text in which some words are frequent."""
    texts = folder / f"{name}-texts"
    texts.mkdir()
    rng = np.random.default_rng(0)
    for number in range(12):
        (texts / f"{number}.txt").write_text(" ".join(rng.choice(words, 60)))
    options = {"vocab_size": 270, "validation_fraction": 0.3} | options
    prepare(folder / name, "text", str(texts), **options)
    return folder / name


def test_another_tokenizer_than_the_checkpoints_is_refused(tmp_path: Path) -> None:
    first = text_cache(tmp_path, "first", ["alpha", "beta", "gamma"])
    trainer = new_trainer(tmp_path, max_steps=1)
    trainer.fit(Recorder(), datamodule=new_data(first))
    file = tmp_path / "model.ckpt"
    trainer.save_checkpoint(file)

    def validate(cache: Path) -> list[int]:
        module = Recorder()
        new_trainer(tmp_path, limit_val_batches=1.0).validate(
            module, datamodule=new_data(cache), ckpt_path=str(file), weights_only=False
        )
        return module.targets

    other = text_cache(tmp_path, "other", ["uno", "dos", "tres"])
    with pytest.raises(ValueError, match=r"another tokenizer than that of .*other, whose ids"):
        validate(other)
    same = text_cache(
        tmp_path, "same", ["uno", "dos", "tres"], tokenizer=str(first), vocab_size=None
    )
    assert validate(same)
    assert validate(first)
