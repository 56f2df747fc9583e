"""Hostile token caches, topology files and tokenizers."""

import json
from fractions import Fraction
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
from contract import REFUSED, answer, write_json
from hypothesis import strategies as st
from mutations import changed_bytes, changed_values

from tinyllm.data.cache import TokenCache
from tinyllm.data.loader import TokenLoader
from tinyllm.data.manifest import FORMAT_VERSION, CacheError, sha256_of_json
from tinyllm.data.prepare import prepare
from tinyllm.data.tokenizer import Tokenizer
from tinyllm.strategies.topology import make_topology


def copied(files: dict[str, bytes], folder: Path) -> Path:
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


# --- token caches -----------------------------------------------------------------------------


@cache
def good_cache() -> dict[str, bytes]:
    """The files of a small cache of several shards, by name."""
    folder = Path(mkdtemp())
    rng = np.random.default_rng(0)
    ids = np.concatenate([[*rng.integers(1, 90, rng.integers(1, 41)), 0] for _ in range(60)])
    ids.astype("<u2").tofile(folder / "ids.u16")
    options: dict[str, Any] = {"vocab_size": 90, "boundary_id": 0, "validation_fraction": 0.2}
    prepare(folder / "cache", "tokens", str(folder / "ids.u16"), shard_tokens=200, **options)
    return {path.name: path.read_bytes() for path in (folder / "cache").iterdir()}


def good_manifest() -> dict[str, Any]:
    value: dict[str, Any] = json.loads(good_cache()["manifest.json"])
    return value


def signed(value: Any) -> Any:
    """The manifest with the identity that its changed content has, as a careful forger writes."""
    if not isinstance(value, dict):
        return value
    parts = {name: value.get(name) for name in ("dtype", "tokenizer", "splits")}
    try:
        identity = sha256_of_json({"version": FORMAT_VERSION, **parts})
    except (TypeError, ValueError, UnicodeError):
        return value
    return {**value, "identity": identity}


def check_cache(folder: Path) -> None:
    """A cache that opens serves exactly the ids in its own files, and nothing from elsewhere."""
    opened = answer(lambda: TokenCache.open(folder), (CacheError,), folder)
    if opened is REFUSED:
        return
    assert isinstance(opened, TokenCache)
    answer(opened.verify, (CacheError,), folder)
    for name, split in opened.manifest.splits.items():
        stream = answer(lambda name=name: opened.split(name), (CacheError,), folder)  # type: ignore[misc]
        if stream is REFUSED:
            continue
        files = [folder / shard.file for shard in split.shards]
        assert all(file.parent == folder and "/" not in file.name for file in files)
        held = b"".join(file.read_bytes() for file in files)
        assert stream.read(0, len(stream)).tobytes() == held
        assert len(stream) == split.tokens
        loader = answer(
            lambda stream=stream: TokenLoader(stream, context=16, batch_size=4, shuffle=False),
            (ValueError,),
            "the split holds",
        )
        if loader is not REFUSED:
            targets = np.concatenate([batch[:, 1:].numpy().ravel() for batch in loader])
            assert targets[targets >= 0].tolist() == np.frombuffer(held, stream.dtype)[1:].tolist()


def cache_manifest(data: Any, folder: Path) -> None:
    place = copied(good_cache(), folder / "cache")
    if data.draw(st.booleans(), label="as bytes"):
        text = data.draw(changed_bytes(good_cache()["manifest.json"]))
        (place / "manifest.json").write_bytes(text)
    else:
        value = data.draw(changed_values(good_manifest()))
        write_json(place / "manifest.json", signed(value) if data.draw(st.booleans()) else value)
    (folder / "outside").write_bytes(good_cache()["train-00000.bin"])
    check_cache(place)


def cache_shards(data: Any, folder: Path) -> None:
    files = good_cache()
    name = data.draw(st.sampled_from(sorted(set(files) - {"manifest.json"})))
    changed = data.draw(changed_bytes(files[name]))
    place = copied(files | {name: changed}, folder / "cache")
    check_cache(place)
    if changed != files[name]:
        assert (
            answer(lambda: TokenCache.open(place).verify(), (CacheError,), place / name) is REFUSED
        )


@cache
def good_tokenizer() -> bytes:
    folder = Path(mkdtemp())
    texts = [f"{number} größere Äpfel, naïve and quick." for number in range(30)]
    return Tokenizer.train(texts, 280).save(folder).read_bytes()


def tokenizer(data: Any, folder: Path) -> None:
    path = folder / "tokenizer.json"
    if data.draw(st.booleans(), label="as bytes"):
        path.write_bytes(data.draw(changed_bytes(good_tokenizer())))
    else:
        write_json(path, data.draw(changed_values(json.loads(good_tokenizer()))))
    loaded = answer(lambda: Tokenizer.load(path), (ValueError,), path)
    if isinstance(loaded, Tokenizer):
        ids = loaded.encode("größer and 1")
        assert (ids < loaded.vocab_size).all()
        assert 0 <= loaded.boundary_id < loaded.vocab_size


# --- topologies -------------------------------------------------------------------------------


def check_topology(path: Path, workers: int, wanted: np.ndarray | None) -> None:
    """A topology that is read is doubly stochastic and is what the file says."""
    made = answer(lambda: make_topology(str(path), workers), (ValueError,), path)
    if made is REFUSED:
        return
    stack = np.stack([made.matrix(t) for t in range(made.period)])
    np.testing.assert_allclose(stack.sum(1), 1, rtol=0, atol=1e-8)
    np.testing.assert_allclose(stack.sum(2), 1, rtol=0, atol=1e-8)
    assert (stack >= 0).all()
    assert wanted is not None, "another reader cannot read this"
    np.testing.assert_array_equal(stack, wanted.astype(np.float64).reshape(stack.shape))


@st.composite
def npy_files(draw: st.DrawFn) -> bytes:
    """Good files, changed files, and headers that lie."""
    n = draw(st.integers(1, 4))
    good = np.full((n, n), 1 / n)
    descr = draw(
        st.sampled_from(
            ["<f8", "<f4", ">f8", "<i8", "|O", "<c16", "|S8", "<U2", "|V8", "x", "<M8[s]"]
        )
    )
    sizes = st.integers(0, 4) | st.sampled_from([-1, 1 << 31, 1 << 40, 1 << 62, 1 << 70])
    shape = draw(st.just((n, n)) | st.lists(sizes, max_size=4).map(tuple))
    header: Any = {"descr": descr, "fortran_order": draw(st.booleans()), "shape": shape}
    text = draw(st.just(repr(header)) | st.text(max_size=20) | st.just("(" * 3_000))
    lying = b"\x93NUMPY\x01\x00" + len(text.encode()).to_bytes(2, "little") + text.encode()
    body = good.tobytes()
    whole = (
        b"\x93NUMPY\x01\x00\x76\x00"
        + repr({"descr": "<f8", "fortran_order": False, "shape": (n, n)}).ljust(117).encode()
        + b"\n"
        + body
    )
    return draw(
        st.just(whole)
        | st.just(lying + body)
        | changed_bytes(whole)
        | changed_bytes(lying + body)
        | st.just(b"PK\x03\x04" + body)
        | st.just(b"\x80\x04N.")
        | st.binary(max_size=40)
    )


def topology_npy(data: Any, folder: Path) -> None:
    path = folder / "matrix.npy"
    path.write_bytes(data.draw(npy_files()))
    try:
        with path.open("rb") as file:
            np.lib.format.read_magic(file)
        wanted = np.array(np.lib.format.open_memmap(path, mode="r"))
    except Exception:
        wanted = None
    check_topology(path, data.draw(st.integers(1, 4), label="N"), wanted)


ENTRIES = st.sampled_from(
    [
        *("1", "0", "1/2", "0.5", "1/3", "2/6", "5e-1", " 1/4 ", "-0", "1e-400", "1e999999999"),
        *("1e-999999999", "1/0", "nan", "inf", "1" * 5_000, "1/" + "3" * 5_000, "0x1", "1_0"),
        *("½", "\u0661", "1//2", "", "=1+1", '"1"', "1/3/1", "1.5/3", "1/-2"),
    ]
)


@st.composite
def csv_files(draw: st.DrawFn) -> bytes:
    n = draw(st.integers(1, 3))
    good = "\n".join(",".join([f"1/{n}"] * n) for _ in range(n)).encode()
    rows = draw(st.lists(st.lists(ENTRIES, min_size=1, max_size=4), max_size=4))
    other = "\n".join(map(",".join, rows)).encode()
    return draw(st.just(good) | st.just(other) | changed_bytes(good) | st.binary(max_size=20))


def topology_csv(data: Any, folder: Path) -> None:
    path = folder / "matrix.csv"
    path.write_bytes(data.draw(csv_files()))
    try:
        lines = [line for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
        # only fractions are made one, which would write 1e-999999999 out
        entries = [
            [float(Fraction(entry) if "/" in entry else entry) for entry in line.split(",")]
            for line in lines
        ]
        wanted = np.array(entries, dtype=float)
    except (ValueError, ArithmeticError):
        wanted = None
    check_topology(path, data.draw(st.integers(1, 3), label="N"), wanted)
