"""Errors that more than one part of the library knows."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Within it an OSError says which file it is about; one of a full disk does not by itself."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


class NonFiniteError(RuntimeError):
    """A loss or gradient was NaN or infinite; no state has been changed since.

    Args:
        update: 0-based update at which it was first seen.
        workers: Global numbers of the workers it was seen in.
    """

    def __init__(self, update: int, workers: list[int]) -> None:
        self.update, self.workers = update, workers
        named = f"worker{'s' * (len(workers) > 1)} {', '.join(map(str, workers))}"
        super().__init__(
            f"loss or gradient of {named} is not finite at update {update}; weights and moments of "
            "all workers are as they were before it. Lower the learning rate, clip, or look at the "
            "batch; the state can still be saved and resumed"
        )
