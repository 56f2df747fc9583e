"""The prefetch thread at the interpreter's end; its other ends are test_loader.py's."""

import subprocess
import sys

import pytest

LEFT_RUNNING = """
import torch
from tinyllm.data.prefetch import Prefetcher

torch.set_num_threads(1)
matrix = torch.randn(600, 600)

def products():
    while True:
        yield matrix @ matrix

prefetcher = Prefetcher(products())
next(prefetcher)
"""


@pytest.mark.parametrize("end", ["pass", "del prefetcher", "raise SystemExit(0)"])
def test_a_program_may_end_while_its_thread_is_inside_pytorch(end: str) -> None:
    """The interpreter kills threads that outlive it, and inside PyTorch that is an abort."""
    done = subprocess.run(
        [sys.executable, "-c", LEFT_RUNNING + end], capture_output=True, text=True, timeout=600
    )
    assert (done.returncode, done.stderr) == (0, "")
