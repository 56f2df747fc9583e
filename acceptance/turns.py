"""Timed runs of one machine: set up beside each other, timed one by one."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """While one is timed, nothing else is timed or set up.

    Those that are set up are timed before others may be set up, so many threads that each set up
    and then time take turns in rounds.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._setting_up = 0
        self._waiting = 0
        self._timing = False

    @contextmanager
    def setting_up(self) -> Iterator[None]:
        """Waits until nobody is timed or waits to be."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._timing)
            self._setting_up += 1
        try:
            yield
        finally:
            with self._changed:
                self._setting_up -= 1
                self._changed.notify_all()

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Waits until nobody is timed or set up."""
        with self._changed:
            self._waiting += 1
            self._changed.wait_for(lambda: not self._setting_up and not self._timing)
            self._waiting -= 1
            self._timing = True
        try:
            yield
        finally:
            with self._changed:
                self._timing = False
                self._changed.notify_all()
