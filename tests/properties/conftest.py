"""Properties are checked with the same examples each time, unless HYPOTHESIS_PROFILE says else.

``HYPOTHESIS_PROFILE=deep`` draws 20 times as many, others each time, and takes minutes.
"""

import os
import sys
from pathlib import Path

from hypothesis import HealthCheck, Phase, settings

# for campaign_tables.py and simulation.py
sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in ("acceptance", "strategies")]

_COMMON = {
    "deadline": None,
    "database": None,
    "phases": [Phase.explicit, Phase.generate, Phase.shrink],  # explaining takes minutes
    "suppress_health_check": [
        *(HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)
    ],
}
settings.register_profile("ci", derandomize=True, max_examples=50, **_COMMON)
settings.register_profile("deep", max_examples=1_000, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
