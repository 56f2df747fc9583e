"""Lets the tests of this folder import the pretended checkout of the acceptance tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "acceptance"))
