"""From a campaign's results to the tables that ``tinyllm accept`` reads, for each candidate."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from tinyllm.acceptance.convergence import CONVERGENCE_COLUMNS
from tinyllm.acceptance.evidence import (
    QUALIFICATIONS,
    EvidenceError,
    Manifest,
    verify_all,
    verify_candidate,
)
from tinyllm.acceptance.files import replace_file
from tinyllm.acceptance.measure import NATIVE, job_name
from tinyllm.acceptance.numerical import NUMERICAL_COLUMNS
from tinyllm.acceptance.performance import COSTS, performance_columns
from tinyllm.acceptance.retained import require_retained
from tinyllm.acceptance.runs import read_result
from tinyllm.acceptance.seals import inputs_of_complete_report

_CURVE_COLUMNS = ["recipe", "seed", "side", "update", "train_tokens", "loss", "protocol"]


def collect(root: Path, candidate: str, folder: Path | None = None) -> dict[str, int]:
    """Writes a candidate's tables and its protocol; gives the tables' numbers of rows.

    What is not measured yet is not in them, which ``tinyllm accept`` calls incomplete.

    Args:
        root: The campaign's folder.
        candidate: Id of a frozen candidate.
        folder: Where they go; None takes ``qualifications/ID`` in the root.

    Raises:
        EvidenceError: If anything frozen has changed, if there is a complete report of other
            tables, or as :func:`tables_from_results`.
    """
    manifest = verify_all(root)
    tables = tables_from_results(root, manifest, candidate)
    place = root / QUALIFICATIONS / candidate if folder is None else folder
    contents = _files_of(tables)
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
    if inputs_of_complete_report(place) not in (None, hashes):
        raise EvidenceError(
            f"{place} holds a complete report, and there are more results by now; its tables stay. "
            "To judge all results, move the folder away and collect again"
        )
    replace_file(place / "protocol.json", manifest.protocol.to_json())
    for name, data in contents.items():
        replace_file(place / name, data)
    return {name: len(table) for name, table in tables.items()}


def verify_tables(root: Path, manifest: Manifest, candidate: str) -> None:
    """Checks that a candidate's tables say what its results say; the manifest is verified.

    Raises:
        EvidenceError: If one does not, or as :func:`tables_from_results`.
    """
    for name, data in _files_of(tables_from_results(root, manifest, candidate)).items():
        path = root / QUALIFICATIONS / candidate / name
        if path.is_file() and path.read_bytes() != data:
            raise EvidenceError(
                f"{path} is not what the results of {candidate} say: there are more by now, or it "
                "was changed; collect again"
            )


def _files_of(tables: dict[str, pd.DataFrame]) -> dict[str, bytes]:
    """Names and bytes of the files that tables are kept in."""
    return {f"{name}.csv": table.to_csv(index=False).encode() for name, table in tables.items()}


def tables_from_results(root: Path, manifest: Manifest, candidate: str) -> dict[str, pd.DataFrame]:
    """A candidate's tables by name, from the results of a campaign; the manifest is verified.

    Raises:
        EvidenceError: If the candidate is not frozen or has changed, or a result was made under
            another manifest or candidate.
    """
    frozen, protocol = verify_candidate(root, candidate), manifest.protocol
    identities = {NATIVE: "", candidate: frozen.identity}

    def rows(kind: str, parts: Sequence[str], *owners: str, key: str = "rows") -> list[Any]:
        found: list[dict[str, Any]] = []
        for part in parts:
            for owner in owners:
                name = job_name(owner, kind, part)
                result = read_result(root, name)
                if result is None:
                    continue
                made = (result.get("manifest"), result.get("candidate"))
                if made != (manifest.identity, identities[owner]):
                    raise EvidenceError(f"{name} was measured under another manifest or candidate")
                try:
                    for inputs in result.get("inputs", {}).values():
                        require_retained(root, [inputs["initial"], *inputs["rows"]])
                    found += [dict(row) for row in result[key]]
                except (AttributeError, KeyError, TypeError, ValueError) as error:
                    raise EvidenceError(f"the result of {name} is damaged: {error!r}") from error
        return found

    def runs(key: str) -> list[Any]:
        parts = [run.id for run in protocol.convergence_runs()]
        both = rows("convergence", parts, NATIVE, candidate, key=key)
        return both + rows("controls", parts, NATIVE, key=key)

    workloads, pairs = [w.id for w in protocol.workloads], [p.id for p in protocol.pairs()]
    tables = {
        "performance": ([*performance_columns(protocol), *COSTS], rows("pairs", pairs, candidate)),
        "numerical": (NUMERICAL_COLUMNS, rows("numerical", workloads, candidate)),
        "convergence": (list(CONVERGENCE_COLUMNS), runs("rows")),
        "validation-curves": (_CURVE_COLUMNS, runs("curve")),
    }
    return {name: pd.DataFrame(found, columns=columns) for name, (columns, found) in tables.items()}
