"""A whole qualification of native against itself on a CPU, in about a minute and a half.

    python scripts/pilot.py --cache data/quickstart --root runs/pilot

Its protocol is a toy with one repeat, and with thresholds that noise does not decide: it shows that
every step works, and says nothing about speed.
"""

import argparse
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from tinyllm.acceptance.accept import main as accept
from tinyllm.acceptance.campaign import Campaign
from tinyllm.acceptance.configure import Settings
from tinyllm.acceptance.evidence import EvidenceError
from tinyllm.acceptance.freezing import freeze_native, freeze_new_candidate
from tinyllm.acceptance.protocol import PROTOCOL_1, Protocol, Recipe, Workload

CHECKOUT = Path(__file__).resolve().parent.parent


def toy_protocol(*, packed: bool = True, repeats: int = 2) -> Protocol:
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
        workloads=(sync, four) if packed else (sync,),
        recipes=(recipe,),
        repeats=repeats,
        warmup_updates=2,
        windows=3,
        window_seconds=0.05,
        numerical_updates=2,
        small_batch_ratio=0.2,
        production_ratio=0.2,
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


def run(root: Path, protocol: Protocol, settings: Settings, checkout: Path = CHECKOUT) -> int:
    """All steps; the exit code of ``tinyllm accept``."""
    freeze_native(root, protocol, settings, checkout=checkout)
    total = Campaign(root, parallel=2).run_baselines()
    candidate = freeze_new_candidate(root, settings.native, checkout=checkout)
    campaign = Campaign(root, candidate.id, parallel=2)
    for repeat in range(1, protocol.repeats + 1):
        total += campaign.run_pairs(f"pilot-{repeat}")  # each call counts as an allocation here
    total += campaign.run_numerical() + campaign.run_convergence()
    print(total)
    campaign.collect()
    return accept([str(root)])


def main() -> int:
    """Runs the pilot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path, required=True, help="Folder of a token cache.")
    parser.add_argument("--root", type=Path, required=True, help="Folder of the campaign.")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    began = time.perf_counter()
    try:
        code = run(options.root, toy_protocol(repeats=1), toy_settings(options.cache))
    except (EvidenceError, OSError, ValueError) as error:
        print(f"refused: {error}", file=sys.stderr)
        return 2
    print(f"{time.perf_counter() - began:.0f} s")
    return code


if __name__ == "__main__":
    sys.exit(main())
