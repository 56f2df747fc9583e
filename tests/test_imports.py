"""Who may import whom: the table below, held over the real files, and what an import may load."""

import ast
import configparser
import graphlib
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Layer:
    """What the files of one top-level folder may import, the standard library aside."""

    layers: frozenset[str] = frozenset()  # other layers of this project
    eager: frozenset[str] = frozenset()  # packages, anywhere
    lazy: frozenset[str] = frozenset()  # extras: inside functions and TYPE_CHECKING blocks only
    composers: frozenset[str] = frozenset()  # modules that may import every layer lazily


CORE = frozenset(
    {
        *("torch", "lightning", "torchmetrics", "numpy", "pandas", "jsonargparse"),
        *("tqdm", "yaml", "typing_extensions"),  # required by lightning itself
    }
)
DATA = frozenset({"datasets", "tokenizers", "sentencepiece", "pyarrow", "huggingface_hub"})

LAYERS = {
    "tinyllm": Layer(
        eager=CORE,
        lazy=DATA | {"matplotlib", "safetensors", "transformers"},
        composers=frozenset({"tinyllm.cli"}),
    ),
    "tinyllm.strategies": Layer(
        layers=frozenset({"tinyllm", "tinyllm.kernels"}),
        eager=frozenset({"torch", "lightning", "numpy", "typing_extensions"}),
        lazy=frozenset({"matplotlib", "submitit"}),
    ),
    "tinyllm.callbacks": Layer(
        layers=frozenset({"tinyllm"}),
        eager=CORE,
        lazy=frozenset({"matplotlib", "safetensors"}),
    ),
    "tinyllm.kernels": Layer(eager=frozenset({"torch", "triton"})),
    "tinyllm.acceptance": Layer(
        eager=frozenset({"numpy", "pandas"}),
        lazy=frozenset({"matplotlib", "safetensors", "submitit"}),
    ),
}


@dataclass(frozen=True)
class Import:
    """One imported module or package, as a dotted name."""

    name: str
    line: int
    at_import: bool  # runs when the file is imported: not in a function or TYPE_CHECKING block


def package_map(root: Path) -> dict[str, Path]:
    """Dotted package name -> folder that exists, from ``package_dir`` in setup.cfg."""
    setup = configparser.ConfigParser()
    setup.read(root / "setup.cfg", encoding="utf-8")
    lines = setup["options"]["package_dir"].strip().splitlines()
    pairs = (line.split("=", maxsplit=1) for line in lines)
    folders = {name.strip(): root / folder.strip() for name, folder in pairs}
    return {name: folder for name, folder in folders.items() if folder.is_dir()}


def project_modules(root: Path) -> dict[str, Path]:
    """Dotted module name -> file, for every Python file under the mapped folders."""
    modules = {}
    for package, folder in package_map(root).items():
        for path in sorted(folder.rglob("*.py")):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            modules[".".join(part for part in parts if part != "__init__")] = path
    return modules


def layer_of(name: str) -> str | None:
    """The layer that a dotted name belongs to, or None when it is not the project's."""
    holders = [layer for layer in LAYERS if name == layer or name.startswith(layer + ".")]
    return max(holders, key=len, default=None)


def imports_of(module: str, path: Path, modules: dict[str, Path]) -> Iterator[Import]:
    """Every import in a file, ``import_module("a literal")`` included."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]

    def walk(node: ast.AST, at_import: bool) -> Iterator[Import]:
        match node:
            case ast.Import(names=names):
                yield from (Import(alias.name, node.lineno, at_import) for alias in names)
            case ast.ImportFrom(module=source, names=names, level=level):
                if level:
                    parents = package.split(".")[: len(package.split(".")) - level + 1]
                    source = ".".join([*parents, source] if source else parents)
                for alias in names:
                    full = f"{source}.{alias.name}"
                    is_module = full in modules or full in LAYERS
                    yield Import(full if is_module else str(source), node.lineno, at_import)
            case ast.Call(func=ast.Name("import_module") | ast.Attribute(attr="import_module")):
                match node.args:
                    case [ast.Constant(value=str(name)), *_] if not name.startswith("."):
                        yield Import(name, node.lineno, at_import)
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                eager, lazy = [], list(ast.iter_child_nodes(node))
            case ast.If(test=ast.Name("TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
                eager, lazy = node.orelse, node.body
            case _:
                eager, lazy = list(ast.iter_child_nodes(node)), []
        for child in eager:
            yield from walk(child, at_import)
        for child in lazy:
            yield from walk(child, False)

    yield from walk(ast.parse(path.read_text(encoding="utf-8")), True)


def complaint(module: str, found: Import) -> str | None:
    """Why a module must not have this import, or None when the table allows it."""
    own = layer_of(module)
    assert own is not None, f"{module} belongs to no layer"
    rule = LAYERS[own]
    layer = layer_of(found.name)
    if layer is not None:
        if layer == own or layer in rule.layers:
            return None
        if module in rule.composers:
            return f"imports {found.name} outside a function" if found.at_import else None
        return f"imports {found.name}, but {own} may import only {sorted(rule.layers) or 'itself'}"
    package = found.name.partition(".")[0]
    if package in sys.stdlib_module_names or package in rule.eager:
        return None
    if package in rule.lazy:
        return f"imports {package} outside a function" if found.at_import else None
    return f"imports {package}, which the table does not allow in {own}"


def complaints(root: Path) -> list[str]:
    """Every import under root that breaks the table, as ``file:line: reason``."""
    modules = project_modules(root)
    return [
        f"{path.relative_to(root)}:{found.line}: {reason}"
        for module, path in modules.items()
        for found in imports_of(module, path, modules)
        if (reason := complaint(module, found))
    ]


def import_cycle(root: Path) -> list[str]:
    """The modules of one import-time cycle, or an empty list when there is none."""
    modules = project_modules(root)
    graph = {
        module: {
            found.name
            for found in imports_of(module, path, modules)
            if found.at_import and found.name in modules
        }
        for module, path in modules.items()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


# The real files


def test_every_mapped_folder_has_a_rule() -> None:
    assert set(package_map(ROOT)) <= set(LAYERS)


def test_imports_follow_the_table() -> None:
    found = complaints(ROOT)
    assert not found, "\n".join(found)


def test_there_is_no_import_cycle() -> None:
    cycle = import_cycle(ROOT)
    assert not cycle, " -> ".join(cycle)


# The checker itself, on a small made-up project


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folders = ["strategies", "callbacks", "kernels", "acceptance"]
    lines = ["tinyllm = tinyllm", *(f"tinyllm.{folder} = {folder}" for folder in folders)]
    (tmp_path / "setup.cfg").write_text(
        "[options]\npackage_dir =\n" + "".join(f"    {line}\n" for line in lines)
    )
    for folder in ["tinyllm", "strategies", "callbacks"]:  # two folders do not exist yet
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text("")
    return tmp_path


def write(project: Path, file: str, code: str) -> None:
    path = project / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(code)


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("tinyllm/model.py", "import os, torch\nfrom lightning.pytorch import Trainer\n"),
        ("tinyllm/model.py", "from . import arena\nfrom .data import loader\n"),
        ("tinyllm/model.py", "def read():\n    import datasets\n"),
        ("tinyllm/cli.py", "def fit():\n    from tinyllm.strategies import SyncStrategy\n"),
        ("strategies/native.py", "from tinyllm.kernels.norm import norm\nimport tinyllm.arena\n"),
        ("callbacks/memory.py", "from tinyllm.metrics import UpdateMetrics\nimport pandas\n"),
        ("kernels/norm.py", "import torch\nimport triton.language as tl\n"),
        ("acceptance/gates.py", "import json\nimport numpy\nfrom . import protocol\n"),
    ],
)
def test_checker_accepts(project: Path, file: str, code: str) -> None:
    write(project, file, code)
    assert complaints(project) == []


@pytest.mark.parametrize(
    ("file", "code", "reason"),
    [
        ("tinyllm/module.py", "from tinyllm.strategies import SyncStrategy\n", "strategies"),
        ("tinyllm/module.py", "from tinyllm import strategies\n", "tinyllm.strategies"),
        ("tinyllm/module.py", "from . import callbacks\n", "tinyllm.callbacks"),
        ("tinyllm/module.py", "def late():\n    import tinyllm.kernels\n", "tinyllm.kernels"),
        ("tinyllm/module.py", "import_module('tinyllm.strategies')\n", "tinyllm.strategies"),
        ("tinyllm/module.py", "import triton\n", "triton"),
        ("tinyllm/module.py", "import datasets\n", "outside a function"),
        ("tinyllm/cli.py", "import tinyllm.strategies\n", "outside a function"),
        ("tinyllm/cli.py", "class A:\n    import tinyllm.strategies\n", "outside a function"),
        ("strategies/base.py", "from tinyllm.callbacks import MemoryMonitor\n", "callbacks"),
        ("strategies/sub/deep.py", "from ...callbacks import MemoryMonitor\n", "callbacks"),
        ("callbacks/memory.py", "from tinyllm.strategies.base import Base\n", "strategies"),
        ("callbacks/memory.py", "from ..strategies.base import Base\n", "strategies"),
        (
            "callbacks/memory.py",
            "from typing import TYPE_CHECKING\n"
            "if TYPE_CHECKING:\n    from tinyllm.strategies import SyncStrategy\n",
            "strategies",
        ),
        ("kernels/norm.py", "from tinyllm.config import LlamaConfig\n", "tinyllm.config"),
        ("kernels/norm.py", "import lightning\n", "lightning"),
        ("acceptance/gates.py", "import torch\n", "torch"),
        ("acceptance/gates.py", "from tinyllm import __version__\n", "tinyllm"),
    ],
)
def test_checker_rejects(project: Path, file: str, code: str, reason: str) -> None:
    write(project, file, code)
    (line,) = complaints(project)
    assert line.startswith(f"{file}:")
    assert reason in line


def test_checker_finds_a_cycle_and_ignores_a_lazy_one(project: Path) -> None:
    write(project, "tinyllm/a.py", "from tinyllm.b import B\n")
    write(project, "tinyllm/b.py", "def late():\n    from tinyllm.a import A\n")
    assert import_cycle(project) == []

    write(
        project, "tinyllm/b.py", "try:\n    from tinyllm import a\nexcept ImportError:\n    pass\n"
    )
    assert set(import_cycle(project)) == {"tinyllm.a", "tinyllm.b"}


def test_helpers_of_tests_have_different_names() -> None:
    """Their folders are all on the path, and the first of a name would be everybody's."""
    folders = [*(path for path in (ROOT / "tests").iterdir() if path.is_dir()), ROOT / "docs/tools"]
    helpers = Counter(path.stem for folder in folders for path in folder.glob("[!_]*.py"))
    shared = {name for name, number in helpers.items() if number > 1}
    assert {name for name in shared if not name.startswith("test_")} == {"conftest"}


# What an import loads, in a fresh interpreter


def run_python(code: str, cwd: Path) -> str:
    """Run code from the given folder; its output. Fails with the interpreter's own message."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# None in sys.modules makes an import fail as if the package were not installed.
ABSENT = """
import sys
for name in ({names}):
    sys.modules[name] = None
"""


def test_importing_tinyllm_loads_no_torch(tmp_path: Path) -> None:
    loaded = run_python("import sys, tinyllm; print(*sys.modules)", tmp_path).split()
    assert not {"torch", "lightning", "numpy", "triton"} & set(loaded)


@pytest.mark.parametrize("where", ["repository root", "elsewhere"])
def test_all_layers_import_under_one_name(tmp_path: Path, where: str) -> None:
    packages = ", ".join(package_map(ROOT))
    run_python(f"import {packages}", ROOT if where == "repository root" else tmp_path)


def test_public_names_need_no_triton(tmp_path: Path) -> None:
    code = ABSENT.format(names="'triton',")
    code += "import tinyllm\nfor name in tinyllm.__all__: print(getattr(tinyllm, name).__name__)"
    printed = run_python(code, tmp_path).split()
    assert printed == ["LlamaConfig", "TinyLLM", "TokenDataModule"]


def test_every_module_imports_without_the_extras(tmp_path: Path) -> None:
    extras = set().union(*(layer.lazy for layer in LAYERS.values()))
    extras -= {"matplotlib", "pyarrow"}  # torchmetrics and pandas load them where they find them
    # torchmetrics, which lightning imports, loads transformers where it finds it
    code = "import lightning.pytorch\n" + ABSENT.format(names=", ".join(map(repr, sorted(extras))))
    modules = [name for name in project_modules(ROOT) if not name.endswith("__main__")]
    code += "from importlib import import_module\n"
    code += f"for name in {modules}: import_module(name)"
    run_python(code, tmp_path)
