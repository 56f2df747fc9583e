"""What several parts do with the arguments that they are given."""

from dataclasses import fields
from numbers import Integral, Real
from typing import Any, get_args


def check_choice(name: str, value: object, allowed: Any) -> None:
    """Raises ValueError for an argument's value that is none of ``allowed``, a ``Literal``."""
    choices = get_args(allowed)
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; choose from {', '.join(choices)}")


def make_plain(instance: Any) -> None:
    """Replaces NumPy's numbers in a frozen dataclass by Python's, which a checkpoint can hold."""
    for field in fields(instance):
        object.__setattr__(instance, field.name, _plain(getattr(instance, field.name)))


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(map(_plain, value))
    if isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value
