"""Shell completion: bash, asked as it asks itself, and scripts for the other shells."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tinyllm.cli import COMMANDS, main

ASK = """
source {script}
COMP_WORDS=({words})
COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
_shtab_tinyllm
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "tinyllm"
    with pytest.MonkeyPatch.context() as patch, path.open("w") as file:
        patch.setattr("sys.stdout", file)
        main(["completion", "bash"])
    return path


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("tinyllm ''", set(COMMANDS)),
        ("tinyllm val", {"validate"}),
        ("tinyllm fit --data.vali", {"--data.validation_batch_size"}),
        ("tinyllm fit --data.residency ''", {"auto", "host", "device"}),
        (
            "tinyllm fit --trainer.strategy tinyllm.strategies.S",
            {"tinyllm.strategies.SyncStrategy"},
        ),
        ("tinyllm prepare --source js", {"jsonl"}),
        ("tinyllm export --w", {"--worker"}),
        ("tinyllm export --to ''", {"hf"}),
        ("tinyllm accept --pro", {"--protocol"}),
        ("tinyllm doctor --", {"--help"}),
        ("tinyllm completion ''", {"bash", "zsh", "fish"}),
        ("tinyllm generate las", {"last.ckpt"}),
    ],
)
def test_bash_completes(script: Path, tmp_path: Path, words: str, expected: set[str]) -> None:
    (tmp_path / "last.ckpt").touch()
    asked = ASK.format(script=script, words=words)
    done = subprocess.run(
        ["bash", "-c", asked], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert set(done.stdout.split()) == expected
    assert done.stderr == ""


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_a_script(command: Any, shell: str) -> None:
    done = command("completion", shell)
    assert (done.code, done.err) == (0, "")
    for name in [*COMMANDS, "validation_batch_size"]:
        assert name in done.out


def test_an_unknown_shell_is_refused(command: Any) -> None:
    done = command("completion", "bush")
    assert done.code == 2
    assert "'bush' is not allowed; did you mean 'bash'?" in done.err
