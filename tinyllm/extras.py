"""Optional libraries, which the extras in setup.cfg install, and an optional program."""

import shutil
from importlib import import_module
from typing import Any


def require(module: str, extra: str) -> Any:
    """Imports an optional library.

    Args:
        module: Dotted name of the module.
        extra: The extra of this package that installs it.

    Raises:
        ModuleNotFoundError: It is missing; the message says how to install it.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise ModuleNotFoundError(
            f"this needs the package {module.partition('.')[0]!r}; install it with: "
            f"pip install 'tinyllm[{extra}]'"
        ) from error


def cpp_compiler() -> str | None:
    """Path of the C++ compiler that ``torch.compile`` finds; None if there is none."""
    return next(filter(None, map(shutil.which, ("c++", "g++", "gcc", "cc", "clang"))), None)
