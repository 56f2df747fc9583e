"""Runs a fuzz target for minutes: ``python tests/fuzz/run.py TARGET --minutes 30``.

Prints how many inputs were tried. The first that breaks the contract is made small and shown, and
the exit code is 1. ``--seed`` repeats a run.
"""

import argparse
import os
import secrets
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported, by the targets
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "acceptance")]
TARGETS = import_module("targets").TARGETS

BATCH = 200  # inputs between two looks at the clock


def main() -> int:
    """Runs the command; 0 if the contract held for every input, 1 if not."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    tempfile.tempdir = tempfile.mkdtemp(prefix="fuzz-")
    first = secrets.randbits(32) if options.seed is None else options.seed
    stop, number, runs = time.monotonic() + 60 * options.minutes, 0, 0

    def once(data: Any) -> None:
        nonlocal runs
        runs += 1
        with tempfile.TemporaryDirectory() as folder:
            TARGETS[options.target](data, Path(folder))

    try:
        while time.monotonic() < stop:

            @seed(first + number)
            @settings(
                max_examples=BATCH,
                deadline=None,
                database=None,
                phases=[Phase.generate, Phase.shrink],
                suppress_health_check=list(HealthCheck),
            )
            @given(st.data())
            def batch(data: Any) -> None:
                # past the end, a batch that is still running has nothing more to do
                if time.monotonic() < stop + 60:
                    once(data)

            batch()
            number += 1
    except BaseException as error:
        print(f"{options.target}: failed after {runs:,} inputs (seed {first + number})")
        if isinstance(error, KeyboardInterrupt):
            raise
        traceback.print_exc()
        return 1
    finally:
        shutil.rmtree(tempfile.tempdir, ignore_errors=True)
    print(
        f"{options.target}: {runs:,} inputs in {options.minutes:g} minutes (seed {first}), all well"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
