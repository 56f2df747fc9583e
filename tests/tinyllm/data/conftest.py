"""Small real inputs that the data tests share."""

from pathlib import Path

import numpy as np
import pytest

from tinyllm.data.prepare import prepare

VOCAB_SIZE, BOUNDARY = 100, 0


@pytest.fixture(scope="session")
def raw_tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 documents of 1 to 40 ids in a raw uint16 file, each ending in the boundary id."""
    path = tmp_path_factory.mktemp("raw") / "ids.u16"
    rng = np.random.default_rng(0)
    ids: list[int] = []
    for _ in range(60):
        ids += [*rng.integers(1, VOCAB_SIZE, rng.integers(1, 41)).tolist(), BOUNDARY]
    np.array(ids, "<u2").tofile(path)
    return path


@pytest.fixture
def token_cache(raw_tokens: Path, tmp_path: Path) -> Path:
    """A cache of the raw documents, in several shards."""
    path = tmp_path / "cache"
    prepare(
        path,
        "tokens",
        str(raw_tokens),
        vocab_size=VOCAB_SIZE,
        boundary_id=BOUNDARY,
        validation_fraction=0.2,
        shard_tokens=200,
    )
    return path


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """40 short documents, with letters outside ASCII."""
    words = ["the", "quick", "brown", "fox", "jumps", "während", "Äpfel", "größer", "日本", "naïve"]
    rng = np.random.default_rng(1)
    return [" ".join(rng.choice(words, 30)) + f" ({number})\n" for number in range(40)]
