"""Freezes native and measures it: the start of a qualification.

    python scripts/gh200_campaign.py ROOT freeze --cache data/corpus
    python scripts/gh200_campaign.py ROOT baselines --select '20m-*'

Then: gh200_compare.py. Any step may be stopped and started again; what is done stays done.
"""

import argparse
import sys
from pathlib import Path

from tinyllm.acceptance.campaign import Campaign
from tinyllm.acceptance.configure import Settings
from tinyllm.acceptance.evidence import EvidenceError
from tinyllm.acceptance.freezing import freeze_native
from tinyllm.acceptance.protocol import Protocol

CHECKOUT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Runs a step; 0 if all of it is done, 1 if something failed, 2 if it is refused."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", type=Path, help="Folder of the campaign.")
    steps = parser.add_subparsers(dest="step", required=True)
    freeze = steps.add_parser("freeze", help="Freeze the protocol, all configurations and native.")
    freeze.add_argument("--cache", required=True, help="Folder of the token cache.")
    freeze.add_argument("--protocol", default="1", metavar="VERSION|FILE")
    freeze.add_argument("--checkout", type=Path, default=CHECKOUT, help="Native's source.")
    baselines = steps.add_parser("baselines", help="Run native alone.")
    baselines.add_argument("--select", nargs="*", default=[], metavar="PATTERN", help="Of ids.")
    options = parser.parse_args()
    try:
        if options.step == "freeze":
            manifest = freeze_native(
                options.root,
                Protocol.load(options.protocol),
                Settings(cache=options.cache),
                checkout=options.checkout,
            )
            print(f"manifest {manifest.identity[:12]}: {len(manifest.configs)} configurations")
            return 0
        summary = Campaign(options.root, select=options.select).run_baselines()
    except (EvidenceError, OSError, ValueError) as error:
        print(f"refused: {error}", file=sys.stderr)
        return 2
    print(summary)
    return 1 if summary.failed else 0


if __name__ == "__main__":
    sys.exit(main())
