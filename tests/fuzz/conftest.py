"""Fuzz targets find their helpers; they run a little in every test run, the same each time."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "acceptance")]
