"""Frozen evidence: one changed byte is refused, nothing is overwritten, nothing is half written."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from campaign_tables import SMALL

from tinyllm.acceptance import PROTOCOL_1
from tinyllm.acceptance.environment import environment
from tinyllm.acceptance.evidence import (
    EvidenceError,
    freeze_candidate,
    freeze_manifest,
    hash_tree,
    identity_of,
    keep_failed,
    verify_candidate,
    verify_manifest,
    write_once,
    write_receipt,
)
from tinyllm.acceptance.protocol import Protocol

FILES = ["setup.cfg", "tinyllm/model.py"]
CONFIGS = {part.id: {"seed": 45} for part in (*SMALL.workloads, *SMALL.recipes)}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A working tree, with a file that is not to be frozen."""
    base = tmp_path / "tree"
    (base / "tinyllm").mkdir(parents=True)
    (base / "setup.cfg").write_text("[metadata]\n")
    (base / "tinyllm" / "model.py").write_text("LAYERS = 8\n")
    (base / "notes.txt").write_text("private\n")
    (base / "requirements.lock").write_text("torch==2.13.0\n")
    return base


def freeze(base: Path, **changes: Any) -> Any:
    options: dict[str, Any] = {
        "configs": CONFIGS,
        "base": base,
        "files": FILES,
        "lockfile": base / "requirements.lock",
        "token_cache": "cache-1",
        "patch": b"--- a\n+++ b\n",
    } | changes
    protocol = options.pop("protocol", SMALL)
    return freeze_manifest(base.parent / "campaign", protocol, **options)


@pytest.fixture
def root(base: Path) -> Path:
    freeze(base)
    return base.parent / "campaign"


def candidate(root: Path, **details: Any) -> Any:
    return freeze_candidate(root, base=root.parent / "tree", files=FILES, details=details)


def test_a_manifest_holds_everything_under_one_identity(root: Path) -> None:
    manifest = verify_manifest(root)
    assert manifest.protocol == SMALL
    assert Protocol.load(root / "protocol.json") == SMALL
    assert manifest.configs == CONFIGS
    assert sorted(manifest.source) == FILES
    assert sorted(manifest.files) == ["native.patch", "protocol.json", "requirements.lock"]
    assert (root / "native" / "tinyllm" / "model.py").read_text() == "LAYERS = 8\n"
    assert not (root / "native" / "notes.txt").exists()
    content = json.loads((root / "manifest.json").read_text())
    identity = content.pop("identity")
    assert identity == identity_of(content) == manifest.identity


def edit_model(base: Path) -> dict[str, Any]:
    (base / "tinyllm" / "model.py").write_text("LAYERS = 9\n")
    return {}


def edit_lock(base: Path) -> dict[str, Any]:
    (base / "requirements.lock").write_text("torch==2.12.0\n")
    return {}


@pytest.mark.parametrize(
    "change",
    [
        edit_model,
        edit_lock,
        lambda base: {"files": ["setup.cfg"]},
        lambda base: {"configs": CONFIGS | {SMALL.recipes[0].id: {"seed": 46}}},
        lambda base: {"token_cache": "cache-2"},
        lambda base: {"patch": b""},
        lambda base: {"protocol": Protocol.from_json(SMALL.to_json().replace("0.98", "0.97"))},
    ],
)
def test_a_manifest_is_frozen_once(
    base: Path, root: Path, change: Callable[[Path], dict[str, Any]]
) -> None:
    before = hash_tree(root)
    assert freeze(base) == verify_manifest(root)  # the same again is no change
    with pytest.raises(EvidenceError, match="frozen with another manifest"):
        freeze(base, **change(base))
    assert hash_tree(root) == before


def test_a_manifest_lists_what_version_1_measures(base: Path) -> None:
    configs = {part.id: {} for part in (*PROTOCOL_1.workloads, *PROTOCOL_1.recipes)}
    freeze(base, protocol=PROTOCOL_1, configs=configs)
    content = json.loads((base.parent / "campaign" / "manifest.json").read_text())
    assert len(content["protocol"]["workloads"]) == 117
    assert len(set(content["pairs"])) == 351
    assert len(set(content["convergence_runs"])) == 15
    assert set(content["configs"]) == set(configs)
    assert content["protocol_hash"] == PROTOCOL_1.hash


def test_what_an_unfinished_freeze_left_is_never_taken_for_frozen(base: Path) -> None:
    freeze(base)
    (base.parent / "campaign" / "manifest.json").unlink()  # as if killed just before it
    freeze(base)
    (base.parent / "campaign" / "manifest.json").unlink()
    edit_model(base)
    with pytest.raises(EvidenceError, match="left by a freeze that did not finish"):
        freeze(base)
    assert not (base.parent / "campaign" / "manifest.json").exists()


def test_each_workload_and_recipe_needs_a_configuration(base: Path) -> None:
    some = {key: value for key, value in CONFIGS.items() if key != "20m-sync-production"}
    with pytest.raises(ValueError, match=r"differ in 1 ids: .'20m-sync-production'"):
        freeze(base, configs=some)
    with pytest.raises(ValueError, match="extra"):
        freeze(base, configs=CONFIGS | {"extra": {}})


def replace_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


FROZEN = [
    *("manifest.json", "protocol.json", "native.patch", "requirements.lock"),
    *("native/setup.cfg", "native/tinyllm/model.py"),
]


@pytest.mark.parametrize("name", FROZEN)
def test_one_changed_byte_is_refused_everywhere(root: Path, name: str) -> None:
    frozen = candidate(root)
    replace_byte(root / name)
    for use in (
        lambda: verify_manifest(root),
        lambda: candidate(root),
        lambda: verify_candidate(root, frozen.id),
    ):
        with pytest.raises(EvidenceError, match=r"changed since it was frozen|cannot be read"):
            use()


@pytest.mark.parametrize("name", FROZEN)
def test_a_missing_file_is_refused(root: Path, name: str) -> None:
    (root / name).unlink()
    with pytest.raises(EvidenceError, match=r"missing since it was frozen|is absent"):
        verify_manifest(root)


@pytest.mark.parametrize("name", ["native/extra.py", "native/tinyllm/__pycache__/model.pyc"])
def test_an_added_file_is_refused(root: Path, name: str) -> None:
    (root / name).parent.mkdir(exist_ok=True)
    (root / name).write_text("")
    with pytest.raises(EvidenceError, match="added since it was frozen"):
        verify_manifest(root)


def test_a_link_is_refused(root: Path) -> None:
    (root / "native" / "setup.cfg").unlink()
    (root / "native" / "setup.cfg").symlink_to(root.parent / "tree" / "setup.cfg")
    with pytest.raises(EvidenceError, match="neither a file nor a folder"):
        verify_manifest(root)


def test_a_candidate_lives_under_its_hash(root: Path) -> None:
    found = candidate(root, backend="gh200")
    assert len(found.id) == 12
    assert found.identity.startswith(found.id)
    assert found.source == root / "candidates" / found.id / "source"
    assert found.details == {"backend": "gh200"}
    assert sorted(hash_tree(found.source)) == FILES
    assert candidate(root, backend="gh200") == found
    assert verify_candidate(root, found.id) == found


def test_other_content_is_another_candidate(base: Path, root: Path) -> None:
    first = candidate(root, backend="gh200")
    other = candidate(root, backend="native")
    edit_model(base)
    third = candidate(root, backend="gh200")
    assert len({first.id, other.id, third.id}) == 3
    assert verify_candidate(root, first.id) == first
    assert (first.source / "tinyllm" / "model.py").read_text() == "LAYERS = 8\n"


@pytest.mark.parametrize("name", ["candidate.json", "source/setup.cfg"])
def test_a_changed_candidate_is_refused(root: Path, name: str) -> None:
    found = candidate(root)
    replace_byte(root / "candidates" / found.id / name)
    with pytest.raises(EvidenceError, match=r"changed since it was frozen|cannot be read"):
        verify_candidate(root, found.id)
    with pytest.raises(EvidenceError):
        candidate(root)  # it is not repaired either


def test_a_renamed_candidate_is_refused(root: Path) -> None:
    found = candidate(root)
    (root / "candidates" / found.id).rename(root / "candidates" / ("0" * 12))
    with pytest.raises(EvidenceError, match="changed"):
        verify_candidate(root, "0" * 12)
    with pytest.raises(EvidenceError, match="absent"):
        verify_candidate(root, found.id)
    with pytest.raises(EvidenceError, match="no candidate id"):
        verify_candidate(root, "../native")


def test_native_is_frozen_before_any_candidate(base: Path, tmp_path: Path) -> None:
    with pytest.raises(EvidenceError, match=r"manifest.json is absent"):
        freeze_candidate(tmp_path / "campaign", base=base, files=FILES, details={})
    (tmp_path / "campaign" / "candidates" / "0123456789ab").mkdir(parents=True)
    with pytest.raises(EvidenceError, match="native is frozen before them"):
        freeze(base)


def test_receipts_are_written_once(root: Path) -> None:
    path = write_receipt(root, "job-17", {"allocation": "17"})
    assert json.loads(path.read_text()) == {
        "manifest": verify_manifest(root).identity,
        "allocation": "17",
    }
    assert write_receipt(root, "job-17", {"allocation": "17"}) == path
    with pytest.raises(EvidenceError, match="nothing is overwritten"):
        write_receipt(root, "job-17", {"allocation": "18"})
    with pytest.raises(ValueError, match="cannot name a receipt"):
        write_receipt(root, "../outside", {})


def test_failed_attempts_are_kept_apart(root: Path) -> None:
    for text in ("first", "second"):
        attempt = root / "pairs" / "a-repeat1"
        attempt.mkdir(parents=True)
        (attempt / "log.txt").write_text(text)
        kept = keep_failed(root, attempt)
        assert not attempt.exists()
        assert (kept / "log.txt").read_text() == text
    assert len(list((root / "failed").iterdir())) == 2


def test_a_killed_writer_leaves_whole_files_only(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from tinyllm.acceptance.evidence import write_once\n"
        "print('ready', flush=True)\nn = 0\n"
        "while True:\n"
        "    write_once(Path(sys.argv[1]) / f'{n}.txt', b'x' * 200_000)\n    n += 1\n"
    )
    for round_ in range(3):
        folder = tmp_path / str(round_)
        writer = subprocess.Popen(
            [sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        writer.stdout.readline()
        deadline = time.monotonic() + 300
        while not (folder / "0.txt").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(writer.pid, signal.SIGKILL)
        writer.communicate()
        written = list(folder.glob("*.txt"))
        assert written
        assert all(path.stat().st_size == 200_000 for path in written)


def test_writing_never_replaces(tmp_path: Path) -> None:
    write_once(tmp_path / "a.txt", "one")
    write_once(tmp_path / "a.txt", "one")
    with pytest.raises(EvidenceError, match="exists with other content"):
        write_once(tmp_path / "a.txt", "two")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "one"


def test_identity_ignores_the_order_of_keys_and_refuses_nan() -> None:
    assert identity_of({"a": 1, "b": [2]}) == identity_of({"b": [2], "a": 1})
    assert identity_of([1, 2]) != identity_of([2, 1])
    with pytest.raises(ValueError):
        identity_of({"a": float("nan")})


@pytest.mark.parametrize("files", [[], ["../outside"], ["/etc/hostname"]])
def test_what_cannot_be_frozen_is_refused(base: Path, files: list[str]) -> None:
    with pytest.raises(ValueError):
        freeze(base, files=files)


def test_the_environment_names_versions() -> None:
    found = environment()
    assert found["packages"]["numpy"]
    assert json.loads(json.dumps(found)) == found
