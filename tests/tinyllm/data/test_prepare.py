"""`prepare` from end to end: content, splits, restarts, clear errors that leave a cache alone."""

import json
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonargparse
import numpy as np
import pytest

from tinyllm.data import build
from tinyllm.data.cache import TokenCache
from tinyllm.data.manifest import CacheError
from tinyllm.data.prepare import prepare
from tinyllm.data.tokenizer import Tokenizer


@pytest.fixture
def corpus(tmp_path: Path, texts: list[str]) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number:03d}.txt").write_text(text, encoding="utf-8")
    return folder


def prepare_text(output: Path, corpus: Path, **options: Any) -> TokenCache:
    options = {"vocab_size": 300, "validation_fraction": 0.2, "shard_tokens": 256} | options
    return prepare(output, "text", str(corpus), **options)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def documents(cache: TokenCache) -> dict[str, list[str]]:
    """Each split's documents as text, cut at the boundaries."""
    tokenizer = cache.tokenizer()
    found = {}
    for name in cache.manifest.splits:
        stream = cache.split(name)  # type: ignore[arg-type]
        ids = stream.read(0, len(stream))
        ends = [-1, *np.flatnonzero(ids == cache.boundary_id).tolist()]
        found[name] = [tokenizer.decode(ids[a + 1 : b]) for a, b in pairwise(ends)]
    return found


def test_pitfall_20_documents_with_exactly_one_boundary_between(
    corpus: Path, tmp_path: Path, texts: list[str]
) -> None:
    cache = prepare_text(tmp_path / "cache", corpus, test_fraction=0.2)
    found = documents(cache)
    assert sorted(found) == ["test", "train", "validation"]
    assert sorted(text for split in found.values() for text in split) == sorted(texts)
    for name, split in found.items():
        assert len(split) == cache.manifest.splits[name].documents > 0
        assert [text for text in texts if text in split] == split
    cache.verify()


def test_same_document_never_stands_in_two_splits(
    corpus: Path, tmp_path: Path, texts: list[str]
) -> None:
    for number, text in enumerate(texts):
        (corpus / f"copy {number}.txt").write_text(text, encoding="utf-8")
    found = documents(prepare_text(tmp_path / "cache", corpus))
    assert len(found["train"]) + len(found["validation"]) == 2 * len(texts)
    assert not set(found["train"]) & set(found["validation"])


@pytest.mark.parametrize("source", ["jsonl", "parquet", "huggingface"])
def test_the_way_in_does_not_change_the_tokens(
    source: Any, corpus: Path, tmp_path: Path, texts: list[str]
) -> None:
    import pyarrow.parquet

    expected = prepare_text(tmp_path / "text", corpus)
    rows = tmp_path / "rows"
    rows.mkdir()
    if source == "jsonl":
        lines = (json.dumps({"body": text}) + "\n" for text in texts)
        (rows / "a.jsonl").write_text("".join(lines))
    else:
        pyarrow.parquet.write_table(pyarrow.table({"body": texts}), rows / "train.parquet")
    cache = prepare(
        tmp_path / "other",
        source,
        [str(rows)],
        vocab_size=300,
        validation_fraction=0.2,
        shard_tokens=256,
        text_field="body",
    )
    assert cache.identity == expected.identity


def test_given_tokenizer_is_kept_byte_for_byte(corpus: Path, tmp_path: Path) -> None:
    path = Tokenizer.train(["another text"], 260).save(tmp_path)
    cache = prepare_text(tmp_path / "cache", corpus, tokenizer=str(path), vocab_size=None)
    assert (cache.path / "tokenizer.json").read_bytes() == path.read_bytes()
    assert cache.vocab_size == cache.tokenizer().vocab_size


def test_another_caches_tokenizer_brings_its_boundary(corpus: Path, tmp_path: Path) -> None:
    file = str(Tokenizer.train(["another text"], 260).save(tmp_path))
    given = {"tokenizer": file, "vocab_size": None}
    first = prepare_text(tmp_path / "first", corpus, **given, boundary_id=7)
    other = {"tokenizer": str(first.path), "vocab_size": None}
    second = prepare_text(tmp_path / "second", corpus, **other)
    assert second.identity == first.identity
    assert prepare_text(tmp_path / "third", corpus, **other, boundary_id=0).boundary_id == 0
    with pytest.raises(CacheError, match="other arguments"):  # the file alone ends with its own
        prepare_text(second.path, corpus, **given)


def test_pitfall_14_raw_ids_beyond_the_vocabulary(tmp_path: Path, raw_tokens: Path) -> None:
    with pytest.raises(ValueError, match=r"token id 9\d is outside the vocabulary of 90 ids"):
        prepare(tmp_path / "a", "tokens", str(raw_tokens), vocab_size=90, boundary_id=0)
    assert not (tmp_path / "a").exists()


def test_raw_tokens_with_a_tokenizer_can_be_decoded(corpus: Path, tmp_path: Path) -> None:
    first = prepare_text(tmp_path / "first", corpus)
    train = first.split("train")
    np.asarray(train.read(0, len(train)), "<u2").tofile(tmp_path / "ids.u16")
    second = prepare(
        tmp_path / "second",
        "tokens",
        str(tmp_path / "ids.u16"),
        tokenizer=str(first.path / "tokenizer.json"),
        validation_fraction=0.2,
    )
    assert second.vocab_size == first.vocab_size
    assert sorted(t for split in documents(second).values() for t in split) == sorted(
        documents(first)["train"]
    )


def test_finished_cache_is_left_as_it_is(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = prepare_text(tmp_path / "cache", corpus)
    before = {path: path.stat().st_mtime_ns for path in first.path.iterdir()}
    capsys.readouterr()
    again = prepare_text(tmp_path / "cache", corpus)
    assert again.identity == first.identity
    assert "is up to date" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in first.path.iterdir()} == before


def test_other_arguments_need_overwrite(corpus: Path, tmp_path: Path) -> None:
    output = tmp_path / "cache"
    first = prepare_text(output, corpus)
    with pytest.raises(CacheError, match=r"vocab_size was 300 and is now 310.*--overwrite true"):
        prepare_text(output, corpus, vocab_size=310)
    assert TokenCache.open(output).identity == first.identity
    second = prepare_text(output, corpus, vocab_size=310, overwrite=True)
    assert second.identity != first.identity
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cache", "corpus"]


def test_changed_files_are_noticed(corpus: Path, tmp_path: Path) -> None:
    prepare_text(tmp_path / "cache", corpus)
    (corpus / "new.txt").write_text("one more")
    with pytest.raises(CacheError, match="made with other arguments"):
        prepare_text(tmp_path / "cache", corpus)


def test_folder_that_is_no_cache_is_never_overwritten(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="is no token cache"):
        prepare_text(corpus, corpus, overwrite=True)
    assert len(list(corpus.iterdir())) == 40


BAD = {"not UTF-8": b"good \xff bad", "the file is empty": b""}


@pytest.mark.parametrize("problem", BAD)
def test_bad_file_is_an_error_that_leaves_the_earlier_cache(
    corpus: Path, tmp_path: Path, problem: str
) -> None:
    output = tmp_path / "cache"
    prepare_text(output, corpus)
    before = files(output)
    (corpus / "bad.txt").write_bytes(BAD[problem])
    with pytest.raises(ValueError, match=rf"bad\.txt: {problem}.*--on_bad_input skip"):
        prepare_text(output, corpus, overwrite=True)
    assert files(output) == before


@pytest.mark.parametrize("problem", BAD)
def test_bad_file_can_be_skipped_and_is_counted(
    corpus: Path, tmp_path: Path, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = prepare_text(tmp_path / "good", corpus)
    for name in ("0.txt", "bad.txt"):
        (corpus / name).write_bytes(BAD[problem])
    cache = prepare_text(tmp_path / "cache", corpus, on_bad_input="skip")
    assert cache.manifest.skipped == {problem: 2}
    assert f"2 inputs: {problem}" in capsys.readouterr().out
    assert cache.identity == expected.identity


def test_empty_validation_split_leaves_the_earlier_cache(corpus: Path, tmp_path: Path) -> None:
    output = tmp_path / "cache"
    prepare_text(output, corpus)
    before = files(output)
    with pytest.raises(
        ValueError, match=r"validation split is empty: none of 2 documents.*fraction=1e-06"
    ):
        prepare_text(output, corpus, validation_fraction=1e-6, max_documents=2, overwrite=True)
    assert files(output) == before


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ("\n \n", "the inputs hold none"),
        ('{"text": ""}\n{\n{"text": 1}\n[\n', r"all inputs were skipped \(.*not JSON: 2;.*: 1\)"),
    ],
)
def test_no_document_at_all_is_no_matter_of_fractions(tmp_path: Path, lines: str, why: str) -> None:
    (tmp_path / "a.jsonl").write_text(lines)
    with pytest.raises(ValueError, match=rf"the source jsonl gave no document: {why}\. Correct"):
        prepare(tmp_path / "out", "jsonl", str(tmp_path), vocab_size=300, on_bad_input="skip")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"validation_fraction": 0.0}, "validation_fraction is 0.0"),
        ({"validation_fraction": 1.0}, "validation_fraction is 1.0"),
        ({"test_fraction": 0.8}, "test_fraction is 0.8"),
        ({"shard_tokens": 0}, "shard_tokens is 0"),
        ({"max_documents": 0}, "max_documents is 0"),
        ({"boundary_id": 3}, "boundary_id needs a --tokenizer"),
        ({"vocab_size": 200}, "vocab_size is 200"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"on_bad_input": "ignore"}, "on_bad_input is 'ignore'; choose from error, skip"),
    ],
)
def test_bad_arguments(corpus: Path, tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepare_text(tmp_path / "cache", corpus, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": None}, "raw tokens need a --tokenizer, or both"),
        ({"boundary_id": None}, "raw tokens need a --tokenizer, or both"),
        ({"boundary_id": 100}, "boundary_id is 100; it must lie in 0 to 99"),
    ],
)
def test_bad_arguments_for_tokens(
    raw_tokens: Path, tmp_path: Path, change: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(
            tmp_path / "a",
            "tokens",
            str(raw_tokens),
            **({"vocab_size": 100, "boundary_id": 0} | change),
        )


def test_restart_after_an_error_ends_in_the_same_bytes(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after every number of documents; one record per shard's worth of tokens."""
    monkeypatch.setattr("tinyllm.data.prepare._BATCH_DOCUMENTS", 3)
    expected = files(prepare_text(tmp_path / "whole", corpus).path)
    output = tmp_path / "cache"
    real = Tokenizer.encode_batch
    for stop in range(1, 14):
        calls = 0

        def stopping(self: Tokenizer, texts: Any, stop: int = stop) -> Any:
            nonlocal calls
            calls += 1
            if calls > stop:
                raise KeyboardInterrupt
            return real(self, texts)

        with monkeypatch.context() as patch:
            patch.setattr(Tokenizer, "encode_batch", stopping)
            with pytest.raises(KeyboardInterrupt):
                prepare_text(output, corpus)
        assert not output.exists()
        position = json.loads((build.partial_folder(output) / "progress.json").read_text())[
            "position"
        ]
        assert position % 3 == 0
        assert stop == 1 or position > 0
        assert files(prepare_text(output, corpus).path) == expected
        for path in output.iterdir():
            path.unlink()
        output.rmdir()


KILLED = """
import os, signal, sys
from tinyllm.data import build, prepare
prepare._BATCH_DOCUMENTS = 3
real, records = build.write_record, 0
def killing(folder, record):
    global records
    real(folder, record)
    records += 1
    if records == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
build.write_record = killing
prepare.prepare(sys.argv[1], "text", sys.argv[2], vocab_size=300, validation_fraction=0.2,
                shard_tokens=256)
"""


def test_restart_after_kill_9_ends_in_the_same_bytes(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = files(prepare_text(tmp_path / "whole", corpus).path)
    output = tmp_path / "cache"
    command = [sys.executable, "-c", KILLED, str(output), str(corpus), "4"]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert not output.exists()
    capsys.readouterr()
    assert files(prepare_text(output, corpus).path) == expected
    assert "Continuing" in capsys.readouterr().out


def test_unfinished_cache_of_other_arguments_is_started_afresh(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "cache"
    command = [sys.executable, "-c", KILLED, str(output), str(corpus), "4"]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    expected = files(prepare_text(tmp_path / "whole", corpus, vocab_size=290).path)
    assert files(prepare_text(output, corpus, vocab_size=290).path) == expected
    assert "Starting afresh" in capsys.readouterr().out


def test_kill_between_the_renames_of_an_overwrite(corpus: Path, tmp_path: Path) -> None:
    output = tmp_path / "cache"
    first = prepare_text(output, corpus)
    output.rename(tmp_path / "cache.old")
    assert prepare_text(output, corpus).identity == first.identity
    assert not (tmp_path / "cache.old").exists()


def test_kill_before_an_overwritten_cache_is_deleted(corpus: Path, tmp_path: Path) -> None:
    output = tmp_path / "cache"
    first = prepare_text(output, corpus)
    (tmp_path / "cache.old").mkdir()
    assert prepare_text(output, corpus).identity == first.identity
    assert {path.name for path in tmp_path.glob("cache*")} == {"cache"}


def test_two_processes_do_not_write_one_cache(corpus: Path, tmp_path: Path) -> None:
    output = tmp_path / "cache"
    with (
        build.building(output),
        pytest.raises(CacheError, match="another `tinyllm prepare` is writing"),
    ):
        prepare_text(output, corpus)
    assert prepare_text(output, corpus).path == output


def test_command_line(raw_tokens: Path, tmp_path: Path) -> None:
    """One input or a list of them, as the docstring says."""
    common = ["--source=tokens", "--vocab_size=100", "--boundary_id=0", "--validation_fraction=0.2"]
    caches = [
        jsonargparse.auto_cli(
            prepare,
            args=[f"--output={tmp_path / str(number)}", f"--input={given}", *common],
            as_positional=False,
        )
        for number, given in enumerate((raw_tokens, f'["{raw_tokens}"]'))
    ]
    assert caches[0].identity == caches[1].identity


def test_raw_tokens_take_no_time_per_token(tmp_path: Path) -> None:
    """5 million tokens: a loop over tokens would take many seconds."""
    ids = np.random.default_rng(0).integers(1, 30_000, 5_000_000).astype("<u2")
    ids[2_000::2_001] = 0
    ids.tofile(tmp_path / "ids.u16")
    start = time.process_time()
    cache = prepare(
        tmp_path / "a", "tokens", str(tmp_path / "ids.u16"), vocab_size=30_000, boundary_id=0
    )
    assert time.process_time() - start < 3
    assert ids[-1] != 0  # so the last document's boundary is added
    assert sum(split.tokens for split in cache.manifest.splits.values()) == len(ids) + 1


def test_raw_tokens_of_a_large_vocabulary_are_refused(tmp_path: Path) -> None:
    """Four-byte ids would be read as twice as many two-byte ones."""
    np.arange(10, dtype="<u4").tofile(tmp_path / "a.bin")
    with pytest.raises(ValueError, match="the vocabulary has 100000 ids, and raw token files"):
        prepare(
            tmp_path / "out", "tokens", str(tmp_path / "a.bin"), vocab_size=100_000, boundary_id=2
        )
    assert not (tmp_path / "out").exists()
