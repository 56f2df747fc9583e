import sys
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from jsonargparse import auto_cli

from tinyllm.strategies.topology import Topology, make_topology
from tinyllm.strategies.topology_report import describe, fraction, topology


def facts(report: str) -> dict[str, str]:
    lines = report.split("\n\n")[0].splitlines()
    return {line[:19].strip(): line[19:] for line in lines}


def test_facts_of_a_time_varying_topology() -> None:
    found = facts(describe(make_topology("one_peer_exponential", 8)))
    assert found["topology"] == "one_peer_exponential"
    assert found["workers"] == "8"
    assert found["phases"] == "3"
    assert found["degree"].startswith("1 ")
    assert found["doubly stochastic"].startswith("yes")
    assert found["symmetric"] == "yes"
    assert found["spectral gap"] == "1 per period of 3 updates"
    assert found["exact consensus"] == "after 3 updates"


def test_facts_of_an_asymptotic_and_directed_topology() -> None:
    found = facts(describe(make_topology("one_peer_exponential", 3)))
    assert found["symmetric"] == "no"
    assert found["spectral gap"] == "0.75 per period of 2 updates"
    assert found["exact consensus"] == "not within a period"


def test_matrices_are_printed_in_fractions() -> None:
    report = describe(make_topology("base_k", 3))
    assert "phase 1\n  1/3    .  2/3\n    .    1    .\n  2/3    .  1/3\n" in report


def test_printed_matrices_read_back() -> None:
    expected = make_topology("ring", 6).matrix(0)
    lines = describe(make_topology("ring", 6)).split("phase 0\n")[1].splitlines()[:6]
    cells = [["0" if cell == "." else cell for cell in line.split()] for line in lines]
    values = [[int(c.split("/")[0]) / int((c + "/1").split("/")[1]) for c in row] for row in cells]
    assert np.array_equal(values, expected)


def test_peers_are_listed() -> None:
    assert "  peers  0: 2  1: 0  2: 1" in describe(make_topology("one_peer_exponential", 3))
    assert "  peers  0: 1  1: 0  2: -" in describe(make_topology("base_k", 3))


def test_matrices_too_wide_for_a_terminal_are_left_out() -> None:
    report = describe(make_topology("complete", 17))
    assert "1/17" not in report
    assert max(map(len, report.splitlines())) <= 100


@pytest.mark.parametrize(
    ("weight", "text"),
    [(0.5, "1/2"), (1 / 3, "1/3"), (8 / 15, "8/15"), (1.0, "1"), (np.pi / 4, "0.785398")],
)
def test_fraction(weight: float, text: str) -> None:
    assert fraction(weight) == text


def test_the_command_prints_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    topology("ring", workers=4)
    assert capsys.readouterr().out.strip() == describe(make_topology("ring", 4))


def test_the_command_parses_as_documented(capsys: pytest.CaptureFixture[str]) -> None:
    commands = {"topology": topology, "other": lambda: None}
    auto_cli(commands, args=["topology", "one_peer_exponential", "--workers", "8"])
    assert facts(capsys.readouterr().out)["exact consensus"] == "after 3 updates"


@pytest.mark.parametrize(
    ("name", "n"), [("one_peer_exponential", 6), ("base_k", 5), ("complete", 20), ("ring", 1)]
)
def test_svg_has_a_panel_per_phase_and_a_label_per_worker(tmp_path, name: str, n: int) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "new" / "graph.svg"
    topology(name, workers=n, svg=file)
    text = file.read_text()
    assert ET.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
    period = make_topology(name, n).period
    assert text.count('<g id="axes_') == period
    assert text.count("<!-- 0 -->") == period  # matplotlib writes each text in a comment


def test_svg_of_the_same_topology_has_the_same_bytes(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("a.svg", "b.svg"):
        topology("one_peer_ring", workers=4, svg=tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_weights_of_a_users_matrix_are_drawn(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    np.save(tmp_path / "w.npy", [[0.2, 0.3, 0.5], [0.5, 0.2, 0.3], [0.3, 0.5, 0.2]])
    topology(str(tmp_path / "w.npy"), workers=3, svg=tmp_path / "w.svg")
    assert "weights 3/10, 1/2" in (tmp_path / "w.svg").read_text()


def test_missing_matplotlib_says_how_to_install_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'tinyllm\[report\]'"):
        topology("ring", workers=4, svg=tmp_path / "graph.svg")


def test_a_topology_that_is_never_symmetric_says_so() -> None:
    assert facts(describe(Topology("turn", np.eye(3)[[1, 2, 0]])))["symmetric"] == "no"
