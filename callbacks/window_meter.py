"""Windows of equal update counts, cut out of a run: numbers only, no Trainer, no clock."""

import statistics
from dataclasses import dataclass
from math import ceil
from typing import Any

MARGIN = 1.1
"""How much longer than asked a window is planned, so that drift does not make it too short."""


@dataclass(frozen=True)
class Window:
    """What was trained in one window.

    Attributes:
        updates: Optimizer updates.
        tokens: Targets of their global batches, of all workers and ranks.
        seconds: From edge to edge, without validation.
    """

    updates: int
    tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Rate of this window."""
        return self.tokens / self.seconds


class WindowMeter:
    """Cuts a run into warm-up, calibration and windows; it is told the time and never looks.

    A stretch starts with :meth:`begin`. After each update :meth:`add_update` tells whether the
    stretch may be over: then its seconds, and the tokens so far, go to :meth:`end`.

    Args:
        warmup_updates: Updates before anything is measured; the first one may compile.
        windows: How many.
        window_seconds: Least length of a window.
        updates_per_window: Length of a window in updates; None lets the calibration decide.

    Attributes:
        updates_per_window: None until it is known.
        windows: Those that are complete.
        startup_seconds: Until the end of the warm-up.
        calibration_seconds: Of the stretch that fixed ``updates_per_window``.
        validation_seconds: Of all pauses, which no other figure holds.

    Raises:
        ValueError: If a number is out of range.
    """

    def __init__(
        self,
        warmup_updates: int,
        windows: int,
        window_seconds: float,
        updates_per_window: int | None = None,
    ) -> None:
        least = {"warmup_updates": warmup_updates, "windows": windows}
        if updates_per_window is not None:
            least["updates_per_window"] = updates_per_window
        for name, value in least.items():
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if not window_seconds > 0:
            raise ValueError(f"window_seconds is {window_seconds}; it must be above 0")
        self.updates_per_window = updates_per_window
        self.windows: list[Window] = []
        self.startup_seconds: float | None = None
        self.calibration_seconds = 0.0
        self.validation_seconds = 0.0
        self._warmup_updates = warmup_updates
        self._wanted = windows
        self._window_seconds = window_seconds
        self._updates = 0
        self._edge = warmup_updates
        self._began = 0.0
        self._paused_at: float | None = None
        self._paused_seconds = 0.0

    @property
    def warm(self) -> bool:
        """Whether the warm-up is over."""
        return self.startup_seconds is not None

    @property
    def done(self) -> bool:
        """Whether all windows are complete."""
        return len(self.windows) == self._wanted

    def begin(self, now: float) -> None:
        """Starts the next stretch."""
        self._began, self._paused_seconds = now, 0.0

    def pause(self, now: float) -> None:
        """Stops the clock."""
        self._paused_at = now

    def resume(self, now: float) -> None:
        """Lets the clock go on, if it was stopped."""
        if self._paused_at is not None:
            self._paused_seconds += now - self._paused_at
            self.validation_seconds += now - self._paused_at
            self._paused_at = None

    def leave_out(self, seconds: float) -> None:
        """Takes a wait out of the present stretch."""
        self._paused_seconds += seconds

    def add_update(self) -> bool:
        """Counts an update; True where the stretch may end."""
        self._updates += 1
        return self._updates == self._edge

    def elapsed(self, now: float) -> float:
        """Seconds of the present stretch."""
        return now - self._began - self._paused_seconds

    def end(self, seconds: float, tokens: int) -> bool:
        """Ends a stretch, unless it is the calibration and still too short; tells which.

        Args:
            seconds: Of the stretch.
            tokens: Of its updates.
        """
        if not self.warm:
            self.startup_seconds = seconds
        elif self.updates_per_window is None:
            if seconds < self._window_seconds:
                self._edge *= 2
                return False
            rate = self._updates / seconds
            self.updates_per_window = ceil(MARGIN * rate * self._window_seconds)
            self.calibration_seconds = seconds
        else:
            self.windows.append(Window(self._updates, tokens, seconds))
        self._updates = 0
        # the calibration is looked at after 1, 2, 4, 8 … updates: the same ones on every rank
        self._edge = self.updates_per_window or 1
        return True

    def summary(self) -> dict[str, Any]:
        """Everything but the single windows, by name."""
        rates = [window.tokens_per_second for window in self.windows]
        return {
            "complete": self.done,
            "startup_seconds": self.startup_seconds,
            "calibration_seconds": self.calibration_seconds,
            "training_seconds": sum(window.seconds for window in self.windows),
            "validation_seconds": self.validation_seconds,
            "warmup_updates": self._warmup_updates,
            "updates_per_window": self.updates_per_window,
            "window_seconds": self._window_seconds,
            "short_windows": [
                number
                for number, window in enumerate(self.windows)
                if window.seconds < self._window_seconds
            ],
            "median_tokens_per_second": statistics.median(rates) if rates else None,
        }
