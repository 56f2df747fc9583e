"""Every fuzz target for a few seconds; ``run.py`` here runs one for as long as asked."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from targets import TARGETS

EXAMPLES = {"config": 8, "evidence": 30, "results": 30, "protocol": 20, "tables": 20}
EXAMPLES |= {"checkpoint-content": 30, "checkpoint-pickle": 20}


@pytest.mark.parametrize("name", TARGETS)
def test_hostile_input_is_read_right_or_refused_clearly(name: str) -> None:
    @settings(
        max_examples=EXAMPLES.get(name, 100),
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def run(data: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            TARGETS[name](data, Path(folder))

    run()
