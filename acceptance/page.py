"""The page of a qualification, in Markdown: verdicts, figure, tables, and what they rest on."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from tinyllm.acceptance.accept import Qualification
from tinyllm.acceptance.figure import words
from tinyllm.acceptance.numerical import COMPARISONS
from tinyllm.acceptance.protocol import SIDES, Protocol


def qualification_page(
    found: Qualification,
    missing: Mapping[str, Sequence[str]],
    origin: Mapping[str, Any],
    *,
    partial: bool,
) -> str:
    """The page.

    Args:
        found: What the gates said; each gate with all of its tables.
        missing: What was not measured, by gate.
        origin: What ``provenance`` returned, and ``inputs``.
        partial: Whether to mark it as the report of an unfinished campaign.
    """
    protocol = found.protocol
    tables = {name: table for gate in found.gates for name, table in gate.tables.items()}
    title = f"# Qualification: {words(found.verdict)}"
    parts = [f"{title} (PARTIAL)" if partial else title]
    if partial:
        parts.append(
            "> **Partial report.** The campaign is not finished: what follows is no qualification, "
            "and [what is missing](#what-is-missing) is listed below."
        )
    if origin["candidate"] is not None:
        parts.append(_candidate(origin["candidate"]))
    parts += [
        _verdicts(found),
        "![Ratios, distances and differences against their limits](qualification.svg)",
        *_speed(tables, protocol),
        *_updates(tables, protocol),
        *_losses(tables, protocol),
        *_problems(found),
        *_missing(missing),
        *_provenance(protocol, origin),
    ]
    return "\n\n".join(parts) + "\n"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def _number(value: Any, pattern: str) -> str:
    """A cell; a number that is not there becomes a dash."""
    return "-" if value is None or math.isnan(value) else pattern.format(value)


def _candidate(frozen: Mapping[str, Any]) -> str:
    """Which candidate it is about."""
    strategy = frozen["details"].get("strategy", frozen["details"])
    options = ", ".join(f"{name}: {json.dumps(value)}" for name, value in strategy.items())
    return f"Candidate `{frozen['id']}` (`{options}`) against native."


def _verdicts(found: Qualification) -> str:
    rows = [[gate.gate, words(gate.verdict)] for gate in found.gates]
    return _table(["gate", "verdict"], [*rows, ["**all**", f"**{words(found.verdict)}**"]])


def _speed(tables: Mapping[str, pd.DataFrame], protocol: Protocol) -> list[str]:
    repeats = range(1, protocol.repeats + 1)
    header = [f"repeat {repeat}" for repeat in repeats]

    def cells(record: Mapping[Any, Any]) -> list[str]:
        return [_number(record[f"repeat_{repeat}"], "{:.3f}") for repeat in repeats]

    parts = [
        "## Speed",
        f"Candidate/native targets per second; a side's score is the median of "
        f"{protocol.windows} windows of at least {protocol.window_seconds:g} s. Small batches: the "
        f"median over a category's workloads is at least {protocol.small_batch_ratio:g} in each "
        f"repeat. Production: each case is at least {protocol.production_ratio:g} in each repeat.",
    ]
    small = tables["small_batch"].to_dict("records")
    if small:
        rows = [[str(r["category"]), *cells(r), words(str(r["gate"]))] for r in small]
        parts.append(_table(["small-batch category", *header, "gate"], rows))
    production = tables["production"].to_dict("records")
    if production:
        rows = [[str(r["workload"]), *cells(r), words(str(r["gate"]))] for r in production]
        parts.append(_table(["production case", *header, "gate"], rows))
    ratios = tables["ratios"]
    accumulation = ratios[ratios["kind"] == "accumulate"]
    if not accumulation.empty:
        rows = [
            [str(name), *(_number(ratio, "{:.3f}") for ratio in group["ratio"])]
            for name, group in accumulation.groupby("workload", sort=False)
        ]
        parts.append(_table(["accumulation, not gated", *header], rows))
    if "costs" in tables:
        parts.append(_costs(tables["costs"]))
    return [*parts, _workloads(ratios, header)]


def _workloads(ratios: pd.DataFrame, header: Sequence[str]) -> str:
    """Every workload by itself, folded: there may be a hundred of them."""
    rows = []
    for name, group in ratios.groupby("workload", sort=False):
        rates = [group[f"{side}_tokens_per_second"].median() / 1e6 for side in SIDES]
        cells = [_number(rate, "{:.3f}") for rate in rates]
        rows.append([str(name), *cells, *(_number(ratio, "{:.3f}") for ratio in group["ratio"])])
    units = [f"{side}, M targets/s" for side in SIDES]
    table = _table(["workload", *units, *header], rows)
    return f"<details><summary>Every workload</summary>\n\n{table}\n\n</details>"


def _costs(costs: pd.DataFrame) -> str:
    """Medians that decide nothing; bytes as GiB."""
    names = [str(name) for name in costs.columns if name not in ("kind", "category", "side")]
    rows = []
    for record in costs.to_dict("records"):
        cells = [
            _number(record[name] / 2**30 if name.endswith("_bytes") else record[name], "{:.3g}")
            for name in names
        ]
        rows.append([f"{record['kind']}, {record['category']}", str(record["side"]), *cells])
    units = [
        name.replace("_bytes", ", GiB").replace("_seconds", ", s").replace("_", " ")
        for name in names
    ]
    return _table(["median, not gated", "side", *units], rows)


def _updates(tables: Mapping[str, pd.DataFrame], protocol: Protocol) -> list[str]:
    rows = [
        [
            str(record["quantity"]),
            *(_number(record[name], "{:.3g}") for name in COMPARISONS),
            _number(record["limit"], "{:g}"),
        ]
        for record in tables["worst"].to_dict("records")
    ]
    return [
        "## Numbers",
        f"The largest relative L2 of any worker over {protocol.numerical_updates} matched updates "
        "from one initial state, and the largest share of the tolerance that a loss uses. Controls "
        "are two independently built native executors; no limit applies to them.",
        _table(["quantity (worst)", *COMPARISONS, "limit"], rows),
    ]


def _losses(tables: Mapping[str, pd.DataFrame], protocol: Protocol) -> list[str]:
    rows = [
        [
            str(record["recipe"]),
            *(_number(record[name], "{:.6f}") for name in ("native_mean", "candidate_mean")),
            _number(record["difference"], "{:+.6f}"),
            _number(record["upper_bound"], "{:.6f}"),
            words(str(record["gate"])),
        ]
        for record in tables["convergence"].to_dict("records")
    ]
    needed = f"seeds_for_{protocol.power:g}"
    power = [
        [
            str(record["recipe"]),
            _number(record["seeds"], "{:.0f}"),
            _number(record["paired_sd"], "{:.3g}"),
            str(record["spread_of"]),
            _number(record["equal_candidate_passes"], "{:.3f}"),
            _number(record[needed], "{:.0f}"),
        ]
        for record in tables["power"].to_dict("records")
    ]
    return [
        "## Convergence",
        "Final loss in nats over the full validation split; differences are candidate - native, "
        f"paired by seed, and the upper {protocol.confidence:.0%} bound of their mean is below "
        f"{protocol.convergence_margin:g}.",
        _table(
            [
                *("recipe", "native mean", "candidate mean", "difference"),
                *(f"upper {protocol.confidence:.0%}", "gate"),
            ],
            rows,
        ),
        "How likely a candidate that truly equals native passes, given the spread of paired "
        f"differences, and how many seeds make that {protocol.power:g}:",
        _table(
            [
                *("recipe", "seeds", "paired sd", "spread of", "an equal one passes"),
                f"seeds for {protocol.power:g}",
            ],
            power,
        ),
    ]


def _problems(found: Qualification) -> list[str]:
    lines = [f"- {gate.gate}: {message}" for gate in found.gates for message in gate.messages]
    return ["## What is wrong", "\n".join(lines)] if lines else []


def _missing(missing: Mapping[str, Sequence[str]]) -> list[str]:
    """A list for each gate, folded: it may have hundreds of entries."""
    lists = [
        f"<details><summary>{gate}: {len(names)}</summary>\n\n"
        + "\n".join(f"- {name}" for name in names)
        + "\n\n</details>"
        for gate, names in missing.items()
        if names
    ]
    return ["## What is missing", *lists] if lists else []


def _provenance(protocol: Protocol, origin: Mapping[str, Any]) -> list[str]:
    manifest = origin["manifest"]
    rows = [["protocol", f"version {protocol.version}, `{protocol.hash}`"]]
    if manifest is None:
        rows.append(["manifest", "none: nothing was frozen"])
    else:
        rows.append(["manifest", f"`{manifest['identity']}`"])
        rows.append(["token cache", f"`{manifest['token_cache']}`"])
    if origin["candidate"] is not None:
        rows.append(["candidate", f"`{origin['candidate']['identity']}`"])
    rows += [[f"[{name}]({name})", f"`{digest}`"] for name, digest in origin["inputs"].items()]
    rows.append(["receipts", str(len(origin["receipts"]))])
    rows.append(["failed attempts", str(len(origin["failed_attempts"]))])
    for entry in origin["environments"]:
        text = _environment(entry["environment"])
        rows.append([f"environment of {len(entry['receipts'])} receipts", text])
    return [
        "## What it rests on",
        _table(["what", "SHA-256, or what was found"], rows),
        "All tables are in [qualification.json](qualification.json), all hashes in "
        "[provenance.json](provenance.json).",
    ]


def _environment(noted: Any) -> str:
    if not isinstance(noted, Mapping):
        return str(noted)
    packages = noted.get("packages") or {}
    gpus = [
        f"{gpu.get('name', 'GPU')} (driver {gpu.get('driver_version', 'unknown')})"
        for gpu in noted.get("gpus") or []
    ]
    texts = [
        *(sorted(set(gpus)) or ["no GPU"]),
        str(noted.get("system", "")),
        f"Python {noted.get('python', 'unknown')}",
        *(f"{name} {number}" for name, number in packages.items()),
    ]
    return ", ".join(text for text in texts if text)
