"""The cache refuses what is damaged, and reads what is not."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from tinyllm.data.cache import TokenCache
from tinyllm.data.manifest import CacheError, Split
from tinyllm.data.stream import TokenStream, token_dtype


def test_pitfall_18_truncated_shard_is_refused(token_cache: Path) -> None:
    shard = token_cache / "train-00001.bin"
    assert shard.stat().st_size == 400
    shard.write_bytes(shard.read_bytes()[:390])
    with pytest.raises(CacheError, match=r"train-00001\.bin has 390 bytes.*gives it 400"):
        TokenCache.open(token_cache)


def test_pitfall_18_grown_shard_is_refused(token_cache: Path) -> None:
    shard = token_cache / "train-00001.bin"
    shard.write_bytes(shard.read_bytes() + b"\0\0")
    with pytest.raises(CacheError, match=r"train-00001\.bin has 402 bytes.*gives it 400"):
        TokenCache.open(token_cache)


def test_missing_shard_is_refused(token_cache: Path) -> None:
    (token_cache / "validation-00000.bin").unlink()
    with pytest.raises(CacheError, match=r"validation-00000\.bin is missing"):
        TokenCache.open(token_cache)


def test_one_changed_byte_is_found(token_cache: Path) -> None:
    TokenCache.open(token_cache).verify()
    shard = token_cache / "train-00002.bin"
    data = bytearray(shard.read_bytes())
    data[7] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CacheError, match=r"train-00002\.bin was changed: its SHA-256 is"):
        TokenCache.open(token_cache).verify()


def change_manifest(cache: Path, old: str, new: str) -> None:
    file = cache / "manifest.json"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def test_edited_manifest_is_refused(token_cache: Path) -> None:
    change_manifest(token_cache, '"boundary_id": 0\n  }', '"boundary_id": 1\n  }')
    with pytest.raises(CacheError, match="was changed after it was written"):
        TokenCache.open(token_cache)


@pytest.mark.parametrize("name", ["../train-00000.bin", "/etc/passwd", "a/b.bin", ".."])
def test_file_names_may_not_leave_the_folder(token_cache: Path, name: str) -> None:
    change_manifest(token_cache, '"file": "train-00000.bin"', f'"file": "{name}"')
    with pytest.raises(CacheError, match="must be a plain name inside the folder"):
        TokenCache.open(token_cache)


def test_other_format_version_is_refused(token_cache: Path) -> None:
    change_manifest(token_cache, '"version": 1', '"version": 2')
    with pytest.raises(CacheError, match="format version 2; this tinyllm reads version 1"):
        TokenCache.open(token_cache)


@pytest.mark.parametrize("text", ["", "[1]", '{"version": 1}'])
def test_broken_manifest_is_refused(token_cache: Path, text: str) -> None:
    (token_cache / "manifest.json").write_text(text)
    with pytest.raises(CacheError, match=r"manifest\.json is not"):
        TokenCache.open(token_cache)


def test_unknown_split_names_those_there_are(token_cache: Path) -> None:
    with pytest.raises(CacheError, match=r"no split 'test'; it has \['train', 'validation'\]"):
        TokenCache.open(token_cache).split("test")


def test_folder_without_manifest(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match=r"has no manifest\.json"):
        TokenCache.open(tmp_path)


def test_splits_hold_the_documents_in_order(token_cache: Path, raw_tokens: Path) -> None:
    """Every document in one split, in source order, with counts that agree."""
    cache = TokenCache.open(token_cache)

    def documents(ids: np.ndarray) -> list[tuple[int, ...]]:
        assert ids[-1] == 0
        return [tuple(d.tolist()) for d in np.split(ids, np.flatnonzero(ids == 0) + 1)[:-1]]

    wanted = documents(np.fromfile(raw_tokens, "<u2"))
    found = {}
    names: tuple[Split, ...] = ("train", "validation")
    for name in names:
        stream = cache.split(name)
        found[name] = documents(stream.read(0, len(stream)))
        manifest = cache.manifest.splits[name]
        assert manifest.documents == len(found[name])
        assert manifest.tokens == len(stream) == sum(shard.tokens for shard in manifest.shards)
        assert [d for d in wanted if d in found[name]] == found[name]
    assert len(cache.manifest.splits["train"].shards) > 2
    assert sorted(found["train"] + found["validation"]) == sorted(wanted)
    assert 2 <= len(found["validation"]) <= 24


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_stream_reads_across_arrays(dtype: type) -> None:
    whole: np.ndarray = np.arange(23, dtype=dtype)
    stream = TokenStream([whole[:5], whole[5:6], whole[6:20], whole[20:]], "four parts")
    assert len(stream) == 23
    for start in range(24):
        for length in range(24 - start):
            part = stream.read(start, length)
            assert part.dtype == dtype
            np.testing.assert_array_equal(part, whole[start : start + length])


@pytest.mark.parametrize(("start", "length"), [(-1, 2), (0, 24), (23, 1), (3, -1)])
def test_stream_refuses_reads_outside(start: int, length: int) -> None:
    with pytest.raises(IndexError, match="of a stream of 23"):
        TokenStream.from_array(np.arange(23, dtype=np.uint16)).read(start, length)


def test_stream_refuses_other_types() -> None:
    with pytest.raises(TypeError, match="given int64"):
        TokenStream.from_array(np.arange(3))


@pytest.mark.parametrize(
    ("vocab_size", "name"), [(1, "uint16"), (65_536, "uint16"), (65_537, "uint32")]
)
def test_pitfall_14_type_by_vocabulary(vocab_size: int, name: str) -> None:
    assert token_dtype(vocab_size).name == name


def test_identity_is_of_the_content_alone(token_cache: Path) -> None:
    before = TokenCache.open(token_cache).identity
    file = token_cache / "manifest.json"
    value = json.loads(file.read_text())
    value["request"]["source"]["inputs"] = ["elsewhere"]
    file.write_text(json.dumps(value))
    assert TokenCache.open(token_cache).identity == before


def test_cache_can_be_sent_to_another_process(token_cache: Path) -> None:
    """As Lightning's spawning strategies do with a data module."""
    cache = TokenCache.open(token_cache)
    assert len(pickle.dumps(cache)) < 10_000
    assert pickle.loads(pickle.dumps(cache)).identity == cache.identity
