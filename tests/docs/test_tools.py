"""The tools that make pages from results, recipes and docstrings."""

import csv
import json
from pathlib import Path
from typing import Any

import griffe
import pytest
from docstrings import Docstrings
from fences import ROOT
from mathematics import on_page_content
from mkdocs.exceptions import PluginError
from performance import _kept_only, pages
from recipes import page as recipes_page

METHOD = "How fast?\n\nFive windows; the figure is the median."


def result(rate: float, **more: Any) -> dict[str, Any]:
    windows = [rate * 0.9, rate, rate * 1.1]
    return {"tokens_per_second": rate, "windows_tokens_per_second": windows, "updates": 12, **more}


@pytest.fixture
def benchmarks(tmp_path: Path) -> Path:
    """Two reports of one question and machine, one of another machine."""
    both = {"native": result(1.5e6, startup_seconds=20.25), "gh200": result(3e6)}
    contents = {
        "fit_h200_2026-01-05": {"gpu": "H200", "method": METHOD, "cases": {"a": both}},
        "fit_h200_2025-12-31": {"method": METHOD, "cases": {"a": {"native": result(1e6)}}},
        "fit_h200x2_2025-12-30": {
            "method": METHOD,
            "runs": [
                {"code": "before", "cases": {"a": result(2e6)}},
                {"code": "after", "cases": {"a": result(4e6, peak_bytes=2**31)}},
            ],
        },
    }
    for name, content in contents.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return tmp_path


def test_the_newest_of_each_question_and_machine_are_shown(benchmarks: Path) -> None:
    found = pages(benchmarks)
    shown, archived = found["index.md"], found["archive.md"]
    assert "## fit, H200, 2026-01-05" in shown
    assert "## fit, H200 \N{MULTIPLICATION SIGN} 2, 2025-12-30" in shown
    assert "2025-12-31" not in shown
    assert "## fit, H200, 2025-12-31" in archived
    assert "2026-01-05" not in archived
    assert shown.count("Five windows; the figure is the median.") == 2
    assert "gpu H200" in shown


def test_tables_hold_the_numbers_in_their_units(benchmarks: Path) -> None:
    lines = pages(benchmarks)["index.md"].splitlines()
    heading = next(line for line in lines if line.startswith("| case | backend |"))
    assert "M tokens/s | ratio to native | windows, M tokens/s | updates | startup, s |" in heading
    to = "\N{NO-BREAK SPACE}\N{EN DASH}\N{NO-BREAK SPACE}"
    assert f"| a | gh200 | 3.000 | 2.00 | 2.700{to}3.300 | 12 |  |" in lines
    assert any(line.startswith("| a | native | 1.500 |  |") for line in lines)
    assert any(line.startswith("| a | 4.000 |") and "| 2.00 |" in line for line in lines)


def test_tables_are_there_unrounded(benchmarks: Path) -> None:
    found = pages(benchmarks)
    rows = list(csv.DictReader(found["fit_h200x2_2025-12-30.csv"].splitlines()))
    assert [row["table"] for row in rows] == ["before", "after"]
    assert float(rows[1]["tokens_per_second"]) == 4e6
    assert [float(x) for x in rows[0]["windows_tokens_per_second"].split()] == [1.8e6, 2e6, 2.2e6]
    for name in ("index.md", "archive.md"):
        linked = [part.partition(")")[0] for part in found[name].split("](")[1:]]
        assert {link for link in linked if not link.endswith(".md")} <= found.keys()


def test_a_file_of_another_name_is_refused(benchmarks: Path) -> None:
    (benchmarks / "mine.json").write_text("{}")
    with pytest.raises(PluginError, match=r"mine.json is not named what_hardware_date"):
        pages(benchmarks)


def test_a_folder_of_tables_and_figures_is_a_report(benchmarks: Path) -> None:
    folder = benchmarks / "roofline_h200_2026-01-01"
    folder.mkdir()
    parts = [{"name": f"part {i}", "count": i, "total_seconds": 0.0012} for i in range(31)]
    content = {"gpu": "H200", "update_seconds": 0.04, "method": METHOD, "parts": parts}
    (folder / "roofline.json").write_text(json.dumps(content))
    (folder / "roofline.csv").write_text("name,count\n")
    (folder / "roofline.svg").write_text("<svg/>")
    found = pages(benchmarks)
    section = found["index.md"].partition("## roofline")[2]
    assert section.startswith(", H200, 2026-01-01\n\ngpu H200, update seconds 0.04\n")
    assert "![roofline](roofline_h200_2026-01-01-roofline.svg)" in section
    assert '??? note "All 31 rows"' in section
    assert "    | part 7 | 7 | 0.0012 |\n" in section
    assert "[CSV](roofline_h200_2026-01-01-roofline.csv)" in section
    assert found["roofline_h200_2026-01-01-roofline.csv"] == "name,count\n"


def test_a_table_alone_is_a_report_and_its_script_tells_the_method(benchmarks: Path) -> None:
    (benchmarks / "matched_h200_2026-01-01.csv").write_text("workload,loss\na,0.5\nb,0.25\n")
    (benchmarks / "matched.py").write_text('"""Do they match?"""\n')
    section = pages(benchmarks)["index.md"].partition("## matched")[2]
    assert "| a | 0.5 |\n| b | 0.25 |" in section
    assert "Do they match?" in section
    assert "[CSV](matched_h200_2026-01-01.csv)" in section


def test_of_a_long_table_the_largest_are_shown(benchmarks: Path) -> None:
    lines = [f"case {i},{'left' if i % 2 else 'right'},{i},{i / 8}" for i in range(40)]
    text = "\n".join(["name,side,update,distance", *lines])
    (benchmarks / "long_h200_2026-01-01.csv").write_text(text)
    section = pages(benchmarks)["index.md"].partition("## long")[2].partition("??? note")[0]
    assert section.endswith("| right | 4.75 |\n| left | 4.875 |\n\n")


def test_qualifications_have_pages_of_their_own(benchmarks: Path) -> None:
    folder = benchmarks / "pilot_h200_2026-01-01"
    folder.mkdir()
    (folder / "qualification.md").write_text("# Qualification\n")
    shown = pages(benchmarks)["index.md"]
    assert "- [pilot, H200, 2026-01-01](pilot_h200_2026-01-01/qualification.md)" in shown
    assert "## pilot" not in shown


def test_a_qualification_links_to_what_was_kept(tmp_path: Path) -> None:
    page = tmp_path / "qualification.md"
    page.write_text("[a.csv](a.csv), [b.csv](b.csv), [below](#there), ![figure](c.svg)")
    (tmp_path / "a.csv").touch()
    kept = "[a.csv](a.csv), b.csv (not kept), [below](#there), ![figure](c.svg)"
    assert _kept_only(page) == kept


def test_no_results_make_pages_too(tmp_path: Path) -> None:
    assert "There are no results yet." in pages(tmp_path)["index.md"]


def test_recipes_are_those_of_the_files() -> None:
    shown = recipes_page(ROOT / "configs")
    table = [line for line in shown.splitlines() if line.startswith("| [")]
    rows = {line[3:].partition("]")[0]: line.rstrip(" |") for line in table}
    times = "\N{NO-BREAK SPACE}\N{MULTIPLICATION SIGN}\N{NO-BREAK SPACE}"
    assert rows["20m"].endswith(f"| synchronous | 128{times}1024 | 0.0056 | 0.9, 0.98 | 3,114")
    assert "| awc, adaptive | 4" in rows["packed4-adaptive"]
    assert all(f"## {path.stem}\n" in shown for path in (ROOT / "configs").iterdir())


def test_formulas_become_mathml() -> None:
    html = on_page_content(
        r'<p><span class="arithmatex">\(a &lt; b\)</span></p><div class="arithmatex">\[x_i\]</div>'
    )
    assert html.count("<math ") == 2
    assert "&#x0003C;" in html or "&lt;" in html
    assert "arithmatex" not in html


@pytest.fixture
def module(tmp_path: Path) -> griffe.Module:
    (tmp_path / "shown.py").write_text(
        '''"""Adds, as in::

    c = a + b
for all of them; see :func:`add` and :class:`~somewhere.Else`.

- a list:
    its text
"""
def _add(a: int, b: int) -> None:
    """Adds.

    Args:
        a: First,
            in two lines.
    """

add = Operation(_add, _launch)
'''
    )
    extensions = griffe.load_extensions(Docstrings())
    found = griffe.load("shown", search_paths=[tmp_path], extensions=extensions)
    assert isinstance(found, griffe.Module)
    return found


def test_docstrings_become_markdown(module: griffe.Module) -> None:
    assert module.docstring is not None
    text = module.docstring.value
    assert text.startswith("Adds, as in:\n\n    c = a + b\n\nfor all of them; see <autoref")
    assert '<autoref identifier="shown.add" optional><code>add</code></autoref>' in text
    assert '<autoref identifier="somewhere.Else" optional><code>Else</code></autoref>' in text
    assert text.endswith("- a list:\n    its text")


def test_an_operation_is_shown_as_its_reference(module: griffe.Module) -> None:
    add = module["add"]
    assert isinstance(add, griffe.Function)
    assert [p.name for p in add.parameters] == ["a", "b"]
    assert add.docstring is not None
    assert "First,\n        in two lines." in add.docstring.value
