"""Exports in transformers: the same logits and text; and back: bit for bit, or a clear refusal."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
import transformers
from run_files import load
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing

from tinyllm.cli import main
from tinyllm.config import LlamaConfig
from tinyllm.data.tokenizer import Tokenizer
from tinyllm.export import export
from tinyllm.hf import read_model, write_model
from tinyllm.module import TinyLLM

ROOT = Path(__file__).parents[2]
PROMPTS = ["1 größere", "7", "", "naïve and  日本\n"]
ODD = LlamaConfig(
    **{"layers": 2, "width": 48, "heads": 3, "ffn_width": 40, "vocab_size": 90, "context": 24},
    **{"rope_theta": 300.0, "norm_eps": 0.01, "init_std": 0.3},
)


@pytest.fixture(scope="module", params=["quickstart", "packed4-quickstart"])
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, text_cache: Path
) -> Path:
    """A quickstart of a few updates, synchronous or with four workers."""
    folder = tmp_path_factory.mktemp(request.param)
    recipes = ["quickstart", request.param]
    files = [f"--config={ROOT / 'configs' / recipe}.yaml" for recipe in dict.fromkeys(recipes)]
    options = {
        "trainer.default_root_dir": folder,
        "trainer.max_steps": 8,
        "trainer.val_check_interval": 8,
        "trainer.precision": "32-true",  # a CPU emulates bf16
        "trainer.enable_progress_bar": "false",
        "trainer.strategy.compile": "false",
        "trainer.accelerator": "cpu",
        "model.config.vocab_size": 300,  # more than the tokenizer has
        "data.cache": text_cache,
    }
    main(["fit", *files, *(f"--{name}={value}" for name, value in options.items())])
    return folder / "checkpoints/last.ckpt"


@pytest.fixture(scope="module")
def exported(checkpoint: Path) -> Path:
    folder = checkpoint.parents[1] / "exported"
    main(["export", str(checkpoint), "--to", "hf", str(folder)])
    return folder


def stock(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def own(state: dict[str, Any]) -> TinyLLM:
    module = TinyLLM(**state["hyper_parameters"])
    module.load_state_dict(state["state_dict"])
    return module


def worst_difference(module: TinyLLM, folder: Path, tokens: torch.Tensor) -> float:
    with torch.no_grad():
        return float((module(tokens) - stock(folder)(tokens).logits).abs().max())


def test_logits_are_those_of_transformers(checkpoint: Path, exported: Path) -> None:
    module = own(load(checkpoint))
    tokens = torch.randint(300, (3, module.config.context))
    assert worst_difference(module, exported, tokens) < 1e-5


def test_every_number_of_the_architecture_comes_along(tmp_path: Path) -> None:
    """With a base, an epsilon and a spread of its own; large weights make each of them count."""
    module = TinyLLM(config=ODD)
    write_model(tmp_path, ODD, module.state_dict(), None)
    tokens = torch.randint(ODD.vocab_size, (2, ODD.context))
    assert worst_difference(module, tmp_path, tokens) < 1e-5
    assert stock(tmp_path).config.initializer_range == 0.3


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_is_that_of_transformers(
    checkpoint: Path, exported: Path, prompt: str, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    options = ["--temperature", "0", "--max_new_tokens", "30"]
    main(["generate", str(checkpoint), "--prompt", prompt, *options])
    text = capsys.readouterr().out
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    prompt = prompt or tokenizer.bos_token  # a new document
    inputs = tokenizer(prompt, return_tensors="pt")
    model = stock(exported)
    ids = model.generate(**inputs, do_sample=False, max_new_tokens=30)[0]
    expected = tokenizer.decode(ids, skip_special_tokens=True)
    assert expected.rstrip("\N{REPLACEMENT CHARACTER}") + "\n" == text  # a character cut off
    assert len(ids) > inputs["input_ids"].shape[1]


def test_an_export_imports_back_bit_for_bit(checkpoint: Path, exported: Path) -> None:
    module, back = own(load(checkpoint)), TinyLLM(init_from=exported)
    assert back.config == module.config
    state = back.state_dict()
    for name, tensor in module.state_dict().items():
        assert torch.equal(state[name], tensor), name


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "20KB"}])
def test_what_transformers_writes_imports_back_bit_for_bit(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """Its own form of config.json, and weights in shards."""
    module = TinyLLM(config=ODD)
    (tmp_path / "first").mkdir()
    write_model(tmp_path / "first", ODD, module.state_dict(), None)
    stock(tmp_path / "first").save_pretrained(tmp_path / "second", **options)
    assert (tmp_path / "second/model.safetensors.index.json").exists() == bool(options)
    config, weights = read_model(tmp_path / "second")
    assert config == ODD
    for name, tensor in module.state_dict().items():
        assert torch.equal(weights[name], tensor), name


# Tokenizers


def exported_tokenizer(folder: Path, tokenizer: Tokenizer) -> Any:
    folder.mkdir()
    module = TinyLLM(config=ODD)
    write_model(folder, ODD, module.state_dict(), tokenizer)
    return transformers.AutoTokenizer.from_pretrained(folder)


def assert_same_ids_and_text(mine: Tokenizer, theirs: Any) -> None:
    for text in [*PROMPTS, " lead", "tail ", "two  spaces\nand a line", "a\tb", "½ ﬁ"]:
        ids = mine.encode(text).tolist()
        assert theirs(text)["input_ids"] == ids, text
        assert theirs.decode(ids) == mine.decode(ids), text


def test_a_tokenizer_gives_the_ids_of_training(text_cache: Path, tmp_path: Path) -> None:
    mine = Tokenizer.load(text_cache)
    theirs = exported_tokenizer(tmp_path / "out", mine)
    assert_same_ids_and_text(mine, theirs)
    assert theirs.eos_token_id == theirs.bos_token_id == mine.boundary_id
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (
        text_cache / "tokenizer.json"
    ).read_bytes()


def test_a_template_of_its_own_is_left_out(text_cache: Path, tmp_path: Path) -> None:
    """The model has never seen the begin token that other programs put before a text."""
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(text_cache / "tokenizer.json")
    )
    template = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    tokenizer.backend_tokenizer.post_processor = template
    tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    mine = Tokenizer.load(tmp_path / "tokenizer.json")
    assert_same_ids_and_text(mine, exported_tokenizer(tmp_path / "out", mine))


@pytest.mark.parametrize(
    "kind",
    [
        {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"},
        {"model_type": "unigram"},
    ],
)
def test_a_sentencepiece_model_gives_the_ids_of_training(
    tmp_path: Path, kind: dict[str, Any]
) -> None:
    file = io.BytesIO()
    lines = [f"{number} größere Äpfel für 日本, naïve and quick lead" for number in range(99)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=file,
        vocab_size=320 if kind.get("byte_fallback") else 45,
        minloglevel=2,
        **kind,
    )
    (tmp_path / "some.model").write_bytes(file.getvalue())
    mine = Tokenizer.load(tmp_path / "some.model")
    theirs = exported_tokenizer(tmp_path / "out", mine)
    for text in ["1 größere Äpfel", "naïve  and quick", " lead 日本"]:
        assert theirs(text)["input_ids"] == mine.encode(text).tolist()
    assert theirs.eos_token_id == mine.boundary_id
    assert Tokenizer.load(tmp_path / "out/tokenizer.model").sha256 == mine.sha256


# What is refused


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path, ODD, TinyLLM(config=ODD).state_dict(), None)
    return tmp_path


def change(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "qwen2"}, "its model_type is 'qwen2', not 'llama'"),
        ({"num_key_value_heads": 1}, "it has 1 key-value heads for 3 heads"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"mlp_bias": True}, "mlp_bias is true"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, r"its RoPE is scaled \(linear\)"),
        ({"rope_parameters": {"rope_type": "llama3"}}, r"its RoPE is scaled \(llama3\)"),
        ({"quantization_config": {}}, "its weights are quantized"),
        ({"head_dim": 32}, "3 heads of 32 do not make up its width of 48"),
        ({"tie_word_embeddings": False}, "its head is not tied to its embedding"),
        ({"mlp_bias": True, "num_key_value_heads": 1}, "key-value heads .*; mlp_bias is true"),
        ({"hidden_size": 54}, r"has shape \[90, 48\], not \[90, 54\]"),
        ({"num_hidden_layers": 3}, r"lacks model.layers.2.input_layernorm.weight, .*, …"),
        ({"num_hidden_layers": 1}, r"also holds model.layers.1"),
    ],
)
def test_a_model_that_does_not_fit(folder: Path, values: dict[str, Any], message: str) -> None:
    change(folder, **({"head_dim": None} if "hidden_size" in values else {}) | values)
    with pytest.raises(ValueError, match=message):
        TinyLLM(init_from=folder)


@pytest.mark.parametrize("equal", [True, False])
def test_a_head_that_equals_the_embedding_is_tied(folder: Path, equal: bool) -> None:
    change(folder, tie_word_embeddings=False)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + (0.0 if equal else 1e-3)
    save_file(weights, folder / "model.safetensors")
    if equal:
        assert "lm_head.weight" not in read_model(folder)[1]
    else:
        with pytest.raises(ValueError, match="not tied"):
            read_model(folder)


def test_what_older_files_leave_out_or_add(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    for name in ("num_key_value_heads", "head_dim", "attention_bias", "mlp_bias", "rope_theta"):
        raw.pop(name)
    (folder / "config.json").write_text(json.dumps(raw))
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file({n: t.bfloat16() for n, t in weights.items()}, folder / "model.safetensors")
    config, read = read_model(folder)
    assert config.rope_theta == 10_000.0
    assert {tensor.dtype for tensor in read.values()} == {torch.float32}
    TinyLLM(init_from=folder)


@pytest.mark.parametrize(
    ("file", "message"),
    [("config.json", "there is no config.json in"), ("model.safetensors", "there is neither")],
)
def test_a_missing_file_is_named(folder: Path, file: str, message: str) -> None:
    (folder / file).unlink()
    with pytest.raises(FileNotFoundError, match=message):
        TinyLLM(init_from=folder)


# On the command line


def test_training_goes_on_from_an_export(command: Any, fit: Any, exported: Path) -> None:
    """At a learning rate of 0 the weights stay, so the checkpoint holds what was read."""
    options = ["--model.init_from", exported, "--trainer.max_steps", 2, "--model.optimizer.lr", 0]
    done = fit("run", *options, "--model.config", "null")
    assert "4 layers, width 192" in done.err
    state = load(Path("run/checkpoints/last.ckpt"))
    weights = read_model(exported)[1]
    for name, tensor in state["state_dict"].items():
        assert torch.equal(tensor, weights[name]), name
    export(Path("run/checkpoints/last.ckpt"), Path("again"))
    assert TinyLLM(init_from=Path("again")).config == TinyLLM(init_from=exported).config


def test_a_checkpoint_needs_the_folder_no_longer(
    command: Any, fit: Any, tmp_path: Path, text_cache: Path
) -> None:
    config = LlamaConfig(layers=1, width=16, heads=2, ffn_width=32, vocab_size=280, context=16)
    (tmp_path / "start").mkdir()
    write_model(tmp_path / "start", config, TinyLLM(config=config).state_dict(), None)
    start = ["--model.init_from", "start", "--model.config", "null"]
    fit("whole", *start)
    fit("run", *start, "--trainer.callbacks", "stopping.SignalAfter",
        "--trainer.callbacks.updates", 6, code=143)  # fmt: skip
    (tmp_path / "start").rename(tmp_path / "gone")
    fit("run", *start, "--ckpt_path", "last")
    whole, resumed = (load(Path(f"{f}/checkpoints/last.ckpt")) for f in ("whole", "run"))
    for name, tensor in whole["state_dict"].items():
        assert torch.equal(resumed["state_dict"][name], tensor), name
    assert command("validate", "--config", "run/config.yaml").code == 0


def test_a_configuration_must_be_that_of_the_folder(folder: Path) -> None:
    """So that a recipe's own size need not be taken out."""
    assert TinyLLM(init_from=folder, config=ODD).config == ODD
    with pytest.raises(
        ValueError, match=r"preset '20m' is another model than the one in .* width 320, not"
    ):
        TinyLLM(init_from=folder, preset="20m")
