"""On a GPU: no callback waits for the device between its edges, and graph pools are counted."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything

from tinyllm import LlamaConfig, TinyLLM, TokenDataModule
from tinyllm.callbacks import ConsensusDistance, MemoryMonitor, ThroughputWindows, UpdateTrace
from tinyllm.callbacks.memory import _read, _reset
from tinyllm.data.prepare import prepare
from tinyllm.strategies import DecentralizedStrategy

pytestmark = pytest.mark.gpu

CONFIG = LlamaConfig(layers=2, width=128, heads=2, ffn_width=256, vocab_size=512, context=128)
TRACED, LOG_EVERY, UPDATES = 2, 8, 40
WARMUP, PER_WINDOW = 5, 10
EDGES = {WARMUP + PER_WINDOW * window for window in range(4)}


class ForbidWaiting(Callback):
    """The first of all callbacks: makes any read of the device an error, except where it is due."""

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        after = trainer.global_step + 1
        due = after <= TRACED + 1 or after % LOG_EVERY == 0 or after in EDGES
        torch.cuda.set_sync_debug_mode("default" if due else "error")


class AllowWaiting(Callback):
    """The last of all callbacks."""

    def on_train_batch_end(self, *_: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(autouse=True)
def _waiting_is_allowed_again() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def cache(tmp_path: Path) -> str:
    tokens = np.random.default_rng(0).integers(1, 512, 400_000).astype(np.uint16)
    tokens[99::100] = 0  # documents of 99 tokens
    tokens.tofile(tmp_path / "tokens.bin")
    prepare(
        tmp_path / "cache", "tokens", str(tmp_path / "tokens.bin"), vocab_size=512, boundary_id=0
    )
    return str(tmp_path / "cache")


def three_windows(folder: Path) -> ThroughputWindows:
    """Their edges are EDGES."""
    return ThroughputWindows(
        folder,
        warmup_updates=WARMUP,
        windows=3,
        updates_per_window=PER_WINDOW,
        window_seconds=1e-9,
    )


def test_nothing_waits_between_edges(
    cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads are errors by torch's sync debug mode; explicit waits are counted."""
    seed_everything(0, verbose=False)
    waits: list[int] = []
    synchronize = torch.accelerator.synchronize
    windows = three_windows(tmp_path)
    trainer = Trainer(
        accelerator="gpu",
        devices=1,
        strategy=DecentralizedStrategy(4),
        precision="bf16-mixed",
        max_steps=UPDATES,
        log_every_n_steps=LOG_EVERY,
        gradient_clip_val=1.0,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            ForbidWaiting(),
            windows,
            MemoryMonitor(tmp_path),
            ConsensusDistance(tmp_path),
            UpdateTrace(tmp_path / "trace", TRACED),
            AllowWaiting(),
        ],
    )

    def counting(device: torch.device) -> None:
        waits.append(trainer.global_step)
        synchronize(device)

    monkeypatch.setattr(torch.accelerator, "synchronize", counting)
    trainer.fit(TinyLLM(config=CONFIG), TokenDataModule(cache, context=128, batch_size=16))
    assert set(waits) == {*EDGES, UPDATES}  # the last is the fit's end
    assert windows.meter.done
    phases = json.loads((tmp_path / "memory.json").read_text())["phases"]
    for phase in ("startup", "training"):
        assert 1e6 < phases[phase]["peak_allocated_bytes"] <= phases[phase]["peak_reserved_bytes"]


class OneBuffer:
    """Gives batches in the same memory, each as soon as the one before has been asked for."""

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows, self._buffer = rows, torch.empty_like(rows[0])

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for rows in self._rows:
            yield self._buffer.copy_(rows)


class Behind(Callback):
    """The device has always more to do than the host."""

    def on_train_batch_start(self, *_: Any) -> None:
        torch.cuda._sleep(1_000_000)


@pytest.mark.parametrize("strategy", ["auto", DecentralizedStrategy(4)])
def test_tokens_are_counted_before_their_memory_is_used_again(
    tmp_path: Path, strategy: Any
) -> None:
    rows = torch.randint(512, (UPDATES, 4, 129), device="cuda")
    for number, batch in enumerate(rows):
        batch[:, 1 : 1 + number] = -100
    windows = three_windows(tmp_path)
    trainer = Trainer(
        accelerator="gpu",
        devices=1,
        strategy=strategy,
        precision="bf16-mixed",
        max_steps=UPDATES,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Behind(), windows],
    )
    trainer.fit(TinyLLM(config=CONFIG), OneBuffer(rows))
    targets = (rows[:, :, 1:] != -100).sum((1, 2))[WARMUP:].tolist()
    expected = [sum(targets[start : start + PER_WINDOW]) for start in (0, 10, 20)]
    assert [window.tokens for window in windows.meter.windows] == expected


def test_a_graph_s_pool_is_in_the_reserved_peak_and_not_in_the_allocated() -> None:
    """PITFALL: memory of a replayed graph is missed by the figure for tensors."""
    device = torch.device("cuda", 0)
    size = 256 * 2**20
    torch.cuda.empty_cache()
    graph, out = torch.cuda.CUDAGraph(), torch.zeros((), device=device)
    with torch.cuda.graph(graph):
        out.copy_(torch.ones(size // 4, device=device).sum())
    _reset(device)
    before = torch.cuda.memory_allocated()
    graph.replay()
    torch.cuda.synchronize()
    assert out.item() == size // 4
    peaks = _read(device)
    assert peaks["peak_reserved_bytes"] >= before + size
    assert peaks["peak_allocated_bytes"] < before + size
