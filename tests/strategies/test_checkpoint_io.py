"""A checkpoint is whole or not there, whatever happens while it is written (PITFALLS 7)."""

import os
import resource
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from tinyllm.strategies import checkpoint_io
from tinyllm.strategies.checkpoint_io import AtomicCheckpointIO

OLD, NEW = {"step": 1, "weights": torch.zeros(1000)}, {"step": 2, "weights": torch.ones(1000)}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """An older checkpoint, in a folder of its own."""
    path = tmp_path / "checkpoints" / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint(OLD, path)
    return path


def step(path: Path) -> int:
    return int(AtomicCheckpointIO().load_checkpoint(path)["step"])


def last_of(folder: Path) -> str:
    """What the Trainer would resume from."""
    callback = ModelCheckpoint(folder)
    trainer = Trainer(accelerator="cpu", logger=False, callbacks=[callback],
                      enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    (found,) = callback._find_last_checkpoints(trainer)
    return found


def test_writes_reads_and_replaces(target: Path) -> None:
    assert step(target) == 1
    AtomicCheckpointIO().save_checkpoint(NEW, target)
    loaded = AtomicCheckpointIO().load_checkpoint(target)
    assert loaded["step"] == 2
    assert torch.equal(loaded["weights"], NEW["weights"])
    assert list(target.parent.iterdir()) == [target]


def test_makes_folders(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "c.ckpt"
    AtomicCheckpointIO().save_checkpoint(NEW, str(path))
    assert step(path) == 2


def test_it_is_on_disk_before_it_takes_the_name(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = []
    fsync, replace = os.fsync, Path.replace
    folder = target.parent.stat().st_ino

    def noting_fsync(descriptor: int) -> None:
        order.append("folder" if os.fstat(descriptor).st_ino == folder else "file")
        fsync(descriptor)

    def noting_replace(self: Path, other: Path) -> Path:
        order.append("rename")
        return replace(self, other)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(Path, "replace", noting_replace)
    AtomicCheckpointIO().save_checkpoint(NEW, target)
    assert order == ["file", "rename", "folder"]


def test_a_second_name_is_replaced_alone(target: Path) -> None:
    last, best = target, target.with_name("best.ckpt")
    AtomicCheckpointIO().save_checkpoint(NEW, best)
    for _ in range(2):  # what is linked already is left so
        AtomicCheckpointIO().link_checkpoint(best, last)
        assert last.samefile(best)
        assert sorted(target.parent.iterdir()) == [best, last]
    for replaced, kept in ((best, last), (last, best)):
        AtomicCheckpointIO().save_checkpoint(NEW, kept)
        AtomicCheckpointIO().link_checkpoint(kept, replaced)
        AtomicCheckpointIO().save_checkpoint(OLD, replaced)
        assert (step(replaced), step(kept)) == (1, 2)


def test_a_link_that_cannot_be_leaves_the_old_one(target: Path) -> None:
    with pytest.raises(OSError, match="gone"):
        AtomicCheckpointIO().link_checkpoint(target.with_name("gone"), target)
    with pytest.raises(OSError, match="memory"):
        AtomicCheckpointIO().link_checkpoint(target, "memory://last.ckpt")
    assert list(target.parent.iterdir()) == [target]
    assert step(target) == 1


def half_written(_: Any, file: Any) -> None:
    file.write(b"PK half of it")
    raise OSError(28, "No space left on device")


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("module", "name", "failure", "error"),
    [
        (torch, "save", half_written, OSError),
        (torch, "save", interrupted, KeyboardInterrupt),
        (os, "fsync", interrupted, KeyboardInterrupt),
        (Path, "replace", interrupted, KeyboardInterrupt),
    ],
)
def test_pitfall_7_a_failure_leaves_the_old_one(
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    name: str,
    failure: Callable[..., None],
    error: type[BaseException],
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module, name, failure)
        with pytest.raises(error):
            AtomicCheckpointIO().save_checkpoint(NEW, target)
    assert step(target) == 1
    assert list(target.parent.iterdir()) == [target]
    assert last_of(target.parent) == str(target)


def in_child(task: Callable[[], None]) -> int:
    """Exit code of a process that only does this: 7 for an OSError, negative for a signal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside other threads
        child = os.fork()
    if child == 0:
        code = 1
        try:
            task()
            code = 0
        except OSError:
            code = 7
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_pitfall_7_a_full_disk_leaves_the_old_one(target: Path) -> None:
    """A real limit, so that torch's own writer fails in the middle of a tensor."""

    def fill() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        large = {"step": 2, "weights": torch.ones(100_000)}
        with pytest.raises(OSError, match=r"File too large: '.*last\.ckpt'") as caught:
            AtomicCheckpointIO().save_checkpoint(large, target)
        raise caught.value

    assert in_child(fill) == 7
    assert step(target) == 1
    assert list(target.parent.iterdir()) == [target]


def kill_while_writing(target: Path) -> None:
    """Writes half of the third block and is killed, as by ``kill -9``."""
    save = torch.save

    class Deadly:
        def __init__(self, file: Any) -> None:
            self._file, self._left = file, 3

        def write(self, data: Any) -> int:
            self._left -= 1
            if not self._left:
                self._file.write(bytes(data)[: len(data) // 2])
                self._file.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            return int(self._file.write(data))

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

    torch.save = lambda checkpoint, file: save(checkpoint, Deadly(file))
    AtomicCheckpointIO().save_checkpoint(NEW, target)


def test_pitfall_7_a_killed_writer_leaves_the_old_one_and_the_next_clears_up(target: Path) -> None:
    assert in_child(lambda: kill_while_writing(target)) == -signal.SIGKILL
    left = [path for path in target.parent.iterdir() if path != target]
    assert len(left) == 1  # half a file, as a kill leaves it
    assert left[0].stat().st_size > 0
    assert left[0].suffix != ".ckpt"
    assert step(target) == 1
    assert last_of(target.parent) == str(target)
    other = target.with_name("best.ckpt")
    AtomicCheckpointIO().save_checkpoint(NEW, other)
    assert left[0].exists()  # another checkpoint's writer may still be at work
    AtomicCheckpointIO().save_checkpoint(NEW, target)
    assert step(target) == 2
    assert sorted(target.parent.iterdir()) == [other, target]


def test_names_may_hold_what_a_pattern_would_read(tmp_path: Path) -> None:
    path = tmp_path / "loss=[1].ckpt"
    for checkpoint in (OLD, NEW):
        AtomicCheckpointIO().save_checkpoint(checkpoint, path)
    assert step(path) == 2


def test_loads_plain_values_only_unless_told(tmp_path: Path) -> None:
    path = tmp_path / "object.ckpt"
    AtomicCheckpointIO().save_checkpoint({"path": Foreign()}, path)
    with pytest.raises(Exception, match="Weights only load failed"):
        AtomicCheckpointIO().load_checkpoint(path)
    with pytest.raises(Exception, match="Weights only load failed"):
        AtomicCheckpointIO().load_checkpoint(path, weights_only=True)
    loaded = AtomicCheckpointIO().load_checkpoint(path, weights_only=False)
    assert isinstance(loaded["path"], Foreign)


class Foreign:
    """Something that is no tensor and no plain value."""


def test_storage_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="not supported"):
        AtomicCheckpointIO().save_checkpoint(NEW, tmp_path / "a.ckpt", {"key": 1})


def test_an_object_store_is_written_by_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    AtomicCheckpointIO().save_checkpoint(NEW, "memory://runs/last.ckpt")
    assert fsspec.filesystem("memory").exists("/runs/last.ckpt")
    assert not Path("memory:").exists()
    assert checkpoint_io.torch is torch


def test_no_bit_of_the_directory_of_records_changes_what_is_read(tmp_path: Path) -> None:
    """It has no checksum: a record marked as a folder was read as whatever memory held."""
    path = tmp_path / "last.ckpt"
    state = {"step": 1, "weights": torch.arange(5.0)}
    AtomicCheckpointIO().save_checkpoint(state, path)
    good = path.read_bytes()
    for bit in range(8 * good.index(b"PK\x01\x02"), 8 * len(good)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bad)
        try:
            found = AtomicCheckpointIO().load_checkpoint(path)
        except ValueError:
            continue
        assert found["step"] == 1
        assert torch.equal(found["weights"], state["weights"])
