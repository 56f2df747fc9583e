"""Tables of a campaign's candidates, and that only their own count."""

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
from fake_checkout import candidate_of, do_all

from tinyllm.acceptance.accept import main as accept
from tinyllm.acceptance.campaign import Campaign
from tinyllm.acceptance.collect import collect
from tinyllm.acceptance.evidence import EvidenceError
from tinyllm.acceptance.report import main as report
from tinyllm.acceptance.seals import sealed_json


def test_candidates_have_tables_of_their_own(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert accept([str(root)]) == 2
    assert "has no candidate's tables; collect them first" in capsys.readouterr().err
    slow = do_all(root)
    before = {path: path.read_bytes() for path in (root / "qualifications" / slow).iterdir()}
    quick = do_all(root, "quick")
    assert {path: path.read_bytes() for path in before} == before
    assert accept([str(root)]) == 2
    message = capsys.readouterr().err
    assert "with --candidate" in message
    assert slow in message
    capsys.readouterr()
    assert accept([str(root), "--candidate", quick, "--json"]) == 0
    ratio = json.loads(capsys.readouterr().out)["gates"]["performance"]["tables"]["ratios"][0]
    assert ratio["ratio"] == pytest.approx(5.0)  # as the pretended speeds are
    assert accept([str(root / "qualifications" / quick)]) == 0  # a folder of tables by itself


def test_tables_that_are_not_the_candidates_results_do_not_count(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = do_all(root, "quick")
    folder = root / "qualifications" / quick
    other = candidate_of(root, "broken")
    shutil.copytree(folder, folder.with_name(other))
    shutil.copytree(folder, folder.with_name("0" * 12))
    capsys.readouterr()
    for command in (accept, report):
        assert command([str(root), "--candidate", quick]) == 0
        assert command([str(root), "--candidate", other]) == 2
        assert f"is not what the results of {other} say" in capsys.readouterr().err
        assert command([str(root), "--candidate", "0" * 12]) == 2
        assert "0" * 12 in capsys.readouterr().err
    table = folder / "performance.csv"
    rows = pd.read_csv(table)
    rows["window_1_seconds"] *= 0.5
    rows.to_csv(table, index=False)
    for command in (accept, report):
        assert command([str(root), "--candidate", quick]) == 2
        assert "performance.csv is not what the results" in capsys.readouterr().err


def test_results_of_another_manifest_are_refused(root: Path) -> None:
    name = do_all(root)
    (path, *_) = sorted((root / "results").glob("native.convergence.*/result.json"))
    result = json.loads(path.read_text()) | {"manifest": "0" * 64}
    del result["seal"]
    path.write_bytes(sealed_json(result))
    with pytest.raises(EvidenceError, match="under another manifest or candidate"):
        collect(root, name)


def test_a_result_that_was_changed_does_not_count(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = do_all(root)
    (path, *_) = sorted((root / "results").glob("native.convergence.*/result.json"))
    result = json.loads(path.read_text())
    result["rows"][0]["final_loss"] += 0.001
    path.write_text(json.dumps(result))
    with pytest.raises(EvidenceError, match="was changed since it was written; move its folder"):
        collect(root, name)
    assert accept([str(root)]) == 2
    assert "was changed since it was written" in capsys.readouterr().err
    path.parent.rename(root / "changed")
    assert len(Campaign(root).run("convergence").done) == 1
    collect(root, name)
    assert accept([str(root)]) == 0


def test_tables_of_a_complete_report_stay(root: Path, tmp_path: Path) -> None:
    name = do_all(root)
    (control, *_) = sorted((root / "results").glob("native.controls.*"))
    control.rename(tmp_path / "control")
    collect(root, name)
    assert report([str(root)]) == 0
    folder = root / "qualifications" / name
    before = {path: path.read_bytes() for path in folder.iterdir()}
    collect(root, name)  # the same tables
    (tmp_path / "control").rename(control)
    with pytest.raises(EvidenceError, match="holds a complete report, and there are more results"):
        collect(root, name)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    folder.rename(tmp_path / "earlier")
    collect(root, name)
    assert report([str(root)]) == 0
