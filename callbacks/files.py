"""Result files that are either whole or not there."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tinyllm.files import replacing


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file, whole or not at all."""
    with replacing(path) as partial:
        partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_csv(path: Path, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Writes a CSV file, whole or not at all."""
    with replacing(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)
