"""How hostile input is made from good input: changed bytes, and changed JSON or YAML values."""

import copy
from typing import Any

from hypothesis import strategies as st

PLACES = st.floats(0, 1, exclude_max=True)
_NUMBERS = st.sampled_from(
    [0, 1, -1, 2, 1 << 31, 1 << 32, 1 << 63, 1 << 70, -(1 << 63), 0.5, 1e308, -0.0, 1e-320]
) | st.sampled_from([float("nan"), float("inf"), float("-inf")])
_TEXTS = st.sampled_from(
    [
        *("", ".", "..", "../outside", "/etc/passwd", "a/b", "a\x00b", "\ud800", "1", "nan"),
        *("x" * 5_000, "native", "manifest.json", "0" * 64, "É" * 200, "1e999999999", "*", "~"),
    ]
)
_SCALARS = st.none() | st.booleans() | _NUMBERS | _TEXTS | st.text(max_size=8)
VALUES = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@st.composite
def changed_bytes(draw: st.DrawFn, good: bytes) -> bytes:
    """Good bytes after one to four changes."""
    data = bytearray(good)
    for _ in range(draw(st.integers(1, 4))):
        at = int(draw(PLACES) * len(data))
        kind = draw(st.sampled_from(["bit", "byte", "cut", "drop", "insert", "repeat", "zero"]))
        length = draw(st.sampled_from([1, 2, 4, 8, 64, 1_000]))
        if kind == "bit" and data:
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "byte" and data:
            data[at] = draw(st.sampled_from([0, 1, 0x20, 0x39, 0x7F, 0x80, 0xFF]))
        elif kind == "cut":
            del data[at:]
        elif kind == "drop":
            del data[at : at + length]
        elif kind == "insert":
            data[at:at] = draw(st.binary(min_size=1, max_size=16))
        elif kind == "repeat":
            data[at:at] = data[at : at + length]
        elif kind == "zero":
            data[at : at + length] = bytes(len(data[at : at + length]))
    return bytes(data)


def _containers(value: Any) -> list[Any]:
    """All lists and mappings in a value that are not empty."""
    found = []
    if isinstance(value, (dict, list)) and value:
        found.append(value)
        for part in value.values() if isinstance(value, dict) else value:
            found += _containers(part)
    return found


@st.composite
def changed_values(draw: st.DrawFn, good: Any, values: st.SearchStrategy[Any] = VALUES) -> Any:
    """A good JSON value after one to three changes."""
    value = copy.deepcopy(good)
    for _ in range(draw(st.integers(1, 3))):
        containers = _containers(value)
        if not containers:
            return draw(values)
        container = containers[int(draw(PLACES) * len(containers))]
        keys = list(container) if isinstance(container, dict) else list(range(len(container)))
        key = keys[int(draw(PLACES) * len(keys))]
        kind = draw(st.sampled_from(["replace", "replace", "delete", "add", "swap", "nudge"]))
        if kind == "delete":
            del container[key]
        elif kind == "add" and isinstance(container, dict):
            container[draw(st.text(max_size=5))] = draw(values)
        elif kind == "add":
            container.append(copy.deepcopy(draw(st.sampled_from(container))))
        elif kind == "swap":
            other = keys[int(draw(PLACES) * len(keys))]
            container[key], container[other] = container[other], container[key]
        elif kind == "nudge" and type(container[key]) in (int, float):
            container[key] += draw(st.sampled_from([1, -1, 1e9, 0.5]))
        else:
            container[key] = draw(values)
    return value
