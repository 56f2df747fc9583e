"""What is observed: Lightning callbacks that measure and report."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinyllm.callbacks.bigram import BigramBaseline
    from tinyllm.callbacks.consensus import ConsensusDistance
    from tinyllm.callbacks.memory import MemoryMonitor
    from tinyllm.callbacks.report import RunReport
    from tinyllm.callbacks.throughput import ThroughputWindows
    from tinyllm.callbacks.trace import UpdateTrace

__all__ = [
    "BigramBaseline",
    "ConsensusDistance",
    "MemoryMonitor",
    "RunReport",
    "ThroughputWindows",
    "UpdateTrace",
]

_HOME = {
    "BigramBaseline": "tinyllm.callbacks.bigram",
    "ConsensusDistance": "tinyllm.callbacks.consensus",
    "MemoryMonitor": "tinyllm.callbacks.memory",
    "RunReport": "tinyllm.callbacks.report",
    "ThroughputWindows": "tinyllm.callbacks.throughput",
    "UpdateTrace": "tinyllm.callbacks.trace",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(
            f"module 'tinyllm.callbacks' has no attribute {name!r}; it has {__all__}"
        )
    return getattr(import_module(_HOME[name]), name)
