"""What is observed: Lightning callbacks that measure and report."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinyllm.callbacks.bigram import BigramBaseline

__all__ = ["BigramBaseline"]

_HOME = {"BigramBaseline": "tinyllm.callbacks.bigram"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(
            f"module 'tinyllm.callbacks' has no attribute {name!r}; it has {__all__}"
        )
    return getattr(import_module(_HOME[name]), name)
