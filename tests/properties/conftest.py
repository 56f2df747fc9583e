"""Properties are checked with the same examples each time, unless HYPOTHESIS_PROFILE says else.

``HYPOTHESIS_PROFILE=deep`` draws 20 times as many, others each time, and takes minutes.
"""

import os
import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

# for campaign_tables.py and simulation.py
sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in ("acceptance", "strategies")]
os.environ.setdefault("TRITON_INTERPRET", "1")  # read when kernels are imported; none runs here

_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
settings.register_profile(
    "ci",
    deadline=None,
    database=None,
    derandomize=True,
    max_examples=50,
    suppress_health_check=_SLOW,
)
settings.register_profile(
    "deep", deadline=None, database=None, max_examples=1_000, suppress_health_check=_SLOW
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
