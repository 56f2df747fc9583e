"""``tinyllm accept``: what it prints, and its exit codes."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from campaign_tables import SMALL, convergence_rows, numerical_rows, performance_rows

from tinyllm.acceptance import PROTOCOL_1
from tinyllm.acceptance.accept import main
from tinyllm.cli import main as tinyllm


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A finished campaign of the small protocol, in which the candidate passes."""
    (tmp_path / "protocol.json").write_text(SMALL.to_json())
    performance_rows().to_csv(tmp_path / "performance.csv", index=False)
    numerical_rows().to_csv(tmp_path / "numerical.csv", index=False)
    convergence_rows().to_csv(tmp_path / "convergence.csv", index=False)
    return tmp_path


def slow(root: Path) -> None:
    rows = performance_rows(ratio=lambda workload, repeat: 1.0)
    rows.to_csv(root / "performance.csv", index=False)


def unfinished(root: Path) -> None:
    convergence_rows().drop(0).to_csv(root / "convergence.csv", index=False)


def invalid(root: Path) -> None:
    rows = numerical_rows()
    rows.loc[0, "gradients"] = float("nan")
    rows.to_csv(root / "numerical.csv", index=False)


@pytest.mark.parametrize(
    ("change", "code", "verdict", "gates"),
    [
        (lambda root: None, 0, "pass", ["pass", "pass", "pass"]),
        (slow, 1, "not_qualified", ["not_qualified", "pass", "pass"]),
        (unfinished, 2, "incomplete", ["pass", "pass", "incomplete"]),
        (invalid, 2, "failed", ["pass", "failed", "pass"]),
        (
            lambda root: [slow(root), unfinished(root)],
            2,
            "incomplete",
            ["not_qualified", "pass", "incomplete"],
        ),
        (
            lambda root: (root / "numerical.csv").unlink(),
            2,
            "incomplete",
            ["pass", "incomplete", "pass"],
        ),
        (
            lambda root: (root / "numerical.csv").write_text(""),
            2,
            "incomplete",
            ["pass", "incomplete", "pass"],
        ),
        (
            lambda root: (root / "numerical.csv").write_bytes(b'a,b\n1,2,3\n"\xff'),
            2,
            "failed",
            ["pass", "failed", "pass"],
        ),
    ],
)
def test_verdicts_and_exit_codes(
    root: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[Path], Any],
    code: int,
    verdict: str,
    gates: list[str],
) -> None:
    change(root)
    assert main([str(root), "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == verdict
    assert [gate["verdict"] for gate in found["gates"].values()] == gates
    assert found["protocol"] == {"version": 0, "hash": SMALL.hash}
    for gate in found["gates"].values():
        assert bool(gate["messages"]) == (gate["verdict"] != "pass")

    assert main([str(root)]) == code
    printed = capsys.readouterr().out
    assert printed.endswith(f"verdict: {verdict}\n")


def test_tables_are_printed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow(root)
    main([str(root)])
    printed = capsys.readouterr().out
    assert "performance: not_qualified" in printed
    assert "  ! small batches: the median ratio is below 1.05: sync repeat 1 (1)" in printed
    for heading in ("repeat_1  repeat_2  repeat_3", "upper_bound", "equal_candidate_passes"):
        assert heading in printed


def test_the_protocol_may_be_named(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(root), "--protocol", "1"]) == 2
    assert f"not under version 1 ({PROTOCOL_1.hash[:12]})" in capsys.readouterr().out
    assert main([str(root), "--protocol", str(root / "protocol.json")]) == 0


def test_without_a_protocol_file_version_1_holds(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "protocol.json").unlink()
    assert main([str(root)]) == 2
    assert capsys.readouterr().out.startswith(f"protocol 1 ({PROTOCOL_1.hash[:12]})")


TABLES = {
    "performance": "window_updates",
    "numerical": "gradients",
    "convergence": "final_loss",
}
"""Each table, and a column of it that decides."""


def edit(path: Path, change: Callable[[int, str], str]) -> None:
    """Changes lines by their number."""
    lines = path.read_text().splitlines()
    path.write_text("".join(f"{change(k, line)}\n" for k, line in enumerate(lines)))


@pytest.mark.parametrize(("table", "column"), TABLES.items())
def test_a_column_that_is_there_twice_is_not_overlooked(
    root: Path, capsys: pytest.CaptureFixture[str], table: str, column: str
) -> None:
    edit(root / f"{table}.csv", lambda k, line: f"{line},{999 if k else column}")
    assert main([str(root)]) == 2
    printed = capsys.readouterr().out
    assert f"{table}: failed\n  ! the table has columns more than once: {column}\n" in printed


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("first", [1, 2])  # all rows, or all but one
def test_rows_that_are_longer_than_the_header_are_refused(
    root: Path, capsys: pytest.CaptureFixture[str], table: str, first: int
) -> None:
    path = root / f"{table}.csv"
    cells = len(path.read_text().splitlines()[0].split(","))
    edit(path, lambda k, line: f"{line},7" if k >= first else line)
    assert main([str(root), "--json"]) == 2
    gate = json.loads(capsys.readouterr().out)["gates"][table]
    assert gate["verdict"] == "failed"
    (message,) = gate["messages"]
    assert message.startswith(f"{path} cannot be read: ")
    assert message.endswith(f"Expected {cells} fields in line {first + 1}, saw {cells + 1}")


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize(
    ("change", "verdict", "message"),
    [
        (lambda lines: [], "incomplete", "is empty"),
        (lambda lines: ["", "  ", ""], "incomplete", "is empty"),
        (lambda lines: lines[:1], "incomplete", "there are no rows"),
        (lambda lines: lines[1:], "failed", "the table lacks columns"),
        (lambda lines: [line.rpartition(",")[0] for line in lines], "failed", "lacks columns"),
        (lambda lines: [lines[0], *(line.rpartition(",")[0] for line in lines[1:])], "failed", ""),
        (lambda lines: ["\ufeff" + lines[0], "", *lines[1:]], "pass", None),
        (lambda lines: [f"{line},," for line in lines], "pass", None),  # columns without a name
        (lambda lines: [f"{lines[0]},note,note", *(f"{x},a,b" for x in lines[1:])], "pass", None),
    ],
)
def test_unusual_files_keep_their_verdict(
    root: Path,
    capsys: pytest.CaptureFixture[str],
    table: str,
    change: Callable[[list[str]], list[str]],
    verdict: str,
    message: str | None,
) -> None:
    path = root / f"{table}.csv"
    path.write_text("\n".join(change(path.read_text().splitlines())))
    main([str(root), "--json"])
    gate = json.loads(capsys.readouterr().out)["gates"][table]
    assert gate["verdict"] == verdict
    if message is None:
        assert not gate["messages"]
    else:
        assert any(message in found for found in gate["messages"])


def test_allocations_are_read_as_text(root: Path) -> None:
    rows = performance_rows()
    names = {1: "1", 2: "01", 3: "NA"}
    rows["allocation"] = rows["repeat"].map(names)
    rows.to_csv(root / "performance.csv", index=False)
    assert main([str(root)]) == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nowhere"], "nowhere is not a folder"),
        ([".", "--protocol", "9"], "there is no version 9; choose from [1, 2]"),
        ([".", "--protocol", "none.json"], "cannot read the protocol none.json"),
    ],
)
def test_errors_exit_with_2(
    capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    assert main(args) == 2
    assert f"tinyllm accept: error: {message}" in capsys.readouterr().err


def test_a_loosened_protocol_cannot_pass_for_version_1(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = SMALL.to_json().replace('"version": 0', '"version": 1')
    (root / "protocol.json").write_text(text)
    assert main([str(root)]) == 2
    assert "calls itself version 1 and differs" in capsys.readouterr().err


def test_it_is_a_command_of_tinyllm(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        tinyllm(["accept", str(root)])
    assert stopped.value.code == 0
    assert "verdict: pass" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        tinyllm(["accept", "nowhere"])
    assert stopped.value.code == 2


@pytest.mark.parametrize(
    "start",
    [
        "import runpy; sys.argv = ['accept', {root!r}]; "
        "runpy.run_module('tinyllm.acceptance', run_name='__main__')",
        "from tinyllm.cli import main; main(['accept', {root!r}])",
    ],
)
def test_it_works_where_torch_is_not_installed(root: Path, start: str) -> None:
    absent = "('torch', 'lightning', 'jsonargparse', 'triton', 'safetensors', 'matplotlib')"
    code = f"import sys\nfor name in {absent}: sys.modules[name] = None\n"
    done = subprocess.run(
        [sys.executable, "-c", code + start.format(root=str(root))],
        cwd=root,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("verdict: pass\n")
