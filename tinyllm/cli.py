"""The ``tinyllm`` command: LightningCLI's subcommands and the ones around training.

Nothing heavy is imported until a subcommand runs, so ``tinyllm --help`` answers at once.
"""

import difflib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_DEBUG = "JSONARGPARSE_DEBUG"  # set, the parser raises its errors too


def _trainer_command(name: str, args: list[str]) -> None:
    import tinyllm.strategies.registry  # noqa: F401  (registers the strategies' short names)
    from tinyllm.trainer_cli import run_trainer_command

    run_trainer_command(name, args)


def _function_command(name: str, args: list[str]) -> None:
    from importlib import import_module

    from jsonargparse import auto_cli

    from tinyllm.cli_errors import HelpfulParser

    module = import_module(_FUNCTION_MODULES[name])
    auto_cli(
        getattr(module, name),
        args=args,
        prog=f"tinyllm {name}",
        parser_class=HelpfulParser,
        as_positional=name == "topology",
    )


_FUNCTION_MODULES = {
    "prepare": "tinyllm.data.prepare",
    "generate": "tinyllm.generate",
    "topology": "tinyllm.strategies.topology_report",
}


@dataclass(frozen=True)
class Command:
    """A subcommand: what it does in a line, and what runs it."""

    summary: str
    run: Callable[[str, list[str]], None]


COMMANDS = {
    "fit": Command("Train a model from a configuration file.", _trainer_command),
    "validate": Command("Loss of a checkpoint on the whole validation split.", _trainer_command),
    "test": Command("Loss of a checkpoint over the whole test split.", _trainer_command),
    "predict": Command("Loss of every single token of the validation split.", _trainer_command),
    "prepare": Command("Turn text or token files into a token cache.", _function_command),
    "generate": Command("Sample text from a checkpoint.", _function_command),
    "topology": Command("Show a topology's mixing matrices and numbers.", _function_command),
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
            "  -h, --help     this page; `tinyllm COMMAND --help` lists a command's options",
            "  --version      the installed version",
            "",
            "Several --config files overlay left to right; values on the command line win:",
            "  tinyllm fit --config configs/20m.yaml --model.optimizer.lr 1e-3",
        ]
    )


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command line.

    Args:
        args: Without the program's name; None takes those of this process.

    Raises:
        SystemExit: 2 for unusable arguments, 1 for any other error, 143 when stopped by SIGTERM.
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
    try:
        COMMANDS[name].run(name, rest)
    except (OSError, RuntimeError, ValueError) as error:
        if os.environ.get(_DEBUG):
            raise
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        sys.stderr.write(f"tinyllm {name}: error: {kind}{error}\n")
        sys.stderr.write(f"(set {_DEBUG}=1 to see where it was raised)\n")
        raise SystemExit(1) from None
