"""A stock Llama as Hugging Face's transformers keeps it: a folder of JSON files and safetensors.

Reading and writing need the `safetensors` package alone; only a SentencePiece tokenizer is
converted by transformers itself.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tinyllm.config import LlamaConfig
from tinyllm.data.tokenizer import Tokenizer
from tinyllm.extras import require
from tinyllm.files import is_plain_name

_CONFIG, _WEIGHTS, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_SIZES = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "ffn_width": "intermediate_size",
    "vocab_size": "vocab_size",
}


# Writing


def write_model(
    folder: Path, config: LlamaConfig, weights: Mapping[str, Tensor], tokenizer: Tokenizer | None
) -> None:
    """Write everything that transformers loads a model and its tokenizer from.

    Args:
        folder: An empty one.
        config: The architecture.
        weights: One worker's, under stock names; stored in float32.
        tokenizer: Whose boundary starts and ends a text; None writes no tokenizer.

    Raises:
        ModuleNotFoundError: safetensors is missing, or transformers where it has to convert.
    """
    tensors = {name: tensor.float().contiguous() for name, tensor in weights.items()}
    save_file = require("safetensors.torch", "hf").save_file
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})
    _write_json(folder / _CONFIG, stock_config(config, tokenizer))
    if tokenizer is not None:
        boundary = tokenizer.boundary_id
        generation: dict[str, Any] = dict.fromkeys(
            ("bos_token_id", "eos_token_id", "pad_token_id"), boundary
        )
        if without_text := list(range(tokenizer.vocab_size, config.vocab_size)):
            generation["suppress_tokens"] = without_text
        _write_json(folder / "generation_config.json", generation)
        _write_tokenizer(folder, config, tokenizer)


def stock_config(config: LlamaConfig, tokenizer: Tokenizer | None = None) -> dict[str, Any]:
    """The fields of a stock Llama's ``config.json``.

    Args:
        config: The architecture.
        tokenizer: Whose boundary ends, and starts, a document.
    """
    boundary = None if tokenizer is None else tokenizer.boundary_id
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{stock: getattr(config, own) for own, stock in _SIZES.items()},
        "num_key_value_heads": config.heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps,
        "initializer_range": config.init_std,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": str(torch.float32).removeprefix("torch."),
        "bos_token_id": boundary,
        "eos_token_id": boundary,
    }


def _write_tokenizer(folder: Path, config: LlamaConfig, tokenizer: Tokenizer) -> None:
    """The tokenizer so that transformers gives the ids that the model was trained on."""
    boundary = tokenizer.token(tokenizer.boundary_id)
    _write_json(
        folder / "tokenizer_config.json",
        {
            # the one class that takes tokenizer.json as it is; LlamaTokenizer would rebuild it
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": config.context,
            "model_input_names": ["input_ids", "attention_mask"],  # what a Llama takes
            "clean_up_tokenization_spaces": False,
            "add_bos_token": False,
            "add_eos_token": False,
            "bos_token": boundary,
            "eos_token": boundary,
            "pad_token": boundary,
        },
    )
    path = tokenizer.save(folder)
    if tokenizer.kind == "sentencepiece":
        converted = require("transformers", "hf").AutoTokenizer.from_pretrained(folder)
        converted.backend_tokenizer.save(str(folder / "tokenizer.json"))
    else:
        description = json.loads(path.read_text(encoding="utf-8"))
        if tokenizer.adds_tokens:  # such as a begin token, which the model has never seen
            description["post_processor"] = None
            _write_json(path, description)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# Reading


def read_model(folder: str | Path) -> tuple[LlamaConfig, dict[str, Tensor]]:
    """The architecture and weights of a stock Llama.

    Args:
        folder: Holds ``config.json`` and ``model.safetensors``, whole or in shards.

    Returns:
        The configuration, and float32 weights under stock names, without a head.

    Raises:
        FileNotFoundError: There is no such folder, or a file is missing.
        ValueError: The model is no Llama with tied embeddings, as many key-value heads as heads,
            no biases and plain rotary positions; the message names all that does not fit.
        ModuleNotFoundError: safetensors is missing.
    """
    folder = Path(folder)
    raw = _read_json(folder / _CONFIG)
    try:
        obstacles = [*_obstacles(raw)]
    except (AttributeError, TypeError) as error:
        raise ValueError(f"{folder / _CONFIG} is damaged: {error}") from error
    # weights of another architecture tell nothing more
    tensors = {} if obstacles else dict(_tensors(folder))
    head = tensors.pop(_HEAD, None)
    if not raw.get("tie_word_embeddings", False) and not _equal(head, tensors.get(_EMBEDDING)):
        obstacles.append("its head is not tied to its embedding")
    if obstacles:
        raise ValueError(
            f"{folder} cannot be trained here: {'; '.join(obstacles)}. A TinyLLM is a Llama with "
            "tied embeddings, no grouped-query attention, no biases and no RoPE scaling"
        )
    config = _read_config(raw, folder)
    _check_names(tensors, config, folder)
    return config, {name: tensor.float() for name, tensor in tensors.items()}


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no {path.name} in {path.parent}; give the folder of a stock Llama, with "
            f"{_CONFIG} and {_WEIGHTS}"
        )
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a JSON object")
    return value


def _tensors(folder: Path) -> Iterable[tuple[str, Tensor]]:
    """All tensors of the folder, whole or in shards, without tables that older files hold."""
    files = [_WEIGHTS]
    if not (folder / _WEIGHTS).is_file():
        if not (folder / _INDEX).is_file():
            raise FileNotFoundError(
                f"there is neither {_WEIGHTS} nor {_INDEX} in {folder}; write the model with "
                "transformers' save_pretrained, which makes one of them"
            )
        files = _shards(folder / _INDEX)
    load_file = require("safetensors.torch", "hf").load_file
    for file in files:
        if not (folder / file).is_file():
            raise FileNotFoundError(f"{folder / file} is missing; {_INDEX} names it")
        try:
            tensors = load_file(folder / file)
        except Exception as error:  # the library's own, which derives from nothing else
            raise ValueError(f"{folder / file} is not a whole safetensors file: {error}") from error
        for name, tensor in tensors.items():
            if not name.endswith("rotary_emb.inv_freq"):
                yield name, tensor


def _shards(path: Path) -> list[str]:
    """The files that an index names, which must lie beside it."""
    names = _read_json(path).get("weight_map")
    files: list[Any] = list(names.values()) if isinstance(names, dict) else [names]
    for file in files:
        if not isinstance(file, str) or not is_plain_name(file):
            raise ValueError(f"{path} names the file {file!r}; it must be a plain name beside it")
    return sorted(set(files))


def _obstacles(raw: Mapping[str, Any]) -> Iterable[str]:
    """Everything in a ``config.json`` that a TinyLLM has not."""
    if raw.get("model_type") != "llama":
        yield f"its model_type is {raw.get('model_type')!r}, not 'llama'"
    heads = raw.get("num_attention_heads")
    if (key_value_heads := raw.get("num_key_value_heads")) not in (None, heads):
        yield f"it has {key_value_heads} key-value heads for {heads} heads"
    for name in ("attention_bias", "mlp_bias"):
        if raw.get(name):
            yield f"{name} is true"
    if (activation := raw.get("hidden_act", "silu")) != "silu":
        yield f"hidden_act is {activation!r}, not 'silu'"
    rope = _rope(raw)
    if (kind := rope.get("rope_type", rope.get("type", "default"))) != "default":
        yield f"its RoPE is scaled ({kind})"
    if "quantization_config" in raw:
        yield "its weights are quantized"
    width = raw.get("hidden_size")
    if raw.get("head_dim") is not None and raw["head_dim"] * (heads or 0) != width:
        yield f"{heads} heads of {raw['head_dim']} do not make up its width of {width}"


def _equal(head: Tensor | None, embedding: Tensor | None) -> bool:
    """Whether a head is a copy of the embedding, which is as good as tied to it."""
    return head is not None and embedding is not None and torch.equal(head, embedding)


def _rope(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settings of the rotary positions: transformers 5 calls them parameters, 4 scaling."""
    return raw.get("rope_parameters") or raw.get("rope_scaling") or {}


def _read_config(raw: Mapping[str, Any], folder: Path) -> LlamaConfig:
    missing = [stock for stock in _SIZES.values() if stock not in raw]
    if missing:
        raise ValueError(f"{folder / _CONFIG} has no {', '.join(missing)}")
    try:
        # what is left out has the value that transformers gives it
        return LlamaConfig(
            **{own: int(raw[stock]) for own, stock in _SIZES.items()},
            context=int(raw.get("max_position_embeddings", 2_048)),
            rope_theta=float(raw.get("rope_theta", _rope(raw).get("rope_theta", 10_000.0))),
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            init_std=float(raw.get("initializer_range", 0.02)),
        )
    except (OverflowError, TypeError, ValueError) as error:
        raise ValueError(f"{folder / _CONFIG} describes no model: {error}") from error


def _check_names(tensors: Mapping[str, Tensor], config: LlamaConfig, folder: Path) -> None:
    """Raises ValueError unless these are the tensors of such a model, in their shapes."""
    if config.layers > len(tensors):
        raise ValueError(
            f"{folder} is not the Llama of its {_CONFIG}: that has {config.layers} layers, and "
            f"there are {len(tensors)} tensors"
        )
    expected = _shapes(config)
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for what, names in (
        ("lacks", expected.keys() - found.keys()),
        ("also holds", found.keys() - expected.keys()),
    ):
        if names:
            some = ", ".join(sorted(names)[:3]) + (", …" if len(names) > 3 else "")
            raise ValueError(f"{folder} is not the Llama of its {_CONFIG}: it {what} {some}")
    for name, shape in expected.items():
        if found[name] != shape:
            raise ValueError(
                f"{folder} is not the Llama of its {_CONFIG}: {name} has shape "
                f"{list(found[name])}, not {list(shape)}"
            )


def _shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of a stock Llama with a tied head."""
    width, ffn_width = config.width, config.ffn_width
    block = {
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
        **{f"self_attn.{part}_proj": (width, width) for part in "qkvo"},
        "mlp.gate_proj": (ffn_width, width),
        "mlp.up_proj": (ffn_width, width),
        "mlp.down_proj": (width, ffn_width),
    }
    blocks = {
        f"model.layers.{layer}.{name}.weight": shape
        for layer in range(config.layers)
        for name, shape in block.items()
    }
    return {_EMBEDDING: (config.vocab_size, width), **blocks, "model.norm.weight": (width,)}
