"""Timed runs of one device: set up and ended beside each other, timed one by one."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tinyllm.acceptance.locks import held


class Turns:
    """While one is timed, nothing else happens.

    Those that are set up are timed before others may be set up or end, so many threads that each
    set up, time and end a run take turns in rounds. Other processes with the same lock wait, too.

    Args:
        lock: A file that all share whose runs would disturb each other.
    """

    def __init__(self, lock: Path) -> None:
        self._lock = lock
        self._changed = threading.Condition()
        self._untimed = 0
        self._waiting = 0
        self._timing = False

    @contextmanager
    def untimed(self) -> Iterator[None]:
        """Waits until nobody is timed or waits to be; for setting up and for ending."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._timing)
            self._untimed += 1
        try:
            with held(self._lock, alone=False):
                yield
        finally:
            with self._changed:
                self._untimed -= 1
                self._changed.notify_all()

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Waits until nobody is timed, set up or ended."""
        with self._changed:
            self._waiting += 1
            self._changed.wait_for(lambda: not self._untimed and not self._timing)
            self._waiting -= 1
            self._timing = True
        try:
            with held(self._lock, alone=True):
                yield
        finally:
            with self._changed:
                self._timing = False
                self._changed.notify_all()
