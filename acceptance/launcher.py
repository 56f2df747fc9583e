"""Starts trainings from a frozen source, by forking a process that has imported it.

Imports take as long as a short training, and a campaign has a thousand of those. Each training is
still a process of its own.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from tinyllm.acceptance.server import die_with_parent

_SERVER = Path(__file__).with_name("server.py")
_LOOK_SECONDS = 0.01


class Launchers:
    """A launcher for each source; as a context manager they end with the block."""

    def __init__(self) -> None:
        self._of: dict[Path, Launcher] = {}

    def __enter__(self) -> "Launchers":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for launcher in self._of.values():
            launcher.close()

    def of(self, source: Path) -> "Launcher":
        """The one of a folder that holds the package; it ends with the thread that asks first."""
        if source not in self._of:
            self._of[source] = Launcher(source)
        return self._of[source]


class Launcher:
    """The process that is forked.

    Args:
        source: Folder that holds the package.
    """

    def __init__(self, source: Path) -> None:
        self._lock = threading.Lock()
        self._server = subprocess.Popen(
            [sys.executable, "-P", str(_SERVER)],
            env=os.environ | _environment(source),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=die_with_parent,
            text=True,
        )

    def close(self) -> None:
        """Ends it, and what it has started."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()

    def start(self, folder: Path, arguments: Sequence[str], log: str) -> "Training":
        """Starts ``tinyllm`` with arguments in a folder, where its output goes to a log."""
        training = Training(folder, self._server)
        request = {"folder": str(folder.resolve()), "arguments": list(arguments), "log": log}
        assert self._server.stdin is not None
        with self._lock:
            self._server.stdin.write(json.dumps(request) + "\n")
            self._server.stdin.flush()
        return training


class Training:
    """A process that is no child of this one, with what is needed of ``subprocess.Popen``."""

    def __init__(self, folder: Path, server: "subprocess.Popen[str]") -> None:
        self._pid, self._code, self._server = folder / ".pid", folder / ".code", server
        self.returncode: int | None = None
        for left in (self._pid, self._code):
            left.unlink(missing_ok=True)

    def poll(self) -> int | None:
        """Its exit code, negative after a signal; None while it runs."""
        if self.returncode is None:
            gone = self._is_gone()  # before looking for what is written before that
            if self._code.exists():
                self.returncode = int(self._code.read_text())
            elif gone:
                self.returncode = -signal.SIGKILL
            if self.returncode is not None:
                for left in (self._pid, self._code):
                    left.unlink(missing_ok=True)
        return self.returncode

    def wait(self, timeout_seconds: float | None = None) -> int:
        """Waits for its exit code.

        Raises:
            TimeoutError: If it takes longer.
        """
        started = time.monotonic()
        while (code := self.poll()) is None:
            if timeout_seconds is not None and time.monotonic() - started > timeout_seconds:
                raise TimeoutError
            time.sleep(_LOOK_SECONDS)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal, unless it has ended."""
        while not self._pid.exists() and self.poll() is None:
            time.sleep(_LOOK_SECONDS)
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended just now
                os.kill(self._numbers()[0], number)

    def _numbers(self) -> list[int]:
        """The training's process, and the one that waits for it and writes down its end."""
        return [int(number) for number in self._pid.read_text().split()]

    def _is_gone(self) -> bool:
        """Whether nobody is left who could write down how it ended."""
        server_is_gone = self._server.poll() is not None
        try:
            os.kill(self._numbers()[1], 0)
        except FileNotFoundError:  # it has not started yet
            return server_is_gone
        except ProcessLookupError:
            return True
        return False


def _environment(source: Path) -> dict[str, str]:
    """What trainings have beside this process's environment."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    # the frozen source comes first; what else is there may be relative to this folder
    paths = [source, *(Path(path) for path in given if path)]
    return {
        "PYTHONPATH": os.pathsep.join(str(path.resolve()) for path in paths),
        "PYTHONDONTWRITEBYTECODE": "1",  # frozen folders stay as they are
        "PYTHONUNBUFFERED": "1",
    }
