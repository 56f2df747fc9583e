"""How commands run or submit a campaign's work: their shared options, and what they do."""

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

from tinyllm.acceptance.campaign import Campaign
from tinyllm.acceptance.evidence import EvidenceError
from tinyllm.acceptance.submission import submit


def json_object(text: str) -> dict[str, Any]:
    """An argument that is a JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is no JSON object, as in {{"name": 1}}')
    return value


def add_work(step: argparse.ArgumentParser) -> None:
    """What a command that does a campaign's work takes; see ``do_work``."""
    step.add_argument(
        "--select",
        nargs="*",
        default=[],
        metavar="PATTERN",
        help="Ids of workloads, recipes or single pieces of work (default: all).",
    )
    step.add_argument(
        "--parallel",
        type=int,
        default=1,
        metavar="N",
        help="How many trainings at a time. Timed ones are then set up beside each other and timed "
        "one by one, and there are no figures of their startup (default: 1).",
    )
    step.add_argument(
        "--submit",
        type=json_object,
        nargs="?",
        const={},
        metavar="JSON",
        help="Submit a job for each piece of work through submitit, with these parameters of its "
        'AutoExecutor, such as {"slurm_partition": "gpu", "timeout_min": 600}.',
    )


def do_work(options: argparse.Namespace, kind: str) -> int:
    """Runs or submits work of a kind; 1 if any of it failed."""
    campaign = Campaign(
        options.root,
        getattr(options, "candidate", None),
        select=options.select,
        parallel=options.parallel,
    )
    campaign.require_work(kind)
    allocation = getattr(options, "allocation", "")
    if options.submit is None:
        summary = campaign.run(kind, allocation)
    else:
        summary = submit(campaign, kind, options.submit, allocation)
    print(summary)
    return 1 if summary.failed else 0


def refusing(run: Callable[[], int]) -> int:
    """The exit code of a command; 2 where it raises what says that it may not be run."""
    try:
        return run()
    except (EvidenceError, ImportError, OSError, ValueError) as error:
        print(f"refused: {error}", file=sys.stderr)
        return 2
