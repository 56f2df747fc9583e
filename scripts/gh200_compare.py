"""Freezes a candidate and compares it with native: the rest of a qualification.

    python scripts/gh200_compare.py ROOT freeze --strategy '{"backend": "gh200"}'
    python scripts/gh200_compare.py ROOT windows --candidate ID
    python scripts/gh200_compare.py ROOT pairs --candidate ID --allocation job-1
    python scripts/gh200_compare.py ROOT numerical --candidate ID --select '*-production'
    python scripts/gh200_compare.py ROOT convergence --candidate ID --submit
    python scripts/gh200_compare.py ROOT collect --candidate ID
    tinyllm accept ROOT

Here, `pairs` times one repeat of each workload, so it is run in as many allocations as the protocol
has repeats; on Slurm all repeats are queued. Any step may be stopped and started again; what is
done stays done.
"""

import argparse
import sys
from pathlib import Path

from tinyllm.acceptance.collect import collect
from tinyllm.acceptance.freezing import freeze_new_candidate
from tinyllm.acceptance.work import add_work, do_work, json_object, refusing

CHECKOUT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Runs a step; 0 if all of it is done or queued, 1 if something failed, 2 if it is refused."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", type=Path, help="Folder of the campaign.")
    steps = parser.add_subparsers(dest="step", required=True)
    freeze = steps.add_parser("freeze", help="Freeze a candidate; prints its id.")
    freeze.add_argument(
        "--strategy",
        type=json_object,
        default={"backend": "gh200"},
        help='Arguments of the strategy that make it the candidate, as JSON (default: {"backend": '
        '"gh200"}).',
    )
    freeze.add_argument("--checkout", type=Path, default=CHECKOUT, help="The candidate's source.")
    for name, text in (
        ("windows", "Find out how many updates of each side fill a window."),
        ("pairs", "Time the next repeat of each workload, both sides in turn."),
        ("numerical", "Compare the first updates."),
        ("convergence", "Train every recipe with every seed."),
        ("collect", "Write the tables for `tinyllm accept`."),
    ):
        step = steps.add_parser(name, help=text)
        step.add_argument("--candidate", required=True, metavar="ID")
        if name != "collect":
            add_work(step)
        if name == "pairs":
            step.add_argument(
                "--allocation",
                default="",
                help="Names the job, lease or boot that this is; not on Slurm, where each job is "
                "an allocation of its own.",
            )
    options = parser.parse_args()
    return refusing(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    if options.step == "freeze":
        print(freeze_new_candidate(options.root, options.strategy, checkout=options.checkout).id)
    elif options.step == "collect":
        for name, rows in collect(options.root, options.candidate).items():
            print(f"{name}.csv: {rows} rows")
    else:
        return do_work(options, options.step)
    return 0


if __name__ == "__main__":
    sys.exit(main())
