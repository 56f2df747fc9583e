"""Seals of results and of a report's files: each holds, or ends with, a hash of its own content.

A result without a valid seal does not count. What has one in a report is as a report wrote it, so
it can be made again and may be replaced.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from tinyllm.acceptance.evidence import identity_of

_SEAL = re.compile(rb"<!-- seal ([0-9a-f]{64}) -->\n\Z")


def sealed_json(content: dict[str, Any]) -> bytes:
    """A JSON file with its seal."""
    whole = content | {"seal": identity_of(content)}
    return (json.dumps(whole, indent=1, allow_nan=False) + "\n").encode()


def holds_seal(content: Any) -> bool:
    """Whether JSON content has the seal of all the rest of it."""
    if not isinstance(content, dict):
        return False
    rest = {name: value for name, value in content.items() if name != "seal"}
    try:
        return bool(content.get("seal") == identity_of(rest))
    except ValueError:  # a number is not finite
        return False


def sealed(text: str) -> bytes:
    """A page or a figure with its seal."""
    body = text.encode()
    return body + f"<!-- seal {hashlib.sha256(body).hexdigest()} -->\n".encode()


def is_sealed(path: Path) -> bool:
    """Whether a file is exactly as a report wrote it."""
    data = path.read_bytes()
    if path.suffix == ".json":
        try:
            return holds_seal(json.loads(data))
        except (RecursionError, ValueError):
            return False
    match = _SEAL.search(data)
    body = data[: match.start()] if match else b""
    return match is not None and hashlib.sha256(body).hexdigest() == match[1].decode()


def inputs_of_complete_report(folder: Path) -> dict[str, str] | None:
    """Hashes of the tables that the complete report in a folder was made from; None without one."""
    path = folder / "qualification.json"
    if not path.is_file() or not is_sealed(path):
        return None
    content = json.loads(path.read_text(encoding="utf-8"))
    inputs: dict[str, str] = content["inputs"]
    return None if content["partial"] else inputs
