"""Configuration files that are as large as they look."""

from pathlib import Path

LARGEST = 100_000
"""Values in a file, each alias counted as what it stands for."""


def check_size(path: str | Path) -> None:
    """Refuses a file whose aliases stand for so much that a parser would never end.

    What is no file, or no YAML, is left to the parser, which says so.

    Raises:
        ValueError: The file stands for more than :data:`LARGEST` values.
    """
    import yaml  # heavy, and not needed for help

    try:
        root = yaml.compose(Path(path).read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        sizes: dict[int, int] = {}
        size = 0 if root is None else _size(root, sizes)
    except (OSError, RecursionError, ValueError, yaml.YAMLError):
        return
    if size > LARGEST:
        raise ValueError(
            f"{path}: its aliases stand for more than {LARGEST:,} values; write out what is meant"
        )


def _size(node: object, sizes: dict[int, int]) -> int:
    if id(node) not in sizes:
        sizes[id(node)] = LARGEST + 1  # of what holds itself
        value = getattr(node, "value", None)
        parts = value if isinstance(value, list) else []
        inner = [part for each in parts for part in (each if isinstance(each, tuple) else (each,))]
        sizes[id(node)] = 1 + sum(_size(part, sizes) for part in inner)
    return sizes[id(node)]
