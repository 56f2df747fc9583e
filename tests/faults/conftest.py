"""Lets the tests of this folder import its helper modules; the cache and the run they train on."""

import sys
from pathlib import Path

import numpy as np
import pytest

_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), *(str(_HERE.parent / name) for name in ("acceptance", "strategies"))]


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random tokens in documents of 24: seven batches of 16 rows of 8 in an epoch, and a part."""
    from tinyllm.data.prepare import prepare

    folder = tmp_path_factory.mktemp("faults")
    tokens = np.random.default_rng(0).integers(1, 64, 24 * 50, dtype=np.uint16)
    tokens[23::24] = 0  # the boundary
    tokens.tofile(folder / "tokens.bin")
    prepare(
        folder / "cache",
        "tokens",
        str(folder / "tokens.bin"),
        vocab_size=64,
        boundary_id=0,
        validation_fraction=0.2,
    )
    return folder / "cache"
