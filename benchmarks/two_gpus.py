"""Do two GPUs train twice as fast as one, and the same?

    python benchmarks/two_gpus.py RESULTS.json --repeats 2

Rates: ``fit_throughput.py`` measures one GPU and two with the same load on each, in turn, and the
figures are medians of the repeats. Trajectories: ``tinyllm fit`` traces its first five updates of
one global batch on one GPU and on two, from one state; relative L2 over all parameters of a worker,
the largest of any worker and update, beside the limits of protocol 1. Synchronous training, and 8
decentralized workers (AWC), all on one GPU or 4 on each of two.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from setting import HERE, environment_of_run, random_cache, versions

from tinyllm.acceptance.protocol import PROTOCOL_1
from tinyllm.acceptance.traces import QUANTITIES, compare_traces
from tinyllm.files import write_json

RATES = {
    "sync": ("20m-sync-production", "20m-sync-x2"),
    "4 workers on each": ("20m-packed4-production", "20m-packed4-x2"),
}
"""For each mode the cases of one GPU and of two."""

TRAJECTORIES = {
    "sync": ("--trainer.strategy", "sync"),
    "8 workers": ("--trainer.strategy", "packed8_awc"),
}
LIMITS = {
    "gradients": PROTOCOL_1.gradients_limit,
    "parameters": PROTOCOL_1.parameters_limit,
    "updates": PROTOCOL_1.updates_limit,
}


def rate(case: str, folder: Path) -> float:
    """Tokens per second of a case on the gh200 backend, inside ``Trainer.fit``."""
    file = folder / "rate.json"
    command = [sys.executable, str(HERE / "fit_throughput.py"), str(file)]
    command += ["--cases", case, "--backends", "gh200"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    found: float = json.loads(file.read_text())["cases"][case]["gh200"]["tokens_per_second"]
    return found


def trace(mode: str, devices: int, cache: Path, folder: Path, options: list[str]) -> Path:
    """Traces the first updates of a mode on so many devices."""
    place = folder / f"{mode.replace(' ', '-')}-{devices}"
    command = [
        # the installed command, which Lightning can start again for the other rank
        *(str(Path(sys.executable).with_name("tinyllm")), "fit"),
        *("--model.preset", "20m", "--data.cache", str(cache), "--data.batch_size", "32"),
        *("--trainer.accelerator", "gpu", "--trainer.precision", "bf16-mixed"),
        *("--trainer.max_steps", str(PROTOCOL_1.numerical_updates)),
        *("--trainer.gradient_clip_val", "1.0", "--trainer.limit_val_batches", "0"),
        *(
            "--trainer.callbacks+",
            "tinyllm.callbacks.UpdateTrace",
            "--trainer.callbacks.folder",
            str(place),
        ),
        *TRAJECTORIES[mode],
        *("--trainer.devices", str(devices), "--trainer.default_root_dir", str(place) + "-run"),
        *options,
    ]
    subprocess.run(command, check=True, env=environment_of_run(None), stdout=subprocess.DEVNULL)
    return place


def differences(one: Path, two: Path) -> dict[str, float]:
    """For each quantity the largest relative L2 of any worker and update."""
    updates = PROTOCOL_1.numerical_updates
    rows = compare_traces(one, two, comparison="two/one", updates=updates).rows
    return {quantity: float(rows[quantity].max(skipna=False)) for quantity in QUANTITIES}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path)
    parser.add_argument("--repeats", type=int, default=3, help="Of the rates; 0 measures none.")
    given = list(sys.argv[1:])
    own = given.index("--") if "--" in given else len(given)
    options, passed_on = parser.parse_args(given[:own]), given[own + 1 :]
    results: dict[str, Any] = {**versions(), "method": __doc__, "rates": {}, "trajectories": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rates: dict[str, list[float]] = {case: [] for pair in RATES.values() for case in pair}
        for _ in range(options.repeats):
            for case, found in rates.items():
                found.append(rate(case, folder))
                print(f"{case}: {found[-1] / 1e6:.3f} M tokens/s", flush=True)
        for mode, (one, two) in RATES.items() if options.repeats else ():
            ratio = median(rates[two]) / median(rates[one])
            results["rates"][mode] = {"one": rates[one], "two": rates[two], "ratio": ratio}
            print(f"{mode}: two GPUs {ratio:.3f} times one", flush=True)
            write_json(options.results, results)
        cache = random_cache(folder, 2_000_000)
        places = {
            mode: [trace(mode, devices, cache, folder, passed_on) for devices in (1, 2)]
            for mode in TRAJECTORIES
        }
        with ProcessPoolExecutor() as processes:
            found = {mode: processes.submit(differences, *pair) for mode, pair in places.items()}
        for mode, future in found.items():
            results["trajectories"][mode] = worst = future.result()
            for quantity, value in worst.items():
                print(f"{mode}: {quantity} {value:.2e}, limit {LIMITS.get(quantity, '-')}")
    write_json(options.results, results)


if __name__ == "__main__":
    main()
