"""tinyllm: pre-train small Llama-style language models with PyTorch Lightning.

Public names are loaded on first use (PEP 562), so that ``import tinyllm`` needs no torch, no
driver and no Triton.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinyllm.config import LlamaConfig
    from tinyllm.data.module import TokenDataModule
    from tinyllm.module import TinyLLM

__version__ = "0.1.0"
__all__ = ["LlamaConfig", "TinyLLM", "TokenDataModule"]

_HOME = {
    "LlamaConfig": "tinyllm.config",
    "TinyLLM": "tinyllm.module",
    "TokenDataModule": "tinyllm.data.module",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tinyllm' has no attribute {name!r}; it has {__all__}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
