"""Lets the tests of this folder import its helper modules; a frozen campaign to work on."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fake_checkout import fork_comparisons, freeze, make_cache, make_checkout, toy_settings

from tinyllm.acceptance.configure import Settings


@pytest.fixture(autouse=True)
def _forked_comparisons(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_comparisons(monkeypatch)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose trainer pretends."""
    return make_checkout(tmp_path / "checkout")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """What the toy protocol leaves open."""
    return toy_settings(make_cache(tmp_path / "cache"))


@pytest.fixture
def root(tmp_path: Path, checkout: Path, settings: Settings) -> Path:
    """A frozen campaign."""
    freeze(tmp_path / "campaign", checkout, Path(settings.cache))
    return tmp_path / "campaign"
