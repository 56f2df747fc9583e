"""Lets the tests of this folder import its helper modules, and take gh200 on a CPU."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def choosable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets strategies take gh200 on this CPU."""
    from engines import choose_on_cpu  # needs Triton

    monkeypatch.setattr("tinyllm.strategies.base.choose_backend", choose_on_cpu)
