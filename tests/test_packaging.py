"""What an installation contains: one import name, every file, and versions that agree."""

import configparser
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import tinyllm

ROOT = Path(__file__).resolve().parent.parent


def setup_cfg() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def package_folders() -> dict[str, Path]:
    """Top-level packages of the map that exist: dotted name -> folder."""
    lines = setup_cfg()["options"]["package_dir"].strip().splitlines()
    pairs = (line.split("=", maxsplit=1) for line in lines)
    return {name.strip(): ROOT / folder.strip() for name, folder in pairs}


def locked_versions() -> dict[str, str]:
    """Canonical package name -> version, from requirements.lock."""
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    pins = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pins}


def declared_requirements() -> list[Requirement]:
    """The core requirements and those of every extra that the lock covers."""
    setup = setup_cfg()
    extras = setup["options.extras_require"]
    covered = [extras[name] for name in ("data", "report", "slurm", "hf", "docs", "test", "lint")]
    lines = "\n".join([setup["options"]["install_requires"], *covered]).splitlines()
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]
    return [Requirement(line) for line in [*lines, *build["requires"]] if line]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The names in a wheel built from links to the sources, so that nothing is left in the tree."""
    build = tmp_path_factory.mktemp("wheel")
    inputs = ["setup.cfg", "pyproject.toml", "README.md", "LICENSE"]
    for name in [*inputs, *(folder.name for folder in package_folders().values())]:
        (build / name).symlink_to(ROOT / name)
    code = "from setuptools import build_meta; build_meta.build_wheel('.')"
    done = subprocess.run([sys.executable, "-c", code], cwd=build, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = build.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return archive.namelist()


def test_wheel_installs_nothing_but_tinyllm(wheel: list[str]) -> None:
    top = {name.partition("/")[0] for name in wheel}
    assert top == {"tinyllm", f"tinyllm-{tinyllm.__version__}.dist-info"}


def test_wheel_holds_every_source_file(wheel: list[str]) -> None:
    sources = {
        f"{package.replace('.', '/')}/{path.relative_to(folder)}"
        for package, folder in package_folders().items()
        for path in folder.rglob("*.py")
    }
    missing = sources - set(wheel)
    assert not missing, f"add their packages to `packages` in setup.cfg: {sorted(missing)}"


def test_wheel_holds_type_marker_and_licence(wheel: list[str]) -> None:
    assert "tinyllm/py.typed" in wheel
    assert f"tinyllm-{tinyllm.__version__}.dist-info/licenses/LICENSE" in wheel


def test_command_is_installed() -> None:
    (command,) = distribution("tinyllm").entry_points.select(group="console_scripts")
    assert (command.name, command.value) == ("tinyllm", "tinyllm.cli:main")


def test_version_is_the_same_everywhere() -> None:
    assert setup_cfg()["metadata"]["version"] == tinyllm.__version__


@pytest.mark.parametrize("requirement", declared_requirements(), ids=lambda r: r.name)
def test_lock_satisfies_the_declared_range(requirement: Requirement) -> None:
    assert requirement.specifier.contains(locked_versions()[canonicalize_name(requirement.name)])


def test_lock_pins_everything_that_is_needed_in_turn() -> None:
    locked = locked_versions()
    missing = set()
    for name in locked:
        try:
            needed = distribution(name).requires or []
        except ModuleNotFoundError:  # an extra that is not installed here
            continue
        for requirement in map(Requirement, needed):
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            # torch pins its CUDA libraries itself: see the lock's header
            if applies and not requirement.name.startswith(("nvidia-", "cuda-")):
                missing |= {canonicalize_name(requirement.name)} - locked.keys()
    assert not missing
