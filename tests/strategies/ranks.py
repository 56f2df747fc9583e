"""Runs a function on several ranks: processes with the environment that a launcher gives them."""

import contextlib
import itertools
import multiprocessing
import os
import socket
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

_CONTEXT = multiprocessing.get_context("forkserver")  # which conftest.py has import everything

TIMEOUT_SECONDS = 300


_ports = itertools.count()


def free_port() -> int:
    """A port that nobody listens on, of a range of this process among those that run tests.

    Below those that the system hands out by itself, which another process may get meanwhile.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first, size = 20_000 + worker % 4 * 3_000, 3_000
    while True:
        port = first + (os.getpid() + next(_ports)) % size
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


class RanksError(Exception):
    """What the ranks raised, one line each; an empty one where a rank returned."""


def run_on_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    launcher: Literal["torchrun", "slurm"] = "torchrun",
    nodes: int = 1,
    **kwargs: Any,
) -> list[Any]:
    """What a function returns on each rank.

    Args:
        function: Of a module that other processes can import.
        world_size: Number of ranks.
        args: The same for all ranks.
        launcher: Whose environment they find.
        nodes: On how many nodes they believe to be.
        kwargs: The same for all ranks.

    Raises:
        RanksError: If any rank raised.
        TimeoutError: If any rank hangs.
    """
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        describe = {"torchrun": _torchrun, "slurm": _slurm}[launcher]

        def environment(rank: int) -> dict[str, str]:
            variables = describe(rank, world_size, world_size // nodes)
            return variables | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

        ranks = [
            _CONTEXT.Process(
                target=_run, args=(environment(rank), f"{folder}/{rank}.pt", function, args, kwargs)
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


def _torchrun(rank: int, world_size: int, per_node: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % per_node),
        "GROUP_RANK": str(rank // per_node),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(per_node),
        "TORCHELASTIC_RUN_ID": "test",
    }


def _slurm(rank: int, world_size: int, per_node: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NAME": "test",
        "SLURM_NODELIST": "node",
        "SLURM_NTASKS": str(world_size),
        "SLURM_NTASKS_PER_NODE": str(per_node),
        "SLURM_NNODES": str(world_size // per_node),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % per_node),
        "SLURM_NODEID": str(rank // per_node),
    }


def _run(
    environment: dict[str, str],
    path: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    os.environ.update(environment)
    error, result = "", None
    try:
        result = function(*args, **kwargs)
    except BaseException as raised:
        traceback.print_exc()
        error = f"{type(raised).__name__}: {raised}"
    torch.save((error, result), path)
