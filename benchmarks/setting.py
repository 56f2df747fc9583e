"""What benchmarks run on and in, and tokens that need no corpus."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tinyllm.acceptance.environment import environment
from tinyllm.data.prepare import prepare

HERE = Path(__file__).resolve().parent
BOUNDARY = 2


def versions() -> dict[str, Any]:
    """What a figure is of: the GPU, its driver, and the libraries."""
    found = environment()
    drivers = {gpu["driver_version"] for gpu in found["gpus"]}  # one of all GPUs of a host
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "driver": drivers.pop() if drivers else "none",
        "python": found["python"],
        **{name: found["packages"].get(name) for name in ("torch", "triton")},
        "cuda": torch.version.cuda,
    }


def environment_of_run(kernels: Path | None) -> dict[str, str]:
    """Of a ``tinyllm fit`` that finds the classes of benchmarks.

    Args:
        kernels: Its own folder for compiled kernels; None leaves it the usual ones.
    """
    found = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    }
    if kernels is not None:
        found |= {
            "TRITON_CACHE_DIR": str(kernels / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(kernels / "inductor"),
        }
    return found


def random_cache(folder: Path, tokens: int, vocab_size: int = 32_000) -> Path:
    """A token cache of random documents of 1,000 tokens.

    Args:
        folder: Takes it and the file that it is made of.
        tokens: How many.
        vocab_size: Ids are below it.
    """
    ids = np.random.default_rng(0).integers(BOUNDARY + 1, vocab_size, tokens, dtype="<u2")
    ids[1_000::1_001] = BOUNDARY
    file = folder / "random.u16"
    ids.tofile(file)
    cache = folder / "cache"
    prepare(cache, "tokens", str(file), vocab_size=vocab_size, boundary_id=BOUNDARY)
    return cache
