"""Command-line errors in a few lines, which name the nearest good key, class or value."""

import difflib
import inspect
import os
import re
import sys
from collections.abc import Iterable
from importlib import import_module
from typing import Any, NoReturn

from jsonargparse import ArgumentParser

# How jsonargparse words what it finds; the tests hold every one of these.
_BAD_KEY = re.compile(
    r"[Uu]nrecognized arguments?: --?(?P<flag>[\w.\-]+)"
    r"|(?:Group ['\"](?P<group>[\w.]+)['\"] )?does not accept option ['\"](?P<option>[\w.\-]+)"
    r"|[Kk]ey ['\"](?P<key>[\w.\-]+)['\"] is not expected"
)
_BAD_PARAMETER = re.compile(
    r"class_path '(?P<path>[\w.]+)':\s+Option '(?P<parameter>[\w.\-]+)' is not accepted"
)
_BAD_CLASS = re.compile(
    r"dot import path string: (?P<name>[\w.]+)"
    r"|class_path '(?P<path>[\w.]+)':\s+(?:module '[\w.]+' has no attribute|No module named)"
)
_BAD_CHOICE = re.compile(
    r"Expected a (?:typing\.)?Literal\[(?P<choices>[^\]]*)\]. Got value: (?P<value>\S+)"
)
_BAD_TYPE = re.compile(r"Expected a <class '(?P<type>\w+)'>. Got value: (?P<value>.*)")
_PLACE = re.compile(r"Parser key \"(?P<place>[\w.]+)\"")
_REQUIRED = re.compile(r"(?<=arguments are required: )(fit|validate|test|predict)\.")


class SuggestionsMixin:
    """Shortens a parser's errors and adds the known key nearest to an unknown one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # an abbreviated option is a misspelt one
        super().__init__(*args, **{"allow_abbrev": False} | kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Prints the message with a suggestion and exits with 2."""
        message = _explained(_REQUIRED.sub("", message), self)
        if not self.exit_on_error or os.environ.get("JSONARGPARSE_DEBUG"):  # type: ignore[attr-defined]
            super().error(message, ex)  # type: ignore[misc]
        parser: Any = getattr(ex, "subcommand_parser", None) or self
        prog = parser.prog.replace(" [options]", "")
        sys.stderr.write(f"{prog}: error: {message}\n(`{prog} --help` lists what is accepted)\n")
        raise SystemExit(2)

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        """The usual help, with types and empty defaults as people write them."""
        text: str = super().format_help(*args, **kwargs)  # type: ignore[misc]
        # where the line was wrapped inside the type, it stays wrapped
        text = re.sub(r"<class(?: |(\s+))'(?:\w+\.)*(\w+)'>", r"\1\2", text)
        return re.sub(r"default:(\s+)\)", r"default:\1'')", text)


class HelpfulParser(SuggestionsMixin, ArgumentParser):
    """The parser of the commands around training."""


def nearest(bad: str, good: Iterable[str]) -> str | None:
    """The dotted name nearest to ``bad``, compared whole and by its last part; None if none is."""
    good = list(good)
    if whole := difflib.get_close_matches(bad, good, n=1, cutoff=0.7):
        return whole[0]
    by_tail = {name.rsplit(".", 1)[-1]: name for name in good}
    tail = difflib.get_close_matches(bad.rsplit(".", 1)[-1], by_tail, n=1, cutoff=0.6)
    return by_tail[tail[0]] if tail else None


def known_classes(*bases: type) -> list[str]:
    """Class paths of everything imported so far that derives from ``bases``."""
    found: list[str] = []
    todo = list(bases)
    while todo:
        children: list[type] = todo.pop().__subclasses__()
        for child in children:
            if not inspect.isabstract(child):
                found.append(_public_path(child))
            todo.append(child)
    return found


def _public_path(cls: type) -> str:
    """The shortest path under which a class can be imported."""
    parts = cls.__module__.split(".")
    for length in range(1, len(parts)):
        package = ".".join(parts[:length])
        if getattr(sys.modules.get(package), cls.__name__, None) is cls:
            return f"{package}.{cls.__name__}"
    return f"{cls.__module__}.{cls.__qualname__}"


def _explained(message: str, parser: Any) -> str:
    """The message in one line if it is of a known kind, with the nearest good name."""
    place = _PLACE.search(message)
    where = f"{place['place']}: " if place else ""
    if match := _BAD_PARAMETER.search(message):
        path, bad = match["path"], match["parameter"]
        return f"{where}{path} has no option {bad!r}{_hint(bad, _parameters_of(path))}"
    if match := _BAD_CLASS.search(message):
        bad = match["path"] or match["name"]
        return f"{where}there is no class {bad!r}{_hint(bad, _classes())}"
    if match := _BAD_CHOICE.search(message):
        choices, bad = re.findall(r"'([^']*)'", match["choices"]), match["value"]
        return f"{where}{bad!r} is not allowed{_hint(bad, choices)} (choices: {', '.join(choices)})"
    if place and (match := _BAD_TYPE.fullmatch(message[place.end() :].lstrip(": \n"))):
        return f"{where}expected {match['type']}, got {match['value']!r}"
    if match := _BAD_KEY.search(message):
        option = ".".join(filter(None, (match["group"], match["option"])))
        bad = match["flag"] or match["key"] or option
        return f"unknown key {bad!r}{_hint(bad, _known_keys(parser))}"
    return message


def shortened(message: str) -> str:
    """What a class said when it was made, without what jsonargparse tried before and after.

    Where an option may be of several types, its message lists what went wrong with each of them.
    """
    if not message.startswith("Does not validate against any of the Union subtypes"):
        return message
    tried = message.partition("\nErrors:\n")[2].partition("\nGiven value type:")[0]
    reasons = [
        re.sub(r"^Problem with given class_path '\S+':\s+", "", reason).strip()
        for reason in re.split(r"^  - ", tried, flags=re.MULTILINE)[1:]
        if not reason.startswith(("Expected a ", "Not a valid subclass "))
    ]
    return "; ".join(reasons) or message


def _hint(bad: str, good: Iterable[str]) -> str:
    best = nearest(bad, good)
    return f"; did you mean {best!r}?" if best else ""


def _known_keys(parser: Any) -> set[str]:
    keys = {action.dest for action in parser._actions if isinstance(action.dest, str)}
    for action in parser._actions:
        for child in (getattr(action, "_name_parser_map", None) or {}).values():
            keys |= _known_keys(child)
    return keys - {"help"}


def _parameters_of(path: str) -> list[str]:
    module, _, name = path.rpartition(".")
    cls = getattr(import_module(module), name)
    named = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in inspect.signature(cls).parameters.values() if p.kind in named]


def _classes() -> list[str]:
    """What can be named by class path in a configuration file."""
    from lightning.pytorch import Callback
    from lightning.pytorch.loggers import Logger
    from lightning.pytorch.strategies import Strategy

    from tinyllm.schedule import Schedule

    return known_classes(Callback, Logger, Strategy, Schedule)
