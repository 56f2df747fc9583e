"""The scripts of docs/examples run as they stand, on a CPU, and are what the README shows."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tinyllm.data.prepare import prepare

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "docs/examples"


def run(name: str, folder: Path) -> str:
    """Runs a script in a folder, without the minute that torch.compile would take."""
    environment = os.environ | {"TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, EXAMPLES / name],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a cache of a few documents where the quickstart has its own."""
    (tmp_path / "texts").mkdir()
    for number in range(60):
        text = " ".join(f"{number * word % 97} and {word}." for word in range(80))
        (tmp_path / "texts" / f"{number}.txt").write_text(text)
    (tmp_path / "data").mkdir()
    prepare(tmp_path / "data/quickstart", "text", [str(tmp_path / "texts")], vocab_size=400)
    return tmp_path


def test_packed_training(folder: Path) -> None:
    said = run("packed.py", folder)
    assert "backend: native" in said
    assert "`max_steps=50` reached" in said
    assert list(folder.rglob("epoch=*-step=50.ckpt"))


def test_somebody_elses_module_on_two_ranks(tmp_path: Path) -> None:
    said = run("own_module.py", tmp_path).splitlines()
    (line,) = [line for line in said if line.startswith("y = ")]  # of one rank
    slope, offset = (float(part.strip("y= +")) for part in line.split("x"))
    assert slope == pytest.approx(3, abs=0.1)
    assert offset == pytest.approx(1, abs=0.1)


def test_the_readme_shows_what_runs() -> None:
    shown = f"```python\n{(EXAMPLES / 'packed.py').read_text()}```\n"
    assert shown in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_every_example_is_run_here(path: Path) -> None:
    assert f'run("{path.name}"' in Path(__file__).read_text()
