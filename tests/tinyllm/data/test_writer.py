"""The writer refuses ids that do not fit and continues exactly where a record says."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinyllm.data.writer import SplitWriter


def new_writer(folder: Path, **options: Any) -> SplitWriter:
    options = {"vocab_size": 100, "boundary_id": 0, "shard_tokens": 8} | options
    return SplitWriter(folder, "train", **options)


@pytest.mark.parametrize(
    ("vocab_size", "bad"), [(100, 100), (65_536, 65_536), (70_000, 70_000), (100, -1)]
)
def test_pitfall_14_ids_outside_the_vocabulary_are_refused(
    tmp_path: Path, vocab_size: int, bad: int
) -> None:
    writer = new_writer(tmp_path, vocab_size=vocab_size)
    with pytest.raises(ValueError, match=f"book 7: token id {bad} is outside the vocabulary of"):
        writer.append(np.array([1, bad, 2]), "book 7")
    assert (writer.tokens, writer.documents) == (0, 0)


def test_pitfall_14_ids_beyond_uint16_survive(tmp_path: Path) -> None:
    writer = new_writer(tmp_path, vocab_size=70_000)
    writer.append(np.array([69_999, 65_536]), "a")
    writer.finish()
    assert np.fromfile(tmp_path / "train-00000.bin", "<u4").tolist() == [69_999, 65_536, 0]


def test_shards_are_cut_by_tokens(tmp_path: Path) -> None:
    writer = new_writer(tmp_path)
    for length in (3, 12, 2, 1):
        writer.append(np.arange(1, length + 1), "a")
    split = writer.finish()
    assert (split.tokens, split.documents) == (22, 4)
    assert [(s.file, s.tokens) for s in split.shards] == [
        ("train-00000.bin", 8),
        ("train-00001.bin", 8),
        ("train-00002.bin", 6),
    ]


def test_continues_at_any_record(tmp_path: Path) -> None:
    """What was written after the record is cut off, whole files included."""
    documents = [np.arange(1, n) for n in (4, 13, 3, 2, 9, 17)]
    whole = tmp_path / "whole"
    whole.mkdir()
    reference = new_writer(whole)
    for document in documents:
        reference.append(document, "a")
    expected = reference.finish()
    for done in range(len(documents) + 1):
        folder = tmp_path / f"after {done}"
        folder.mkdir()
        killed = new_writer(folder)
        for document in documents[:done]:
            killed.append(document, "a")
        killed.sync()
        record = killed.progress()
        for document in documents[done:]:
            killed.append(document, "not on record")
        killed.sync()
        writer = new_writer(folder, **record)
        for document in documents[done:]:
            writer.append(document, "a")
        assert writer.finish() == expected


def test_shard_shorter_than_its_record_is_refused(tmp_path: Path) -> None:
    writer = new_writer(tmp_path)
    writer.append(np.arange(1, 5), "a")
    writer.sync()
    (tmp_path / "train-00000.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="shorter than the 10 bytes on record"):
        new_writer(tmp_path, **writer.progress())
