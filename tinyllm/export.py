"""One ordinary model out of a checkpoint: what ``tinyllm export`` runs."""

import os
import shutil
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from tinyllm.arguments import check_choice
from tinyllm.checkpoint import read_checkpoint, tokenizer_of
from tinyllm.hf import write_model
from tinyllm.module import TinyLLM, module_of, parameter_groups

Format = Literal["hf"]


def export(checkpoint: Path, output: Path, worker: str = "average", to: Format = "hf") -> None:
    """Write one model of a checkpoint for other programs.

    Args:
        checkpoint: A checkpoint that `tinyllm fit` has written.
        output: Folder to make; it must not exist.
        worker: `average` for the mean of all workers' weights, or one worker's number from 0.
        to: The format. `hf` is a stock Llama as Hugging Face's transformers loads it:
            model.safetensors in float32, config.json, and what the checkpoint's tokenizer needs.
            `tinyllm fit --model.init_from` reads it, too.

    Raises:
        FileExistsError: The folder is there already.
        FileNotFoundError: There is no checkpoint.
        ValueError: It is not one, or there is no such worker.
    """
    check_choice("to", to, Format)
    if output.exists():
        raise FileExistsError(f"{output} is there already; choose another folder or remove it")
    state = read_checkpoint(checkpoint)
    module = module_of(state, checkpoint)
    if worker != "average":
        _take_worker(module, state, worker, checkpoint)
    partial = output.with_name(f".{output.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    try:
        write_model(partial, module.config, module.state_dict(), tokenizer_of(state))
        partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    which = "the average of all workers" if worker == "average" else f"worker {worker}"
    print(f"{output}: {module.config.num_parameters:,} parameters, {which}")


def _workers_state(state: dict[str, Any], checkpoint: Path) -> dict[int, dict[str, Any]]:
    """The optimizer's state by parameter; empty where the checkpoint holds weights alone."""
    if not state.get("optimizer_states"):
        return {}
    try:
        entries = dict(state["optimizer_states"][0]["state"])
        usable = all(
            isinstance(entry, dict)
            and isinstance(entry["exp_avg"], Tensor)
            and entry["exp_avg"].ndim
            for entry in entries.values()
        )
        if not usable or (entries and 0 not in entries):
            raise ValueError("it is none of AdamW's")
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{checkpoint} is damaged: its optimizer's state: {error}") from error
    return entries


def _take_worker(module: TinyLLM, state: dict[str, Any], worker: str, checkpoint: Path) -> None:
    """Replaces the module's weights, the average, by one worker's."""
    entries = _workers_state(state, checkpoint)
    workers = len(entries[0]["exp_avg"]) if entries else 0
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
        rows = entries[index].get("weights") if index in entries else None
        if not isinstance(rows, Tensor) or rows.shape != (workers, *parameter.shape[1:]):
            shape = list(rows.shape) if isinstance(rows, Tensor) else "missing"
            raise ValueError(
                f"{checkpoint} is damaged: the weights of parameter {index} are {shape}, not "
                f"{[workers, *parameter.shape[1:]]}"
            )
        parameter.data = rows[int(worker)][None].to(parameter.dtype, copy=True)
