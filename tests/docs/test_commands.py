"""Every command that the documentation shows is understood by what it calls, or run by a test.

Commands of ``tinyllm`` are parsed by the real command line, so an option that is gone fails here;
scripts and blocks that are extracted from files name the test that runs them.
"""

import ast
import configparser
import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from built_site import Site
from fences import PAGES, ROOT, SHELL, Block, blocks, inline_code
from packaging.requirements import Requirement

from tinyllm.cli import COMMANDS, main

# Files that are shown or called, and the test that runs each.
RUN_BY = {
    "docs/concepts/arena.py": "tests/docs/test_scripts.py::test_the_arena_is_laid_out_as_shown",
    "docs/concepts/figures.py": "tests/docs/test_scripts.py::test_figures_are_those_of_the_code",
    "docs/examples/own_module.py": "tests/test_examples.py"
    "::test_somebody_elses_module_on_two_ranks",
    "docs/examples/packed.py": "tests/test_examples.py::test_packed_training",
    "docs/guides/scripts/keep_kernels.sh": "tests/docs/test_scripts.py::test_kernels_are_kept",
    "docs/guides/scripts/fit.sbatch": "tests/docs/test_scripts.py"
    "::test_a_job_that_runs_out_of_time_is_queued_again",
    "docs/guides/scripts/sweep.sh": "tests/docs/test_scripts.py::test_a_sweep",
    "docs/guides/scripts/optuna_sweep.py": "tests/docs/test_scripts.py::test_a_search",
    "kernels/swiglu.py": "tests/kernels/test_swiglu.py",
}
# Pages whose commands are all run, in their order.
RUN_WHOLE = {
    "docs/guides/qualifying.md": "tests/scripts/test_guide.py"
    "::test_every_command_does_what_the_guide_says",
}
# A GPU is needed to run it; its arguments are checked here.
ON_A_GPU = ("benchmarks/fit_throughput.py",)
VARIABLES = {"$NODE": "0", "$HEAD": "localhost"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout's configurations, and the files that commands name as a user's own."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    matrix = np.full((3, 3), 1 / 3)
    (tmp_path / "my_topology.csv").write_text("\n".join(["1/3, 1/3, 1/3"] * 3))
    np.save(tmp_path / "my_topology.npy", matrix)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(args: list[str]) -> int:
    """The exit code of ``tinyllm``, in this process."""
    try:
        main(args)
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def check_tinyllm(args: list[str]) -> None:
    """Parses a command, or runs it where that takes no time."""
    shows = "--help" in args or any(arg.endswith(".help") for arg in args)
    parses = args[0] in COMMANDS and args[0] not in ("topology", "accept", "doctor")
    if parses and not shows and "--print_config" not in args:
        args = [*args, "--print_config"]
    assert run(args) == 0, shlex.join(["tinyllm", *args])


def check_make(args: list[str]) -> None:
    """What ``make`` would do."""
    own = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    subprocess.run(["make", "-n", *args], cwd=ROOT, env=own, check=True, capture_output=True)


def check_torchrun(args: list[str]) -> None:
    """Both torchrun's options and those of what it starts."""
    from torch.distributed.run import get_args_parser

    given = get_args_parser().parse_args(args)
    assert (given.no_python, given.training_script) == (True, "tinyllm")
    check_tinyllm(given.training_script_args)


def check_pip(args: list[str]) -> None:
    """The extras of the package that are to be installed from here."""
    assert args[0] == "install"
    for name in args[1:]:
        wanted = Requirement(name.replace(".", "tinyllm", 1))
        assert wanted.name == "tinyllm"
        assert wanted.extras <= extras()


def extras() -> set[str]:
    """What can stand in brackets behind the package's name."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    return set(setup["options.extras_require"])


def check_file(args: list[str]) -> None:
    """A script that a test runs."""
    script = args[0]
    assert (ROOT / script).is_file()
    if script in ON_A_GPU:
        text = (ROOT / script).read_text(encoding="utf-8")
        assert all(f'"{name}"' in text for name in args[3:]), args
    else:
        assert script in RUN_BY, f"name the test that runs {script} in RUN_BY"


def check_pytest(args: list[str]) -> None:
    """Files and folders of tests."""
    paths = [arg for arg in args if arg.startswith("tests")]
    assert all((ROOT / path).exists() for path in paths)


def check_source(args: list[str]) -> None:
    """The one file that there is to source."""
    assert args == [".venv/bin/activate"]


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "tinyllm": check_tinyllm,
    "make": check_make,
    "torchrun": check_torchrun,
    "pip": check_pip,
    "bash": check_file,
    "sbatch": check_file,
    "python": check_file,
    ".venv/bin/pytest": check_pytest,
    "srun": lambda args: check(shlex.join(args[2:])),  # after --ntasks-per-node
    "source": check_source,
}


def check(command: str) -> None:
    """One command of a shell."""
    for name, value in VARIABLES.items():
        command = command.replace(name, value)
    program, *args = shlex.split(command.partition(" > ")[0], comments=True)
    assert program in CHECKS, f"{program!r} is new here: say in CHECKS how it is checked"
    CHECKS[program](args)


WITH_COMMANDS = [
    page
    for page in PAGES
    if page not in RUN_WHOLE and any(block.commands for block in blocks(page))
]


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_commands_are_understood(page: str, folder: Path) -> None:
    for block in blocks(page):
        for command in block.commands:
            try:
                check(command)
            except (AssertionError, subprocess.CalledProcessError, SystemExit) as error:
                raise AssertionError(f"{block}: {command}: {error}") from error


@pytest.mark.parametrize(
    "command",
    [
        "tinyllm fit --config configs/20m.yaml --model.optimizer.rate 1",
        "tinyllm fit --config configs/20m.yml",
        "tinyllm prepare --output x --source texts",
        "tinyllm topology spiral --workers 4",
        "make quickstrat",
        "torchrun --nproc_per_node 2 --no_python tinyllm fit --trainer.device 2",
        "pip install '.[everything]'",
        "python benchmarks/gone.py",
        "curl https://example.org",
    ],
)
def test_a_wrong_command_is_noticed(command: str, folder: Path) -> None:
    with pytest.raises((AssertionError, subprocess.CalledProcessError, SystemExit)):
        check(command)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_to_files(page: str) -> None:
    """Where no site is built; those of the site's pages are checked in it."""
    text = (ROOT / page).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    assert [link for link in links if not (ROOT / link.partition("#")[0]).exists()] == []


def test_every_extra_is_explained() -> None:
    text = (ROOT / "docs" / "start" / "install.md").read_text(encoding="utf-8")
    explained = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    assert explained == extras() - {"test", "lint"}  # of those who work on the library


@pytest.mark.parametrize("page", PAGES)
def test_blocks_are_of_a_kind_that_is_checked(page: str) -> None:
    for block in blocks(page):
        assert block.language in (*SHELL, "python", "yaml", "text"), block
        if page.startswith("docs/"):
            assert block.language, f"{block} names no language"
            assert block.language != "python" or block.snippet, f"{block}: extract it from a file"
        if block.snippet:
            assert block.snippet in RUN_BY, f"name the test that runs {block.snippet} in RUN_BY"


YAML = [block for page in PAGES for block in blocks(page) if block.language == "yaml"]


@pytest.mark.parametrize("block", YAML, ids=str)
def test_configurations_are_accepted(block: Block, folder: Path) -> None:
    (folder / "shown.yaml").write_text(block.text, encoding="utf-8")
    files = ["--config", "configs/20m.yaml", "--config", "shown.yaml"]
    assert run(["fit", *files, "--print_config"]) == 0


def test_console_blocks_show_what_is_printed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = [b for page in PAGES for b in blocks(page) if b.language == "console"]
    assert shown
    for block in shown:
        (command,) = block.commands
        expected = block.text.split("\n", 1)[1].split("\n...")[0].strip()
        capsys.readouterr()
        assert run(shlex.split(command)[1:]) == 0
        assert capsys.readouterr().out.strip().startswith(expected)


def test_python_of_the_readme_is_a_file_that_is_run() -> None:
    shown = [block for block in blocks("README.md") if block.language == "python"]
    files = {(ROOT / path).read_text(encoding="utf-8") for path in RUN_BY if path.endswith(".py")}
    assert [block for block in shown if block.text not in files] == []


@pytest.mark.parametrize("test", sorted({*RUN_BY.values(), *RUN_WHOLE.values()}))
def test_what_is_named_as_a_test_is_one(test: str) -> None:
    path, _, name = test.partition("::")
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert name in functions or (not name and any(f.startswith("test") for f in functions))


def test_options_in_sentences_exist(site: Site) -> None:
    """An option that is gone is not talked about; those of commands are checked above."""
    known = (site.folder / "sources" / "reference" / "commands.md.txt").read_text("utf-8")
    known += "".join(block.text for page in PAGES for block in blocks(page))
    known += "".join((ROOT / script).read_text(encoding="utf-8") for script in RUN_BY)
    options = set(re.findall(r"--([a-z]\w*(?:\.\w+)*)", known))
    nested = ("trainer.strategy.", "model.schedule.")  # of the class that is chosen
    for page in PAGES:
        for code in inline_code(page):
            for option in re.findall(r"(?<![\w-])--([a-z]\w*(?:\.\w+)*)", code):
                found = option in options or option.startswith(nested)
                assert found or any(o.startswith(f"{option}.") for o in options), (page, option)
