"""Command-line errors in a few lines, which name the nearest good key, class or value."""

import difflib
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Iterable
from contextvars import ContextVar
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from jsonargparse import ArgumentParser

from tinyllm.short_names import class_of, public_path, short_names

# How jsonargparse words what it finds; the tests hold every one of these.
_BAD_KEY = re.compile(
    r"[Uu]nrecognized arguments?: --?(?P<flag>[\w.\-]+)"
    r"|(?:Group ['\"](?P<group>[\w.]+)['\"] )?does not accept option ['\"](?P<option>[\w.\-]+)"
    r"|[Kk]ey ['\"](?P<key>[\w.\-]+)['\"] is not expected"
)
_BAD_OPTION = re.compile(r"Option '(?P<option>[\w.\-]+)' is not accepted")
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
_OF_CLASS = re.compile(r"Problem with given class_path '\S+':")
_UNKNOWN_KEY = re.compile(r"unknown key '(?P<key>[\w.\-]+)'")
_NO_PATH = re.compile(r"^- Expected a path but .* either not accessible or invalid\n\s*- ")
_NEEDED = "the following arguments are required: "
_INNER = re.compile(r"[a-z_]\w*(?:\.\w+)*: ")  # an option of a class, as it is explained here
_REQUIRED = re.compile(r"(?<=arguments are required: )(fit|validate|test|predict)\.")

_FILE: ContextVar[Path | None] = ContextVar("file", default=None)
"""The configuration file that is being read, as a user would name it."""

_FILES: list[tuple[Path, Path]] = []
"""Names and places of all that were read; what no option takes is noticed after the last."""


class SuggestionsMixin:
    """Shortens a parser's errors and adds the known key nearest to an unknown one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # an abbreviated option is a misspelt one
        super().__init__(*args, **{"allow_abbrev": False} | kwargs)

    def parse_path(self, path: str | Path, *args: Any, **kwargs: Any) -> Any:
        """Reads a configuration file, whose name is in errors."""
        outer = _FILE.get()  # in whose folder a path is looked for
        named = Path(path) if outer is None else outer.parent / path
        token = _FILE.set(named)
        _FILES.append((named, Path(path).absolute()))
        try:
            return super().parse_path(path, *args, **kwargs)  # type: ignore[misc]
        except UnicodeDecodeError as error:
            self.error(f"it is not UTF-8 text: {error.reason}", error)
        finally:
            _FILE.reset(token)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Prints the message with a suggestion and exits with 2."""
        message = _explained(_REQUIRED.sub("", message), self)
        if not self.exit_on_error or os.environ.get("JSONARGPARSE_DEBUG"):  # type: ignore[attr-defined]
            super().error(message, ex)  # type: ignore[misc]
        parser: Any = getattr(ex, "subcommand_parser", None) or self
        prog = parser.prog.replace(" [options]", "")
        if match := _BAD_OPTION.fullmatch(message):  # of a function, which has no parser of its own
            message = _unknown(match["option"], parser)
        file = _FILE.get() or _file_with(message)
        message = f"{file}: {message}" if file else message
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


_LAZY: set[str] = set()


def make_known(class_paths: Iterable[str]) -> None:
    """Lets errors suggest classes that are imported only when they are used."""
    _LAZY.update(class_paths)


def nearest(bad: str, good: Iterable[str]) -> str | None:
    """The dotted name nearest to ``bad``, in any case, whole or by its last part; None if none."""
    bad, names = bad.lower(), {name.lower(): name for name in good}
    if whole := difflib.get_close_matches(bad, names, n=1, cutoff=0.7):
        return names[whole[0]]
    by_tail = {lower.rpartition(".")[2]: name for lower, name in names.items()}
    tail = difflib.get_close_matches(bad.rpartition(".")[2], by_tail, n=1, cutoff=0.6)
    return by_tail[tail[0]] if tail else None


def known_classes(*bases: type) -> list[str]:
    """Class paths of everything imported so far that derives from ``bases``."""
    found: list[str] = []
    todo = list(bases)
    while todo:
        children: list[type] = todo.pop().__subclasses__()
        for child in children:
            if not inspect.isabstract(child):
                found.append(public_path(child))
            todo.append(child)
    return found


def _explained(message: str, parser: Any) -> str:
    """The message in one line if it is of a known kind, with the nearest good name."""
    place = _PLACE.search(message)
    where = f"{place['place']}: " if place else ""
    rest = message[place.end() :].lstrip(": \n") if place else message
    reasons = [reason for reason in _reasons(rest) if reason != rest]
    explained = [reason for reason in reasons if _INNER.match(reason)]
    if place and explained:
        return "; ".join(_placed(place["place"], reason) for reason in explained)
    if match := _BAD_PARAMETER.search(message):
        path, bad = match["path"], match["parameter"]
        return f"{where}{path} has no option {bad!r}{_hint(bad, _parameters_of(path))}"
    if match := _BAD_CLASS.search(message):
        bad = match["path"] or match["name"]
        of_strategy = where == "trainer.strategy: "
        if of_strategy and (meant := class_of(bad)):
            path, options = meant
            return f"{where}{bad!r} is a short name; as class_path give {path!r}" + (
                f" with init_args {options}" if options else ""
            )
        names = short_names() if of_strategy else []
        return f"{where}there is no class {bad!r}{_hint(bad, [*_classes(), *names])}"
    if match := _BAD_CHOICE.search(message):
        choices, bad = re.findall(r"'([^']*)'", match["choices"]), match["value"]
        return f"{where}{_not_among(bad, choices)}"
    if place and (match := _BAD_TYPE.fullmatch(rest)):
        return f"{where}expected {match['type']}, got {match['value']!r}"
    if place and reasons:
        return "; ".join(_placed(place["place"], reason) for reason in reasons)
    if match := _BAD_KEY.search(message):
        option = ".".join(filter(None, (match["group"], match["option"])))
        bad = match["flag"] or match["key"] or option
        return _unknown(bad, parser)
    return message


def _unknown(key: str, parser: Any) -> str:
    """That no option takes a key, with the nearest that there is."""
    return f"unknown key {key!r}{_hint(key, _known_keys(parser))}"


def _file_with(message: str) -> Path | None:
    """The last configuration file that has the key which no option takes."""
    if not (match := _UNKNOWN_KEY.match(message)):
        return None
    import yaml  # heavy, and not needed for help

    for named, file in reversed(_FILES):
        try:
            values = yaml.safe_load(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError):  # a URL, or of another kind
            continue
        if _has(values, match["key"]):
            return named
    return None


def _has(values: Any, key: str) -> bool:
    """Whether a dotted key is among nested values, of which names may be dotted, too."""
    if not isinstance(values, dict):
        return False
    dots = [place for place, letter in enumerate(key) if letter == "."]
    return key in values or any(_has(values.get(key[:at]), key[at + 1 :]) for at in dots)


def forget_files() -> None:
    """Begins another command, which has read no configuration file."""
    _FILES.clear()


def _placed(place: str, reason: str) -> str:
    """What is wrong with an option, with the option's whole name."""
    if reason.startswith(_NEEDED):
        names = reason.removeprefix(_NEEDED).split(", ")
        return _NEEDED + ", ".join(f"{place}.{name}" for name in names)
    return f"{place}{'.' if _INNER.match(reason) else ': '}{reason}"


def shortened(message: str) -> str:
    """What a class said when it was made, without what jsonargparse tried before and after.

    Where an option may be of several types, its message lists what went wrong with each of them;
    if it was of none, they are named.
    """
    return "; ".join(_reasons(message))


def _reasons(message: str) -> list[str]:
    """What went wrong, of all that a message lists; the message itself where it lists nothing."""
    message = _NO_PATH.sub("", message)
    first, _, rest = message.partition("\n")
    rest = textwrap.dedent(rest)
    if _OF_CLASS.fullmatch(first):
        return _reasons(rest)
    if first != "Does not validate against any of the Union subtypes":
        return [message]
    listed = re.split(r"^Errors:\n", rest, maxsplit=1, flags=re.MULTILINE)[-1]
    tried, _, given = listed.partition("\nGiven value type:")
    types: list[str] = []
    others: list[str] = []
    for reason in re.split(r"^  - ", tried, flags=re.MULTILINE)[1:]:
        is_type = reason.startswith(("Expected a ", "Not a valid subclass "))
        (types if is_type else others).append(reason.strip())
    if others:
        return list(dict.fromkeys(inner for reason in others for inner in _reasons(reason)))
    return [_of_no_type(types, given.partition("\nGiven value: ")[2])] if types else [message]


def _of_no_type(reasons: list[str], value: str) -> str:
    """That a value is of none of the types whose refusals are given."""
    kinds: list[str] = []
    choices: list[str] = []
    for reason in reasons:
        if match := re.match(r"Expected a (?:typing\.)?Literal\[(.*)\]", reason):
            choices += re.findall(r"[^\s',]+", match[1])
        elif match := re.match(r"Expected a <class '(?:\w+\.)*(\w+)'>", reason):
            kinds.append(match[1].replace("NoneType", "null"))
        elif match := re.match(r"(?:Expected a |Not a valid subclass (?:of )?)(.*)", reason):
            kinds.append(re.sub(r"(?:\w+\.)+(?=\w)", "", match[1]))
    if choices and set(kinds) <= {"null"}:
        return _not_among(value, list(dict.fromkeys(choices + kinds)))
    *others, last = dict.fromkeys(kinds + choices)
    return f"expected {', '.join(others)}{' or ' if others else ''}{last}, got {value!r}"


def _not_among(bad: str, choices: list[str]) -> str:
    return f"{bad!r} is not allowed{_hint(bad, choices)} (choices: {', '.join(choices)})"


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

    return [*known_classes(Callback, Logger, Strategy, Schedule), *sorted(_LAZY)]
