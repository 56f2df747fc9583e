"""What a shell needs to complete the command line: what ``tinyllm completion`` prints."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from jsonargparse import ArgumentParser, capture_parser


def completion(shell: Literal["bash", "zsh", "fish"]) -> None:
    """Print a script with which a shell completes commands, options and their values.

    It is made from the options of this version and of the packages that are installed; make it
    again after an update.

    Args:
        shell: Which shell it is for. Where bash finds it by itself:
            ~/.local/share/bash-completion/completions/tinyllm
    """
    from tinyllm.cli import COMMANDS

    whole = ArgumentParser(prog="tinyllm")
    whole.add_argument("--version", action="version", version="", help="the installed version")
    commands = whole.add_subcommands(dest="command")
    for name, command in COMMANDS.items():
        commands.add_subcommand(name, _parser(name, command), help=command.summary)
    print(whole.get_completion_script(f"shtab-{shell}"))


def _parser(name: str, command: Any) -> ArgumentParser:
    """The parser that a command makes of its arguments."""
    try:
        with _stopping_argparse():
            parser = capture_parser(command.run, name, [])
    except _PlainParser as found:  # of the standard library
        parser = ArgumentParser(prog=f"tinyllm {name}")
        for action in found.parser._actions:
            if action.dest != "help":
                parser._add_action(action)
    inner = parser._subcommands_action  # LightningCLI's parser has the one for `fit` inside
    return inner._name_parser_map[name] if inner else parser


class _PlainParser(Exception):  # noqa: N818  (it carries a result)
    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__()
        self.parser = parser


@contextmanager
def _stopping_argparse() -> Iterator[None]:
    """Does for the standard library's parsers what ``capture_parser`` does for jsonargparse's."""

    def stop(self: argparse.ArgumentParser, *_: Any) -> None:
        raise _PlainParser(self)

    original = argparse.ArgumentParser.parse_args
    argparse.ArgumentParser.parse_args = stop  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        argparse.ArgumentParser.parse_args = original  # type: ignore[method-assign]
