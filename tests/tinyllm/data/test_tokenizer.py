"""Each kind of tokenizer gives plain ids and text back, whatever its file would add."""

import base64
import io
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tokenizers
from tokenizers.processors import TemplateProcessing

from tinyllm.data.tokenizer import BOUNDARY_TOKEN, Tokenizer


@pytest.fixture(scope="session")
def sentencepiece_file(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        vocab_size=320,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        minloglevel=2,
    )
    path = tmp_path_factory.mktemp("sp") / "tokenizer.model.v1"
    path.write_bytes(model.getvalue())
    return path


@pytest.fixture(scope="session")
def trained(texts: list[str]) -> Tokenizer:
    return Tokenizer.train(texts, 300)


def test_trained_bpe_round_trip(trained: Tokenizer, texts: list[str]) -> None:
    """Also text and bytes that it was not trained on."""
    assert trained.vocab_size == 300
    assert trained.boundary_id == 0
    for text in [*texts, "\x00 \u2603 Ω ≠ \t\r\n  end", ""]:
        assert trained.decode(trained.encode(text)) == text
    for row, text in zip(trained.encode_batch(texts), texts, strict=True):
        assert row.dtype == np.uint32
        np.testing.assert_array_equal(row, trained.encode(text))


def test_training_is_deterministic_across_processes(texts: list[str], tmp_path: Path) -> None:
    """Else a run killed while training could not end in the same cache."""
    (tmp_path / "texts").write_text("\0".join(texts))
    program = (
        "import sys; from pathlib import Path; from tinyllm.data.tokenizer import Tokenizer\n"
        "texts = Path(sys.argv[1]).read_text().split('\\0')\n"
        "print(Tokenizer.train(texts, 300).sha256)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "texts")]
    outputs = {subprocess.run(command, capture_output=True, check=True).stdout for _ in range(2)}
    assert outputs == {f"{Tokenizer.train(texts, 300).sha256}\n".encode()}


@pytest.mark.parametrize("character", ["x", "7", "-", " "])
def test_a_long_run_of_one_character_trains_in_seconds(character: str) -> None:
    text = character * 500_000
    start = time.process_time()
    tokenizer = Tokenizer.train([text, "some words"], 300)
    assert time.process_time() - start < 5  # a tenth of a second, where one word takes minutes
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_training_sees_words_of_usual_length_whole(texts: list[str]) -> None:
    """They are what training on the same words without any cut gives."""
    plain = tokenizers.Tokenizer(tokenizers.models.BPE())
    plain.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[BOUNDARY_TOKEN],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = [*texts, f"{'a' * 999} {'1' * 999} {'=' * 999}{' ' * 999}"]
    plain.train_from_iterator(texts, trainer)
    plain.decoder = tokenizers.decoders.ByteLevel()
    trained = Tokenizer.train(texts, 300)
    assert (
        trained.to_state()["file"] == base64.b64encode(plain.to_str(pretty=True).encode()).decode()
    )


def test_pitfall_20_template_and_spelled_out_boundary_add_nothing(
    trained: Tokenizer, tmp_path: Path
) -> None:
    """A file with a template, truncation and padding still gives the bare ids of the text."""
    plain = tokenizers.Tokenizer.from_file(str(trained.save(tmp_path)))
    plain.post_processor = TemplateProcessing(
        single=f"{BOUNDARY_TOKEN} $A {BOUNDARY_TOKEN}", special_tokens=[(BOUNDARY_TOKEN, 0)]
    )
    plain.enable_truncation(4)
    plain.enable_padding(length=64)
    path = tmp_path / "decorated.json"
    plain.save(str(path))
    decorated = Tokenizer.load(path)
    text = f"the quick brown fox {BOUNDARY_TOKEN} jumps"
    np.testing.assert_array_equal(decorated.encode(text), trained.encode(text))
    assert decorated.boundary_id not in decorated.encode(text)
    assert decorated.decode(decorated.encode(text)) == text


def test_sentencepiece_round_trip(sentencepiece_file: Path, texts: list[str]) -> None:
    tokenizer = Tokenizer.load(sentencepiece_file)
    assert tokenizer.kind == "sentencepiece"
    assert tokenizer.vocab_size == 320
    assert tokenizer.boundary_id == 2  # its </s>
    text = "the quick größer 日本 </s> fox"
    ids = tokenizer.encode(text)
    assert not {1, 2} & set(ids.tolist())  # neither <s> nor </s>
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, 2]) == text


def test_save_and_load_keep_the_file_byte_for_byte(
    trained: Tokenizer, sentencepiece_file: Path, tmp_path: Path
) -> None:
    for number, tokenizer in enumerate((trained, Tokenizer.load(sentencepiece_file))):
        folder = tmp_path / str(number)
        folder.mkdir()
        path = tokenizer.save(folder)
        assert path.name == tokenizer.identity.file
        for again in (Tokenizer.load(folder), Tokenizer.load(path)):
            assert again.identity == tokenizer.identity
            np.testing.assert_array_equal(again.encode("the fox"), tokenizer.encode("the fox"))


def test_missing_and_wrong_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no tokenizer at .*none\.json"):
        Tokenizer.load(tmp_path / "none.json")
    with pytest.raises(FileNotFoundError, match=r"neither tokenizer\.json nor tokenizer\.model"):
        Tokenizer.load(tmp_path)
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(ValueError, match=r"a\.json is not a file of the tokenizers library"):
        Tokenizer.load(tmp_path / "a.json")
    (tmp_path / "a.model").write_bytes(b"not a model")
    with pytest.raises(ValueError, match=r"a\.model is not a SentencePiece model"):
        Tokenizer.load(tmp_path / "a.model")


def test_boundary_must_be_known_and_in_the_vocabulary(trained: Tokenizer, tmp_path: Path) -> None:
    path = trained.save(tmp_path)
    assert Tokenizer.load(path, boundary_id=7).boundary_id == 7
    with pytest.raises(ValueError, match=r"boundary_id is 300; .* ids from 0 to 299"):
        Tokenizer.load(path, boundary_id=300)
    text = path.read_text().replace(BOUNDARY_TOKEN, "<other>")
    path.write_text(text)
    with pytest.raises(ValueError, match=r"no end-of-document token.*--boundary_id"):
        Tokenizer.load(path)


def test_too_small_vocabulary_is_refused(texts: list[str]) -> None:
    with pytest.raises(ValueError, match=r"vocab_size is 256; .* at least 257"):
        Tokenizer.train(texts, 256)


def test_optional_libraries_are_imported_when_used() -> None:
    program = (
        "import sys, lightning.pytorch\n"  # which loads some of them with transformers
        "before = set(sys.modules)\n"
        "import tinyllm.data.bigram, tinyllm.data.module, tinyllm.data.prepare\n"
        "print({'datasets', 'tokenizers', 'sentencepiece'} & (set(sys.modules) - before))"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert output.stdout.decode().strip() == "set()"


def test_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'tinyllm\[data\]'"):
        Tokenizer.train(["a"], 300)
