"""One ``tinyllm fit`` of a campaign, from its start to how it ended."""

import json
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from tinyllm.acceptance.launcher import Launcher
from tinyllm.acceptance.runs import INTERRUPTED, RunError

_LOG_LINES = 5
_LOOK_SECONDS = 0.02
_SAVING_SECONDS = 10.0
_STOPPED = (130, 143)  # exit codes of `tinyllm fit` after Ctrl-C and SIGTERM
_STOPPING = (signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM)
"""From outside; of others, such as SIGSEGV, a training is the cause itself."""


class Fit:
    """A training run, which starts at once; as a context manager it ends with the block.

    Its folder gets ``given.json``, ``log.txt`` and what training writes. In the folder of a run
    that was interrupted, training goes on from the last checkpoint, with the log ``log-2.txt``.

    Args:
        launcher: Of the frozen source.
        config: Of ``tinyllm fit``.
        folder: Where to run.

    Attributes:
        starts: How many times it has been started, this one included.
    """

    def __init__(self, launcher: Launcher, config: Mapping[str, Any], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.starts = 1 + len(list(folder.glob("log*.txt")))
        self._log = folder / ("log.txt" if self.starts == 1 else f"log-{self.starts}.txt")
        (folder / "given.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        goes_on = [] if self.starts == 1 else ["--ckpt_path", "last"]
        arguments = ["fit", "--config", "given.json", *goes_on]
        self._process = launcher.start(folder, arguments, self._log.name)

    def __enter__(self) -> "Fit":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)  # which saves a checkpoint
            self._process.send_signal(signal.SIGCONT)
            try:
                self._process.wait(_SAVING_SECONDS)
            except TimeoutError:
                self._process.send_signal(signal.SIGKILL)
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
            RunError: If its exit code is not 0; of the kind ``interrupted`` if it was stopped from
                outside.
        """
        self._process.send_signal(signal.SIGCONT)  # where it stands still
        code = self._process.wait()
        if code:
            stopped = -code in _STOPPING or code in _STOPPED
            raise RunError(
                f"{self.folder.name} ended with exit code {code}: {self._last_lines()}",
                kind=INTERRUPTED if stopped else "failed",
            )

    def _wait_until(self, reached: Callable[[], bool]) -> None:
        while not reached() and self._process.poll() is None:
            time.sleep(_LOOK_SECONDS)

    def _last_lines(self) -> str:
        try:
            lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return "it never started"
        return " / ".join(line for line in lines[-_LOG_LINES:] if line.strip())
