"""Lets the tests of this folder import their helpers and those of the strategies' tests."""

import sys
from pathlib import Path

_FOLDER = Path(__file__).parent
sys.path[:0] = [str(_FOLDER), str(_FOLDER.parent / "strategies")]
