"""Update traces against the formulas of an update, computed independently in float64."""

import hashlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from classifier import classifier, examples
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from safetensors.torch import load_file
from simulation import (
    CONFIG,
    OPTIMIZER,
    SCHEDULE,
    UPDATES,
    Batches,
    batches,
    learning_rates,
    new_trainer,
    tiny,
)
from torch import Tensor

from tinyllm import TinyLLM
from tinyllm.callbacks import UpdateTrace
from tinyllm.model import IGNORED
from tinyllm.strategies import DecentralizedStrategy, SyncStrategy
from tinyllm.strategies.topology import Matrix, make_topology

# Both sides are float64 until the trace rounds to float32, so half a unit in the last place
# (6e-8) is left; the sums differ in order by far less.
CLOSE: dict[str, float] = {"rtol": 2e-7, "atol": 1e-12}


def read(folder: Path) -> tuple[list[dict[str, Tensor]], list[dict[str, Any]]]:
    """Tensors and record of each update that was traced."""
    trace = json.loads((folder / "trace.json").read_text())
    assert list(trace) == ["format", "updates"]
    assert trace["format"] == 1
    numbers = [f"{record['update']:05d}.safetensors" for record in trace["updates"]]
    files = [f"update-{number}" for number in numbers]
    others = [*(f"rows-{number}" for number in numbers), "initial.safetensors", "trace.json"]
    assert sorted(path.name for path in folder.iterdir()) == sorted([*files, *others])
    return [load_file(folder / name) for name in files], trace["updates"]


def trace(
    folder: Path, strategy: Any, given: Sequence[Any], updates: int = 3, **options: Any
) -> tuple[list[dict[str, Tensor]], list[dict[str, Any]]]:
    module: LightningModule = options.pop("module", None) or tiny()
    ckpt_path = options.pop("ckpt_path", None)
    callbacks = [UpdateTrace(folder, updates), *options.pop("callbacks", [])]
    trainer = new_trainer(strategy, callbacks=callbacks, **options)
    trainer.fit(module, Batches(given), ckpt_path=ckpt_path)
    return read(folder)


def expect(
    global_batches: Sequence[Tensor], matrices: Sequence[Matrix], scheme: str, clip: float | None
) -> tuple[list[dict[str, Tensor]], list[list[float]]]:
    """What an update's formulas say, with N ordinary models, autograd and torch.optim.AdamW."""
    workers = len(matrices[0])
    models, optimizers = [tiny().double() for _ in range(workers)], []
    for model in models:
        scales = [p for n, p in model.named_parameters() if "norm" in n]
        matrices_ = [p for n, p in model.named_parameters() if "norm" not in n]
        optimizers.append(
            torch.optim.AdamW(
                [{"params": matrices_}, {"params": scales, "weight_decay": 0.0}],
                betas=OPTIMIZER.betas,
                eps=OPTIMIZER.eps,
                weight_decay=OPTIMIZER.weight_decay,
            )
        )
    parameters = [dict(model.named_parameters()) for model in models]
    names = list(parameters[0])

    def stacked(values: Any) -> dict[str, Tensor]:
        return {n: torch.cat([values(i, n).detach() for i in range(workers)]) for n in names}

    def mix(matrix: Matrix) -> None:
        rows = stacked(lambda i, n: parameters[i][n])
        mixed = {n: torch.tensordot(torch.from_numpy(matrix), rows[n], 1) for n in names}
        for i in range(workers):
            for n in names:
                parameters[i][n].data.copy_(mixed[n][i : i + 1])

    traced, losses = [], []
    for t, rows in enumerate(global_batches):
        of_workers = []
        before = stacked(lambda i, n: parameters[i][n].clone())
        for i in range(workers):
            optimizers[i].zero_grad()
            own = rows[i::workers]
            logits = models[i].model(own[None, :, :-1].clamp_min(0))
            loss = F.cross_entropy(logits.flatten(0, 2), own[:, 1:].flatten(), ignore_index=IGNORED)
            loss.backward()
            of_workers.append(loss.item())
        gradients = stacked(lambda i, n: parameters[i][n].grad.clone())
        for i in range(workers):
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(parameters[i].values(), clip)
            for group in optimizers[i].param_groups:
                group["lr"] = OPTIMIZER.lr * SCHEDULE.factor(t, UPDATES)
        if scheme == "awc":
            mix(matrices[t])
        for optimizer in optimizers:
            optimizer.step()
        if scheme == "atc":
            mix(matrices[t])
        after = stacked(lambda i, n: parameters[i][n].clone())
        kinds = {
            "parameters": after,
            "gradients": gradients,
            "updates": {n: after[n] - before[n] for n in names},
            "exp_avg": stacked(lambda i, n: optimizers[i].state[parameters[i][n]]["exp_avg"]),
            "exp_avg_sq": stacked(lambda i, n: optimizers[i].state[parameters[i][n]]["exp_avg_sq"]),
        }
        traced.append(
            {f"{kind}/{n}": v.float() for kind, vs in kinds.items() for n, v in vs.items()}
        )
        losses.append(of_workers)
    return traced, losses


def sha256(rows: Tensor) -> str:
    return hashlib.sha256(rows.numpy().astype("<i8").tobytes()).hexdigest()


def assert_trace(
    found: tuple[list[dict[str, Tensor]], list[dict[str, Any]]],
    expected: tuple[list[dict[str, Tensor]], list[list[float]]],
    global_batches: Sequence[Tensor],
) -> None:
    tensors, records = found
    for mine, wanted in zip(tensors, expected[0], strict=True):
        assert set(mine) == set(wanted)
        for name, value in mine.items():
            assert value.dtype == torch.float32
            torch.testing.assert_close(value, wanted[name], **CLOSE, msg=name)
    for t, (record, losses) in enumerate(zip(records, expected[1], strict=True)):
        assert list(record) == ["update", "loss", "learning_rate", "rows_sha256", "step"]
        assert record["update"] == t
        assert record["step"] == t + 1
        assert record["loss"] == pytest.approx(losses, rel=1e-12)
        assert record["learning_rate"] == pytest.approx(learning_rates()[t], rel=1e-12)
        assert record["rows_sha256"] == sha256(global_batches[t])


def padded(global_batches: list[Tensor]) -> list[Tensor]:
    """Batches in which the later half of every third row is no target."""
    for rows in global_batches:
        rows[::3, CONFIG.context // 2 :] = IGNORED
    return global_batches


@pytest.mark.parametrize("clip", [None, 0.05])
def test_one_worker(tmp_path: Path, clip: float | None) -> None:
    given = padded(batches(1, 8))
    found = trace(
        tmp_path,
        SyncStrategy(compile=False, micro_batch_size=3),
        given,
        gradient_clip_val=clip,
        max_steps=UPDATES,
    )
    expected = expect(given[:3], [np.eye(1)] * 3, "awc", clip)
    assert_trace(found, expected, given)


def test_one_worker_under_a_plain_strategy(tmp_path: Path) -> None:
    """Lightning's own: torch.optim.AdamW, and parameters with a worker axis of 1."""
    given = padded(batches(1, 8))
    found = trace(tmp_path, "auto", given, gradient_clip_val=0.05)
    assert_trace(found, expect(given[:3], [np.eye(1)] * 3, "awc", 0.05), given)


@pytest.mark.parametrize("scheme", ["awc", "atc"])
def test_packed_workers(tmp_path: Path, scheme: Any) -> None:
    """The updates hold the mixing, and gradients are those at the weights before it."""
    given = padded(batches(4, 3))
    strategy = DecentralizedStrategy(4, scheme=scheme, topology="one_peer_ring", compile=False)
    found = trace(tmp_path, strategy, given, gradient_clip_val=0.05)
    topology = make_topology("one_peer_ring", 4)
    expected = expect(given[:3], [topology.matrix(t) for t in range(3)], scheme, 0.05)
    assert_trace(found, expected, given)
    assert found[0][0]["parameters/model.embed_tokens.weight"].shape == (4, 31, 8)


@pytest.mark.parametrize("strategy", [lambda: SyncStrategy(compile=False), lambda: "auto"])
def test_accumulated_batches_are_one_update(tmp_path: Path, strategy: Any) -> None:
    given = batches(1, 8, UPDATES)
    parts = [part for rows in given for part in rows.split(4)]
    found = trace(tmp_path, strategy(), parts, accumulate_grad_batches=2)
    assert_trace(found, expect(given[:3], [np.eye(1)] * 3, "awc", None), given)


def test_a_resumed_run_goes_on_counting(tmp_path: Path) -> None:
    save = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=4, save_top_k=-1)
    strategy = SyncStrategy(compile=False)
    options: dict[str, Any] = {"callbacks": [save], "enable_checkpointing": True}
    whole = trace(tmp_path / "whole", strategy, batches(1), 6, **options)
    resumed = trace(
        tmp_path / "resumed",
        SyncStrategy(compile=False),
        batches(1),
        2,
        ckpt_path=tmp_path / "step=4.ckpt",
    )
    assert [record["update"] for record in resumed[1]] == [4, 5]
    assert resumed[1] == whole[1][4:]
    for mine, wanted in zip(resumed[0], whole[0][4:], strict=True):
        assert all(torch.equal(mine[name], wanted[name]) for name in wanted)


def test_a_resumed_run_keeps_the_trace_of_its_first_updates(tmp_path: Path) -> None:
    save = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=4, save_top_k=-1)
    options: dict[str, Any] = {"callbacks": [save], "enable_checkpointing": True}
    trace(tmp_path / "run", SyncStrategy(compile=False), batches(1), 2, **options)
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    path = tmp_path / "step=4.ckpt"
    _, records = trace(tmp_path / "run", SyncStrategy(compile=False), batches(1), 2, ckpt_path=path)
    assert [record["update"] for record in records] == [0, 1]
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_more_updates_than_the_run_has(tmp_path: Path) -> None:
    _, records = trace(tmp_path, SyncStrategy(compile=False), batches(1), 5, max_steps=2)
    assert len(records) == 2


def test_a_killed_run_leaves_whole_updates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first file of the second update is cut off in the middle."""
    import safetensors.torch

    save, calls = safetensors.torch.save_file, iter(range(9))

    def dying(tensors: Any, path: Path) -> None:
        save(tensors, path)
        if next(calls) == 3:
            path.write_bytes(path.read_bytes()[:100])
            raise KeyboardInterrupt

    monkeypatch.setattr(safetensors.torch, "save_file", dying)
    with pytest.raises(BaseException):  # noqa: B017  (Lightning turns it into an exit)
        trace(tmp_path, SyncStrategy(compile=False), batches(1))
    _, records = read(tmp_path)
    assert [record["update"] for record in records] == [0]


def test_the_initial_state_and_the_rows_are_kept(tmp_path: Path) -> None:
    """All workers start from one state, and mixing makes them differ after that."""
    given = batches(2, 3)
    strategy = DecentralizedStrategy(2, topology="ring", compile=False)
    (first, *_), records = trace(tmp_path / "two", strategy, given)
    initial = load_file(tmp_path / "two" / "initial.safetensors")
    wanted = {f"parameters/{name}": value for name, value in tiny().named_parameters()}
    assert set(initial) == set(wanted)
    for name, value in initial.items():
        assert torch.equal(value, wanted[name].float())  # [1, *shape]
        after, change = first[name], first[name.replace("parameters", "updates")]
        torch.testing.assert_close(after - change, value.expand_as(after), rtol=1e-6, atol=1e-7)
    for record, rows in zip(records, given, strict=False):
        kept = load_file(tmp_path / "two" / f"rows-{record['update']:05d}.safetensors")
        assert torch.equal(kept["rows"], rows)
        assert sha256(kept["rows"]) == record["rows_sha256"]


def test_unequal_workers_are_all_in_the_initial_state(tmp_path: Path) -> None:
    save = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=4, save_top_k=-1)
    options: dict[str, Any] = {"callbacks": [save], "enable_checkpointing": True}
    trace(tmp_path / "a", DecentralizedStrategy(2, compile=False), batches(2), **options)
    resumed = DecentralizedStrategy(2, compile=False)
    trace(tmp_path / "b", resumed, batches(2), ckpt_path=tmp_path / "step=4.ckpt")
    initial = load_file(tmp_path / "b" / "initial.safetensors")
    assert {len(value) for value in initial.values()} == {2}


def test_files_go_to_the_run_s_folder(tmp_path: Path) -> None:
    trainer = new_trainer(
        SyncStrategy(compile=False), callbacks=[UpdateTrace(updates=1)], default_root_dir=tmp_path
    )
    trainer.fit(tiny(), Batches(batches(1)))
    assert len(read(tmp_path / "trace")[1]) == 1


def test_safetensors_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'tinyllm\[report\]'"):
        trace(tmp_path, SyncStrategy(compile=False), batches(1))


class Sgd(TinyLLM):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_what_cannot_be_traced_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match=r"Adam's moments, and there is SGD"):
        trace(tmp_path, "auto", batches(1), module=Sgd(config=CONFIG))
    with pytest.raises(ValueError, match="traces batches of token rows"):
        trace(tmp_path, SyncStrategy(compile=False), examples(6), module=classifier())
    with pytest.raises(ValueError, match="updates is 0; it must be at least 1"):
        UpdateTrace(tmp_path, 0)


def test_nothing_is_done_afterwards(tmp_path: Path) -> None:
    """1 µs in each of three hooks is less than half a percent of the shortest update, 1.3 ms."""
    callback: Any = UpdateTrace(tmp_path)
    fastest = float("inf")
    for _ in range(20):
        started = time.perf_counter()
        for _ in range(100):
            callback.on_train_batch_start(None, None, None, 0)
            callback.on_before_optimizer_step(None, None, None)
            callback.on_train_batch_end(None, None, None, None, 0)
        fastest = min(fastest, (time.perf_counter() - started) / 100)
    assert fastest < 3e-6
