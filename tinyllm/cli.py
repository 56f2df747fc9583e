"""The ``tinyllm`` command: LightningCLI's subcommands and the ones around training.

Nothing heavy is imported until a subcommand runs, so ``tinyllm --help`` answers at once.
"""

import difflib
import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

from tinyllm.config_files import check_size

_DEBUG = "JSONARGPARSE_DEBUG"  # set, the parser raises its errors too
_SECTIONS = ("--trainer", "--model", "--data", "--checkpoint", "--best_checkpoint")


@contextmanager
def _importing() -> Iterator[None]:
    """Keeps the garbage collector away from what the heavy modules are made of.

    They make 400,000 objects that live as long as the process, and looking through them while they
    are made and again when Python exits takes two seconds. Where torch is there before, this is
    not a process of the command alone, and its objects are left to it.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()  # all that is there so far is left out of collections


def _trainer_command(name: str, args: list[str]) -> None:
    with _importing():
        import tinyllm.strategies.registry  # noqa: F401  (registers the strategies' short names)
        from tinyllm import callbacks
        from tinyllm.cli_errors import forget_files, make_known
        from tinyllm.short_names import written_out
        from tinyllm.trainer_cli import run_trainer_command

    forget_files()
    make_known(f"tinyllm.callbacks.{callback}" for callback in callbacks.__all__)
    run_trainer_command(name, written_out(configs_first(args, _SECTIONS)))


def _function_command(name: str, args: list[str]) -> None:
    from importlib import import_module

    with _importing():
        from jsonargparse import auto_cli

        from tinyllm.cli_errors import HelpfulParser, forget_files

        module = import_module(_FUNCTION_MODULES[name])
    forget_files()
    auto_cli(
        getattr(module, name),
        args=configs_first(args),
        prog=f"tinyllm {name}",
        config_help="A YAML or JSON file with these options; several overlay left to right.",
        parser_class=HelpfulParser,
        as_positional=name != "prepare",  # which asks for too much to tell apart by order
    )


def _accept_command(name: str, args: list[str]) -> None:
    from tinyllm.acceptance.accept import main as accept  # needs neither torch nor jsonargparse

    raise SystemExit(accept(args, prog=f"tinyllm {name}"))


def _doctor_command(name: str, args: list[str]) -> None:
    from argparse import ArgumentParser  # the standard library's, which works without the others
    from importlib import import_module

    from tinyllm.doctor import doctor

    ArgumentParser(f"tinyllm {name}", description=COMMANDS[name].summary).parse_args(args)
    doctor(lambda: import_module("tinyllm.strategies.backends"))


_FUNCTION_MODULES = {
    "prepare": "tinyllm.data.prepare",
    "generate": "tinyllm.generate",
    "export": "tinyllm.export",
    "topology": "tinyllm.strategies.topology_report",
    "completion": "tinyllm.completion",
}


@dataclass(frozen=True)
class Command:
    """A subcommand: what it does in a line, and what runs it."""

    summary: str
    run: Callable[[str, list[str]], None]


COMMANDS = {
    "prepare": Command("Turn text or token files into a token cache.", _function_command),
    "fit": Command("Train a model from configuration files.", _trainer_command),
    "validate": Command("Loss of a checkpoint over the whole validation split.", _trainer_command),
    "test": Command("Loss of a checkpoint over the whole test split.", _trainer_command),
    "predict": Command("Write the loss of every validation token to a file.", _trainer_command),
    "generate": Command("Sample text from a checkpoint.", _function_command),
    "export": Command("Write one model of a checkpoint for other programs.", _function_command),
    "topology": Command("Show a topology's mixing matrices and numbers.", _function_command),
    "accept": Command("Decide by frozen gates if a backend may replace another.", _accept_command),
    "doctor": Command("Print what a bug report needs to say about a machine.", _doctor_command),
    "completion": Command("Print a script for a shell to complete commands.", _function_command),
}


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: tinyllm COMMAND [options]",
            "",
            "Pre-train small Llama-style language models, synchronously or with decentralized",
            "workers packed on one GPU.",
            "",
            "commands:",
            *lines,
            "",
            "options:",
            "  -h, --help  this page; `tinyllm COMMAND --help` explains a command's options",
            "  --version   the installed version",
            "",
            "Several --config files overlay left to right; values on the command line win:",
            "  tinyllm fit --config configs/20m.yaml --model.optimizer.lr 1e-3",
        ]
    )


def configs_first(args: Sequence[str], sections: Sequence[str] = ()) -> list[str]:
    """Moves configuration files before everything else, so that explicit values win over them.

    Args:
        args: A command's arguments.
        sections: Flags that give a whole section by file, as in ``--model FILE``; such files come
            after the ones of ``--config``.
    """
    whole: list[str] = []
    parts: list[str] = []
    rest: list[str] = []
    remaining = iter(args)
    for argument in remaining:
        flag, has_value, _ = argument.partition("=")
        if flag not in ("-c", "--config", *sections):
            rest.append(argument)
            continue
        kind = parts if flag in sections else whole
        named = [argument.partition("=")[2]] if has_value else list(islice(remaining, 1))
        for path in named:
            check_size(path)
        kind += [argument] if has_value else [argument, *named]
    return whole + parts + rest


def _run(name: str, args: list[str]) -> None:
    try:
        COMMANDS[name].run(name, args)
    finally:
        sys.stdout.flush()


def _run_or_explain(name: str, args: list[str]) -> None:
    """Runs a command; what can go wrong becomes a line and an exit code."""
    try:
        _run(name, args)
    except BrokenPipeError:
        # whoever read the output has left, as `head` does; the rest has nowhere to go
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None
    except KeyboardInterrupt:
        sys.stderr.write(f"\ntinyllm {name}: interrupted\n")
        raise SystemExit(130) from None
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        if os.environ.get(_DEBUG):
            raise
        plain = isinstance(error, (ImportError, FileNotFoundError, ValueError))
        kind = "" if plain else f"{type(error).__name__}: "
        notes = "".join(f"{note}\n" for note in getattr(error, "__notes__", []))
        sys.stderr.write(f"tinyllm {name}: error: {kind}{error}\n{notes}")
        sys.stderr.write(f"(set {_DEBUG}=true to see where it was raised)\n")
        raise SystemExit(1) from None


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command line.

    Args:
        args: Without the program's name; None takes those of this process.

    Raises:
        SystemExit: 2 for unusable arguments, 1 for any other error, 130 when interrupted, 138 and
            143 when stopped by SIGUSR1 (Slurm's) and SIGTERM, 141 when nobody reads the output.
    """
    arguments = list(sys.argv[1:] if args is None else args)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        return
    name, rest = arguments[0], arguments[1:]
    if name == "--version":
        import tinyllm

        print(tinyllm.__version__)
        return
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.4)
        hint = f"did you mean {close[0]!r}? " if close else ""
        sys.stderr.write(
            f"tinyllm: error: {name!r} is not a command; {hint}choose from {', '.join(COMMANDS)}\n"
        )
        raise SystemExit(2)
    _run_or_explain(name, rest)
