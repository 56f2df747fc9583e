"""``tinyllm accept``: the verdict on a campaign's folder, as tables, JSON and an exit code."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from tinyllm.acceptance.collect import verify_tables
from tinyllm.acceptance.convergence import convergence_gate
from tinyllm.acceptance.evidence import QUALIFICATIONS, EvidenceError, verify_all
from tinyllm.acceptance.gates import GateResult, Verdict, worst
from tinyllm.acceptance.numerical import numerical_gate
from tinyllm.acceptance.performance import performance_gate
from tinyllm.acceptance.protocol import Protocol
from tinyllm.acceptance.retained import verify_retained

GATES: dict[str, Callable[[pd.DataFrame | None, Protocol], GateResult]] = {
    "performance": performance_gate,
    "numerical": numerical_gate,
    "convergence": convergence_gate,
}
"""All gates, by the name of the table ``{name}.csv`` that each reads."""

EXIT_CODES = {
    Verdict.PASS: 0,
    Verdict.NOT_QUALIFIED: 1,
    Verdict.INCOMPLETE: 2,
    Verdict.FAILED: 2,
}

_SHOWN = {  # table: its title, and how its numbers are printed
    "small_batch": ("Small batches: median of candidate/native speed", "{:.3f}"),
    "production": ("Production: candidate/native speed", "{:.3f}"),
    "costs": ("Medians beside the speed; they decide nothing", "{:.4g}"),
    "worst": ("Largest relative L2 of any worker and update", "{:.3g}"),
    "convergence": ("Final validation loss in nats, and the upper bound of its change", "{:.6f}"),
    "power": ("How likely a truly equal candidate passes", "{:.4g}"),
}


@dataclass(frozen=True)
class Qualification:
    """What all gates say together; the worst verdict counts."""

    protocol: Protocol
    gates: tuple[GateResult, ...]

    @property
    def verdict(self) -> Verdict:
        """Whether the candidate may replace native."""
        return worst(gate.verdict for gate in self.gates)

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            "protocol": {"version": self.protocol.version, "hash": self.protocol.hash},
            "verdict": self.verdict.value,
            "gates": {gate.gate: gate.to_dict() for gate in self.gates},
        }

    def to_text(self) -> str:
        """The tables and messages, to read in a terminal."""
        lines = [f"protocol {self.protocol.version} ({self.protocol.hash[:12]})"]
        for gate in self.gates:
            lines += ["", f"{gate.gate}: {gate.verdict}"]
            lines += [f"  ! {message}" for message in gate.messages]
            for name, table in gate.tables.items():
                if name in _SHOWN and not table.empty:
                    title, number = _SHOWN[name]
                    text = table.to_string(index=False, float_format=number.format, na_rep="-")
                    lines += ["", f"  {title}", *(f"  {line}" for line in text.splitlines())]
        return "\n".join([*lines, "", f"verdict: {self.verdict}"])


def qualify(root: str | Path, protocol: Protocol) -> Qualification:
    """Runs all gates over ``performance.csv``, ``numerical.csv`` and ``convergence.csv``.

    A table that is not there is incomplete, and one that is no CSV has failed.

    Raises:
        NotADirectoryError: If the root is no folder.
    """
    root = Path(root)
    if not root.is_dir():
        raise NotADirectoryError(f"{root} is not a folder")
    return Qualification(protocol, tuple(_judge(name, root, protocol) for name in GATES))


def _judge(name: str, root: Path, protocol: Protocol) -> GateResult:
    path = root / f"{name}.csv"
    try:
        rows = _read_table(path)
    except FileNotFoundError:
        return GateResult(name, Verdict.INCOMPLETE, {}, (f"{path} is missing",))
    except pd.errors.EmptyDataError:
        return GateResult(name, Verdict.INCOMPLETE, {}, (f"{path} is empty",))
    except (OSError, ValueError) as error:  # pandas' parser errors are ValueErrors
        problem = f"{path} cannot be read: {str(error).strip()}"
        return GateResult(name, Verdict.FAILED, {}, (problem,))
    return GATES[name](rows, protocol)


def _read_table(path: Path) -> pd.DataFrame:
    """A table as it stands in its file.

    As text, so that allocations named 007 and NA stay so; the gates read the numbers. The first
    line is read like the others: as a header, pandas would rename columns that are there twice,
    and take the first cells of longer rows for an index.
    """
    lines = pd.read_csv(path, header=None, dtype=str, keep_default_na=False, na_values=[""])
    return lines[1:].set_axis(lines.iloc[0].fillna("").tolist(), axis=1).reset_index(drop=True)


def protocol_of(root: Path, named: str | None) -> Protocol:
    """The protocol that was asked for, else the one in ``protocol.json``, else version 1.

    Raises:
        ValueError: If it cannot be read.
    """
    own = root / "protocol.json"
    if named is not None:
        return Protocol.load(named)
    return Protocol.load(own if own.is_file() else "1")


def tables_of(root: Path, candidate: str | None = None) -> tuple[Path, str | None]:
    """Where a candidate's tables are, and its id; a folder that is no campaign has its own tables.

    In a campaign they are what the candidate's results say, and every frozen byte is as it was.

    Args:
        root: A campaign's folder, or one with tables.
        candidate: Its id; None takes the only one that was collected.

    Raises:
        ValueError: If no candidate was collected, or several were and none is named, or one is
            named and the folder is no campaign.
        EvidenceError: If a campaign's frozen bytes or the candidate's tables were changed.
    """
    if not (root / "manifest.json").is_file():
        if candidate is not None:
            raise ValueError(f"{root} is no campaign, so it has no candidate {candidate}")
        return root, None
    manifest, folder = verify_all(root), root / QUALIFICATIONS
    if candidate is None:
        collected = sorted(path.name for path in folder.glob("[!.]*"))
        if not collected:
            raise ValueError(f"{folder} has no candidate's tables; collect them first")
        if len(collected) > 1:
            raise ValueError(f"name one of the candidates {collected} with --candidate")
        (candidate,) = collected
    verify_tables(root, manifest, candidate)
    return folder / candidate, candidate


def add_tables_options(parser: argparse.ArgumentParser) -> None:
    """``root``, ``--candidate`` and ``--protocol``, as every command that reads tables has them."""
    parser.add_argument(
        "root",
        type=Path,
        help="A campaign's folder, or one with performance.csv, numerical.csv and convergence.csv.",
    )
    parser.add_argument(
        "--candidate",
        metavar="ID",
        help="Of a campaign, the candidate to judge (default: the only one that was collected).",
    )
    parser.add_argument(
        "--protocol",
        metavar="VERSION|FILE",
        help="A final version, or a protocol's JSON file (default: ROOT/protocol.json where there "
        "is one, else 1).",
    )


def main(args: Sequence[str] | None = None, prog: str = "tinyllm accept") -> int:
    """Runs the command; its exit code: 0 pass, 1 not qualified, 2 incomplete or invalid."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Decide by frozen gates whether a candidate may replace the native backend. "
        "Exits 0 for a pass, 1 if the candidate is not qualified, 2 if anything is missing or "
        "does not count.",
    )
    add_tables_options(parser)
    parser.add_argument("--json", action="store_true", help="Print everything as JSON.")
    options = parser.parse_args(args)
    try:
        tables, candidate = tables_of(options.root, options.candidate)
        if candidate is not None:
            verify_retained(options.root)
        found = qualify(tables, protocol_of(options.root, options.protocol))
    except (EvidenceError, OSError, ValueError) as error:
        sys.stderr.write(f"{prog}: error: {error}\n")
        return 2
    if options.json:
        print(json.dumps(found.to_dict(), indent=1, allow_nan=False))
    else:
        print(found.to_text())
    return EXIT_CODES[found.verdict]
