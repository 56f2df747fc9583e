"""How an update runs: Lightning strategies, topologies, consensus and engines.

Public names are loaded on first use, so that topologies can be looked at without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinyllm.strategies.decentralized import DecentralizedStrategy
    from tinyllm.strategies.sync import SyncStrategy

__all__ = ["DecentralizedStrategy", "SyncStrategy"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(
            f"module 'tinyllm.strategies' has no attribute {name!r}; it has {__all__}"
        )
    return getattr(import_module("tinyllm.strategies.registry"), name)
