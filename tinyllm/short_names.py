"""Short strategy names that options follow, written out as the class that they stand for."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

_FLAG = "--trainer.strategy"
_FILES = {
    "-c": ("trainer", "strategy"),
    "--config": ("trainer", "strategy"),
    "--trainer": ("strategy",),
}


def public_path(cls: type) -> str:
    """The shortest path under which a class can be imported."""
    parts = cls.__module__.split(".")
    for length in range(1, len(parts)):
        package = ".".join(parts[:length])
        if getattr(sys.modules.get(package), cls.__name__, None) is cls:
            return f"{package}.{cls.__name__}"
    return f"{cls.__module__}.{cls.__qualname__}"


def short_names() -> list[str]:
    """The names that are registered so far."""
    from lightning.pytorch.strategies import StrategyRegistry

    return StrategyRegistry.available_strategies()


def class_of(name: object) -> tuple[str, dict[str, Any]] | None:
    """The class path and options that a registered name stands for; None for any other value."""
    from lightning.pytorch.strategies import StrategyRegistry

    if not isinstance(name, str) or name not in StrategyRegistry:
        return None
    entry = StrategyRegistry[name]
    return public_path(entry["strategy"]), entry["init_params"]


def written_out(args: Sequence[str]) -> list[str]:
    """Adds the class and its options after a short name for which further options are given.

    The parser takes options of a class only, and a name by itself is left as it is. Where options
    stand before their strategy on the command line it is put in front of them: they would be lost.

    Args:
        args: One of the Trainer's commands' arguments, configuration files first.
    """
    steps = _strategy_first(list(_steps(args)))
    result: list[str] = []
    for index, (arguments, strategy) in enumerate(steps):
        result += arguments
        meant = class_of(strategy)
        if meant is not None and _options_follow(value for _, value in steps[index + 1 :]):
            path, options = meant
            result += [_FLAG, path]
            for option, value in options.items():
                result += [f"{_FLAG}.{option}", str(value)]
    return result


def _strategy_first(steps: list[tuple[list[str], object]]) -> list[tuple[list[str], object]]:
    """Moves the one strategy that the command line gives to before the first of its options."""
    flags = [arguments[0].partition("=")[0] for arguments, _ in steps]
    options = [index for index, flag in enumerate(flags) if flag.startswith(f"{_FLAG}.")]
    if flags.count(_FLAG) == 1 and options and options[0] < (place := flags.index(_FLAG)):
        steps.insert(options[0], steps.pop(place))
    return steps


def _steps(args: Sequence[str]) -> Iterator[tuple[list[str], object]]:
    """A flag and its value at a time, with what they make of the strategy; None for nothing."""
    remaining = iter(args)
    for argument in remaining:
        flag, has_value, value = argument.partition("=")
        arguments = [argument]
        if flag == _FLAG or flag in _FILES:
            if not has_value and (following := next(remaining, None)) is not None:
                value = following
                arguments.append(value)
            yield arguments, value if flag == _FLAG else _strategy_in(value, _FILES[flag])
        else:
            yield arguments, {} if flag.startswith(f"{_FLAG}.") else None


def _options_follow(later: Iterable[object]) -> bool:
    """Whether the next that is said of the strategy is an option, and not another strategy."""
    strategy = next((value for value in later if value is not None), None)
    return isinstance(strategy, dict) and "class_path" not in strategy


def _strategy_in(path: str, keys: Iterable[str]) -> object:
    """What a configuration file gives; None if nothing, or it is none, which the parser says."""
    import yaml

    try:
        value = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, RecursionError, ValueError, yaml.YAMLError):
        return None
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value
