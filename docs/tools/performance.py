"""Performance pages of the site, from the results in ``benchmarks/``; a hook of mkdocs.

A result is named ``what_hardware_date``: a JSON file, a CSV file, or a folder with a JSON file,
tables and figures. The newest of each what and hardware stands on the page of results, the others
on that of earlier reports. A qualification, a folder with a ``qualification.md``, becomes a page of
its own.
"""

import ast
import csv
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

_NAME = re.compile(r"(?P<what>.+)_(?P<hardware>[^_]+)_(?P<date>\d{4}-\d{2}-\d{2})")
_RATE = "tokens_per_second"
_RATIO = "ratio_to_native"
_LONG_TABLE_ROWS = 30  # longer ones are folded
_FEW_KINDS = 6
_TO = "\N{NO-BREAK SPACE}\N{EN DASH}\N{NO-BREAK SPACE}"
_COLORS = {"native": "#6e7781", "gh200": "#1f6feb"}
_INK = "#24292f"
_INTRODUCTION = """\
# Performance

What this project's own scripts in `benchmarks/` have measured, one section for each question and
machine. Rates are of complete updates; the method stands below each table. Absolute figures move
between machines: compare what was measured in one run.

What was tried, with what was expected and what came out, is in the [notes on speed](notes.md);
results that newer ones have replaced are among the [earlier reports](archive.md).
"""
_ARCHIVE = """\
# Earlier reports

Results that newer ones of the same question and machine have replaced, newest first.
"""


@dataclass(frozen=True)
class Row:
    """One measurement: where it stands in its file, such as case and backend, and its values."""

    labels: tuple[str, ...]
    values: dict[str, Any]


@dataclass(frozen=True)
class Report:
    """One result.

    Attributes:
        name: Of its file or folder, without a suffix.
        what, hardware, date: The parts of the name.
        content: What its JSON file holds, or a CSV file's rows.
        files: Tables and figures that belong to it, by name.
    """

    name: str
    what: str
    hardware: str
    date: str
    content: dict[str, Any]
    files: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> "Report":
        """Reads a result; its name says what it is about."""
        match = _NAME.fullmatch(path.name if path.is_dir() else path.stem)
        if match is None:
            raise PluginError(f"{path} is not named what_hardware_date, with the date Y-M-D")
        paths = [p for p in sorted(path.iterdir()) if p.is_file()] if path.is_dir() else [path]
        texts = {p: p.read_text(encoding="utf-8") for p in paths}
        content: dict[str, Any] = {}
        for file, text in texts.items():
            if file.suffix == ".json":
                content |= json.loads(text)
        if not content:  # tables alone
            for file, text in texts.items():
                if file.suffix == ".csv":
                    rows = csv.DictReader(text.splitlines())
                    content[file.stem] = [{k: _value(v) for k, v in row.items()} for row in rows]
        if "method" not in content:
            content["method"] = _docstring(path.with_name(f"{match['what']}.py"))
        name = match[0]
        files = {p.name if p.stem == name else f"{name}-{p.name}": t for p, t in texts.items()}
        return cls(name, **match.groupdict(), content=content, files=files)

    @property
    def tables(self) -> list[tuple[str, list[Row]]]:
        """Tables with their titles."""
        found = []
        for run in self.content.get("runs", [self.content]):
            for key, value in run.items():
                rows = list(_rows(value))
                if rows:
                    plain = key in ("cases", self.name)  # there is no more to say
                    title = run.get("code", "") if plain else key.replace("_", " ")
                    found.append((str(title), rows))
        return found

    @property
    def has_rates(self) -> bool:
        """Whether it measures how fast training is."""
        return any(_RATE in row.values for _, rows in self.tables for row in rows)


def _value(text: str) -> Any:
    """A cell of a CSV file."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _docstring(script: Path) -> str:
    """How a script says that it measures."""
    if not script.is_file():
        return ""
    return ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""


def _rows(node: Any, labels: tuple[str, ...] = ()) -> Iterator[Row]:
    """Every dictionary of numbers in a node, under the keys or the names that lead to it."""
    if isinstance(node, Mapping):
        if labels and any(isinstance(v, int | float) for v in node.values()):
            yield Row(labels, dict(node))
            return
        for key, value in node.items():
            yield from _rows(value, (*labels, str(key)))
    elif isinstance(node, list) and all(isinstance(item, Mapping) for item in node):
        for item in node:
            name = next((k for k, v in item.items() if isinstance(v, str)), None)
            values = {k: v for k, v in item.items() if k != name}
            yield Row((*labels, str(item.get(name, ""))), values)


# --- tables -----------------------------------------------------------------------------------


def _scaled(name: str, value: float) -> str:
    """A number as it is read best, in the unit that :func:`_heading` names."""
    if name.endswith(_RATE):
        return f"{value / 1e6:.3f}"
    if name.endswith("_bytes"):
        return f"{value / 2**30:.2f}"
    if name.startswith("ratio") or name.endswith(("_gib", "_ms")):
        return f"{value:.2f}"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _cell(name: str, value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return "" if value is None else str(value).lower()
    if isinstance(value, int | float):
        return _scaled(name, value)
    if isinstance(value, list) and value and all(isinstance(v, int | float) for v in value):
        return _TO.join(_scaled(name, end) for end in (min(value), max(value)))
    return str(value)


def _heading(name: str) -> str:
    units = {
        f"windows_{_RATE}": "windows, M tokens/s",
        _RATE: "M tokens/s",
    }
    for ending, unit in (("_bytes", "GiB"), ("_gib", "GiB"), ("_seconds", "s"), ("_ms", "ms")):
        if name.endswith(ending):
            return f"{name.removesuffix(ending).replace('_', ' ')}, {unit}"
    return units.get(name, name.replace("_", " "))


def _with_ratios(rows: list[Row]) -> list[Row]:
    """Adds each backend's rate over native's, where a case has both."""
    native = {row.labels[:-1]: row.values for row in rows if row.labels[-1] == "native"}
    others = any(row.labels[-1] != "native" and row.labels[:-1] in native for row in rows)
    if not others:
        return rows
    done = []
    for row in rows:
        base, rate = native.get(row.labels[:-1], {}).get(_RATE), row.values.get(_RATE)
        compared = base and rate and row.labels[-1] != "native"
        ratio = {_RATIO: rate / base} if compared else {}
        done.append(Row(row.labels, row.values | ratio))
    return done


def _table(rows: list[Row]) -> str:
    """The rows in Markdown: labels, then values, in the order in which they first appear."""
    depth = max(len(row.labels) for row in rows)
    names = list(dict.fromkeys(name for row in rows for name in row.values))
    if _RATIO in names:
        names.remove(_RATIO)
        names.insert(names.index(_RATE) + 1, _RATIO)
    labels = (["case", "backend"] if _RATE in names else []) + [""] * depth
    lines = [
        [*labels[:depth], *map(_heading, names)],
        [*["---"] * depth, *["---:"] * len(names)],
        *(
            [
                *row.labels,
                *[""] * (depth - len(row.labels)),
                *(_cell(n, row.values.get(n)) for n in names),
            ]
            for row in rows
        ),
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _largest(rows: list[Row]) -> str:
    """For a long table the largest of each measured number, by what tells a few kinds of row."""
    texts = {name for row in rows for name, value in row.values.items() if isinstance(value, str)}
    kinds = {name: {row.values.get(name) for row in rows} for name in sorted(texts)}
    few = {name: len(found) for name, found in kinds.items() if 1 < len(found) <= _FEW_KINDS}
    if not few:
        return ""
    name = min(few, key=lambda name: few[name])
    columns = [key for key, value in rows[0].values.items() if isinstance(value, float)]
    largest = []
    for kind in dict.fromkeys(row.values[name] for row in rows):
        own = [row.values for row in rows if row.values[name] == kind]
        values = {key: max(float(v[key]) for v in own) for key in columns}
        largest.append(Row((str(kind),), values))
    return "The largest of each:\n\n" + _table(largest)


def _csv(report: Report) -> str:
    """All numbers of a report, unrounded; lists are written with spaces between their items."""
    rows = [(title, row) for title, table in report.tables for row in table]
    depth = max((len(row.labels) for _, row in rows), default=0)
    names = list(dict.fromkeys(name for _, row in rows for name in row.values))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    labels = ["case", "backend", *(f"label_{i}" for i in range(2, depth))][:depth]
    writer.writerow(["table", *labels, *names])
    for title, row in rows:
        values = (row.values.get(name, "") for name in names)
        cells = (" ".join(map(str, v)) if isinstance(v, list) else v for v in values)
        writer.writerow([title, *row.labels, *[""] * (depth - len(row.labels)), *cells])
    return out.getvalue()


def _chart(rows: list[Row]) -> str | None:
    """Tokens per second as bars, in SVG; None where there are none."""
    rated = [(row, row.values[_RATE] / 1e6) for row in rows if _RATE in row.values]
    if not rated:
        return None
    import matplotlib as mpl
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys(row.labels[0] for row, _ in rated))
    backends = list(dict.fromkeys(row.labels[1] for row, _ in rated if len(row.labels) > 1))
    height = 0.8 / max(1, len(backends))
    bars = 0.28 * len(cases) * max(1, len(backends))
    figure = Figure(figsize=(8, 0.7 + bars + (0.3 if len(backends) > 1 else 0)))
    axes = figure.add_subplot()
    for row, rate in rated:
        index = backends.index(row.labels[1]) if backends and len(row.labels) > 1 else 0
        y = cases.index(row.labels[0]) + (index - (len(backends) - 1) / 2) * height * bool(backends)
        color = _COLORS.get(row.labels[-1], "#1f6feb")
        axes.barh(y, rate, height * 0.9, color=color)
        axes.text(rate, y, f" {rate:.2f}", va="center", fontsize=9, color=_INK)
    axes.set_yticks(range(len(cases)), cases, fontsize=9, color=_INK)
    axes.invert_yaxis()
    axes.set_xlabel("M tokens/s", fontsize=9, color=_INK)
    axes.margins(x=0.1)
    axes.tick_params(colors=_INK, labelsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if len(backends) > 1:
        handles = [mpl.patches.Patch(color=_COLORS.get(b, "#1f6feb"), label=b) for b in backends]
        place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": len(backends)}
        axes.legend(handles=handles, fontsize=9, frameon=False, **place)
    figure.tight_layout()
    out = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "tinyllm"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


# --- pages ------------------------------------------------------------------------------------


def _section(report: Report, generated: dict[str, str]) -> str:
    """One report; what it shows beside its text is added to ``generated``."""
    name, content = report.name, report.content
    generated |= report.files
    parts = [f"## {_title(report.name)}"]
    facts = {
        key: value
        for key, value in content.items()
        if isinstance(value, str | int | float) and key != "method" and value != ""
    }
    parts.append(", ".join(f"{k.replace('_', ' ')} {_cell(k, v)}" for k, v in facts.items()))
    parts += [f"![{report.what}]({file})" for file in report.files if file.endswith(".svg")]
    for number, (title, rows) in enumerate(report.tables):
        if title:
            parts.append(f"**{title[0].upper()}{title[1:]}**")
        chart = _chart(rows)
        if chart is not None:
            image = f"{name}-{number}.svg"
            generated[image] = chart
            cases = ", ".join(dict.fromkeys(row.labels[0] for row in rows))
            parts.append(f"![Tokens per second of {cases}]({image})")
        table = _table(_with_ratios(rows))
        if len(rows) <= _LONG_TABLE_ROWS:
            parts.append(table)
        else:
            parts += [_largest(rows), _folded(f"All {len(rows)} rows", table)]
    method = str(content.get("method", "")).strip()
    if method:
        parts.append(_folded("Method", f"```text\n{method}\n```"))
    if not any(file.endswith(".csv") for file in report.files):
        generated[f"{name}.csv"] = _csv(report)
    linked = [file for file in {**report.files, f"{name}.csv": ""} if file in generated]
    kinds = [f"[{file.rpartition('.')[2].upper()}]({file})" for file in linked]
    parts.append(f"All numbers, unrounded: {', '.join(kinds)}")
    return "\n\n".join(part for part in parts if part) + "\n"


def _title(name: str) -> str:
    """``what_hardware_date`` as it is read."""
    match = _NAME.fullmatch(name)
    if match is None:
        return name
    hardware = re.sub(r"X(\d+)$", " \N{MULTIPLICATION SIGN} \\1", match["hardware"].upper())
    return f"{match['what'].replace('_', ' ')}, {hardware}, {match['date']}"


def _folded(title: str, text: str) -> str:
    """A block that opens on a click."""
    indented = "\n".join(f"    {line}" if line else "" for line in text.splitlines())
    return f'??? note "{title}"\n\n{indented}'


def pages(benchmarks: Path) -> dict[str, str]:
    """Files of the site's folder ``performance``, by name: pages, charts and tables.

    Args:
        benchmarks: The folder with the results.

    Raises:
        PluginError: If one is not named as results are.
    """
    reports = sorted(map(Report.read, _results(benchmarks)), key=lambda r: (r.what, r.date))
    newest = {(report.what, report.hardware): report for report in reports}
    # rates of training first, then by date
    current = sorted(newest.values(), key=lambda r: (r.has_rates, r.date), reverse=True)
    earlier = [report for report in reversed(reports) if report not in current]
    generated: dict[str, str] = {}
    shown = [_section(report, generated) for report in current]
    archived = [_section(report, generated) for report in earlier]
    index = [_INTRODUCTION]
    if qualified := _qualified(benchmarks):
        index.append("Both backends by the gates of a qualification:\n")
        index += [f"- [{_title(f.name)}]({f.name}/qualification.md)" for f in qualified]
        index.append("")
    generated["index.md"] = "\n".join([*index, *(shown or ["There are no results yet.\n"])])
    generated["archive.md"] = "\n".join([_ARCHIVE, *(archived or ["There are none yet.\n"])])
    return generated


def _results(benchmarks: Path) -> Sequence[Path]:
    """Files and folders that hold results."""
    folders = [p for p in benchmarks.iterdir() if p.is_dir() and not p.name.startswith("__")]
    own = [folder for folder in folders if folder not in _qualified(benchmarks)]
    return sorted([*benchmarks.glob("*.json"), *benchmarks.glob("*.csv"), *own])


def _qualified(benchmarks: Path) -> list[Path]:
    return sorted(path.parent for path in benchmarks.glob("*/qualification.md"))


def on_config(config: MkDocsConfig) -> None:
    """Adds the qualifications to the navigation."""
    found = _qualified(_benchmarks(config))
    if found:
        section = next(entry for entry in config.nav or [] if "Performance" in entry)
        section["Performance"][1:1] = [
            {_title(folder.name): f"performance/{folder.name}/qualification.md"} for folder in found
        ]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages, and what belongs to them."""
    benchmarks = _benchmarks(config)
    for name, content in pages(benchmarks).items():
        files.append(File.generated(config, f"performance/{name}", content=content))
    for folder in _qualified(benchmarks):
        for path in (p for p in folder.iterdir() if p.suffix in (".md", ".svg", ".csv", ".json")):
            name = f"performance/{folder.name}/{path.name}"
            content = _kept_only(path) if path.suffix == ".md" else path.read_bytes()
            files.append(File.generated(config, name, content=content))
    return files


def _kept_only(page: Path) -> str:
    """A page without its links to tables that have not been kept beside it."""

    def link(match: re.Match[str]) -> str:
        there = (page.parent / match[2]).exists()
        return match[0] if there else f"{match[1]} (not kept)"

    text = page.read_text(encoding="utf-8")
    return re.sub(r"(?<!!)\[([^\]]+)\]\(([\w.-]+)\)", link, text)


def _benchmarks(config: MkDocsConfig) -> Path:
    return Path(config.docs_dir).parent / "benchmarks"
