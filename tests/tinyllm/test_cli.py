"""The command itself: its help, what it refuses, and exit codes."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tinyllm import cli
from tinyllm.cli import COMMANDS, configs_first, main

NAMES = [
    "prepare",
    "fit",
    "validate",
    "test",
    "predict",
    "generate",
    "export",
    "topology",
    "doctor",
]


def test_help_lists_and_explains_all_commands_without_torch() -> None:
    code = (
        "import sys\nfrom tinyllm.cli import main\nmain(['--help'])\n"
        "heavy = {'torch', 'lightning', 'numpy', 'jsonargparse', 'triton'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines() if line[:2] == "  "]
    explained = {line[0]: line[1] for line in lines}
    assert set(NAMES) <= set(COMMANDS)
    for name, known in COMMANDS.items():
        assert explained[name] == known.summary
        assert len(known.summary) > 15


@pytest.mark.parametrize("first", ["pass", "import torch"])
def test_imports_are_kept_from_the_garbage_collector(first: str) -> None:
    """Those of a process of its own; another's objects are left to it."""
    code = (
        f"import gc\n{first}\nfrom tinyllm.cli import main\n"
        "try:\n    main(['topology', '--name', 'no such'])\n"
        "except SystemExit:\n    pass\n"
        "print(gc.isenabled(), gc.get_freeze_count())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    enabled, frozen = done.stdout.split()
    assert enabled == "True"
    assert (int(frozen) > 10_000) == (first == "pass")


@pytest.mark.parametrize("args", [[], ["-h"], ["--help"]])
def test_help_is_shown_without_a_command(args: list[str], command: Any) -> None:
    done = command(*args)
    assert done.code == 0
    assert done.out.startswith("usage: tinyllm COMMAND [options]")


def test_version(command: Any) -> None:
    import tinyllm

    assert command("--version").out == f"{tinyllm.__version__}\n"


@pytest.mark.parametrize(("given", "meant"), [("fti", "fit"), ("prepair", "prepare")])
def test_a_misspelt_command_names_the_nearest(command: Any, given: str, meant: str) -> None:
    done = command(given)
    assert done.code == 2
    assert f"{given!r} is not a command; did you mean {meant!r}?" in done.err


def test_an_unknown_command_lists_the_known(command: Any) -> None:
    done = command("xyz", "--config", "a")
    assert done.code == 2
    assert "did you mean" not in done.err
    for name in NAMES:
        assert name in done.err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_its_options(command: Any, name: str) -> None:
    done = command(name, "--help")
    assert done.code == 0
    assert done.out.startswith(f"usage: tinyllm {name} ")
    assert max(map(len, done.out.splitlines())) <= 100
    for noise in ("<class", "Lightning Trainer command line tool", "[options] fit"):
        assert noise not in done.out
    expected = {
        "fit": ["--ckpt_path", "--model.preset", "--trainer.max_steps", "--data.cache"],
        "prepare": ["--source", "--output", "--vocab_size", "--on_bad_input"],
        "generate": ["  checkpoint ", "--temperature", "--top_k", "--top_p", "--seed"],
        "export": ["  checkpoint ", "  output ", "--to ", "--worker "],
        "topology": ["name", "--workers", "--svg"],
    }
    expected |= {key: ["--ckpt_path", "--data.cache"] for key in ("validate", "test", "predict")}
    for option in expected.get(name, ["--help"]):
        assert option in done.out


def test_fit_help_tells_precedence_first_and_the_trainer_last(command: Any) -> None:
    text = command("fit", "--help").out
    head = " ".join(text[: text.index("options:")].split())
    assert "defaults, then from the checkpoint" in head
    sections = ["checkpoint to start from:", "model: ", "model.optimizer: ", "data: "]
    sections += ["checkpoint: last.ckpt", "best_checkpoint: best.ckpt", "trainer: "]
    places = [text.index(f"\n{section}") for section in sections]
    assert places == sorted(places)
    assert "packed4_awc" in text


@pytest.mark.parametrize(("exported", "seed"), [("7", 7), (None, 0)])
def test_a_seed_of_true_is_the_one_that_is_exported(
    fit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exported: str | None, seed: int
) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", exported or "")  # restores what was there before
    if exported is None:
        monkeypatch.delenv("PL_GLOBAL_SEED")
    fit("run", "--seed_everything", "true", "--trainer.max_steps", "1")
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert config["seed_everything"] == seed


def test_configuration_files_come_first_in_their_order() -> None:
    args = ["--a", "1", "--config", "x", "--b=2", "-c", "y", "--model", "m", "--config=z"]
    first = ["--config", "x", "-c", "y", "--config=z"]
    assert configs_first(args) == [*first, "--a", "1", "--b=2", "--model", "m"]
    assert configs_first(args, ["--model"]) == [*first, "--model", "m", "--a", "1", "--b=2"]
    assert configs_first(["--config"]) == ["--config"]


def test_a_functions_options_win_over_its_configuration_files(command: Any, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("workers: 4\n")
    (tmp_path / "b.yaml").write_text("workers: 3\n")
    for args in (
        ["--config", "a.yaml", "--workers", "2"],
        ["--workers", "2", "--config", "a.yaml"],
    ):
        assert "\nworkers            2\n" in command("topology", "ring", *args).out
    done = command("topology", "ring", "--config", "a.yaml", "--config", "b.yaml")
    assert "\nworkers            3\n" in done.out


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (ValueError("too few"), "error: too few\n"),
        (FileNotFoundError("no file at x"), "error: no file at x\n"),
        (ModuleNotFoundError("needs y"), "error: needs y\n"),
        (RuntimeError("out of memory"), "error: RuntimeError: out of memory\n"),
        (PermissionError(13, "Permission denied"), "error: PermissionError: [Errno 13] Permission"),
    ],
)
def test_an_error_is_one_line_and_exit_code_1(
    command: Any, monkeypatch: pytest.MonkeyPatch, error: Exception, shown: str
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setitem(cli.COMMANDS, "topology", cli.Command("Fails.", fail))
    done = command("topology", "ring")
    assert done.code == 1
    assert done.err.startswith(f"tinyllm topology: {shown}")
    assert "Traceback" not in done.err
    assert "JSONARGPARSE_DEBUG=true" in done.err
    monkeypatch.setenv("JSONARGPARSE_DEBUG", "true")
    with pytest.raises(type(error)):
        main(["topology", "ring"])


def test_a_mistake_of_ours_is_not_hidden(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("bug")

    monkeypatch.setitem(cli.COMMANDS, "topology", cli.Command("Fails.", fail))
    with pytest.raises(KeyError):
        command("topology", "ring")


def test_an_interrupt_is_exit_code_130(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(cli.COMMANDS, "topology", cli.Command("Is interrupted.", fail))
    done = command("topology", "ring")
    assert (done.code, done.err) == (130, "\ntinyllm topology: interrupted\n")


def test_a_reader_that_leaves_is_no_error() -> None:
    code = "from tinyllm.cli import main; main(['topology', 'complete', '--workers', '200'])"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141
