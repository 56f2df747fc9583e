"""Configuration files whose aliases grow."""

from pathlib import Path
from typing import Any

import pytest

from tinyllm.config_files import check_size

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize("text", [BOMB, "&a [*a]", "a: &a {b: [*a]}"])
def test_a_command_refuses_aliases_that_stand_for_too_much(
    command: Any, tmp_path: Path, text: str
) -> None:
    (tmp_path / "bomb.yaml").write_text(text)
    done = command("fit", "--config", "bomb.yaml", "--print_config")
    assert done.code == 1
    assert "bomb.yaml: its aliases stand for more than 100,000 values" in done.err


def test_ordinary_aliases_and_what_is_no_yaml_pass(tmp_path: Path) -> None:
    for text in ("a: &a [1, 2]\nb: [*a, *a]\n", "[" * 3_000, "\x00", "a: [", ""):
        (tmp_path / "a.yaml").write_text(text)
        check_size(tmp_path / "a.yaml")
    check_size(tmp_path / "none.yaml")
