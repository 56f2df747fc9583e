"""What every reader of files owes: the right answer, or an error that says what is wrong where."""

import contextlib
import io
import json
import resource
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
SECONDS = 20
SPARE_BYTES = 4 << 30


class TooSlowError(BaseException):
    """A reader hangs; no reader may catch this."""


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """Within it a reader that hangs, or asks for 4 GiB more than there is, fails."""

    def stop(*_: Any) -> None:
        raise TooSlowError(f"not done after {SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGALRM, before)


class Refused:
    """A reader said no, clearly."""


REFUSED = Refused()


def answer(
    read: Callable[[], T], errors: tuple[type[Exception], ...], names: str | Path
) -> T | Refused:
    """What a reader gives; REFUSED for one of its own errors, which must name the file.

    Everything else that it raises is a fault, memory that cannot be had included.
    """
    with limits():
        try:
            return read()
        except errors as error:
            message = str(error)
    if str(names) not in message:
        raise AssertionError(f"the message does not name {names}: {message!r}")
    if "allocate" in message:
        raise AssertionError(f"a file makes the reader ask for too much memory: {message!r}")
    return REFUSED


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    code: int
    out: str
    err: str


def command(*args: object) -> Outcome:
    """Runs ``tinyllm`` in this process; one that fails must say why, and none may crash."""
    from tinyllm.cli import main

    out, err = io.StringIO(), io.StringIO()
    with limits(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(arg) for arg in args])
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
    found = Outcome(code, out.getvalue(), err.getvalue())
    assert code in (0, 1, 2), found
    assert code == 0 or found.err.strip() or found.out.strip(), f"exit {code} without a word"
    assert "allocate" not in found.err, found.err
    return found


def write_json(path: Path, value: Any) -> None:
    """JSON with all that Python's writer knows, NaN and lone surrogates included."""
    path.write_text(json.dumps(value), encoding="utf-8")
