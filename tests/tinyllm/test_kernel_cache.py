"""Compiled kernels are kept where other nodes and other users cannot write."""

import os
import tempfile
from pathlib import Path

import pytest

from tinyllm.kernel_cache import use_local_kernel_cache


def test_kernels_are_kept_on_this_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    use_local_kernel_cache()
    folder = Path(os.environ["TRITON_CACHE_DIR"])
    assert folder.parent == Path(tempfile.gettempdir())
    assert str(os.getuid()) in folder.name  # another user's is not ours to write


def test_a_folder_for_kernels_that_was_chosen_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/somewhere/else")
    use_local_kernel_cache()
    assert os.environ["TRITON_CACHE_DIR"] == "/somewhere/else"


@pytest.mark.parametrize("taken_by", ["file", "link", "others"])
def test_a_folder_that_others_can_write_to_is_not_the_cache(
    taken_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    name = tmp_path / f"tinyllm_kernels_{os.getuid()}"
    if taken_by == "link":
        (tmp_path / "elsewhere").mkdir()
        name.symlink_to(tmp_path / "elsewhere")
    elif taken_by == "others":
        name.mkdir()
        name.chmod(0o777)
    else:
        name.touch()
    use_local_kernel_cache()
    folder = Path(os.environ["TRITON_CACHE_DIR"])
    assert folder != name
    assert folder.parent == tmp_path
    assert folder.stat().st_mode & 0o077 == 0
