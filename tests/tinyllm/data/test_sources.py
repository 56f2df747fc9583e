"""Each source gives its documents in order, and says precisely what is wrong with an input."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tinyllm.data.sources import BadInput, Document, Item, SourceKind, open_source


def contents(items: list[Item]) -> list[str]:
    """The documents' texts; fails on a bad input."""
    assert all(isinstance(item, Document) for item in items), items
    return [str(item.content) for item in items if isinstance(item, Document)]


def read(kind: SourceKind, *inputs: Path, text_field: str = "text") -> list[Item]:
    return list(open_source(kind, [str(i) for i in inputs], text_field=text_field).read())


def test_stdlib_is_the_library_without_tests() -> None:
    source = open_source("stdlib")
    documents = list(source.read())
    places = [Path(item.place) for item in documents]
    assert len(documents) == source.description["files"] > 400
    assert source.description["bytes"] > 7_000_000
    assert "argparse.py" in {p.name for p in places}
    assert not {"test", "tests", "encodings", "site-packages"} & {
        x for p in places for x in p.parts
    }
    assert len(contents(documents)) == len(documents)
    assert places == sorted(places)


def test_text_files_and_folders(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "sub/c.md", ".hidden", ".git/d.txt"):
        path = tmp_path / "folder" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"Größe {name}\r\n", newline="", encoding="utf-8")
    single = tmp_path / "one.txt"
    single.write_text("one")
    assert contents(read("text", single, tmp_path / "folder")) == [
        "one",
        "Größe a.txt\r\n",
        "Größe b.txt\r\n",
        "Größe sub/c.md\r\n",
    ]


def test_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "eins \\u00e4", "n": 1}\n\n{"text": "zwei\\n"}', encoding="utf-8")
    assert contents(read("jsonl", path)) == ["eins ä", "zwei\n"]
    assert contents(read("jsonl", tmp_path)) == ["eins ä", "zwei\n"]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"text": "\xff"}', "not UTF-8"),
        (b'{"text": ', "not JSON"),
        (b"[" * 100_000, "not JSON"),  # deeper than Python's stack
        (b'["text"]', "not a JSON object"),
        (b'{"body": "x"}', "no field 'text'"),
        (b'{"text": 5}', "the field 'text' is not text"),
        (b'{"text": null}', "the field 'text' is not text"),
        (b'{"text": ""}', "the text is empty"),
    ],
)
def test_bad_jsonl_line_costs_that_line(tmp_path: Path, line: bytes, problem: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "first"}\n' + line + b'\n{"text": "last"}\n')
    first, bad, last = read("jsonl", path)
    assert contents([first, last]) == ["first", "last"]
    assert isinstance(bad, BadInput)
    assert bad.problem == problem
    assert bad.place == f"{path}, line 2"


@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path: Path, kind: SourceKind) -> None:
    path = tmp_path / "a.jsonl"
    text = {"text": "eins", "jsonl": '{"text": "eins"}\n'}[kind]
    path.write_text(text, encoding="utf-8-sig")
    assert contents(read(kind, path)) == ["eins"]
    path.write_text("", encoding="utf-8-sig")
    if kind == "text":
        assert read(kind, path) == [BadInput(str(path), "the file is empty")]


def write_parquet(path: Path, **columns: Sequence[object]) -> None:
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def test_parquet(tmp_path: Path) -> None:
    many = [f"text {n}" for n in range(2500)]
    write_parquet(tmp_path / "a.parquet", body=many, other=list(range(2500)))
    assert contents(read("parquet", tmp_path, text_field="body")) == many


def test_bad_parquet(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", text=["one", None, "", "four"])
    write_parquet(tmp_path / "b.parquet", body=["x"], other=[1])
    (tmp_path / "c.parquet").write_bytes(b"nonsense")
    (tmp_path / "d.parquet").touch()
    one, null, empty, four, no_column, nonsense, empty_file = map(
        str, (i.content if isinstance(i, Document) else i for i in read("parquet", tmp_path))
    )
    assert (one, four) == ("one", "four")
    assert null.endswith("a.parquet, row 2: the field 'text' is not text (it is NoneType)")
    assert empty.endswith("a.parquet, row 3: the text is empty")
    assert no_column.endswith("b.parquet: no field 'text' (it has body, other; see --text_field)")
    assert "c.parquet: not a Parquet file" in nonsense
    assert empty_file.endswith("d.parquet: the file is empty")


def test_damaged_parquet_pages_cost_the_rest_of_the_file(tmp_path: Path) -> None:
    path, many = tmp_path / "a.parquet", [f"text {n}" for n in range(2048)]
    pyarrow.parquet.write_table(
        pyarrow.table({"text": many}), path, row_group_size=1024, use_dictionary=False
    )
    write_parquet(tmp_path / "b.parquet", text=["last"])
    page = pyarrow.parquet.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    damaged = bytearray(path.read_bytes())
    damaged[page + 200 : page + 400] = b"\xff" * 200
    path.write_bytes(damaged)
    *good, bad, last = read("parquet", tmp_path)
    assert contents([*good, last]) == [*many[:1024], "last"]
    assert isinstance(bad, BadInput)
    assert bad.place == f"{path}, after row 1024"
    assert bad.problem == "the rest of the file cannot be read"


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_huggingface_reads_a_local_dataset_folder(tmp_path: Path, kind: str) -> None:
    rows = [f"Zeile {n} äöü" for n in range(7)]
    folder = tmp_path / "dataset"
    folder.mkdir()
    if kind == "parquet":
        write_parquet(folder / "train.parquet", content=rows)
        write_parquet(folder / "validation.parquet", content=["other"])
    else:
        for name, lines in (("train", rows), ("validation", ["other"])):
            text = "".join(json.dumps({"content": line}) + "\n" for line in lines)
            (folder / f"{name}.jsonl").write_text(text)
    source = open_source("huggingface", [str(folder)], text_field="content")
    assert contents(list(source.read())) == rows
    assert contents(list(source.read())) == rows  # a second pass is the same
    other = open_source(
        "huggingface", [str(folder)], text_field="content", dataset_split="validation"
    )
    assert contents(list(other.read())) == ["other"]
    missing = next(open_source("huggingface", [str(folder)]).read())
    assert isinstance(missing, BadInput)
    assert str(missing).endswith("row 1: no field 'text' (it has content; see --text_field)")


def test_huggingface_dataset_that_does_not_exist(tmp_path: Path) -> None:
    source = open_source("huggingface", [str(tmp_path / "none")])
    with pytest.raises(ValueError, match=r"the dataset '.*none' .* cannot be opened"):
        next(source.read())


def test_tokens_are_cut_at_boundaries(tmp_path: Path) -> None:
    """A missing last boundary is no fault; two in a row are (Pitfall 20)."""
    np.array([5, 6, 2, 7, 2, 2, 65_535], "<u2").tofile(tmp_path / "a.u16")
    np.array([8, 2], "<u2").tofile(tmp_path / "b.bin")
    items = list(open_source("tokens", [str(tmp_path)], boundary_id=2).read())
    found = [i.content.tolist() if isinstance(i, Document) else i for i in items]  # type: ignore[union-attr]
    doubled = BadInput(f"{tmp_path / 'a.u16'}, token 5", "two boundaries in a row")
    assert found == [[5, 6], [7], doubled, [65_535], [8]]


def test_odd_token_file(tmp_path: Path) -> None:
    (tmp_path / "a.u16").write_bytes(b"\1\0\2")
    (bad,) = open_source("tokens", [str(tmp_path)], boundary_id=2).read()
    assert str(bad).endswith("a.u16: not a file of 2-byte token ids (it has 3 bytes)")


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet", "tokens"])
def test_missing_inputs(tmp_path: Path, kind: SourceKind) -> None:
    with pytest.raises(FileNotFoundError, match="none does not exist"):
        open_source(kind, [str(tmp_path / "none")], boundary_id=0)
    with pytest.raises(FileNotFoundError, match=f"has no file for the source {kind}"):
        open_source(kind, [str(tmp_path)], boundary_id=0)
    with pytest.raises(ValueError, match=f"the source {kind} needs --input"):
        open_source(kind)


def test_wrong_number_of_inputs() -> None:
    with pytest.raises(ValueError, match="stdlib takes no input"):
        open_source("stdlib", ["a"])
    with pytest.raises(ValueError, match="huggingface takes one input"):
        open_source("huggingface", ["a", "b"])
    with pytest.raises(ValueError, match="source is 'csv'; choose from stdlib, text"):
        open_source("csv", ["a"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tokens needs --boundary_id"):
        open_source("tokens", [__file__])


def test_half_a_surrogate_pair(tmp_path: Path) -> None:
    """JSON can spell what UTF-8 cannot hold."""
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n{"text": "\\ud800"}\n')
    good, bad = open_source("jsonl", [str(tmp_path)]).read()
    assert isinstance(good, Document)
    assert isinstance(bad, BadInput)
    assert "line 2" in bad.place
    assert bad.problem == "not valid Unicode"
