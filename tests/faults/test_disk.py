"""What a run needs fails under it: it says what and where, and the last checkpoint is whole."""

import json
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
from disks import small_disk
from processes import run
from training import EVERY, assert_same_run, check_whole, write_config

from tinyllm.data.cache import TokenCache
from tinyllm.data.prepare import prepare

UPDATES = 4 * EVERY

needs_mounts = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a disk")


@pytest.fixture(scope="module")
def config(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("disk") / "run.yaml", cache, UPDATES)


@pytest.fixture(scope="module")
def whole(config: Path) -> Path:
    """A run that nothing happened to."""
    folder = config.with_name("whole")
    done = run(*fit(config, folder), log=config.with_name("whole.log"))
    assert done.wait() == 0, done.said
    return folder


def fit(config: Path, folder: Path, *args: object) -> list[object]:
    return ["fit", "--config", config, "--trainer.default_root_dir", folder, *args]


def does(name: str, updates: int, **options: object) -> list[object]:
    """Options of a fit that has something done to its files after an update."""
    arguments = {"updates": updates, **options}
    given = json.dumps({"class_path": f"faults.{name}", "init_args": arguments}, default=str)
    return ["--trainer.callbacks+", given]


def assert_it_can_go_on(config: Path, folder: Path, whole: Path, saved: int) -> None:
    """What is left is whole, holds the state after an update, and leads to the same end."""
    assert check_whole(folder) == saved
    resumed = run(*fit(config, folder), "--ckpt_path", "last", log=folder.with_name("resumed.log"))
    assert resumed.wait() == 0, resumed.said
    assert_same_run(folder, whole)


# --- a full disk ----------------------------------------------------------------------------------


@needs_mounts
def test_a_disk_without_room_for_another_checkpoint(
    config: Path, whole: Path, tmp_path: Path
) -> None:
    """There is room for last.ckpt and best.ckpt, and not for a third beside them."""
    checkpoint_bytes = (whole / "checkpoints" / "last.ckpt").stat().st_size
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    within = partial(small_disk, disk, 5 * checkpoint_bytes // 2, kept)
    log = tmp_path / "log"
    done = run(*fit(config, disk), within=within, log=log)
    assert done.wait() == 1
    assert f"error: OSError: [Errno 28] No space left on device: '{disk}/" in done.said
    assert_it_can_go_on(config, kept, whole, EVERY)


@needs_mounts
def test_a_disk_without_room_for_another_row(config: Path, whole: Path, tmp_path: Path) -> None:
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    within = partial(small_disk, disk, 2_000_000, kept)
    full = does("FillAfter", EVERY + 1, folder=disk)
    done = run(*fit(config, disk), *full, within=within, log=tmp_path / "log")
    assert done.wait() == 1
    assert "error: OSError: [Errno 28] No space left on device: '" in done.said
    (kept / "filler").unlink()
    assert_it_can_go_on(config, kept, whole, EVERY)


def test_a_checkpoint_that_is_larger_than_a_file_may_be(
    config: Path, whole: Path, tmp_path: Path
) -> None:
    checkpoint_bytes = (whole / "checkpoints" / "last.ckpt").stat().st_size
    folder = tmp_path / "run"
    limit = does("LimitAfter", EVERY + 1, size_bytes=checkpoint_bytes - 1)
    done = run(*fit(config, folder), *limit, log=tmp_path / "log")
    assert done.wait() == 1
    assert f"error: OSError: [Errno 27] File too large: '{folder}/checkpoints/" in done.said
    assert_it_can_go_on(config, folder, whole, EVERY)


@needs_mounts
def test_a_cache_that_does_not_fit(cache: Path, tmp_path: Path) -> None:
    """What was prepared so far is kept, and goes on where there is room."""
    tokens = tmp_path / "tokens.bin"
    tokens.write_bytes((cache.parent / "tokens.bin").read_bytes() * 100)
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    options = ["--source", "tokens", "--input", tokens, "--vocab_size", 64]
    options += ["--boundary_id", 0, "--validation_fraction", 0.2, "--shard_tokens", 20_000]
    within = partial(small_disk, disk, 150_000, kept)
    done = run("prepare", *options, "--output", disk / "cache", within=within, log=tmp_path / "log")
    assert done.wait() == 1
    error = "error: OSError: [Errno 28] No space left on device"
    assert f"{error}: '{disk}/cache.partial/" in done.said
    assert not (kept / "cache").exists()
    again = run("prepare", *options, "--output", kept / "cache", log=tmp_path / "again.log")
    assert again.wait() == 0, again.said
    assert "Continuing" in again.said
    other = run("prepare", *options, "--output", tmp_path / "other", log=tmp_path / "other.log")
    assert other.wait() == 0, other.said
    assert TokenCache.open(kept / "cache").identity == TokenCache.open(tmp_path / "other").identity
    TokenCache.open(kept / "cache").verify()


# --- a read-only folder ---------------------------------------------------------------------------


@needs_mounts
def test_a_disk_that_becomes_read_only(config: Path, whole: Path, tmp_path: Path) -> None:
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    within = partial(small_disk, disk, 10_000_000, kept)
    options = does("ReadOnlyAfter", EVERY + 1, folder=disk)
    done = run(*fit(config, disk), *options, within=within, log=tmp_path / "log")
    assert done.wait() == 1
    assert f"error: OSError: [Errno 30] Read-only file system: '{disk}/" in done.said
    assert_it_can_go_on(config, kept, whole, EVERY)


def test_a_folder_that_cannot_be_made(config: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run(*fit(config, tmp_path / "file" / "run"), log=tmp_path / "log")
    assert done.wait() == 1
    assert f"error: NotADirectoryError: [Errno 20] Not a directory: '{tmp_path}/file" in done.said


# --- a cache that goes away -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def with_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache whose tokenizer goes into each checkpoint."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(40):
        (folder / f"{number}.txt").write_text(f"{number} larger apples, naïve and quick.\n" * 3)
    prepare(folder / "cache", "text", [str(folder)], vocab_size=280, validation_fraction=0.2)
    return folder / "cache"


@pytest.mark.parametrize("updates", [1, EVERY + 4], ids=["before a validation", "after one"])
def test_a_cache_deleted_while_a_run_reads_it(
    config: Path, with_tokenizer: Path, tmp_path: Path, updates: int
) -> None:
    """It is open, so the run ends as ever; a later one says what is missing."""
    cache = Path(shutil.copytree(with_tokenizer, tmp_path / "cache"))
    options = ["--data.cache", cache, "--model.config.vocab_size", 280]
    undisturbed = run(*fit(config, tmp_path / "whole", *options), log=tmp_path / "whole.log")
    assert undisturbed.wait() == 0, undisturbed.said
    options += does("DeleteAfter", updates, folder=cache)
    disturbed = run(*fit(config, tmp_path / "run", *options), log=tmp_path / "log")
    assert disturbed.wait() == 0, disturbed.said
    assert not cache.exists()
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    again = run(*fit(config, tmp_path / "run", *options), "--ckpt_path", "last",
                log=tmp_path / "again.log")  # fmt: skip
    assert again.wait() == 1
    assert f"error: no token cache at {cache}: the folder does not exist" in again.said
    assert_same_run(tmp_path / "run", tmp_path / "whole")
