"""How long does a whole run of a recipe take, where does the time go, and which loss does it reach?

    python benchmarks/long_run.py CACHE RESULTS.json --backends gh200 native --seeds 0 1
    python benchmarks/long_run.py CACHE RESULTS.json --updates 60 -- --data.batch_size 64

Trains ``configs/20m.yaml`` on a token cache with a vocabulary of 32,000 ids: 3,114 updates of
131,072 targets, six validations on the whole validation split, the last of them after the last
update, and the recipe's checkpoints. Each run is a process ``tinyllm fit`` of its own; its time is
from the start to the exit of that process, of which the parts are: imports and options, all else up
to the end of the first update, training, validation, checkpoints, what comes after training, and
the exit of Python. At the edges of parts the host waits for the device. Each backend runs for a few
updates before, which do not count, so that its kernels are compiled, as they are where it is used;
with ``--cold`` every run compiles them in empty folders. Tokens per second are those of training
after the first update, without validation and checkpoints. The seed is that of the weights and of
the order of rows, so backends with the same seed are twins. What follows ``--`` goes to
``tinyllm fit``.
"""

import argparse
import csv
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import yaml
from lightning.pytorch.profilers import Profiler
from setting import HERE, environment_of_run, versions

from tinyllm.data.cache import TokenCache
from tinyllm.data.manifest import CacheError
from tinyllm.files import write_json

RECIPE = HERE.parent / "configs" / "20m.yaml"
VALIDATIONS = 6
FEW_UPDATES = (  # compile all kernels
    *("--trainer.max_steps", "4", "--trainer.val_check_interval", "2"),
    *("--trainer.limit_val_batches", "2"),
)
LAST_LOG_POINTS = 10  # whose mean is the training loss at the end: of 100 updates


class Parts(Profiler):
    """Divides the time of a fit among its parts, each with the device's work that it gave.

    Args:
        file: Takes seconds by part, and when this was made and when the fit was over, in seconds
            since the epoch.
    """

    def __init__(self, file: str) -> None:
        super().__init__()
        self._file = Path(file)
        self._made = self._since = time.time()
        self._seconds: dict[str, float] = {}
        self._part = self._interrupted = "first_update"

    def start(self, action_name: str) -> None:
        """Training is left for a validation, a checkpoint, or for good."""
        action = action_name.rpartition(".")[2]
        if action == "save_checkpoint":
            self._interrupted = self._part
            self._enter("checkpoints")
        elif self._part == "training" and action == "on_validation_start":
            self._enter("validation")
        elif self._part == "training" and action == "on_train_end":
            self._enter("ending")

    def stop(self, action_name: str) -> None:
        """It begins after the first update, and goes on after what interrupted it."""
        action = action_name.rpartition(".")[2]
        begun = self._part == "first_update" and action == "run_training_batch"
        validated = self._part == "validation" and action_name.startswith("[LightningModule]")
        if action == "save_checkpoint":
            self._enter(self._interrupted)
        elif begun or (validated and action == "on_validation_epoch_end"):
            self._enter("training")

    def _enter(self, part: str) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        now = time.time()
        self._seconds[self._part] = self._seconds.get(self._part, 0.0) + now - self._since
        self._part, self._since = part, now

    def describe(self) -> None:
        """Writes the file; Lightning calls this last."""
        self._enter("exit")
        found = {"made": self._made, "over": self._since, "seconds": self._seconds}
        self._file.write_text(json.dumps(found))


def measure(
    backend: str, seed: int, cache: Path, folder: Path, options: Sequence[str], cold: bool
) -> dict[str, Any]:
    """One run, in an empty folder.

    Args:
        backend: The strategy's.
        seed: Of the weights and of the order of rows.
        cache: Tokens.
        folder: Takes the run's files.
        options: More, for ``tinyllm fit``.
        cold: Whether it finds no compiled kernels.

    Raises:
        CalledProcessError: If it failed; what it says about that is on stderr.
    """
    run, parts = folder / "run", folder / "parts.json"
    command = [
        *(sys.executable, "-c", "from tinyllm.cli import main; main()", "fit"),
        *("--config", str(RECIPE), *options),
        *("--data.cache", str(cache), "--data.seed", str(seed), "--seed_everything", str(seed)),
        *("--trainer.strategy.backend", backend, "--trainer.default_root_dir", str(run)),
        *("--trainer.enable_progress_bar", "false"),
        *("--trainer.profiler", "long_run.Parts", "--trainer.profiler.file", str(parts)),
    ]
    environment = environment_of_run(folder if cold else None)
    start = time.time()
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    end = time.time()
    found = json.loads(parts.read_text())
    given = yaml.safe_load((run / "config.yaml").read_text())
    updates = given["trainer"]["max_steps"]
    targets = updates * given["data"]["batch_size"] * given["data"]["context"]
    seconds = {
        "imports": found["made"] - start,
        **found["seconds"],
        "exit": end - found["over"],
    }
    with (run / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    train, validation = (
        [float(row[name]) for row in rows if row.get(name)]
        for name in ("train/loss", "validation/loss")
    )
    return {
        "tokens_per_second": targets * (1 - 1 / updates) / seconds["training"],
        "wall_seconds": end - start,
        **{f"{part}_seconds": value for part, value in seconds.items()},
        "targets": targets,
        "final_validation_loss": validation[-1],
        "final_train_loss": fmean(train[-LAST_LOG_POINTS:]) if train else None,
        "validation_losses": validation,
        "last_train_losses": train[-LAST_LOG_POINTS:],
    }


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cache", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument(
        "--backends", nargs="+", choices=("native", "gh200"), default=["gh200", "native"]
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument(
        "--updates", type=int, help=f"A multiple of {VALIDATIONS}, in place of the recipe's."
    )
    parser.add_argument("--cold", action="store_true", help="Let each run compile its kernels.")
    given = list(sys.argv[1:] if args is None else args)
    own = given.index("--") if "--" in given else len(given)
    options, passed_on = parser.parse_args(given[:own]), given[own + 1 :]
    if options.updates is not None:
        if options.updates < VALIDATIONS or options.updates % VALIDATIONS:
            parser.error(f"--updates is {options.updates}; give a multiple of {VALIDATIONS}")
        every = options.updates // VALIDATIONS
        passed_on += ["--trainer.max_steps", str(options.updates)]
        passed_on += ["--trainer.val_check_interval", str(every)]
    try:
        cache = TokenCache.open(options.cache)
    except CacheError as error:
        parser.error(str(error))
    results: dict[str, Any] = {
        **versions(),
        "cache": cache.identity[:12],
        "cold": options.cold,
        "options": shlex.join(passed_on),
        "method": __doc__,
        "cases": {},
    }

    def measured(backend: str, seed: int, more: Sequence[str] = ()) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as name:
            try:
                return measure(
                    *(backend, seed, options.cache, Path(name), [*passed_on, *more]), options.cold
                )
            except subprocess.CalledProcessError as error:
                sys.exit(f"{backend}, seed {seed}: tinyllm fit exited with {error.returncode}")

    for backend in () if options.cold else options.backends:
        measured(backend, options.seeds[0], FEW_UPDATES)
    for seed in options.seeds:
        for backend in options.backends:
            run = measured(backend, seed)
            results["cases"].setdefault(f"seed {seed}", {})[backend] = run
            write_json(options.results, results)
            parts = ("imports", "first_update", "training", "validation", "checkpoints", "ending")
            print(
                f"{backend}, seed {seed}: {run['wall_seconds']:.1f} s ("
                + ", ".join(f"{p.replace('_', ' ')} {run[f'{p}_seconds']:.1f}" for p in parts)
                + f", exit {run['exit_seconds']:.1f}), {run['tokens_per_second'] / 1e6:.3f} M "
                f"tokens/s, validation loss {run['final_validation_loss']:.4f}, training loss "
                f"{run['final_train_loss'] or float('nan'):.4f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
