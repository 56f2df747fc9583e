"""What the tests of the site look at."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Site:
    """What a build left."""

    folder: Path
    log: str
    code: int
