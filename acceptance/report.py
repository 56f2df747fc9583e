"""Writes down what a campaign showed: JSON, a figure and a page, beside its tables.

From ``performance.csv``, ``numerical.csv`` and ``convergence.csv`` of a folder come

- ``qualification.json``: verdicts, messages and all tables;
- ``provenance.json``: hashes of the protocol, the tables, the frozen sides and the receipts, and
  the environments that were noted;
- ``qualification.svg`` and ``qualification.md``, to read.

A campaign that is not finished is refused, unless a partial report is asked for; that one says so
everywhere and lists what is missing.

Every file ends with, or holds, a seal: a hash of its own content. A report replaces only files with
a valid seal, so nothing that someone else wrote or edited is lost, and a complete report stays: it
is renewed from the same tables only, never from others or by a partial one.
"""

import argparse
import io
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyllm.acceptance.accept import (
    EXIT_CODES,
    GATES,
    Qualification,
    add_tables_options,
    protocol_of,
    qualify,
    tables_of,
)
from tinyllm.acceptance.environment import environment
from tinyllm.acceptance.evidence import (
    EvidenceError,
    hash_file,
    identity_of,
    verify_all,
    verify_candidate,
)
from tinyllm.acceptance.figure import qualification_figure
from tinyllm.acceptance.files import replace_file
from tinyllm.acceptance.gates import Verdict
from tinyllm.acceptance.json_text import parse_json
from tinyllm.acceptance.page import qualification_page
from tinyllm.acceptance.protocol import Protocol
from tinyllm.acceptance.retained import verify_retained
from tinyllm.acceptance.seals import inputs_of_complete_report, is_sealed, sealed, sealed_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TABLES = (*(f"{name}.csv" for name in GATES), "validation-curves.csv")
"""What a report is made from; the last one may be absent, since no gate reads it."""

OUTPUTS = ("qualification.json", "provenance.json", "qualification.svg", "qualification.md")
"""What a report consists of."""

_UNFINISHED = (Verdict.INCOMPLETE, Verdict.FAILED)


class ReportError(RuntimeError):
    """There is no report to write: the campaign is not finished, or a file would be lost."""


@dataclass(frozen=True)
class Report:
    """A report that was written.

    Attributes:
        found: What the gates said.
        missing: What was not measured, by gate.
        partial: Whether it is marked as partial.
        files: What was written.
    """

    found: Qualification
    missing: dict[str, list[str]]
    partial: bool
    files: tuple[Path, ...]


def write_report(
    root: str | Path,
    protocol: Protocol,
    *,
    partial: bool = False,
    evidence: str | Path | None = None,
    candidate: str | None = None,
) -> Report:
    """Judges a campaign's tables and writes the report beside them.

    Args:
        root: Folder with the tables.
        protocol: What was to be measured.
        partial: Reports an unfinished campaign, too, marked as such.
        evidence: Folder with ``manifest.json``, candidates and receipts, all verified where there
            is a manifest; None takes the root.
        candidate: Id of the frozen candidate that was measured; None takes the only one.

    Raises:
        NotADirectoryError: If the root is no folder.
        ReportError: If the campaign is not finished and no partial report is asked for, if a file
            of another origin would be overwritten, or if several candidates are frozen and none is
            named.
        EvidenceError: If anything frozen has changed, or was frozen for another protocol.
        ModuleNotFoundError: If matplotlib is missing.
    """
    root = Path(root)
    found = _complete_tables(qualify(root, protocol), root)
    missing = missing_of(found)
    unfinished = found.verdict in _UNFINISHED
    if unfinished and not partial:
        raise ReportError(_refusal(found))
    inputs = {name: hash_file(root / name) for name in TABLES if (root / name).is_file()}
    _require_replaceable(root, inputs, unfinished)
    judged = found.to_dict() | {"partial": unfinished, "missing": missing, "inputs": inputs}
    origin = provenance(Path(evidence or root), protocol, candidate) | {"inputs": inputs}
    measured = origin["candidate"]
    figure = qualification_figure(
        found,
        missing if unfinished else {},
        "Candidate" if measured is None else f"Candidate {measured['id']}",
    )
    page = qualification_page(found, missing, origin, partial=unfinished)
    contents = {
        "provenance.json": sealed_json(origin),
        "qualification.svg": sealed(svg(figure)),
        "qualification.md": sealed(page),
        "qualification.json": sealed_json(judged),
    }
    for name, content in contents.items():
        replace_file(root / name, content)
    return Report(found, missing, unfinished, tuple(root / name for name in OUTPUTS))


def missing_of(found: Qualification) -> dict[str, list[str]]:
    """Names of everything that was not measured or does not count, by gate."""
    tables = {name: table for gate in found.gates for name, table in gate.tables.items()}
    ratios, cases, pairs = tables["ratios"], tables["cases"], tables["pairs"]
    unmeasured = ratios[ratios["ratio"].isna()]
    repeats = unmeasured.groupby("workload", sort=False)["repeat"].agg(list)
    workers = cases["workload"].map({w.id: w.workers for w in found.protocol.workloads})
    # whatever the verdict: a control has none, and a case may break a limit before it is complete
    partial = cases[cases["measured"] < workers * found.protocol.numerical_updates]
    lost = pairs[pairs["difference"].isna()]
    return {
        "performance": [f"{name} repeat {r}" for name, which in repeats.items() for r in which],
        "numerical": [
            f"{name} {comparison}"
            for name, comparison in zip(partial["workload"], partial["comparison"], strict=True)
        ],
        "convergence": [
            f"{recipe} seed {seed}"
            for recipe, seed in zip(lost["recipe"], lost["seed"], strict=True)
        ],
    }


def provenance(evidence: Path, protocol: Protocol, candidate: str | None = None) -> dict[str, Any]:
    """Hashes of what a qualification rests on, and the environments that its receipts hold.

    Raises:
        EvidenceError: If anything frozen has changed, is absent, or is for another protocol, or a
            receipt is of another manifest.
        ReportError: If several candidates are frozen and none is named.
    """
    manifest: dict[str, Any] | None = None
    measured: dict[str, Any] | None = None
    if (evidence / "manifest.json").is_file() or candidate is not None:
        frozen = verify_all(evidence)
        if frozen.protocol.hash != protocol.hash:
            raise EvidenceError(
                f"{evidence / 'manifest.json'} was frozen for protocol "
                f"{frozen.protocol.hash[:12]}, and the report is for {protocol.hash[:12]}"
            )
        manifest = {
            "identity": frozen.identity,
            "source": identity_of(frozen.source),
            "files": frozen.files,
            "token_cache": frozen.token_cache,
        }
        ids = sorted(place.parent.name for place in evidence.glob("candidates/*/candidate.json"))
        if candidate is None and len(ids) > 1:
            raise ReportError(
                f"several candidates are frozen ({', '.join(ids)}); name the one that was measured "
                "with --candidate"
            )
        if candidate is not None or ids:
            found = verify_candidate(evidence, candidate or ids[0])
            measured = {"id": found.id, "identity": found.identity, "details": found.details}
    receipts, environments = _receipts(evidence, manifest["identity"] if manifest else None)
    return {
        "protocol": {"version": protocol.version, "hash": protocol.hash},
        "manifest": manifest,
        "candidate": measured,
        "retained": verify_retained(evidence),
        "receipts": receipts,
        "environments": environments,
        "report_environment": environment(),
        "failed_attempts": sorted(path.name for path in evidence.glob("failed/*")),
    }


def _receipts(evidence: Path, manifest: str | None) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Hash of each receipt, and each distinct environment with the receipts that hold it."""
    hashes: dict[str, str] = {}
    environments: dict[str, dict[str, Any]] = {}
    for path in sorted(evidence.glob("receipts/*.json")):
        hashes[path.stem] = hash_file(path)
        try:
            receipt = parse_json(path.read_text(encoding="utf-8"))
            made_under, noted = receipt.get("manifest"), receipt.get("environment")
        except (AttributeError, ValueError) as error:
            raise EvidenceError(f"{path} is no receipt: {error}") from error
        if made_under != manifest:
            raise EvidenceError(f"{path} is a receipt of another manifest; move it away")
        if noted:
            entry = {"environment": noted, "receipts": []}
            environments.setdefault(identity_of(noted), entry)["receipts"].append(path.stem)
    return hashes, list(environments.values())


def svg(figure: "Figure") -> str:
    """A figure as SVG, the same text for the same figure."""
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "tinyllm"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def _complete_tables(found: Qualification, root: Path) -> Qualification:
    """Gives gates that could read nothing their empty tables, and shortens paths to names."""
    gates = []
    for gate in found.gates:
        tables = gate.tables or GATES[gate.gate](None, found.protocol).tables
        messages = tuple(message.replace(f"{root}{os.sep}", "") for message in gate.messages)
        gates.append(replace(gate, tables=tables, messages=messages))
    return replace(found, gates=tuple(gates))


def _refusal(found: Qualification) -> str:
    lines = [
        f"{gate.gate} ({gate.verdict}): {message}"
        for gate in found.gates
        if gate.verdict in _UNFINISHED
        for message in gate.messages
    ]
    return "\n  ".join(
        [
            f"the campaign is {found.verdict}, so there is no report; finish it, or ask for a "
            "partial one with --partial",
            *lines,
        ]
    )


def _require_replaceable(root: Path, inputs: Mapping[str, str], partial: bool) -> None:
    """Refuses to lose a file that is no report's, and a complete report."""
    for name in OUTPUTS:
        path = root / name
        if path.exists() and not is_sealed(path):
            raise ReportError(
                f"{path} is not as a report wrote it; nothing is overwritten: move it away"
            )
    complete = inputs_of_complete_report(root)
    if complete is not None and (partial or complete != inputs):
        raise ReportError(
            f"{root} holds the complete report of other tables, which stays; move its files "
            f"away ({', '.join(OUTPUTS)}) or use another folder"
        )


def main(args: Sequence[str] | None = None, prog: str = "gh200_report.py") -> int:
    """Runs the command; its exit code is that of ``tinyllm accept``, 2 if nothing was written."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Write qualification.json, provenance.json, qualification.svg and "
        "qualification.md beside a campaign's tables. Exits 0 for a pass, 1 if the candidate is "
        "not qualified, 2 if anything is missing or does not count.",
    )
    add_tables_options(parser)
    parser.add_argument(
        "--partial",
        action="store_true",
        help="Report an unfinished campaign, too, marked as partial.",
    )
    options = parser.parse_args(args)
    try:
        tables, candidate = tables_of(options.root, options.candidate)
        report = write_report(
            tables,
            protocol_of(options.root, options.protocol),
            partial=options.partial,
            evidence=options.root,
            candidate=candidate,
        )
    except (OSError, ValueError, ReportError, EvidenceError, ModuleNotFoundError) as error:
        sys.stderr.write(f"{prog}: error: {error}\n")
        return 2
    mark = "partial report" if report.partial else "report"
    print(f"{mark}: {', '.join(str(path) for path in report.files)}")
    print(f"verdict: {report.found.verdict}")
    return EXIT_CODES[report.found.verdict]
