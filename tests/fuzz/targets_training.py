"""Hostile checkpoints, stock models and configuration files."""

import copy
import io
import json
import os
import pickle
import zipfile
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
import yaml
from contract import REFUSED, answer, command, write_json
from hypothesis import strategies as st
from mutations import VALUES, changed_bytes, changed_values

from tinyllm import LlamaConfig, TinyLLM
from tinyllm.checkpoint import read_checkpoint
from tinyllm.hf import read_model, write_model
from tinyllm.module import parameter_groups
from tinyllm.strategies.checkpoint_io import AtomicCheckpointIO

CONFIG = LlamaConfig(layers=1, width=8, heads=2, ffn_width=8, vocab_size=16, context=8)
WORKERS = 2


@cache
def good_state() -> dict[str, Any]:
    """What a checkpoint of two packed workers holds."""
    torch.manual_seed(0)
    module = TinyLLM(config=CONFIG)
    parameters = [p for group in parameter_groups(module.model) for p in group]
    entries = {
        index: {
            "step": torch.tensor(3.0),
            **{
                name: torch.randn(WORKERS, *p.shape[1:])
                for name in ("exp_avg", "exp_avg_sq", "weights")
            },
        }
        for index, p in enumerate(parameters)
    }
    groups = [{"lr": 0.1, "betas": (0.9, 0.99), "params": list(range(len(parameters)))}]
    return {
        "epoch": 0,
        "global_step": 3,
        "pytorch-lightning_version": "2.6.0",
        "state_dict": dict(module.state_dict()),
        "hyper_parameters": dict(module.hparams),
        "optimizer_states": [{"state": entries, "param_groups": groups}],
        "lr_schedulers": [{"last_epoch": 3, "_last_lr": [0.1]}],
        "TokenDataModule": {"tokenizer": None},
    }


def written(state: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


@cache
def good_checkpoint() -> bytes:
    return written(good_state())


def same(found: Any, wanted: Any) -> bool:
    """Whether two states are equal, to the last bit."""
    if isinstance(wanted, torch.Tensor):
        return (
            isinstance(found, torch.Tensor)
            and found.dtype == wanted.dtype
            and torch.equal(found, wanted)
        )
    if isinstance(wanted, dict):
        return (
            isinstance(found, dict)
            and list(found) == list(wanted)
            and all(same(found[key], wanted[key]) for key in wanted)
        )
    if isinstance(wanted, (list, tuple)):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    return bool(type(found) is type(wanted) and found == wanted)


def checkpoint_bytes(data: Any, folder: Path) -> None:
    """A damaged file is refused, or nothing of what it holds has changed."""
    path = folder / "last.ckpt"
    path.write_bytes(data.draw(changed_bytes(good_checkpoint())))
    for read in (read_checkpoint, AtomicCheckpointIO().load_checkpoint):
        state = answer(lambda read=read: read(path), (ValueError,), path)  # type: ignore[misc]
        assert state is REFUSED or same(state, good_state()), "a damaged file was read"


TENSORS = st.sampled_from(
    [
        torch.zeros(0),
        torch.tensor(float("nan")),
        torch.zeros(16, 8, dtype=torch.int64),
        torch.zeros(1, 1).expand(1 << 20, 1 << 20),
        torch.zeros(2, 16, 8),
    ]
)


def checkpoint_content(data: Any, folder: Path) -> None:
    """Whole files with other content: every command works, or says what is wrong."""
    state = data.draw(changed_values(good_state(), VALUES | TENSORS))
    path = folder / "last.ckpt"
    path.write_bytes(written(state))
    if answer(lambda: read_checkpoint(path), (ValueError,), path) is not REFUSED:
        worker = data.draw(st.sampled_from(["average", "0", "1", "2", "-1"]))
        done = command("export", path, folder / "out", "--worker", worker)
        assert done.code != 0 or (folder / "out" / "model.safetensors").is_file()
        assert done.code == 0 or not (folder / "out").exists()
        command("generate", path)


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self._canary = canary

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._canary),)


PROTOCOLS = st.integers(0, pickle.HIGHEST_PROTOCOL)


def checkpoint_pickle(data: Any, folder: Path) -> None:
    """No reader runs what a pickle asks for, wherever in the file it stands."""
    path, canary = folder / "last.ckpt", folder / "canary"
    protocol = data.draw(PROTOCOLS)
    payload = pickle.dumps(
        data.draw(st.sampled_from([Evil(canary), {"state_dict": Evil(canary)}])), protocol
    )
    kind = data.draw(st.sampled_from(["bare", "zip", "state", "legacy"]))
    if kind == "bare":
        path.write_bytes(payload)
    elif kind == "legacy":
        numbers = [0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}]
        path.write_bytes(b"".join(pickle.dumps(number, 2) for number in numbers) + payload)
    elif kind == "state":
        torch.save({**good_state(), "extra": Evil(canary)}, path)
    else:
        with (
            zipfile.ZipFile(io.BytesIO(good_checkpoint())) as good,
            zipfile.ZipFile(path, "w") as bad,
        ):
            for name in good.namelist():
                own = name.endswith("data.pkl")
                bad.writestr(name, payload if own else good.read(name))
    for read in (read_checkpoint, AtomicCheckpointIO().load_checkpoint):
        assert answer(lambda read=read: read(path), (ValueError,), path) is REFUSED  # type: ignore[misc]
    for args in (["generate", path], ["export", path, folder / "out"]):
        assert command(*args).code == 1
    assert not canary.exists(), "a checkpoint ran code"


# --- stock models -----------------------------------------------------------------------------


@cache
def good_model() -> dict[str, bytes]:
    folder = Path(mkdtemp())
    torch.manual_seed(0)
    write_model(folder, CONFIG, TinyLLM(config=CONFIG).state_dict(), None)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def stock_model(data: Any, folder: Path) -> None:
    """A folder of a stock Llama, whole or in shards, with a changed file."""
    place, files = folder / "model", dict(good_model())
    place.mkdir()
    (folder / "outside.safetensors").write_bytes(files["model.safetensors"])
    kind = data.draw(st.sampled_from(["config", "weights", "index"]))
    if kind == "config":
        value = data.draw(changed_values(json.loads(files["config.json"])))
        write_json(folder / "config", value)
        files["config.json"] = (folder / "config").read_bytes()
    elif kind == "weights":
        files["model.safetensors"] = data.draw(changed_bytes(files["model.safetensors"]))
    else:
        files["model-1.safetensors"] = files.pop("model.safetensors")
        index = {"weight_map": {"a": "model-1.safetensors", "b": "model-1.safetensors"}}
        outside = st.sampled_from(["../outside.safetensors", str(folder / "outside.safetensors")])
        value = data.draw(changed_values(index, VALUES | outside))
        write_json(folder / "index", value)
        files["model.safetensors.index.json"] = (folder / "index").read_bytes()
    for name, content in files.items():
        (place / name).write_bytes(content)
    if kind == "index":
        names = value.get("weight_map") if isinstance(value, dict) else None
        left = isinstance(names, dict) and any("outside" in str(name) for name in names.values())
    found = answer(lambda: read_model(place), (ValueError, FileNotFoundError), place)
    if found is REFUSED:
        return
    assert isinstance(found, tuple)
    assert not (kind == "index" and left), "a file outside the folder was read"
    module = TinyLLM(config=found[0])
    module.load_state_dict(found[1])


# --- configuration files ----------------------------------------------------------------------

GOOD_CONFIG = yaml.safe_load("""
seed_everything: 1
trainer:
  accelerator: cpu
  max_steps: 12
  val_check_interval: 4
  logger: false
  callbacks:
    - {class_path: tinyllm.callbacks.ThroughputWindows}
  strategy:
    class_path: tinyllm.strategies.DecentralizedStrategy
    init_args: {workers: 2, scheme: awc, topology: ring, compile: false}
model:
  config: {layers: 1, width: 16, heads: 2, ffn_width: 32, vocab_size: 280, context: 16}
  optimizer: {lr: 0.01, betas: [0.9, 0.99]}
  schedule: {class_path: tinyllm.schedule.WSD, init_args: {decay_fraction: 0.5}}
data: {cache: cache, context: 16, batch_size: 8}
""")
BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{b}: &{b} [{','.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
TEXTS = st.sampled_from(
    [
        "!!python/object/apply:os.mkdir [canary]",
        "trainer: !!python/object/apply:os.mkdir [canary]",
        "&a [*a]",
        "[" * 2_000,
        "{" * 500,
        BOMB,
        "trainer: &t {callbacks: [*t]}",
        "? [a]\n: b",
        "\x00",
        "---\n---\n",
        "2026-11-29",
        "",
        "model: nothere.yaml",
        "a: 1\n" * 3,
        "trainer:\n\tmax_steps: 1",
        "__default_config__: x",
        "config: x.yaml",
        "print_config: true",
        "1: 2",
        "null: 3",
    ]
)


def config(data: Any, folder: Path) -> None:
    """``--print_config`` prints settings that it reads again as the same, or says what is wrong."""
    path, again = folder / "run.yaml", folder / "again.yaml"
    kind = data.draw(st.sampled_from(["values", "values", "bytes", "text"]))
    good = yaml.safe_dump(GOOD_CONFIG)
    if kind == "values":
        value = data.draw(changed_values(copy.deepcopy(GOOD_CONFIG)))
        path.write_text(yaml.safe_dump(value), encoding="utf-8")
    elif kind == "bytes":
        path.write_bytes(data.draw(changed_bytes(good.encode())))
    else:
        path.write_text(data.draw(TEXTS), encoding="utf-8")
    here = Path.cwd()
    os.chdir(folder)
    try:
        done = command("fit", "--config", path, "--print_config")
        assert not (folder / "canary").exists(), "a configuration ran code"
        if done.code != 0:
            assert "Traceback" not in done.err
            return
        again.write_text(done.out, encoding="utf-8")
        repeated = command("fit", "--config", again, "--print_config")
        assert (repeated.code, repeated.out) == (0, done.out), repeated.err
    finally:
        os.chdir(here)
