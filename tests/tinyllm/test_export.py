"""Exports: every worker's own weights or their average, under stock names."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader

from tinyllm import LlamaConfig, TinyLLM
from tinyllm.cli import main
from tinyllm.data.tokenizer import Tokenizer
from tinyllm.export import export
from tinyllm.strategies import DecentralizedStrategy, SyncStrategy

CONFIG = LlamaConfig(layers=2, width=16, heads=2, ffn_width=24, vocab_size=300, context=12)


def checkpoint(folder: Path, strategy: Any, **options: Any) -> Path:
    torch.manual_seed(0)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows = [torch.randint(300, (8, 13)) for _ in range(3)]
    trainer.fit(TinyLLM(config=CONFIG), DataLoader(rows, batch_size=None))
    trainer.save_checkpoint(folder / "some.ckpt", **options)
    return folder / "some.ckpt"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    strategy = DecentralizedStrategy(3, topology="ring", compile=False)
    # eight rows over three workers: one row of padding
    return checkpoint(tmp_path_factory.mktemp("packed"), _Padded(strategy))


def _Padded(strategy: DecentralizedStrategy) -> DecentralizedStrategy:  # noqa: N802
    step = strategy.training_step

    def padded(rows: Tensor, *args: Any) -> Any:
        return step(torch.cat((rows, torch.full_like(rows[:1], -100))), *args)

    strategy.training_step = padded  # type: ignore[method-assign]
    return strategy


def stock_names() -> set[str]:
    layer = ["input_layernorm", "post_attention_layernorm"]
    layer += [f"self_attn.{part}_proj" for part in "qkvo"]
    layer += [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
    names = {f"model.layers.{i}.{name}.weight" for i in range(2) for name in layer}
    return names | {"model.embed_tokens.weight", "model.norm.weight"}


def test_workers_differ_and_the_average_is_their_mean(packed: Path, tmp_path: Path) -> None:
    for worker in ("0", "1", "2", "average"):
        export(packed, tmp_path / worker, worker)
    workers = [load_file(tmp_path / w / "model.safetensors") for w in "012"]
    average = load_file(tmp_path / "average/model.safetensors")
    assert set(average) == stock_names()
    for name, tensor in average.items():
        stacked = torch.stack([worker[name] for worker in workers])
        torch.testing.assert_close(tensor, stacked.mean(0), rtol=1e-6, atol=1e-7)
        if "proj" in name or "embed" in name:
            assert not torch.equal(stacked[0], stacked[1])


def test_an_export_holds_the_rows_of_the_checkpoint(packed: Path, tmp_path: Path) -> None:
    """The fused projection is stored as one parameter and exported as three."""
    export(packed, tmp_path / "two", "2")
    saved = torch.load(packed, weights_only=True)["optimizer_states"][0]["state"]
    fused = saved[1]["weights"][2]  # after the embedding comes the first block's q, k and v
    exported = load_file(tmp_path / "two/model.safetensors")
    parts = [exported[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(torch.cat(parts), fused)


def test_config_is_that_of_a_stock_llama(packed: Path, tmp_path: Path) -> None:
    export(packed, tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    expected = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "vocab_size": 300,
        "max_position_embeddings": 12,
        "tie_word_embeddings": True,
        "rope_theta": 10_000.0,
        "rms_norm_eps": 1e-5,
    }
    assert expected.items() <= config.items()


def test_one_worker_is_the_average(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, SyncStrategy(compile=False))
    export(path, tmp_path / "zero", "0")
    export(path, tmp_path / "average")
    zero, average = (load_file(tmp_path / n / "model.safetensors") for n in ("zero", "average"))
    assert all(torch.equal(zero[name], tensor) for name, tensor in average.items())


def test_the_tokenizer_comes_along(packed: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.train(["a few words " * 50, "and some others " * 50], 300)
    state = torch.load(packed, weights_only=True)
    state["TokenDataModule"] = {"tokenizer": tokenizer.to_state()}
    torch.save(state, tmp_path / "with.ckpt")
    export(tmp_path / "with.ckpt", tmp_path / "out")
    loaded = Tokenizer.load(tmp_path / "out")
    assert loaded.sha256 == tokenizer.sha256
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["eos_token_id"] == tokenizer.boundary_id


@pytest.mark.parametrize(
    ("worker", "message"),
    [("3", "worker is '3'.* has the workers 0 to 2"), ("-1", "0 to 2"), ("best", "0 to 2")],
)
def test_a_worker_that_is_not_there(
    packed: Path, tmp_path: Path, worker: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        export(packed, tmp_path / "out", worker)
    assert list(tmp_path.iterdir()) == []


def test_weights_alone_have_only_an_average(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, SyncStrategy(compile=False), weights_only=True)
    with pytest.raises(ValueError, match="it holds weights alone"):
        export(path, tmp_path / "out", "0")
    export(path, tmp_path / "out")


def test_another_format_is_refused(packed: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="to is 'gguf'; choose from hf"):
        export(packed, tmp_path / "out", to="gguf")  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(FileExistsError, match="is there already"):
        export(packed, tmp_path / "out")


def test_the_command(packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["export", str(packed), "--to", "hf", str(tmp_path / "x"), "--worker", "1"])
    assert "worker 1" in capsys.readouterr().out
    assert (tmp_path / "x/model.safetensors").is_file()
