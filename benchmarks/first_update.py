"""How long does a training take from the start of its process to the end of its first update?

    python benchmarks/first_update.py RESULTS.json --backends gh200 native

Runs ``tinyllm fit`` with the 20m model, twice for each backend: with empty folders for compiled
kernels (cold), and with what that run has left in them (warm). Imports are in the time.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from setting import environment_of_run, random_cache, versions


class FirstUpdate(Callback):
    """Writes when the first update was complete to a file, and ends training.

    Args:
        file: Takes the time, in seconds since the epoch.
    """

    def __init__(self, file: str) -> None:
        self._file = Path(file)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        torch.cuda.synchronize()
        self._file.write_text(str(time.time()))
        trainer.should_stop = True


def measure(backend: str, cache: Path, folder: Path, kernels: Path) -> float:
    """Seconds of one run."""
    file = folder / "first"
    command = [
        *(sys.executable, "-c", "from tinyllm.cli import main; main()", "fit"),
        *("--model.preset", "20m", "--data.cache", str(cache)),
        *("--trainer.strategy", "sync", "--trainer.strategy.backend", backend),
        *("--trainer.accelerator", "gpu", "--trainer.devices", "1"),
        *("--trainer.precision", "bf16-mixed"),
        *("--trainer.max_steps", "1", "--trainer.default_root_dir", str(folder)),
        *("--trainer.callbacks+", "first_update.FirstUpdate"),
        *("--trainer.callbacks.file", str(file)),
    ]
    environment = environment_of_run(kernels)
    start = time.time()
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    return float(file.read_text()) - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path)
    parser.add_argument(
        "--backends", nargs="+", choices=("native", "gh200"), default=["gh200", "native"]
    )
    options = parser.parse_args()
    results: dict[str, Any] = {**versions(), "method": __doc__, "cases": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cache = random_cache(folder, 2_000_000)
        for backend in options.backends:
            kernels = folder / f"kernels-{backend}"
            for state in ("cold", "warm"):
                place = folder / f"{backend}-{state}"
                place.mkdir()
                seconds = measure(backend, cache, place, kernels)
                results["cases"].setdefault(state, {})[backend] = {"first_update_seconds": seconds}
                print(f"{backend} {state}: {seconds:.1f} s", flush=True)
    options.results.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
