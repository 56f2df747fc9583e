"""``tinyllm fit`` in a process of its own, from a frozen source."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from tinyllm.acceptance.runs import INTERRUPTED, RunError

_PR_SET_PDEATHSIG = 1
_LOG_LINES = 5
_LOOK_SECONDS = 0.02
_SAVING_SECONDS = 10.0
_STOPPED = (130, 143)  # exit codes of `tinyllm fit` after Ctrl-C and SIGTERM
_LIBC = ctypes.CDLL(None)  # loaded here: little may be done between fork and exec


class Fit:
    """A training run, which starts at once; as a context manager it ends with the block.

    Its folder gets ``given.json``, ``log.txt`` and what training writes. In the folder of a run
    that was interrupted, training goes on from the last checkpoint, with the log ``log-2.txt``.

    Args:
        source: Folder that holds the package.
        config: Of ``tinyllm fit``.
        folder: Where to run.

    Attributes:
        starts: How many times it has been started, this one included.
    """

    def __init__(self, source: Path, config: Mapping[str, Any], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.starts = 1 + len(list(folder.glob("log*.txt")))
        self._log = folder / ("log.txt" if self.starts == 1 else f"log-{self.starts}.txt")
        (folder / "given.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        goes_on = [] if self.starts == 1 else ["--ckpt_path", "last"]
        command = "from tinyllm.cli import main; main()"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", command, "fit", "--config", "given.json", *goes_on],
                cwd=folder,
                env=os.environ | _environment(source),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )

    def __enter__(self) -> "Fit":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process.poll() is None:
            self._process.terminate()  # which saves a checkpoint
            self._process.send_signal(signal.SIGCONT)
            try:
                self._process.wait(_SAVING_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def wait_until_ready(self) -> None:
        """Waits until it holds after its first update (see ``ThroughputWindows``).

        Raises:
            RunError: If it ends before.
        """
        self._wait_until((self.folder / "ready").exists)
        if not (self.folder / "ready").exists():
            self.wait()
            raise RunError(f"{self.folder.name} ended before its first update")

    def go(self) -> None:
        """Lets it go on, and waits until its windows are over; then it stands still.

        What is left is tidying up, which would disturb others that are timed.
        """
        (self.folder / "go").touch()
        self._wait_until((self.folder / "timing.json").exists)
        self._process.send_signal(signal.SIGSTOP)

    def wait(self) -> None:
        """Waits for its end.

        Raises:
            RunError: If its exit code is not 0; of the kind ``interrupted`` after a signal.
        """
        self._process.send_signal(signal.SIGCONT)  # where it stands still
        code = self._process.wait()
        if code:
            stopped = code < 0 or code in _STOPPED
            raise RunError(
                f"{self.folder.name} ended with exit code {code}: {self._last_lines()}",
                kind=INTERRUPTED if stopped else "failed",
            )

    def _wait_until(self, reached: Callable[[], bool]) -> None:
        while not reached() and self._process.poll() is None:
            time.sleep(_LOOK_SECONDS)

    def _last_lines(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return " / ".join(line for line in lines[-_LOG_LINES:] if line.strip())


def _environment(source: Path) -> dict[str, str]:
    """What a child has beside this process's environment."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    # the frozen source comes first; what else is there may be relative to this folder
    paths = [source, *(Path(path) for path in given if path)]
    return {
        "PYTHONPATH": os.pathsep.join(str(path.resolve()) for path in paths),
        "PYTHONDONTWRITEBYTECODE": "1",  # frozen folders stay as they are
        "PYTHONUNBUFFERED": "1",
    }


def _die_with_parent() -> None:
    """In the child: a killed campaign leaves nothing that still trains."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
