"""What is built for others: the same bytes every time, and it works where it is installed."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tinyllm import __version__

ROOT = Path(__file__).resolve().parent.parent
SDIST, WHEEL = f"tinyllm-{__version__}.tar.gz", f"tinyllm-{__version__}-py3-none-any.whl"
SECONDS = "1700000000"


def build(folder: Path, umask: int) -> Path:
    """Both archives from a checkout that was made under a umask of its own; gives their folder."""

    def hidden(name: str, entries: list[str]) -> set[str]:
        kept = {".ci"} if name == str(ROOT) else set()
        left_out = {"data", "runs", "site", "build", "dist", "docs", "tests", "benchmarks"}
        at_top = left_out if name == str(ROOT) else {"__pycache__"}
        return {e for e in entries if e.startswith(".") and e not in kept} | at_top

    before = os.umask(umask)
    try:
        shutil.copytree(ROOT, folder, ignore=hidden, copy_function=shutil.copyfile)
    finally:
        os.umask(before)
    (folder / "tinyllm" / "__pycache__").mkdir()
    (folder / "tinyllm" / "__pycache__" / "arena.pyc").touch()
    done = subprocess.run(
        [sys.executable, str(folder / ".ci" / "dist.py")],
        env=os.environ | {"SOURCE_DATE_EPOCH": SECONDS},
        capture_output=True,
        text=True,
        umask=umask,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == [str(folder / "dist" / n) for n in (SDIST, WHEEL)]
    return folder / "dist"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("dist") / "checkout", 0o022)


def test_two_builds_are_the_same_byte_for_byte(dist: Path, tmp_path: Path) -> None:
    """From another folder, at another time, under another umask."""
    other = build(tmp_path / "elsewhere", 0o077)
    for name in (SDIST, WHEEL):
        assert (dist / name).read_bytes() == (other / name).read_bytes(), name


def test_the_sdist_holds_what_a_build_needs(dist: Path, tmp_path: Path) -> None:
    """The wheel built from it is the wheel built from the checkout."""
    with tarfile.open(dist / SDIST) as archive:
        assert {m.uname + m.gname for m in archive} == {""}
        assert {m.mtime for m in archive} == {int(SECONDS)}
        names = {m.name.partition("/")[2] for m in archive}
        archive.extractall(tmp_path, filter="data")
    assert {"CHANGELOG.md", "LICENSE", "requirements.lock", "configs/20m.yaml"} <= names
    assert not [name for name in names if name.startswith(("tests", "docs", "benchmarks"))]
    code = "from setuptools import build_meta; build_meta.build_wheel('.')"
    source = tmp_path / SDIST.removesuffix(".tar.gz")
    environment = os.environ | {"SOURCE_DATE_EPOCH": SECONDS}
    subprocess.run(
        [sys.executable, "-c", code], cwd=source, env=environment, check=True, capture_output=True
    )
    with zipfile.ZipFile(source / WHEEL) as one, zipfile.ZipFile(dist / WHEEL) as two:
        assert one.namelist() == two.namelist()
        assert all(one.read(name) == two.read(name) for name in two.namelist())


SMOKE = """
import tinyllm, tinyllm.acceptance, tinyllm.kernels, sys
from pathlib import Path
import numpy as np
from lightning.pytorch import Trainer
from tinyllm.data.prepare import prepare
from tinyllm.strategies import DecentralizedStrategy

assert tinyllm.__file__.startswith(sys.argv[1]), tinyllm.__file__
assert tinyllm.kernels.__file__.startswith(sys.argv[1])
np.random.default_rng(0).integers(1, 64, 2000, "<u2").tofile("tokens.bin")
tokens = np.fromfile("tokens.bin", "<u2")
tokens[19::20] = 0
tokens.tofile("tokens.bin")
prepare(Path("cache"), "tokens", "tokens.bin", vocab_size=64, boundary_id=0,
        validation_fraction=0.2)
config = tinyllm.LlamaConfig(layers=1, width=16, heads=2, ffn_width=32, vocab_size=64, context=8)
trainer = Trainer(accelerator="cpu", devices=1, max_steps=3, logger=False,
                  strategy=DecentralizedStrategy(2, compile=False), enable_progress_bar=False)
trainer.fit(tinyllm.TinyLLM(config=config), tinyllm.TokenDataModule("cache", 8, 4))
assert trainer.global_step == 3
"""


@pytest.mark.parametrize("name", [SDIST, WHEEL])
def test_what_is_installed_trains(dist: Path, tmp_path: Path, name: str) -> None:
    """Into a folder of its own; its dependencies are those of this environment."""
    target = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    pip += ["--no-build-isolation", "--target", str(target), str(dist / name)]
    done = subprocess.run(pip, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    environment = os.environ | {"PYTHONPATH": str(target), "PYTHONSAFEPATH": "1"}

    def run(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "usage: tinyllm COMMAND" in run(str(target / "bin" / "tinyllm"), "--help")
    run("-c", SMOKE, str(target))
