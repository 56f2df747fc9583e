"""Forks trainings from a process that has imported what they need; ``launcher`` runs this script.

Takes a line of JSON for each training from standard input: its folder, its log, and the arguments
of ``tinyllm``. In the folder there are ``.keeper``, the number of the process that waits for it,
``.pid``, its own when it runs, and ``.code`` when it has ended. Nothing of this project is imported
but what PYTHONPATH leads to.
"""

import ctypes
import importlib
import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_NOT_INITIALIZED = 3  # of the CUDA driver
_CANNOT_FORK = 71  # as of sysexits.h
_PACKAGE = "tinyllm"
_IMPORTED = ("strategies.registry", "trainer_cli")
_LIBC = ctypes.CDLL(None)


def import_all() -> None:
    """Imports what every training does; what cannot be imported is for the training to report."""
    try:
        package = importlib.import_module(_PACKAGE)
        for name in _IMPORTED:
            file = Path(package.__path__[0], *name.split(".")).with_suffix(".py")
            if file.is_file():  # else an installed package would be found in its place
                importlib.import_module(f"{_PACKAGE}.{name}")
    except Exception:
        return


def cuda_is_touched() -> bool:
    """Whether an import has initialized the CUDA driver, after which a fork cannot use it."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    context = ctypes.c_void_p()
    return bool(driver.cuCtxGetCurrent(ctypes.byref(context)) != _NOT_INITIALIZED)


def next_training() -> dict[str, Any]:
    """Waits for requests, and returns in a new process with its own."""
    for line in sys.stdin:
        request = json.loads(line)
        reading, writing = os.pipe()
        keeper = os.fork()
        if keeper == 0:
            die_with_parent()
            os.close(writing)
            os.read(reading, 1)  # ends when this process is noted, so that none is after its end
            os.close(reading)
            return keep_code(request)
        os.close(reading)
        with suppress(OSError):  # of the folder, which is another's matter
            note(request, "keeper", keeper)
        os.close(writing)
    raise SystemExit


def note(request: dict[str, Any], name: str, number: int) -> None:
    """Writes a number to a hidden file in a training's folder, whole or not at all."""
    folder = Path(request["folder"])
    (folder / f".{name}-partial").write_text(str(number))
    (folder / f".{name}-partial").rename(folder / f".{name}")


def keep_code(request: dict[str, Any]) -> dict[str, Any]:
    """Returns in a child; this process waits for its end and writes down how it was."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        training = os.fork()
    except OSError:  # there are too many processes
        note(request, "code", _CANNOT_FORK)
        os._exit(1)
    if training == 0:
        die_with_parent()
        return request
    _, status = os.waitpid(training, 0)
    note(request, "code", os.waitstatus_to_exitcode(status))
    os._exit(0)


def die_with_parent() -> None:
    """A killed campaign leaves nothing that still trains."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def become(request: dict[str, Any]) -> None:
    """Takes the folder, the arguments and the log of a training."""
    os.chdir(request["folder"])
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream, descriptor in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
        os.dup2(descriptor, stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.argv = [_PACKAGE, *request["arguments"]]
    note(request, "pid", os.getpid())


if __name__ == "__main__":
    # Sent to a whole group, the first two are for trainings. The third is for submitit's job, which
    # then ends its trainings; they keep ignoring it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    import_all()
    imported_in_vain = cuda_is_touched()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    found = next_training()
    become(found)
    if imported_in_vain:
        command = f"from {_PACKAGE}.cli import main; main()"
        os.execv(sys.executable, [sys.executable, "-P", "-c", command, *found["arguments"]])
    importlib.import_module(f"{_PACKAGE}.cli").main()
