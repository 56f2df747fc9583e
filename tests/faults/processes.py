"""``tinyllm`` commands in processes of their own, which can be killed at any moment."""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path

from ranks import free_port

# Each command is a fork of a process that has imported everything: a kill in the first second of
# a command is then a kill of the command, and not of Python's imports.
_CONTEXT = multiprocessing.get_context("forkserver")

Within = Callable[[], AbstractContextManager[object]]

SECONDS = 240.0
"""After which a test gives up: thirty times what the longest command takes on a machine at rest."""


class Command:
    """One that runs beside the test, and is dead when the block ends.

    Args:
        args: Its arguments.
        log: File for what it says.
        within: Opens what its process runs it in, such as a disk of its own.
    """

    def __init__(self, *args: object, log: Path, within: Within = nullcontext) -> None:
        self._log = log
        given = [str(arg) for arg in args]
        self._process = _CONTEXT.Process(target=_run, args=(given, log, within))
        self._process.start()

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def said(self) -> str:
        """What it has said so far."""
        return self._log.read_text(encoding="utf-8")

    def wait(self) -> int:
        """Its exit code; minus the signal's number after a signal."""
        self._process.join(SECONDS)
        assert self._process.exitcode is not None, f"it hangs:\n{self.said}"
        return self._process.exitcode

    def kill(self) -> int:
        """Kills it, if it still runs, as ``kill -9`` does."""
        self._process.kill()
        return self.wait()

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait_until(self, reached: Callable[[], bool], pause: float = 0.001) -> None:
        """Waits for something that happens while it runs; looks every `pause` seconds."""
        end = time.monotonic() + SECONDS
        while not reached():
            assert self._process.exitcode is None, f"it ended before:\n{self.said}"
            assert time.monotonic() < end, f"it takes too long:\n{self.said}"
            time.sleep(pause)


def run(*args: object, log: Path, within: Within = nullcontext) -> Command:
    """A command that has ended."""
    command = Command(*args, log=log, within=within)
    command.wait()
    return command


@contextmanager
def _as_rank(rank: int, ranks: int, port: int) -> Iterator[None]:
    """What torchrun tells a rank."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "TORCHELASTIC_RUN_ID": "test",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    yield


@contextmanager
def ranks(number: int, *args: object, logs: Path) -> Iterator[list[Command]]:
    """A command on several ranks."""
    port = free_port()
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                Command(
                    *args,
                    "--trainer.devices",
                    number,
                    log=logs / f"rank{rank}.log",
                    within=partial(_as_rank, rank, number, port),
                )
            )
            for rank in range(number)
        ]


def _run(args: list[str], log: Path, within: Within) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    sys.argv = ["tinyllm", *args]
    from tinyllm.cli import main

    with within():
        main()
