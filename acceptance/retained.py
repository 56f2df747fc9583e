"""Files that evidence keeps by content: initial states and the batches that were compared.

They lie in ``retained/`` of a campaign's folder, named ``{SHA-256}.safetensors``, so one that many
comparisons share is there once. Results name them by hash.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from tinyllm.acceptance.evidence import EvidenceError, hash_file

FOLDER = "retained"
_SUFFIX = ".safetensors"
_DIGEST = re.compile(r"[0-9a-f]{64}")


def retain(root: Path, path: Path) -> str:
    """Moves a file there; gives its hash."""
    digest = hash_file(path)
    place = root / FOLDER / f"{digest}{_SUFFIX}"
    place.parent.mkdir(exist_ok=True)
    path.chmod(0o444)
    path.replace(place)  # another one there has the same content
    return digest


def require_retained(root: Path, digests: Iterable[str]) -> None:
    """Checks that files are there, and nothing else.

    Raises:
        EvidenceError: If one is not.
    """
    for digest in digests:
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise EvidenceError(f"{digest!r} is no hash of a file in {root / FOLDER}")
        path = root / FOLDER / f"{digest}{_SUFFIX}"
        if not path.is_file():
            raise EvidenceError(f"{path} is not there any more")


def verify_retained(root: Path) -> dict[str, int]:
    """Sizes in bytes of all retained files by hash, after each was read.

    Raises:
        EvidenceError: If one is not what its name says.
    """
    sizes = {}
    for path in sorted((root / FOLDER).glob("[!.]*")):
        if hash_file(path) != path.stem:
            raise EvidenceError(f"{path} has been changed since it was retained")
        sizes[path.stem] = path.stat().st_size
    return sizes
