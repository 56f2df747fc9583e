"""Runs a function on several ranks: processes with the environment that ``torchrun`` gives them."""

import multiprocessing
import os
import socket
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# One process imports everything once, and each rank is a fork of it. That process has started no
# thread and holds no lock, unlike the one that runs the tests.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["lightning.pytorch", "tinyllm.strategies.registry"])

TIMEOUT_SECONDS = 120


class RanksError(Exception):
    """What the ranks raised, one line each; an empty one where a rank returned."""


def run_on_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, **kwargs: Any
) -> list[Any]:
    """What a function returns on each rank.

    Args:
        function: Of a module that other processes can import.
        world_size: Number of ranks.
        args: The same for all ranks.
        kwargs: The same for all ranks.

    Raises:
        RanksError: If any rank raised.
        TimeoutError: If any rank hangs.
    """
    with tempfile.TemporaryDirectory() as folder, socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        listener.close()
        ranks = [
            _CONTEXT.Process(
                target=_run, args=(rank, world_size, port, folder, function, args, kwargs)
            )
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(TIMEOUT_SECONDS)
        hanging = [rank for rank, process in enumerate(ranks) if process.is_alive()]
        for process in ranks:
            process.kill()
        if hanging:
            raise TimeoutError(f"ranks {hanging} of {world_size} still run after a long time")
        results = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(world_size)]
    if any(error for error, _ in results):
        raise RanksError("\n".join(error for error, _ in results))
    return [result for _, result in results]


def _run(
    rank: int,
    world_size: int,
    port: int,
    folder: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="test",
    )
    error, result = "", None
    try:
        result = function(*args, **kwargs)
    except BaseException as raised:
        traceback.print_exc()
        error = f"{type(raised).__name__}: {raised}"
    torch.save((error, result), Path(folder) / f"{rank}.pt")
