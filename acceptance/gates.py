"""What all gates share: verdicts, results, and the checks that every table goes through."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import pandas as pd

from tinyllm.acceptance.protocol import Protocol

_EXAMPLES = 4  # places that a message names; the rest are counted


class Verdict(StrEnum):
    """What a gate decides; only ``pass`` lets a candidate through."""

    PASS = "pass"
    NOT_QUALIFIED = "not_qualified"  # complete and valid, and not good enough
    INCOMPLETE = "incomplete"  # something has not been measured
    FAILED = "failed"  # something was measured in a way that does not count


_SEVERITY = list(Verdict)


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict that decides: failed, else incomplete, else not_qualified, else pass."""
    return max(verdicts, key=_SEVERITY.index, default=Verdict.PASS)


@dataclass(frozen=True)
class GateResult:
    """What a gate found.

    Attributes:
        gate: Its name.
        verdict: The decision.
        tables: What it was decided on, by name; the ones to read first come first.
        messages: What is wrong, a sentence each; empty for a pass.
    """

    gate: str
    verdict: Verdict
    tables: dict[str, pd.DataFrame]
    messages: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """All of it for JSON; numbers that are not finite become None."""
        return {
            "gate": self.gate,
            "verdict": self.verdict.value,
            "messages": list(self.messages),
            "tables": {
                name: json.loads(table.to_json(orient="records", double_precision=15))
                for name, table in self.tables.items()
            },
        }


@dataclass
class Findings:
    """Collects what is wrong; the same problem at many places becomes one message."""

    _places: dict[tuple[Verdict, str], list[str]] = field(default_factory=dict)

    def add(self, verdict: Verdict, problem: str, places: Iterable[str] = ()) -> None:
        """Notes a problem, and where it was found."""
        self._places.setdefault((verdict, problem), []).extend(places)

    def add_any(self, verdict: Verdict, problem: str, places: Iterable[str]) -> None:
        """Notes a problem if there is any place where it was found."""
        if found := list(places):
            self.add(verdict, problem, found)

    @property
    def verdict(self) -> Verdict:
        """The worst that was noted; pass when nothing was."""
        return worst(verdict for verdict, _ in self._places)

    @property
    def messages(self) -> tuple[str, ...]:
        """One message per problem, the gravest first."""
        ordered = sorted(self._places, key=lambda found: -_SEVERITY.index(found[0]))
        return tuple(_sentence(problem, self._places[v, problem]) for v, problem in ordered)


def _sentence(problem: str, places: Sequence[str]) -> str:
    unique = list(dict.fromkeys(places))
    if not unique:
        return problem
    more = len(unique) - _EXAMPLES
    return f"{problem}: {', '.join(unique[:_EXAMPLES])}" + (f" and {more} more" if more > 0 else "")


def conclude(gate: str, findings: Findings, tables: dict[str, pd.DataFrame]) -> GateResult:
    """A gate's result: the worst of what was noted and of the verdicts in its tables.

    A verdict stands in a table's column ``gate``. One that nothing noted explains comes from
    numbers that overflow, and is noted here.
    """
    known = set(Verdict)
    for name, table in tables.items():
        stated = [Verdict(cell) for cell in table.get("gate", ()) if cell in known]
        if _SEVERITY.index(worst(stated)) > _SEVERITY.index(findings.verdict):
            findings.add(worst(stated), f"{name}: some results are no finite numbers")
    return GateResult(gate, findings.verdict, tables, findings.messages)


def at_least(value: float, threshold: float, protocol: Protocol) -> bool:
    """Whether a value reaches a threshold; at it is enough. False for NaN."""
    return value >= threshold - protocol.threshold_rounding


def below(value: float, threshold: float, protocol: Protocol) -> bool:
    """Whether a value is strictly below a threshold; at it is not. False for NaN."""
    return value < threshold - protocol.threshold_rounding


class RowChecks:
    """A table under inspection: its columns in the right types, and which rows still count.

    Attributes:
        rows: The columns that the gate asked for; text as str, everything else as float.
        good: True for each row that passed all checks so far.
    """

    def __init__(
        self,
        rows: pd.DataFrame | None,
        *,
        text: Sequence[str],
        numbers: Sequence[str],
        label: Sequence[str],
        findings: Findings,
        optional: Sequence[str] = (),
    ) -> None:
        """Reads the columns; a table that lacks some has no rows that count.

        Args:
            rows: Any table; None and empty ones are incomplete.
            text: Names of the columns to read as text.
            numbers: Names of the columns to read as numbers; what is none becomes NaN.
            label: Columns whose values name a row in messages.
            findings: Where problems are noted.
            optional: Names of other columns that the gate reads where they are there.
        """
        wanted = [*text, *numbers]
        self.findings = findings
        self.rows = pd.DataFrame(columns=wanted)
        if rows is None or rows.empty:
            findings.add(Verdict.INCOMPLETE, "there are no rows")
        elif missing := [name for name in wanted if name not in rows.columns]:
            findings.add(Verdict.FAILED, "the table lacks columns", missing)
        elif twice := [n for n in (*wanted, *optional) if list(rows.columns).count(n) > 1]:
            findings.add(Verdict.FAILED, "the table has columns more than once", twice)
        else:
            self.rows = rows[wanted].reset_index(drop=True)
        for name in text:
            column = self.rows[name]
            self.rows[name] = column.astype(object).where(column.notna(), "").map(_text)
        for name in numbers:
            column = pd.to_numeric(self.rows[name], errors="coerce")
            self.rows[name] = column.astype(float)
        self.good = pd.Series(True, index=self.rows.index)
        parts = [self.rows[name].map(_text) for name in label]
        names = [
            " ".join(f"{name} {value}" if i else value for i, (name, value) in enumerate(both))
            for both in (zip(label, values, strict=True) for values in zip(*parts, strict=True))
        ]
        self.labels = pd.Series(names, index=self.rows.index, dtype=object)

    def require(self, holds: pd.Series, problem: str) -> None:
        """Rules rows out for which a condition does not hold."""
        wrong = ~holds.astype(bool)
        if wrong.any():
            self.findings.add(Verdict.FAILED, problem, self.labels[wrong])
            self.good &= ~wrong

    def require_protocol(self, protocol: Protocol) -> None:
        """Rules rows out that were measured under another protocol."""
        for found in self.rows["protocol"].unique():
            if found != protocol.hash:
                self.require(
                    self.rows["protocol"] != found,
                    f"measured under protocol {found[:12] or '(none)'}, not under version "
                    f"{protocol.version} ({protocol.hash[:12]})",
                )

    def require_one_of(self, column: str, allowed: Iterable[Any], what: str) -> None:
        """Rules rows out whose value in a column is not among the allowed ones."""
        self.require(self.rows[column].isin(list(allowed)), what)

    def require_finite(
        self, columns: Sequence[str], *, positive: bool = False, among: pd.Series | None = None
    ) -> None:
        """Rules rows out with NaN, infinite, negative, or, if asked, zero values.

        Args:
            columns: Where to look.
            positive: Whether zero is wrong, too.
            among: True for the rows to look at; None takes all.
        """
        elsewhere = False if among is None else ~among
        for column in columns:
            values = self.rows[column]
            if positive:
                fits, kind = (values > 0) & (values < math.inf), "a finite number above 0"
            else:
                fits, kind = (values >= 0) & (values < math.inf), "a finite number of at least 0"
            self.require(fits | elsewhere, f"{column} is not {kind}")

    def require_unique(self, columns: Sequence[str]) -> None:
        """Rules all rows out that share their values in these columns with another row."""
        twice = self.rows.duplicated(list(columns), keep=False)
        self.require(~twice, "more than one row")

    def counted(self) -> pd.DataFrame:
        """The rows that passed all checks."""
        return self.rows[self.good]


def _text(value: object) -> str:
    """A cell as text; whole numbers lose the ``.0`` that a column with gaps gives them."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).strip()
