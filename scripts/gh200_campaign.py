"""Freezes native and measures it: the start of a qualification.

    python scripts/gh200_campaign.py ROOT freeze --cache data/corpus
    python scripts/gh200_campaign.py ROOT windows --select '20m-*'
    python scripts/gh200_campaign.py ROOT convergence --submit '{"slurm_partition": "gpu"}'
    python scripts/gh200_campaign.py ROOT controls

Then: gh200_compare.py. Any step may be stopped and started again; what is done stays done.
"""

import argparse
import sys
from pathlib import Path

from tinyllm.acceptance.configure import Settings
from tinyllm.acceptance.freezing import freeze_native
from tinyllm.acceptance.protocol import Protocol
from tinyllm.acceptance.work import add_work, do_work, refusing

CHECKOUT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Runs a step; 0 if all of it is done or queued, 1 if something failed, 2 if it is refused."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", type=Path, help="Folder of the campaign.")
    steps = parser.add_subparsers(dest="step", required=True)
    freeze = steps.add_parser("freeze", help="Freeze the protocol, all configurations and native.")
    freeze.add_argument("--cache", required=True, help="Folder of the token cache.")
    freeze.add_argument("--protocol", default="1", metavar="VERSION|FILE")
    freeze.add_argument("--checkout", type=Path, default=CHECKOUT, help="Native's source.")
    for name, text in (
        ("windows", "Find out how many updates of native fill a window."),
        ("convergence", "Train every recipe with every seed."),
        ("controls", "Train every recipe with every seed once more, for native's own spread."),
    ):
        add_work(steps.add_parser(name, help=text))
    options = parser.parse_args()
    return refusing(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    if options.step != "freeze":
        return do_work(options, options.step)
    protocol, settings = Protocol.load(options.protocol), Settings(cache=options.cache)
    manifest = freeze_native(options.root, protocol, settings, checkout=options.checkout)
    print(f"manifest {manifest.identity[:12]}: {len(manifest.configs)} configurations")
    return 0


if __name__ == "__main__":
    sys.exit(main())
