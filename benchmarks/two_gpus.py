"""Do two GPUs train twice as fast as one, and the same?

    python benchmarks/two_gpus.py RESULTS.json --repeats 3
    python benchmarks/two_gpus.py RESULTS.json --parts trajectories -- --model.preset 50m

``rates``: ``fit_throughput.py`` measures one GPU and two with the same load on each, in turn; the
figures are medians of the repeats. ``trajectories``: ``tinyllm fit`` traces its first five updates
on one GPU and on two, from one state, over the same global batches; relative L2 over all parameters
of a worker, the largest of any worker and update, beside the limits of protocol 1. Both for
synchronous and for decentralized training (AWC): 4 workers on each GPU for rates, and 8 for
trajectories, all on one GPU or 4 on each of two. One GPU's rates of both modes are measured side by
side, on a GPU each; trajectories, which are not timed, all at once. What follows ``--`` goes to
``tinyllm fit``.
"""

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from setting import HERE, random_cache, versions

from tinyllm.acceptance.protocol import PROTOCOL_1
from tinyllm.acceptance.traces import QUANTITIES, compare_traces
from tinyllm.files import write_json

RATES = {
    "sync": ("20m-sync-production", "20m-sync-x2"),
    "decentralized": ("20m-packed4-production", "20m-packed4-x2"),
}
"""For each mode the cases of one GPU and of two."""

STRATEGIES = {"sync": "sync", "decentralized": "packed8_awc"}
LIMITS = {
    "gradients": PROTOCOL_1.gradients_limit,
    "parameters": PROTOCOL_1.parameters_limit,
    "updates": PROTOCOL_1.updates_limit,
}


def run(command: list[str], gpu: int | None) -> None:
    """A command on one GPU, or on all."""
    environment = dict(os.environ)
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = str(gpu)
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)


def rate(case: str, gpu: int | None, folder: Path) -> float:
    """Tokens per second of a case on the gh200 backend, inside ``Trainer.fit``."""
    file = folder / f"{case}.json"
    script = str(HERE / "fit_throughput.py")
    run([sys.executable, script, str(file), "--cases", case, "--backends", "gh200"], gpu)
    found: float = json.loads(file.read_text())["cases"][case]["gh200"]["tokens_per_second"]
    return found


def measure_rates(repeats: int, folder: Path) -> dict[str, Any]:
    """For each mode, tokens per second of one GPU and of two, and the ratio of their medians."""
    found: dict[str, dict[str, Any]] = {mode: {"one": [], "two": []} for mode in RATES}
    for _ in range(repeats):
        with ThreadPoolExecutor() as threads:
            ones = threads.map(rate, [one for one, _ in RATES.values()], (0, 1), (folder, folder))
            for mode, one in zip(found, ones, strict=True):
                found[mode]["one"].append(one)
        for mode, (_, two) in RATES.items():
            found[mode]["two"].append(rate(two, None, folder))
    for mode, rates in found.items():
        rates["ratio"] = median(rates["two"]) / median(rates["one"])
        print(f"{mode}: {rates}", flush=True)
    return found


def trace(mode: str, devices: int, gpu: int | None, folder: Path, options: list[str]) -> Path:
    """Traces the first updates of a mode."""
    place = folder / f"{mode}-{devices}"
    command = [
        # the installed command, which Lightning can start again for the other rank
        *(str(Path(sys.executable).with_name("tinyllm")), "fit"),
        *("--model.preset", "20m", "--data.cache", str(folder / "cache")),
        *("--data.batch_size", "32", "--trainer.strategy", STRATEGIES[mode]),
        *("--trainer.accelerator", "gpu", "--trainer.precision", "bf16-mixed"),
        *("--trainer.max_steps", str(PROTOCOL_1.numerical_updates)),
        *("--trainer.gradient_clip_val", "1.0", "--trainer.limit_val_batches", "0"),
        *("--trainer.callbacks+", "tinyllm.callbacks.UpdateTrace"),
        *("--trainer.callbacks.folder", str(place)),
        *("--trainer.devices", str(devices), "--trainer.default_root_dir", f"{place}-run"),
        *options,
    ]
    run(command, gpu)
    return place


def differences(one: Path, two: Path) -> dict[str, float]:
    """For each quantity the largest relative L2 of any worker and update."""
    updates = PROTOCOL_1.numerical_updates
    rows = compare_traces(one, two, comparison="two/one", updates=updates).rows
    return {quantity: float(rows[quantity].max(skipna=False)) for quantity in QUANTITIES}


def measure_trajectories(folder: Path, options: list[str]) -> dict[str, dict[str, float]]:
    """For each mode how far two GPUs lead from one."""
    random_cache(folder, 2_000_000)
    # a process forked from one that has threads and a GPU may never end
    spawn = multiprocessing.get_context("spawn")
    with ThreadPoolExecutor() as threads, ProcessPoolExecutor(mp_context=spawn) as processes:
        traces = {
            (mode, devices): threads.submit(trace, mode, devices, alone, folder, options)
            for gpu, mode in enumerate(STRATEGIES)
            for devices, alone in ((1, gpu), (2, None))
        }
        pairs = {
            mode: [traces[mode, devices].result() for devices in (1, 2)] for mode in STRATEGIES
        }
        found = {mode: processes.submit(differences, *pair) for mode, pair in pairs.items()}
        results = {mode: difference.result() for mode, difference in found.items()}
    for mode, worst in results.items():
        for quantity, value in worst.items():
            print(f"{mode}: {quantity} {value:.2e}, limit {LIMITS.get(quantity, '-')}", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path)
    parts = ("rates", "trajectories")
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--repeats", type=int, default=3, help="Of the rates.")
    given = list(sys.argv[1:])
    own = given.index("--") if "--" in given else len(given)
    options, passed_on = parser.parse_args(given[:own]), given[own + 1 :]
    results: dict[str, Any] = {**versions(), "method": __doc__}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "rates" in options.parts:
            results["rates"] = measure_rates(options.repeats, folder)
            write_json(options.results, results)
        if "trajectories" in options.parts:
            results["trajectories"] = measure_trajectories(folder, passed_on)
    write_json(options.results, results)


if __name__ == "__main__":
    main()
