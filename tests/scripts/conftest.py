"""Lets the tests of this folder import the pretended checkout of the acceptance tests."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "acceptance"))

from fake_checkout import fork_comparisons


@pytest.fixture(autouse=True)
def _forked_comparisons(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_comparisons(monkeypatch)
