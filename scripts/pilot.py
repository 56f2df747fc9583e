"""A whole qualification in miniature: freeze, measure, compare, collect, report and judge.

    python scripts/pilot.py --root runs/pilot
    python scripts/pilot.py --root runs/gpu-pilot --device gpu --candidate gh200 --output results

On a CPU: native against itself, on a protocol of two tiny workloads with thresholds that noise does
not decide, in less than two minutes. It shows that every step works, and says nothing about speed.

On a GPU: workloads and thresholds of version 1, with short warm-ups and windows, fewer numerical
updates and no convergence, so its report is always a partial one. Runs are set up beside each other
and timed one by one. Tables are renewed with every piece of work and the report with every step:
what was measured before a time limit is there.

Tokens are random, and drawn like words: a few are frequent. Stopped, it can be started again; what
is done stays done. On a machine with several GPUs, start it once for each, with the same ``--root``
and another ``CUDA_VISIBLE_DEVICES`` and ``--select``.
"""

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tinyllm.acceptance.accept import EXIT_CODES
from tinyllm.acceptance.campaign import Campaign
from tinyllm.acceptance.collect import collect
from tinyllm.acceptance.configure import Settings
from tinyllm.acceptance.evidence import QUALIFICATIONS
from tinyllm.acceptance.freezing import freeze_native, freeze_new_candidate
from tinyllm.acceptance.launcher import Launchers
from tinyllm.acceptance.locks import claimed
from tinyllm.acceptance.measure import SHORT
from tinyllm.acceptance.protocol import PROTOCOL_1, Protocol, Recipe, Workload
from tinyllm.acceptance.report import write_report
from tinyllm.acceptance.runs import LOCKS, Summary, failures, is_done
from tinyllm.acceptance.work import refusing

CHECKOUT = Path(__file__).resolve().parent.parent
_DOCUMENT_TOKENS = 200
_ATTEMPTS = 4  # at a pair, on a machine that has other work

GPU_WORKLOADS = (
    "20m-sync-b4-c512-clip1",
    "20m-sync-production",
    "20m-packed4-b8-c512-clip1",
    "50m-sync-production",
    "20m-packed8-b8-c1024-clip1",
    "90m-sync-production",
    "20m-packed4-awc-production",
    "20m-packed8-b4-c1024-clip1",
    "20m-packed4-adaptive-production",
    "20m-sync-b16-c1024-clipoff",
    "20m-packed8-awc-production",
    "20m-packed4-atc-production",
    "20m-sync-b8-c512-clipoff",
    "50m-packed4-b16-c512-clipoff",
    "50m-sync-b8-c512-clipoff",
    "90m-packed8-b4-c1024-clip1",
    "90m-packed4-b4-c512-clipoff",
    "50m-packed8-b16-c512-clipoff",
    "90m-sync-b4-c1024-clip1",
    "90m-packed4-b8-c1024-clip1",
    "50m-packed4-b4-c1024-clip1",
    "50m-packed8-b8-c512-clip1",
    "50m-sync-b16-c512-clip1",
    "90m-packed8-b8-c512-clipoff",
    "20m-packed4-b16-c1024-clipoff",
)
"""In the order in which a pilot takes them: no four neighbours need all memory of a large GPU. The
first 12 have every production case; all have six small-batch workloads of each category, which
among them have every model, batch, context and clip.
"""


def toy_protocol(workloads: int = 2, repeats: int = 1) -> Protocol:
    """Version 1's rules on one or two tiny workloads and a tiny recipe."""
    shape = {"preset": "toy", "context": 32, "clip": 1.0, "local_batch": 2}
    sync = Workload("toy-sync", "small-batch", mode="sync", scheme=None, workers=1, **shape)
    four = Workload("toy-packed4", "production", mode="packed4", scheme="awc", workers=4, **shape)
    recipe = Recipe(
        "toy-packed4-run",
        mode="packed4",
        scheme="awc",
        workers=4,
        budget_tokens=20 * 4 * 2 * 32,
        seeds=(45, 46),
        t_quantile=6.314,
        **shape,
    )
    return replace(
        PROTOCOL_1,
        version=0,
        workloads=(sync, four)[:workloads],
        recipes=(recipe,),
        repeats=repeats,
        warmup_updates=2,
        windows=3,
        window_seconds=0.05,
        numerical_updates=2,
        small_batch_ratio=0.05,
        production_ratio=0.05,
    )


def gpu_protocol(workloads: int = 6, repeats: int = 3) -> Protocol:
    """Version 1's thresholds on some of its workloads, measured for a shorter time."""
    return replace(
        PROTOCOL_1,
        version=0,
        workloads=tuple(PROTOCOL_1.workload(name) for name in GPU_WORKLOADS[:workloads]),
        recipes=PROTOCOL_1.recipes[:1],
        repeats=repeats,
        warmup_updates=10,
        windows=5,
        window_seconds=0.5,
        numerical_updates=2,
    )


def toy_settings(cache: Path, vocab_size: int = 1024) -> Settings:
    """A model of two small layers, computed eagerly."""
    shape = {"layers": 2, "width": 64, "heads": 1, "ffn_width": 128, "context": 32}
    return Settings(
        cache=str(cache),
        accelerator="cpu",
        precision="32-true",
        native={"backend": "native", "compile": False},
        models={"toy": {"config": {**shape, "vocab_size": vocab_size}}},
        planned_updates=100_000,
    )


def make_tokens(root: Path, vocab_size: int, tokens: int) -> Path:
    """A token cache of random documents, in which a word's frequency falls with its id."""
    from tinyllm.data.prepare import prepare

    ids = np.random.default_rng(0).zipf(1.3, tokens) % (vocab_size - 1) + 1
    ids[_DOCUMENT_TOKENS - 1 :: _DOCUMENT_TOKENS] = 0  # ends a document
    cache = root / "tokens"
    while not cache.is_dir():
        with claimed(root / LOCKS, "tokens") as mine:  # another pilot may have the same folder
            if mine:
                ids.astype("<u2").tofile(root / "tokens.u16")
                file = str(root / "tokens.u16")
                prepare(cache, "tokens", file, vocab_size=vocab_size, boundary_id=0)
            else:
                time.sleep(1)
    return cache


def run(
    root: Path,
    protocol: Protocol,
    settings: Settings,
    *,
    candidate: Mapping[str, Any] | None = None,
    output: Path | None = None,
    select: Sequence[str] = (),
    parallel: int = 2,
    converge: bool = True,
    checkout: Path = CHECKOUT,
) -> int:
    """All steps.

    Args:
        root: The campaign's folder.
        protocol: What is measured.
        settings: Native's.
        candidate: Arguments of the strategy that differ from native's; None compares native with
            itself.
        output: Where tables and report go; None takes the candidate's folder in the root.
        select: Patterns of ids; none selects all.
        parallel: How many trainings at a time.
        converge: Whether recipes are trained, too.
        checkout: Source of both sides.

    Returns:
        The exit code of ``tinyllm accept``.
    """
    freeze_native(root, protocol, settings, checkout=checkout)
    strategy = {**settings.native, **(candidate or {})}
    name = freeze_new_candidate(root, strategy, checkout=checkout).id
    place = root / QUALIFICATIONS / name if output is None else output
    began, total = time.perf_counter(), Summary()

    def report(line: str) -> None:
        print(f"{time.perf_counter() - began:6.1f} s  {line}", flush=True)
        collect(root, name, place)

    options: dict[str, Any] = {"select": select, "parallel": parallel, "report": report}
    with Launchers() as launchers:
        native, other = (Campaign(root, of, **options, launchers=launchers) for of in (None, name))
        steps = [(other, "windows", "")]
        steps += [(other, "pairs", f"pilot-{k}") for k in range(1, protocol.repeats + 1)]
        steps += [(other, "numerical", "")]
        steps += [(native, "convergence", ""), (other, "convergence", "")] if converge else []
        for campaign, kind, allocation in steps:
            # here each repeat counts as an allocation
            summary = campaign.run(kind, allocation)
            for _ in range(_ATTEMPTS - 1):  # windows that were too short are longer then
                names = [n for n in set(summary.failed) if not is_done(root, n)]
                short = [n for n in names if failures(root, n, SHORT)]
                summary += campaign.run(kind, allocation, short) if short else Summary()
            total += summary
            if kind != "windows":
                report(f"report  after {kind} {allocation}".rstrip())
                written = write_report(place, protocol, partial=True, evidence=root, candidate=name)
    print(total)
    print(written.found.to_text())
    print(f"report: {place / 'qualification.md'}")
    return EXIT_CODES[written.found.verdict]


def main() -> int:
    """Runs the pilot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, required=True, help="Folder of the campaign.")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument(
        "--candidate",
        default="native",
        metavar="BACKEND",
        help="What is compared with native (default: native itself).",
    )
    parser.add_argument(
        "--workloads", type=int, metavar="N", help="How many, of 2 (default: 2) or 25 (6)."
    )
    parser.add_argument(
        "--repeats", type=int, metavar="N", help="How many (default: 1 on a CPU, 3 on a GPU)."
    )
    parser.add_argument("--select", nargs="*", default=[], metavar="PATTERN", help="Of ids.")
    parser.add_argument(
        "--parallel",
        type=int,
        metavar="N",
        help="How many trainings at a time (default: 2 on a CPU, 6 on a GPU).",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="Where tables and report go (default: qualifications/ID in the root).",
    )
    options = parser.parse_args()
    return refusing(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    given = {
        name: value
        for name in ("workloads", "repeats")
        if (value := getattr(options, name)) is not None
    }
    options.root.mkdir(parents=True, exist_ok=True)
    parallel = options.parallel or (2 if options.device == "cpu" else 6)
    threads = str(max(1, (os.cpu_count() or 1) // parallel))
    for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
        os.environ.setdefault(name, threads)  # of each training
    if options.device == "cpu":
        protocol = toy_protocol(**given)
        settings = toy_settings(make_tokens(options.root, 1024, 200_000))
    else:
        protocol = gpu_protocol(**given)
        settings = Settings(cache=str(make_tokens(options.root, 32_000, 20_000_000)))
    return run(
        options.root,
        protocol,
        settings,
        candidate={"backend": options.candidate},
        output=options.output,
        select=options.select,
        parallel=parallel,
        converge=options.device == "cpu",
    )


if __name__ == "__main__":
    sys.exit(main())
