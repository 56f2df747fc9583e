"""Stopped at update 7 of an epoch of 12 and resumed: the same weights and log, bit for bit."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from tinyllm import LlamaConfig, TinyLLM, TokenDataModule
from tinyllm.data.prepare import prepare
from tinyllm.logger import RunLogger
from tinyllm.schedule import WarmupCosine
from tinyllm.strategies import DecentralizedStrategy, SyncStrategy

CONFIG = LlamaConfig(layers=1, width=16, heads=2, ffn_width=32, vocab_size=64, context=16)
EPOCH = 12
UPDATES = 2 * EPOCH
STOP = 7
ROWS = 8


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens for exactly twelve batches of eight rows, the last of them partial."""
    folder = tmp_path_factory.mktemp("resume")
    tokens = np.random.default_rng(0).integers(1, 64, 1_900, dtype=np.uint16)
    tokens[18::19] = 0  # the boundary: a hundred documents
    tokens.tofile(folder / "tokens.bin")
    prepare(
        folder / "cache",
        "tokens",
        str(folder / "tokens.bin"),
        vocab_size=64,
        boundary_id=0,
        validation_fraction=0.2,
    )
    return folder / "cache"


class At(Callback):
    """Does something once the stopping update is done."""

    def __init__(self, act: Any) -> None:
        self.act = act

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == STOP:
            self.act()


def train(
    cache: Path,
    folder: Path,
    *callbacks: Callback,
    packed: bool = False,
    updates: int = UPDATES,
    accumulate: int = 1,
    resume: bool = False,
) -> list[Tensor]:
    """Trains, or goes on from the last checkpoint; returns the weights."""
    seed_everything(3, verbose=False)
    module = TinyLLM(config=CONFIG, schedule=WarmupCosine(updates=UPDATES))
    strategy = DecentralizedStrategy(4, compile=False) if packed else SyncStrategy(compile=False)
    checkpoint = ModelCheckpoint(
        folder / "checkpoints",
        save_top_k=0,
        save_last=True,
        save_on_exception=True,
        every_n_train_steps=STOP,
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_steps=updates,
        log_every_n_steps=1,
        val_check_interval=5,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=1.0,
        logger=RunLogger(folder),
        callbacks=[checkpoint, *callbacks],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = TokenDataModule(str(cache), context=16, batch_size=ROWS, validation_batch_size=8)
    trainer.fit(module, data, ckpt_path="last" if resume else None)
    assert trainer.global_step == updates
    return [p.detach().clone() for p in module.parameters()]


def assert_as_uninterrupted(cache: Path, folder: Path, whole: Path, **options: Any) -> None:
    """Resumes in ``folder`` and compares with a run in ``whole`` that nothing stopped."""
    resumed = train(cache, folder, resume=True, **options)
    expected = train(cache, whole, **options)
    for mine, other in zip(resumed, expected, strict=True):
        assert torch.equal(mine, other)
    assert (folder / "metrics.csv").read_text() == (whole / "metrics.csv").read_text()


def test_the_epoch_has_twelve_updates(cache: Path) -> None:
    data = TokenDataModule(str(cache), context=16, batch_size=ROWS)
    assert len(data.train_dataloader()) == EPOCH


@pytest.mark.parametrize("packed", [False, True])
def test_stopped_by_sigterm(cache: Path, tmp_path: Path, packed: bool) -> None:
    with pytest.raises(SIGTERMException):
        train(
            cache,
            tmp_path / "stopped",
            At(lambda: os.kill(os.getpid(), signal.SIGTERM)),
            packed=packed,
        )
    assert_as_uninterrupted(cache, tmp_path / "stopped", tmp_path / "whole", packed=packed)


def test_stopped_by_sigterm_inside_an_update(cache: Path, tmp_path: Path) -> None:
    """Between two accumulated batches: the gradients so far are in the checkpoint."""

    class InTheWindow(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            if trainer.global_step == 2 and args[-1] == 7:  # batches 0–2, 3–5, then 6 and 7 of 8
                os.kill(os.getpid(), signal.SIGTERM)

    options = {"accumulate": 3, "updates": 8}
    with pytest.raises(SIGTERMException):
        train(cache, tmp_path / "stopped", InTheWindow(), **options)
    saved = torch.load(tmp_path / "stopped/checkpoints/last.ckpt", weights_only=True)
    assert "pending" in saved["optimizer_states"][0]
    assert_as_uninterrupted(cache, tmp_path / "stopped", tmp_path / "whole", **options)


@pytest.mark.parametrize("stop", [5, STOP, EPOCH, EPOCH + 1])
def test_stopped_by_max_steps(cache: Path, tmp_path: Path, stop: int) -> None:
    """PITFALL 4: also where it falls on an epoch's end, or on a validation."""
    train(cache, tmp_path / "stopped", updates=stop)
    assert_as_uninterrupted(cache, tmp_path / "stopped", tmp_path / "whole")


def test_stopped_by_kill_after_a_checkpoint(cache: Path, tmp_path: Path) -> None:
    """Killed at update 9, two after the checkpoint; what it logged since is replaced."""
    script = tmp_path / "killed.py"
    script.write_text(
        "import importlib.util, os, signal\n"
        "from pathlib import Path\n"
        "from lightning.pytorch import Callback\n"
        f"spec = importlib.util.spec_from_file_location('resume', {__file__!r})\n"
        "resume = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(resume)\n"
        "class Kill(Callback):\n"
        "    def on_train_batch_end(self, trainer, *_):\n"
        "        if trainer.global_step == 9:\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        f"resume.train(Path({str(cache)!r}), Path({str(tmp_path / 'stopped')!r}), Kill())\n"
    )
    killed = subprocess.run([sys.executable, str(script)], capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert_as_uninterrupted(cache, tmp_path / "stopped", tmp_path / "whole")
