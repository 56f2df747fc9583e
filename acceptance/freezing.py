"""Freezes the two sides of a campaign from checkouts of this project."""

import configparser
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tinyllm.acceptance.configure import Settings, resolved_configs
from tinyllm.acceptance.evidence import (
    Candidate,
    EvidenceError,
    Manifest,
    freeze_candidate,
    freeze_manifest,
)
from tinyllm.acceptance.protocol import Protocol


def freeze_native(
    root: Path, protocol: Protocol, settings: Settings, *, checkout: Path
) -> Manifest:
    """Freezes a checkout as native, with a configuration for each id of the protocol.

    Raises:
        EvidenceError: If the folder holds another manifest, or candidates without any.
        ValueError: If the cache is too small for a recipe.
    """
    # native runs in folders of its own, so its cache needs a path that holds everywhere
    whole = replace(settings, cache=str(Path(settings.cache).resolve()))
    cache = cache_manifest(whole.cache)
    configs = resolved_configs(protocol, whole, cache["splits"]["train"]["tokens"])
    with _staged(checkout) as (base, files):
        return freeze_manifest(
            root,
            protocol,
            configs=configs,
            base=base,
            files=files,
            lockfile=checkout / "requirements.lock",
            token_cache=cache["identity"],
            patch=_patch(checkout),
        )


def freeze_new_candidate(root: Path, strategy: Mapping[str, Any], *, checkout: Path) -> Candidate:
    """Freezes a checkout and the strategy's arguments, such as ``backend``, as a candidate."""
    with _staged(checkout) as (base, files):
        return freeze_candidate(root, base=base, files=files, details={"strategy": dict(strategy)})


@contextmanager
def _staged(checkout: Path) -> Iterator[tuple[Path, list[str]]]:
    """The checkout's package as it is imported: every mapped folder under one name."""
    setup = configparser.ConfigParser()
    setup.read(checkout / "setup.cfg", encoding="utf-8")
    try:
        lines = setup["options"]["package_dir"].strip().splitlines()
    except KeyError:
        raise ValueError(f"{checkout} is no checkout: setup.cfg has no package_dir") from None
    pairs = [[part.strip() for part in line.split("=", maxsplit=1)] for line in lines]
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch)
        for package, folder in pairs:
            origin, target = checkout / folder, base.joinpath(*package.split("."))
            for path in sorted(origin.rglob("*")) if origin.is_dir() else ():
                inner = path.relative_to(origin)
                hidden = any(part.startswith((".", "__pycache__")) for part in inner.parts)
                if path.is_file() and not hidden:
                    (target / inner).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(path, target / inner)
        files = [path.relative_to(base).as_posix() for path in base.rglob("*") if path.is_file()]
        yield base, files


def _patch(checkout: Path) -> bytes:
    """Differences from the last commit; empty where there is no git."""
    try:
        done = subprocess.run(
            ["git", "diff", "--binary", "HEAD"], cwd=checkout, capture_output=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return b""
    return done.stdout


def cache_manifest(cache: str) -> dict[str, Any]:
    """What a token cache says of itself.

    Raises:
        EvidenceError: If there is none.
    """
    path = Path(cache) / "manifest.json"
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise EvidenceError(f"{cache} holds no token cache; make one: tinyllm prepare") from None
    return content
