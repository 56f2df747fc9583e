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
        self._lock = threading.Lock()
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
        """The one of a folder that holds the package; it ends with the thread that asks first.

        One that was killed is replaced.
        """
        with self._lock:
            known = self._of.get(source)
            if known is None or known.has_ended:
                if known is not None:
                    known.close()
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
        with suppress(BrokenPipeError):  # what could not be sent to one that was killed
            self._server.stdin.close()
        self._server.wait()

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone, and can start nothing any more."""
        return self._server.poll() is not None

    def start(self, folder: Path, arguments: Sequence[str], log: str) -> "Training":
        """Starts ``tinyllm`` with arguments in a folder, where its output goes to a log.

        Raises:
            BrokenPipeError: If the process that starts them has been killed.
        """
        training = Training(folder, self._server)
        request = {"folder": str(folder.resolve()), "arguments": list(arguments), "log": log}
        assert self._server.stdin is not None
        try:
            with self._lock:
                self._server.stdin.write(json.dumps(request) + "\n")
                self._server.stdin.flush()
        except BrokenPipeError as error:
            raise BrokenPipeError(
                "the process that starts trainings was killed; the next attempt starts another"
            ) from error
        return training


class Training:
    """A process that is no child of this one, with what is needed of ``subprocess.Popen``."""

    def __init__(self, folder: Path, server: "subprocess.Popen[str]") -> None:
        self._server = server
        self._pid, self._keeper, self._code = (folder / f".{n}" for n in ("pid", "keeper", "code"))
        self.returncode: int | None = None
        self._tidy()

    def poll(self) -> int | None:
        """Its exit code, negative after a signal; None while it runs."""
        if self.returncode is None:
            gone = self._is_gone()  # before looking for what is written before that
            if self._code.exists():
                self.returncode = int(self._code.read_text())
            elif gone:
                self.returncode = -signal.SIGKILL
            if self.returncode is not None:
                self._tidy()
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
                os.kill(int(self._pid.read_text()), number)

    def _tidy(self) -> None:
        for left in (self._pid, self._keeper, self._code):
            left.unlink(missing_ok=True)

    def _is_gone(self) -> bool:
        """Whether nobody is left who could write down how it ended."""
        server_is_gone = self._server.poll() is not None
        try:
            os.kill(int(self._keeper.read_text()), 0)
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
