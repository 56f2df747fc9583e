"""What a qualification rests on, frozen before it is measured, and never overwritten.

A campaign's folder::

    manifest.json       protocol, resolved configurations, hashes of everything below, one identity
    protocol.json       the protocol, as ``tinyllm accept`` reads it
    native/             the source that native runs from
    native.patch        its differences from the last commit
    requirements.lock   exact versions of what it needs
    candidates/ID/      candidate.json and source/; ID is the start of their common hash
    receipts/           a file for each thing that happened, written once
    retained/           initial states and batches, each named by its hash (see ``retained``)
    failed/             attempts that failed, kept apart
    qualifications/ID/  tables and report of each candidate

Frozen folders are checked file by file before every use: a changed, missing or added file is
refused, compiled bytecode too, so run from them with ``PYTHONDONTWRITEBYTECODE=1``. Files appear
whole or not at all, whenever a process is killed.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tinyllm.acceptance.files import sync, written_beside
from tinyllm.acceptance.json_text import parse_json
from tinyllm.acceptance.protocol import Protocol

FORMAT = 1
QUALIFICATIONS = "qualifications"
"""Folder with one for each candidate, which holds its tables and its report."""
_ID_DIGITS = 12
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_FIXED = ("protocol.json", "native.patch", "requirements.lock")


class EvidenceError(RuntimeError):
    """Frozen evidence is absent, has changed, or would be overwritten."""


@dataclass(frozen=True)
class Manifest:
    """A campaign's frozen side.

    Attributes:
        identity: SHA-256 over all content of ``manifest.json``.
        protocol: What is measured.
        configs: Resolved configuration of each workload and recipe, by id.
        source: SHA-256 of each file of ``native/``, by its path there.
        files: The same of the single files beside it.
        token_cache: Identity of the token cache that is trained on.
    """

    identity: str
    protocol: Protocol
    configs: dict[str, Any]
    source: dict[str, str]
    files: dict[str, str]
    token_cache: str


@dataclass(frozen=True)
class Candidate:
    """A frozen candidate.

    Attributes:
        id: The first twelve digits of ``identity``, and the name of its folder.
        identity: SHA-256 over the manifest's identity, its details and its files.
        source: The folder to run it from.
        details: What the caller said about it.
    """

    id: str
    identity: str
    source: Path
    details: dict[str, Any]


def identity_of(content: Any) -> str:
    """SHA-256 over JSON content, as 64 hexadecimal digits; the order of keys does not matter.

    Raises:
        ValueError: If a number is not finite.
        TypeError: If something is not JSON.
    """
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def hash_file(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_tree(folder: Path) -> dict[str, str]:
    """SHA-256 of every file under a folder, by its path there.

    Raises:
        EvidenceError: If something is neither a file nor a folder; a link could change unseen.
    """
    hashes = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise EvidenceError(f"{path} is neither a file nor a folder")
        if path.is_file():
            hashes[path.relative_to(folder).as_posix()] = hash_file(path)
    return hashes


def write_once(path: Path, data: bytes | str) -> None:
    """Writes a file whole or not at all; writing the same again does nothing.

    Raises:
        EvidenceError: If the file is there with other content.
    """
    content = data.encode() if isinstance(data, str) else data
    with written_beside(path, content, mode=0o444) as partial:
        try:
            os.link(partial, path)  # unlike a rename, this never replaces
        except FileExistsError:
            if path.read_bytes() != content:
                raise EvidenceError(
                    f"{path} exists with other content; nothing is overwritten"
                ) from None
    sync(path.parent)


def freeze_manifest(
    root: Path,
    protocol: Protocol,
    *,
    configs: Mapping[str, Any],
    base: Path,
    files: Iterable[str | Path],
    lockfile: Path,
    token_cache: str,
    patch: bytes = b"",
) -> Manifest:
    """Freezes native and everything that both sides share; doing the same again changes nothing.

    Args:
        root: The campaign's folder.
        protocol: What will be measured.
        configs: Resolved configuration by id; one for each workload and recipe of the protocol.
        base: Folder that native's files are copied from.
        files: Their paths, relative to base.
        lockfile: Pinned versions.
        token_cache: Identity of the token cache.
        patch: Differences of the files from the last commit.

    Raises:
        EvidenceError: If the folder holds another manifest, or candidates without any.
        ValueError: If the configurations are not those of the protocol.
    """
    wanted = {w.id for w in protocol.workloads} | {r.id for r in protocol.recipes}
    if set(configs) != wanted:
        unlike = sorted(wanted ^ set(configs))
        raise ValueError(f"configurations and protocol differ in {len(unlike)} ids: {unlike[:4]}")
    if not (root / "manifest.json").exists() and any((root / "candidates").glob("*")):
        raise EvidenceError(f"{root} holds candidates; native is frozen before them")
    source = _hashes(base, files)
    fixed = dict(
        zip(_FIXED, (protocol.to_json().encode(), patch, lockfile.read_bytes()), strict=True)
    )
    content = {
        "format": FORMAT,
        "protocol": asdict(protocol),
        "protocol_hash": protocol.hash,
        "pairs": [pair.id for pair in protocol.pairs()],
        "convergence_runs": [run.id for run in protocol.convergence_runs()],
        "configs": dict(configs),
        "source": source,
        "files": {name: hashlib.sha256(data).hexdigest() for name, data in fixed.items()},
        "token_cache": token_cache,
    }
    document = {"identity": identity_of(content), **content}
    text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    if (root / "manifest.json").exists() and (root / "manifest.json").read_text() != text:
        raise EvidenceError(f"{root} is frozen with another manifest; use another folder")
    _copy_whole(base, source, root / "native")
    if hash_tree(root / "native") != source:
        raise EvidenceError(
            f"{root / 'native'} holds other files, left by a freeze that did not finish; use "
            "another folder, or remove it"
        )
    for name, data in fixed.items():
        write_once(root / name, data)
    write_once(root / "manifest.json", text)  # last: where it is, the rest is complete
    return verify_manifest(root)


def verify_manifest(root: Path) -> Manifest:
    """The manifest, after every byte that it vouches for was checked.

    Raises:
        EvidenceError: If there is none, or anything has changed.
    """
    content = _read_frozen(root / "manifest.json")
    identity = content.pop("identity", None)
    if content.get("format") != FORMAT or identity_of(content) != identity:
        raise EvidenceError(f"{root / 'manifest.json'} has been changed since it was frozen")
    _require_mappings(root / "manifest.json", content, "configs", "source", "files")
    found = {name: hash_file(root / name) for name in _FIXED if (root / name).is_file()}
    _require_same(root, content["files"], found)
    _require_same(root / "native", content["source"], hash_tree(root / "native"))
    try:
        protocol = Protocol.load(root / "protocol.json")
    except ValueError as error:
        raise EvidenceError(f"{root / 'protocol.json'} cannot be used: {error}") from error
    if content.get("protocol_hash") != protocol.hash or "token_cache" not in content:
        raise EvidenceError(f"{root / 'manifest.json'} has been changed since it was frozen")
    return Manifest(
        identity=str(identity),
        protocol=protocol,
        configs=content["configs"],
        source=content["source"],
        files=content["files"],
        token_cache=content["token_cache"],
    )


def freeze_candidate(
    root: Path, *, base: Path, files: Iterable[str | Path], details: Mapping[str, Any]
) -> Candidate:
    """Freezes a candidate under its own hash; the same one again is the same folder.

    Args:
        root: The campaign's folder, with its manifest.
        base: Folder that the candidate's files are copied from.
        files: Their paths, relative to base.
        details: More that tells candidates apart, such as the backend to run; JSON content.

    Raises:
        EvidenceError: If the manifest is absent or anything frozen has changed.
        ValueError: If there are no files, or one is not below base.
    """
    manifest = verify_all(root)
    source = _hashes(base, files)
    content = {
        "format": FORMAT,
        "manifest": manifest.identity,
        "details": dict(details),
        "source": source,
    }
    identity = identity_of(content)
    place = root / "candidates" / identity[:_ID_DIGITS]
    if not place.exists():
        text = json.dumps({"identity": identity, **content}, indent=1, allow_nan=False) + "\n"
        _copy_whole(base, source, place, inner="source", extra={"candidate.json": text})
    return verify_candidate(root, place.name)


def verify_candidate(root: Path, candidate_id: str) -> Candidate:
    """A candidate, after every byte of it and of the manifest was checked.

    Raises:
        EvidenceError: If there is none, it belongs to another manifest, or anything has changed.
    """
    return _verify_candidate(verify_manifest(root), root, candidate_id)


def _verify_candidate(manifest: Manifest, root: Path, candidate_id: str) -> Candidate:
    place = root / "candidates" / candidate_id
    if not re.fullmatch(rf"[0-9a-f]{{{_ID_DIGITS}}}", candidate_id):
        raise EvidenceError(f"{candidate_id!r} is no candidate id: {_ID_DIGITS} hexadecimal digits")
    content = _read_frozen(place / "candidate.json")
    identity = content.pop("identity", None)
    if identity_of(content) != identity or str(identity)[:_ID_DIGITS] != candidate_id:
        raise EvidenceError(f"{place / 'candidate.json'} has been changed since it was frozen")
    _require_mappings(place / "candidate.json", content, "source", "details")
    if content.get("manifest") != manifest.identity:
        raise EvidenceError(f"{place} was frozen under another manifest")
    _require_same(place / "source", content["source"], hash_tree(place / "source"))
    return Candidate(candidate_id, str(identity), place / "source", content["details"])


def verify_all(root: Path) -> Manifest:
    """The manifest, after every byte of it and of all candidates was checked.

    Raises:
        EvidenceError: If there is none, or anything has changed.
    """
    manifest = verify_manifest(root)
    for place in sorted((root / "candidates").glob("[!.]*")):
        _verify_candidate(manifest, root, place.name)
    return manifest


def write_receipt(root: Path, name: str, content: Mapping[str, Any]) -> Path:
    """Notes something that happened, once: an allocation, a submission, an environment.

    Args:
        root: The campaign's folder, with its manifest.
        name: Names the file; letters, digits, ``.``, ``_`` and ``-``.
        content: JSON content; the manifest's identity is added.

    Raises:
        EvidenceError: If there is another receipt of this name.
        ValueError: If the name cannot be a file's.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} cannot name a receipt; use letters, digits, '.', '_' and '-'")
    identity = _read_frozen(root / "manifest.json").get("identity")
    path = root / "receipts" / f"{name}.json"
    write_once(
        path, json.dumps({"manifest": identity, **content}, indent=1, allow_nan=False) + "\n"
    )
    return path


def keep_failed(root: Path, attempt: Path) -> Path:
    """Moves a failed attempt to ``failed/``, beside earlier ones of the same name."""
    (root / "failed").mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        place = root / "failed" / f"{attempt.name}-{number}"
        try:
            place.mkdir()  # claims the number, also against another process
        except FileExistsError:
            number += 1
            continue
        attempt.rename(place / attempt.name)
        return place / attempt.name


def _hashes(base: Path, files: Iterable[str | Path]) -> dict[str, str]:
    """Hashes of the files to freeze, by their path below base."""
    hashes = {}
    for name in sorted({Path(file).as_posix() for file in files}):
        path = base / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{name} is not a path below {base}")
        if path.is_symlink() or not path.is_file():
            raise EvidenceError(f"{path} cannot be frozen: it is no ordinary file")
        hashes[name] = hash_file(path)
    if not hashes:
        raise ValueError(f"there are no files of {base} to freeze")
    return hashes


def _copy_whole(
    base: Path,
    hashes: Mapping[str, str],
    place: Path,
    *,
    inner: str = "",
    extra: Mapping[str, str] | None = None,
) -> None:
    """Copies files into a folder that appears complete or not at all.

    Where the folder is there already, by whomever, it is left as it is for the caller to verify.
    """
    if place.exists():
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=f".{place.name}.") as scratch:
        partial = Path(scratch) / place.name
        for name, expected in hashes.items():
            target = partial / inner / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(base / name, target)  # with its mode, so that scripts stay executable
            if hash_file(target) != expected:
                raise EvidenceError(f"{base / name} changed while it was being frozen")
            sync(target)
        for name, text in (extra or {}).items():
            (partial / name).write_text(text, encoding="utf-8")
            sync(partial / name)
        try:
            partial.rename(place)
        except OSError:
            if not place.is_dir():
                raise
    sync(place.parent)


def _read_frozen(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(path.read_text(encoding="utf-8"), parse_constant=_no_number)
    except FileNotFoundError:
        raise EvidenceError(f"{path} is absent; freeze it first") from None
    except (OSError, RecursionError, ValueError) as error:
        raise EvidenceError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise EvidenceError(f"{path} has been changed since it was frozen")
    return content


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _require_mappings(path: Path, content: Mapping[str, Any], *names: str) -> None:
    for name in names:
        if not isinstance(content.get(name), dict):
            raise EvidenceError(f"{path} has been changed since it was frozen: {name} is not there")


def _require_same(folder: Path, frozen: Mapping[str, str], found: Mapping[str, str]) -> None:
    """Refuses a folder whose files are not those that were frozen."""
    for problem, names in (
        ("changed", [name for name in frozen if name in found and frozen[name] != found[name]]),
        ("missing", [name for name in frozen if name not in found]),
        ("added", [name for name in found if name not in frozen]),
    ):
        if names:
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            raise EvidenceError(
                f"{folder}: {problem} since it was frozen: {', '.join(names[:4])}{more}"
            )
