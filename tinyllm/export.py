"""One ordinary model out of a checkpoint: what ``tinyllm export`` runs."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tinyllm.checkpoint import read_checkpoint
from tinyllm.config import LlamaConfig
from tinyllm.data.tokenizer import Tokenizer
from tinyllm.module import TinyLLM, parameter_groups


def export(checkpoint: Path, output: Path, worker: str = "average") -> None:
    """Write one model of a checkpoint in the form of a stock Llama.

    The folder gets `model.safetensors` in float32 under stock Llama names, `config.json`, and the
    tokenizer that the checkpoint carries.

    Args:
        checkpoint: A checkpoint that `tinyllm fit` has written.
        output: Folder to make; it must not exist.
        worker: `average` for the mean of all workers' weights, or one worker's number from 0.

    Raises:
        FileExistsError: The folder is there already.
        FileNotFoundError: There is no checkpoint.
        ValueError: It is not one, or there is no such worker.
    """
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ImportError(
            "export needs safetensors, which is missing: pip install 'tinyllm[report]'"
        ) from error
    if output.exists():
        raise FileExistsError(f"{output} is there already; choose another folder or remove it")
    state = read_checkpoint(checkpoint)
    module = TinyLLM.load_from_checkpoint(checkpoint, map_location="cpu", weights_only=True)
    if worker != "average":
        _take_worker(module, state, worker, checkpoint)
    partial = output.with_name(f".{output.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    try:
        tensors = {name: t.float().contiguous() for name, t in module.state_dict().items()}
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        tokenizer = _tokenizer(state)
        if tokenizer is not None:
            tokenizer.save(partial)
        config = stock_config(module.config, tokenizer)
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    size = sum(tensor.numel() for tensor in tensors.values())
    which = "the average of all workers" if worker == "average" else f"worker {worker}"
    print(f"{output}: {size:,} parameters, {which}")


def _tokenizer(state: dict[str, Any]) -> Tokenizer | None:
    carried = state.get("TokenDataModule", {}).get("tokenizer")
    return None if carried is None else Tokenizer.from_state(carried)


def _take_worker(module: TinyLLM, state: dict[str, Any], worker: str, checkpoint: Path) -> None:
    """Replaces the module's weights, the average, by one worker's."""
    entries: dict[int, dict[str, Tensor]] = (state.get("optimizer_states") or [{"state": {}}])[0][
        "state"
    ]
    workers = entries[0]["exp_avg"].shape[0] if entries else 0
    if not worker.isdecimal() or int(worker) >= workers:
        allowed = f"0 to {workers - 1}" if entries else "none, since it holds weights alone"
        raise ValueError(
            f"worker is {worker!r}; {checkpoint} has the workers {allowed}: give one of them, or "
            "`average`"
        )
    if workers == 1:  # its weights are the module's
        return
    parameters = [p for group in parameter_groups(module.model) for p in group]
    for index, parameter in enumerate(parameters):
        parameter.data = entries[index]["weights"][int(worker)][None].clone()


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
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.ffn_width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
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
