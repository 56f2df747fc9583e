"""Command-line errors in a few lines, which name the nearest good key or class path."""

import difflib
import re
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

from jsonargparse import ArgumentParser
from lightning.pytorch.cli import LightningArgumentParser

_BAD_KEY = re.compile(
    r"[Uu]nrecognized arguments?: --?(?P<flag>[\w.\-]+)"
    r"|(?:Group ['\"](?P<group>[\w.]+)['\"] )?does not accept option ['\"](?P<option>[\w.\-]+)"
    r"|[Kk]ey ['\"](?P<key>[\w.\-]+)['\"] is not expected"
)
_BAD_CLASS = re.compile(r"dot import path string: (?P<path>[\w.]+)")


class SuggestionsMixin:
    """Shortens a parser's errors and adds the known key nearest to an unknown one."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Prints the message with a suggestion and exits with 2."""
        hint = _key_hint(message, self) or _class_hint(message)
        if hint:
            message = f"{message}\n{hint}"
        if not self.exit_on_error:  # type: ignore[attr-defined]
            super().error(message, ex)  # type: ignore[misc]
        parser = getattr(ex, "subcommand_parser", None) or self
        prog = parser.prog.replace(" [options]", "")
        sys.stderr.write(f"{prog}: error: {message}\n(`{prog} --help` lists what is accepted)\n")
        raise SystemExit(2)


class HelpfulParser(SuggestionsMixin, ArgumentParser):
    """The parser of the commands around training."""


class HelpfulLightningParser(SuggestionsMixin, LightningArgumentParser):
    """The parser of the Trainer's commands."""


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
    found, todo = [], list(bases)
    while todo:
        for child in todo.pop().__subclasses__():
            found.append(f"{child.__module__}.{child.__qualname__}")
            todo.append(child)
    return found


def _known_keys(parser: Any) -> set[str]:
    keys = {action.dest for action in parser._actions if isinstance(action.dest, str)}
    for action in parser._actions:
        for child in (getattr(action, "_name_parser_map", None) or {}).values():
            keys |= _known_keys(child)
    return keys - {"help"}


def _key_hint(message: str, parser: Any) -> str | None:
    match = _BAD_KEY.search(message)
    if not match:
        return None
    bad = match["flag"] or match["key"] or ".".join(filter(None, (match["group"], match["option"])))
    best = nearest(bad, _known_keys(parser))
    return f"unknown key {bad!r}" + (f"; did you mean {best!r}?" if best else "")


def _class_hint(message: str) -> str | None:
    match = _BAD_CLASS.search(message)
    if not match:
        return None
    from lightning.pytorch import Callback
    from lightning.pytorch.loggers import Logger
    from lightning.pytorch.strategies import Strategy

    from tinyllm.schedule import Schedule

    bad = match["path"]
    best = nearest(bad, known_classes(Callback, Logger, Strategy, Schedule))
    return f"unknown class {bad!r}" + (f"; did you mean {best!r}?" if best else "")
