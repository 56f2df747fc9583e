"""One background thread that prepares the next items while the current one is used."""

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class _Channel(Generic[T]):
    """A bounded queue that can be closed from either side, without polling."""

    def __init__(self, depth: int) -> None:
        # The default lock is re-entrant, so a garbage collection inside `put` or `get` may
        # call `close` on the same thread.
        self._changed = threading.Condition()
        self._items: deque[T] = deque()
        self._depth = depth
        self._closed = False
        self._error: BaseException | None = None

    def put(self, item: T) -> bool:
        """Wait for room; False once nobody listens any more."""
        with self._changed:
            while len(self._items) >= self._depth and not self._closed:
                self._changed.wait()
            if self._closed:
                return False
            self._items.append(item)
            self._changed.notify_all()
            return True

    def get(self) -> T:
        """Wait for an item; after the last one, the producer's error or StopIteration."""
        with self._changed:
            while not self._items and not self._closed:
                self._changed.wait()
            if self._items:
                item = self._items.popleft()
                self._changed.notify_all()
                return item
            error, self._error = self._error, None
            if error is not None:
                raise error
            raise StopIteration

    def finish(self, error: BaseException | None) -> None:
        """The producer's end: what is queued can still be taken."""
        with self._changed:
            self._error = error
            self._closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """The consumer's end: what is queued is dropped."""
        with self._changed:
            self._items.clear()
            self._closed = True
            self._changed.notify_all()


class _Filler(threading.Thread, Generic[T]):
    """Puts `items` into `channel` until either ends; knows no prefetcher, so that one can go."""

    def __init__(self, items: Iterable[T], channel: _Channel[T]) -> None:
        super().__init__(daemon=True, name="tinyllm-prefetch")
        self._items = items
        self._channel = channel

    def run(self) -> None:
        try:
            for item in self._items:
                if not self._channel.put(item):
                    return
        except BaseException as error:
            self._channel.finish(error)
        else:
            self._channel.finish(None)

    def close(self) -> None:
        """Stop, and wait for the item in hand."""
        self._channel.close()
        self.join()


@atexit.register
def _end_all() -> None:
    """No thread may outlive the interpreter: one that comes back from PyTorch then aborts."""
    for thread in threading.enumerate():
        if isinstance(thread, _Filler):
            thread.close()


class Prefetcher(Generic[T]):
    """An iterator over `items`, at most `depth` of them ahead of the consumer.

    The thread ends with the items, with :meth:`close`, or when the prefetcher is collected. An
    exception in `items` is raised in the consumer, after the items before it.

    Args:
        items: Consumed in the thread; must not refer to the prefetcher.
        depth: Finished items to hold.
    """

    def __init__(self, items: Iterable[T], depth: int = 2) -> None:
        self._channel: _Channel[T] = _Channel(depth)
        self._thread = _Filler(items, self._channel)
        self._finalizer = weakref.finalize(self, self._channel.close)
        self._thread.start()

    def __iter__(self) -> "Prefetcher[T]":
        return self

    def __next__(self) -> T:
        return self._channel.get()

    def close(self) -> None:
        """Stop the thread and wait for it."""
        self._thread.close()
