"""A campaign's report: its files, what it refuses, and what it says of an unfinished campaign."""

import hashlib
import json
import runpy
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from campaign_tables import (
    PUBLISHED_DIFFERENCES,
    SMALL,
    convergence_rows,
    numerical_rows,
    performance_rows,
    put,
)

from tinyllm.acceptance import PROTOCOL_1, figure
from tinyllm.acceptance.evidence import (
    EvidenceError,
    freeze_candidate,
    freeze_manifest,
    write_receipt,
)
from tinyllm.acceptance.report import OUTPUTS, ReportError, main, write_report
from tinyllm.acceptance.seals import is_sealed

SCRIPT = Path(__file__).parents[2] / "scripts" / "gh200_report.py"
MEDIANS = {
    "sync": (1.837, 1.946, 1.726),
    "packed4": (1.063, 1.087, 1.085),
    "packed8": (1.057, 1.047, 1.055),
}
NATIVE = dict(
    zip(PUBLISHED_DIFFERENCES, (3.561927, 3.582629, 3.589794, 3.562178, 3.562264), strict=True)
)


def write_tables(root: Path, protocol: Any = SMALL) -> Path:
    root.mkdir(exist_ok=True)
    (root / "protocol.json").write_text(protocol.to_json())
    performance_rows(protocol).to_csv(root / "performance.csv", index=False)
    numerical_rows(protocol).to_csv(root / "numerical.csv", index=False)
    convergence_rows(protocol).to_csv(root / "convergence.csv", index=False)
    return root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A finished campaign of the small protocol, in which the candidate passes."""
    return write_tables(tmp_path / "campaign")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Such a campaign with its report, for copies."""
    root = write_tables(tmp_path_factory.mktemp("written") / "campaign")
    write_report(root, SMALL)
    return root


@pytest.fixture
def reported(written: Path, tmp_path: Path) -> Path:
    """Such a campaign with its report."""
    return Path(shutil.copytree(written, tmp_path / "reported"))


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A campaign with the published medians, worst distances and final losses."""
    root = tmp_path_factory.mktemp("published")
    kinds = {w.id: (w.kind, w.mode) for w in PROTOCOL_1.workloads}
    shown = {"parameters": 6.48e-5, "gradients": 0.00575, "updates": 0.0778, "exp_avg": 0.00515}

    def ratio(workload: str, repeat: int) -> float:
        kind, mode = kinds[workload]
        return MEDIANS[mode][repeat - 1] if kind == "small-batch" else 1.1

    def difference(recipe: str, seed: int) -> float:
        return PUBLISHED_DIFFERENCES[recipe][seed - 45]

    performance_rows(PROTOCOL_1, ratio).assign(
        startup_seconds=2.5, peak_reserved_bytes=3 * 2**30
    ).to_csv(root / "performance.csv", index=False)
    numerical_rows(PROTOCOL_1, **shown).to_csv(root / "numerical.csv", index=False)
    convergence_rows(PROTOCOL_1, difference, NATIVE).to_csv(root / "convergence.csv", index=False)
    report = write_report(root, PROTOCOL_1)
    assert report.found.verdict == "not_qualified"
    assert [path.name for path in report.files] == list(OUTPUTS)
    return root


def content(root: Path, name: str = "qualification.json") -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((root / name).read_text())
    return loaded


@pytest.mark.parametrize(
    "line",
    [
        "# Qualification: not qualified",
        "| sync | 1.837 | 1.946 | 1.726 | pass |",
        "| packed4 | 1.063 | 1.087 | 1.085 | pass |",
        "| packed8 | 1.057 | 1.047 | 1.055 | not qualified |",
        "| 20m-packed4-atc-production | 1.100 | 1.100 | 1.100 | pass |",
        "| 20m-accumulate-b11-m4 | 1.100 | 1.100 | 1.100 |",
        "| 20m-packed4-b4-c512-clip1 | 0.094 | 0.102 | 1.063 | 1.087 | 1.085 |",
        "| median, not gated | side | startup, s | peak reserved, GiB |",
        "| small-batch, sync | candidate | 2.5 | 3 |",
        "| parameters | 6.48e-05 | 3.24e-05 | 0.02 |",
        "| updates | 0.0778 | 0.0389 | 0.1 |",
        "| sync-production | 3.561927 | 3.563907 | +0.001980 | 0.011131 | not qualified |",
        "| packed4-b32-c512 | 3.562264 | 3.564475 | +0.002211 | 0.004884 | pass |",
        "| sync-production | 3 | 0.00543 | candidate/native (3 pairs) | 0.291 | 12 |",
        "![Ratios, distances and differences against their limits](qualification.svg)",
        f"| protocol | version 1, `{PROTOCOL_1.hash}` |",
    ],
)
def test_the_page_shows_the_published_tables(published: Path, line: str) -> None:
    assert line in (published / "qualification.md").read_text().splitlines()


def test_a_finished_campaign_is_not_called_partial(published: Path) -> None:
    assert "PARTIAL" not in (published / "qualification.md").read_text()
    found = content(published)
    assert not found["partial"]
    assert found["missing"] == {"performance": [], "numerical": [], "convergence": []}


def test_json_holds_verdicts_and_tables(published: Path) -> None:
    found = content(published)
    assert {name: gate["verdict"] for name, gate in found["gates"].items()} == {
        "performance": "not_qualified",
        "numerical": "pass",
        "convergence": "not_qualified",
    }
    assert len(found["gates"]["performance"]["tables"]["ratios"]) == 351
    table = (published / "numerical.csv").read_bytes()
    assert found["inputs"]["numerical.csv"] == hashlib.sha256(table).hexdigest()
    assert content(published, "provenance.json")["protocol"]["hash"] == PROTOCOL_1.hash


def test_the_figure_is_svg_with_a_panel_for_each_gate(published: Path) -> None:
    figure = ET.parse(published / "qualification.svg").getroot()
    ids = {element.get("id", "") for element in figure.iter()}
    # three categories of small batches, production, distances, final losses
    assert {name for name in ids if name.startswith("axes_")} == {f"axes_{k}" for k in range(1, 7)}


def test_the_same_tables_give_the_same_files(reported: Path) -> None:
    root = reported
    first = {name: (root / name).read_bytes() for name in OUTPUTS}
    write_report(root, SMALL)
    assert {name: (root / name).read_bytes() for name in OUTPUTS} == first
    assert all(is_sealed(root / name) for name in OUTPUTS)
    assert not list(root.glob(".*"))


@pytest.mark.parametrize(
    ("spoil", "verdict", "missing"),
    [
        (
            lambda root: convergence_rows().drop(0).to_csv(root / "convergence.csv", index=False),
            "incomplete",
            {"convergence": ["sync-production seed 45"]},
        ),
        (  # an update of a control
            lambda root: numerical_rows().drop(9).to_csv(root / "numerical.csv", index=False),
            "incomplete",
            {"numerical": ["20m-sync-b4-c512-clip1 native/native"]},
        ),
        (  # an update of a candidate that breaks a limit in another one
            lambda root: (
                put(0, "gradients", 1.0)(numerical_rows())
                .drop(4)
                .to_csv(root / "numerical.csv", index=False)
            ),
            "incomplete",
            {"numerical": ["20m-sync-b4-c512-clip1 candidate/native"]},
        ),
        (
            lambda root: (root / "numerical.csv").unlink(),
            "incomplete",
            {
                "numerical": [
                    f"{w.id} {comparison}"
                    for w in SMALL.workloads
                    for comparison in ("candidate/native", "native/native")
                ]
            },
        ),
        (
            lambda root: (
                performance_rows().assign(protocol="other").to_csv(root / "performance.csv")
            ),
            "failed",
            {"performance": [f"{w.id} repeat {r}" for w in SMALL.workloads for r in (1, 2, 3)]},
        ),
    ],
)
def test_an_unfinished_campaign_needs_partial(
    root: Path, spoil: Any, verdict: str, missing: dict[str, list[str]]
) -> None:
    spoil(root)
    with pytest.raises(ReportError, match=f"the campaign is {verdict}, so there is no report"):
        write_report(root, SMALL)
    assert not [name for name in OUTPUTS if (root / name).exists()]

    report = write_report(root, SMALL, partial=True)
    assert report.partial
    assert {gate: names for gate, names in report.missing.items() if names} == missing
    found, page = content(root), (root / "qualification.md").read_text()
    assert found["partial"]
    assert found["missing"] == report.missing
    assert page.startswith(f"# Qualification: {verdict} (PARTIAL)\n")
    for name in next(iter(missing.values())):
        assert f"- {name}\n" in page
    assert str(root) not in page + json.dumps(found)


def test_the_figure_of_a_partial_report_says_so(root: Path, written: Path) -> None:
    complete = (written / "qualification.svg").read_text()
    other = root
    (other / "convergence.csv").unlink()
    write_report(other, SMALL, partial=True)
    # text is drawn as paths, each with its text in a comment
    assert "PARTIAL: missing 6 of 6 seeds" in (other / "qualification.svg").read_text()
    assert "PARTIAL" not in complete


def test_asking_for_partial_does_not_mark_a_finished_campaign(root: Path) -> None:
    assert not write_report(root, SMALL, partial=True).partial


@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize("edited", [True, False])
def test_a_file_of_another_origin_is_not_overwritten(
    root: Path, reported: Path, name: str, edited: bool
) -> None:
    if edited:
        root = reported
        text = (root / name).read_text()
        (root / name).write_text(text.replace("0", "1", 1))
    else:
        (root / name).write_text("mine")
    before = {n: (root / n).read_bytes() for n in OUTPUTS if (root / n).exists()}
    with pytest.raises(ReportError, match=f"{name} is not as a report wrote it"):
        write_report(root, SMALL)
    assert {n: (root / n).read_bytes() for n in OUTPUTS if (root / n).exists()} == before


def test_a_partial_report_is_renewed_until_it_is_complete_and_then_stays(root: Path) -> None:
    (root / "convergence.csv").unlink()
    write_report(root, SMALL, partial=True)
    convergence_rows().to_csv(root / "convergence.csv", index=False)
    assert not write_report(root, SMALL).partial

    performance_rows(ratio=lambda workload, repeat: 1.2).to_csv(
        root / "performance.csv", index=False
    )
    with pytest.raises(ReportError, match="holds the complete report of other tables"):
        write_report(root, SMALL)
    (root / "performance.csv").unlink()
    with pytest.raises(ReportError, match="holds the complete report of other tables"):
        write_report(root, SMALL, partial=True)


def test_a_protocol_without_gated_speed_has_a_figure(tmp_path: Path) -> None:
    only = replace(SMALL, workloads=SMALL.workloads[-1:])
    report = write_report(write_tables(tmp_path / "few", only), only, partial=True)
    assert report.found.verdict == "incomplete"
    assert "<svg" in (tmp_path / "few" / "qualification.svg").read_text()


def freeze(root: Path) -> str:
    base = root.parent / "source"
    base.mkdir()
    (base / "run.py").write_text("print(1)\n")
    (base / "lock").write_text("torch==2\n")
    configs = {w.id: {} for w in SMALL.workloads} | {r.id: {} for r in SMALL.recipes}
    freeze_manifest(
        root,
        SMALL,
        configs=configs,
        base=base,
        files=["run.py"],
        lockfile=base / "lock",
        token_cache="abc",
    )
    frozen = freeze_candidate(root, base=base, files=["run.py"], details={"backend": "native"})
    for number in (1, 2):
        write_receipt(root, f"job-{number}", {"environment": {"python": "3.12", "gpus": []}})
    write_receipt(root, "job-3", {"environment": {"python": "3.11", "gpus": []}})
    (root / "failed" / "pair-1").mkdir(parents=True)
    return frozen.id


def test_provenance_names_what_was_frozen(root: Path) -> None:
    candidate = freeze(root)
    write_report(root, SMALL)
    origin = content(root, "provenance.json")
    assert origin["candidate"]["id"] == candidate
    assert origin["candidate"]["details"] == {"backend": "native"}
    assert origin["manifest"]["identity"] == content(root, "manifest.json")["identity"]
    assert origin["manifest"]["token_cache"] == "abc"
    assert sorted(origin["receipts"]) == ["job-1", "job-2", "job-3"]
    noted = {e["environment"]["python"]: e["receipts"] for e in origin["environments"]}
    assert noted == {"3.12": ["job-1", "job-2"], "3.11": ["job-3"]}
    assert origin["failed_attempts"] == ["pair-1"]
    page = (root / "qualification.md").read_text()
    assert f"| candidate | `{origin['candidate']['identity']}` |" in page
    assert f'Candidate `{candidate}` (`backend: "native"`) against native.' in page
    assert "| environment of 2 receipts | no GPU, Python 3.12 |" in page


@pytest.mark.parametrize("frozen", [True, False])
def test_a_receipt_of_another_manifest_is_refused(root: Path, frozen: bool) -> None:
    if frozen:
        freeze(root)
    (root / "receipts").mkdir(exist_ok=True)
    (root / "receipts" / "job-0.json").write_text(json.dumps({"manifest": "0" * 64}))
    with pytest.raises(EvidenceError, match=r"job-0.json is a receipt of another manifest; move"):
        write_report(root, SMALL)
    assert not (root / "qualification.json").exists()


def test_one_of_several_candidates_is_named(root: Path) -> None:
    freeze(root)
    base = root.parent / "source"
    other = freeze_candidate(root, base=base, files=["run.py"], details={"backend": "gh200"})
    with pytest.raises(ReportError, match=r"several candidates are frozen .*--candidate"):
        write_report(root, SMALL)
    write_report(root, SMALL, candidate=other.id)
    assert content(root, "provenance.json")["candidate"]["details"] == {"backend": "gh200"}
    with pytest.raises(EvidenceError, match="absent"):
        write_report(root, SMALL, candidate="0123456789ab")


def test_a_named_candidate_needs_a_manifest(root: Path) -> None:
    with pytest.raises(EvidenceError, match=r"manifest.json is absent"):
        write_report(root, SMALL, candidate="0123456789ab")


@pytest.mark.parametrize("changed", ["native/run.py", "candidates/*/source/run.py", "native.patch"])
def test_changed_evidence_is_refused(root: Path, changed: str) -> None:
    freeze(root)
    (path,) = root.glob(changed)
    path.chmod(0o644)
    path.write_text("print(2)\n")
    with pytest.raises(EvidenceError, match="changed since it was frozen"):
        write_report(root, SMALL)
    assert not (root / "qualification.json").exists()


def test_evidence_may_lie_elsewhere_and_must_be_of_the_protocol(root: Path) -> None:
    freeze(root)
    tables = write_tables(root.parent / "tables")
    write_report(tables, SMALL, evidence=root)
    assert content(tables, "provenance.json")["candidate"] is not None
    other = replace(SMALL, repeats=2)
    with pytest.raises(EvidenceError, match="was frozen for protocol"):
        write_report(write_tables(root.parent / "other", other), other, evidence=root)


def test_the_command(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(root)]) == 0
    assert capsys.readouterr().out.endswith("verdict: pass\n")
    assert main(["nowhere"]) == 2
    assert "nowhere is not a folder" in capsys.readouterr().err

    other = write_tables(root.parent / "other")
    pd.DataFrame().to_csv(other / "convergence.csv")
    assert main([str(other)]) == 2
    assert "ask for a partial one with --partial" in capsys.readouterr().err
    assert main([str(other), "--partial"]) == 2
    assert capsys.readouterr().out.startswith("partial report: ")


def test_the_script_runs_without_torch(root: Path) -> None:
    absent = "('torch', 'lightning', 'jsonargparse', 'triton', 'safetensors')"
    code = (
        f"import runpy, sys\nfor name in {absent}: sys.modules[name] = None\n"
        f"sys.argv = ['gh200_report.py', {str(root)!r}]\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert (root / "qualification.svg").is_file()


def test_the_script_does_nothing_when_imported() -> None:
    assert "main" in runpy.run_path(str(SCRIPT), run_name="imported")


def test_a_missing_matplotlib_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'tinyllm\[report\]'"):
        write_report(root, SMALL)
    assert not [name for name in OUTPUTS if (root / name).exists()]


@pytest.mark.parametrize(
    ("distance", "limit", "crosses"), [(0.2, 0.05, 1), (0.01, 0.05, 0), (1 + 1e-14, 1.0, 0)]
)
def test_what_is_beyond_a_limit_is_drawn_as_a_cross(
    distance: float, limit: float, crosses: int
) -> None:
    """A loss, whose limit is 1, may use all of its tolerance, within the gate's rounding."""
    from matplotlib.figure import Figure

    panel = Figure().subplots()
    row = {"quantity": "gradients", "candidate/native": distance, "native/native": 0.001}
    figure._numerical(panel, pd.DataFrame([{**row, "limit": limit}]), PROTOCOL_1)
    assert [line.get_marker() for line in panel.get_lines()].count("X") == crosses
