"""Sampling: exact distributions, greedy and seeded text, and what is refused."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tinyllm.checkpoint import read_checkpoint
from tinyllm.config import LlamaConfig
from tinyllm.data.tokenizer import Tokenizer
from tinyllm.generate import decoded, restrict, sample
from tinyllm.model import Llama
from tinyllm.module import module_of

CONFIG = LlamaConfig(layers=2, width=16, heads=2, ffn_width=32, vocab_size=40, context=24)
PROMPT = torch.tensor([3, 1, 4, 1, 5])
INF = math.inf


@pytest.fixture(scope="module")
def model() -> Llama:
    """Untrained, with weights large enough that its greedy text wanders."""
    torch.manual_seed(9)
    model = Llama(CONFIG)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 2:
                parameter.normal_(std=0.6)
    return model


def step_by_step(model: Llama, prompt: Tensor, count: int) -> list[int]:
    """The likeliest next token, again and again, each time from the whole text and no cache."""
    ids = prompt.tolist()
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([[ids]]))[0, 0, -1].argmax()))
    return ids[len(prompt) :]


# restrict, by value

LOGITS = torch.tensor([0.5, 0.125, 0.25, 0.0625, 0.0625]).log()


def kept(logits: Tensor, top_k: int | None, top_p: float | None) -> list[int]:
    restricted = restrict(logits, top_k, top_p)
    inside = restricted.isfinite()
    assert torch.equal(restricted[inside], logits[inside])
    assert (restricted[~inside] == -INF).all()
    return inside.nonzero().flatten().tolist()


@pytest.mark.parametrize(
    ("top_k", "expected"),
    [
        (None, [0, 1, 2, 3, 4]),
        *((1, [0]), (2, [0, 2]), (3, [0, 1, 2]), (4, [0, 1, 2, 3]), (5, [0, 1, 2, 3, 4])),
        (99, [0, 1, 2, 3, 4]),
    ],
)
def test_top_k_keeps_exactly_k(top_k: int | None, expected: list[int]) -> None:
    assert kept(LOGITS, top_k, None) == expected


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [
        *((1e-9, [0]), (0.3, [0]), (0.5, [0]), (0.501, [0, 2]), (0.75, [0, 2])),
        *((0.76, [0, 1, 2]), (0.875, [0, 1, 2]), (0.9, [0, 1, 2, 3]), (0.94, [0, 1, 2, 3, 4])),
        *((1.0, [0, 1, 2, 3, 4]), (None, [0, 1, 2, 3, 4])),
    ],
)
def test_top_p_keeps_the_smallest_nucleus(top_p: float | None, expected: list[int]) -> None:
    """Probabilities are powers of two, so that sums are exact and the bounds are met exactly."""
    assert kept(LOGITS.double(), None, top_p) == expected


def test_the_nucleus_is_of_what_top_k_leaves() -> None:
    # of 0.5, 0.25 and 0.125 the first is 4/7 = 0.571
    assert kept(LOGITS.double(), 3, 0.57) == [0]
    assert kept(LOGITS.double(), 3, 0.58) == [0, 2]
    assert kept(LOGITS.double(), None, 0.57) == [0, 2]


def test_equal_logits_are_cut_by_id() -> None:
    equal = torch.zeros(6)
    assert kept(equal, 2, None) == [0, 1]
    assert kept(equal, None, 0.34) == [0, 1, 2]
    assert kept(equal, 1, None) == [int(equal.argmax())]


def test_a_large_vocabulary_sums_to_the_nucleus() -> None:
    """By definition: the fewest ids, likeliest first, that have at least this probability."""
    logits = torch.randn(32_000) * 2
    inside = kept(logits, None, 0.9)
    probability = logits.double().softmax(-1)
    total, smallest = probability[inside].sum(), probability[inside].min()
    assert total >= 0.9
    assert total - smallest < 0.9
    assert smallest >= probability.sum() - 1  # not NaN
    assert (probability > smallest).sum() == len(inside) - 1


# sample


def test_greedy_equals_step_by_step_without_a_cache(model: Llama) -> None:
    expected = step_by_step(model, PROMPT, 19)
    assert len(set(expected)) > 3
    assert list(sample(model, PROMPT, 19, temperature=0)) == expected
    assert list(sample(model, PROMPT, 19, temperature=0, seed=5, top_p=0.1)) == expected


@pytest.mark.parametrize("temperature", [1e-30, 0.5, 1.0, 50.0, 1e30])
def test_top_k_of_one_is_greedy(model: Llama, temperature: float) -> None:
    expected = step_by_step(model, PROMPT, 10)
    assert list(sample(model, PROMPT, 10, temperature=temperature, top_k=1)) == expected


@pytest.mark.parametrize("temperature", [1e-30, 2e-38, 1e-38, 1e-45, 1e-320])
def test_a_tiny_temperature_is_greedy(model: Llama, temperature: float) -> None:
    expected = step_by_step(model, PROMPT, 10)
    assert list(sample(model, PROMPT, 10, temperature=temperature)) == expected


@pytest.mark.parametrize("seed", [-(2**63), 2**64 - 1])
def test_the_first_and_last_seed_work(model: Llama, seed: int) -> None:
    assert len(list(sample(model, PROMPT, 3, seed=seed))) == 3


def test_a_seed_repeats_and_none_does_not(model: Llama) -> None:
    first = [list(sample(model, PROMPT, 15, seed=seed)) for seed in (1, 1, 2)]
    assert first[0] == first[1] != first[2]
    state = torch.get_rng_state()
    free = [tuple(sample(model, PROMPT, 15)) for _ in range(4)]
    assert len(set(free)) > 1
    assert torch.equal(torch.get_rng_state(), state)  # the draw is from a generator of its own


class Fixed(torch.nn.Module):
    """A model with the same next-token distribution everywhere."""

    def __init__(self, probability: Tensor) -> None:
        super().__init__()
        self.config = LlamaConfig(1, 8, 2, 8, vocab_size=len(probability), context=5_000)
        self._logits = probability.log()

    def forward(self, tokens: Tensor, cache: Any = None) -> Tensor:
        return self._logits.expand(*tokens.shape, -1)


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({}, [0.5, 0.125, 0.25, 0.0625, 0.0625]),
        ({"temperature": 0.5}, [0.25, 1 / 64, 1 / 16, 1 / 256, 1 / 256]),
        ({"temperature": 1e6}, [1, 1, 1, 1, 1]),
        ({"top_k": 2}, [0.5, 0, 0.25, 0, 0]),
        ({"top_p": 0.8}, [0.5, 0.125, 0.25, 0, 0]),
        ({"top_k": 3, "temperature": 2.0}, [0.5**0.5, 0.125**0.5, 0.5, 0, 0]),
        ({"vocab_size": 2}, [0.5, 0.125, 0, 0, 0]),
    ],
)
def test_samples_follow_the_exact_distribution(options: Any, weights: list[float]) -> None:
    model: Any = Fixed(LOGITS.exp())
    drawn = Counter(sample(model, PROMPT[:1], 4_000, seed=0, **options))
    for token, weight in enumerate(weights):
        expected = weight / sum(weights)
        # five standard deviations of a binomial; the seed is fixed, so this cannot flicker
        slack = 5 * (expected * (1 - expected) / 4_000) ** 0.5
        assert drawn[token] / 4_000 == pytest.approx(expected, abs=slack)


@pytest.mark.parametrize(("asked", "got"), [(0, 0), (1, 1), (19, 19), (20, 20), (99, 20)])
def test_the_context_ends_the_text(model: Llama, asked: int, got: int) -> None:
    """24 positions hold the prompt of 5 and 19 more; the last one still has a successor."""
    assert len(list(sample(model, PROMPT, asked))) == got


def test_a_prompt_may_fill_the_context(model: Llama) -> None:
    prompt = torch.arange(24)
    assert list(sample(model, prompt, 9, temperature=0)) == step_by_step(model, prompt, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1; it must be at least 0 and finite"),
        ({"temperature": INF}, "temperature is inf"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"top_k": 0}, "top_k is 0; it must be at least 1"),
        ({"top_p": 0.0}, "top_p is 0.0; it must be above 0 and at most 1"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"seed": 2**64}, f"seed is {2**64}; it must be from {-(2**63)} to {2**64 - 1}"),
        ({"seed": -(2**63) - 1}, "it must be from"),
        ({"max_new_tokens": -1}, "max_new_tokens is -1; it must be at least 0"),
        ({"prompt": PROMPT[:0]}, "the prompt has 0 tokens; it must have from 1 to 24"),
        ({"prompt": torch.arange(25)}, "the prompt has 25 tokens; it must have from 1 to 24"),
    ],
)
def test_options_out_of_range_are_refused_at_once(
    model: Llama, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):  # before a token is asked for
        sample(model, **{"prompt": PROMPT, "max_new_tokens": 3, **options})


def test_no_gradients_are_kept(model: Llama) -> None:
    tokens = sample(model, PROMPT, 2)
    next(tokens)
    assert torch.is_grad_enabled()  # inference mode is on only while a token is computed
    assert not torch.is_inference_mode_enabled()


# decoded


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Bytes alone: every character outside ASCII takes several tokens."""
    return Tokenizer.train(["abc"], 257)


@pytest.mark.parametrize("text", ["plain", "größer 日本 🙂!", "日", ""])
def test_characters_of_several_bytes_come_whole(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).tolist()
    assert len(ids) == len(text.encode())
    pieces = list(decoded(tokenizer, [], ids))
    assert "".join(pieces) == text
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)
    assert len(pieces) == len(text)


def test_only_what_follows_is_given(tokenizer: Tokenizer) -> None:
    before, after = (
        tokenizer.encode(text).tolist() for text in ("a日\N{REPLACEMENT CHARACTER}", "本")
    )
    assert "".join(decoded(tokenizer, before, after)) == "本"


def test_an_unfinished_character_at_the_end_is_left_out(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a日本").tolist()
    assert "".join(decoded(tokenizer, [], ids[:-1])) == "a日"


def test_bytes_that_are_no_character_hold_up_nothing(tokenizer: Tokenizer) -> None:
    stray = tokenizer.encode("日").tolist()[1]
    ids = [*tokenizer.encode("a").tolist(), stray, *tokenizer.encode("b日").tolist()]
    assert "".join(decoded(tokenizer, [], ids)) == "a\N{REPLACEMENT CHARACTER}b日"


def test_the_boundary_ends_the_text(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("ab").tolist(), tokenizer.boundary_id, *tokenizer.encode("c").tolist()]
    assert "".join(decoded(tokenizer, [], ids)) == "ab"


# The command


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    from tinyllm.cli import main

    folder = tmp_path_factory.mktemp("run")
    options = ["--trainer.max_steps", "80", "--trainer.val_check_interval", "80"]
    main(["fit", "--config", str(tiny), "--trainer.default_root_dir", str(folder), *options])
    return folder / "checkpoints" / "last.ckpt"


def test_prints_the_prompt_and_its_continuation(command: Any, checkpoint: Path) -> None:
    options = [checkpoint, "--prompt", "größ", "--max_new_tokens", "6"]
    greedy = command("generate", *options, "--temperature", "0")
    assert greedy.code == 0, greedy.err
    assert greedy.out.startswith("größ")
    assert greedy.out.endswith("\n")
    assert greedy.out == command("generate", *options, "--top_k", "1").out
    seeded = [command("generate", *options, "--seed", seed).out for seed in (1, 1, 2)]
    assert seeded[0] == seeded[1] != seeded[2]
    assert greedy.err == ""


@pytest.mark.parametrize("prompt", ["1 gr", ""])
def test_continues_as_the_model_does(
    command: Any, checkpoint: Path, text_cache: Path, prompt: str
) -> None:
    from tinyllm import TinyLLM

    state = torch.load(checkpoint, weights_only=True)
    module = TinyLLM(**state["hyper_parameters"])
    module.load_state_dict(state["state_dict"])
    tokenizer = Tokenizer.load(text_cache)
    ids = tokenizer.encode(prompt).tolist() or [tokenizer.boundary_id]  # starts a document
    new = step_by_step(module.model, torch.tensor(ids), 5)
    options = ["--max_new_tokens", 5, "--temperature", 0]
    done = command("generate", checkpoint, "--prompt", prompt, *options)
    assert done.out == prompt + "".join(decoded(tokenizer, ids if prompt else [], new)) + "\n"
    assert len(done.out) > len(prompt) + 1


def test_another_tokenizer_may_be_given(
    command: Any, checkpoint: Path, text_cache: Path, tmp_path: Path
) -> None:
    options = [checkpoint, "--temperature", "0", "--max_new_tokens", "4"]
    expected = command("generate", *options).out
    for path in (text_cache, text_cache / "tokenizer.json"):
        assert command("generate", *options, "--tokenizer", path).out == expected
    large = Tokenizer.train(["a few words of text, and some more of them"], 300)
    large.save(tmp_path)
    if large.vocab_size > 280:
        done = command("generate", *options, "--tokenizer", tmp_path / "tokenizer.json")
        assert done.code == 1
        assert "give the tokenizer that the model was trained with" in done.err


def test_a_caches_own_boundary_starts_and_ends_documents(
    command: Any, checkpoint: Path, text_cache: Path, tmp_path: Path
) -> None:
    from tinyllm.data.cache import TokenCache
    from tinyllm.data.prepare import prepare

    boundary, file = 9, text_cache / "tokenizer.json"
    texts = [str(path) for path in sorted(text_cache.parent.glob("*.txt"))]
    prepare(
        tmp_path / "cache",
        "text",
        texts,
        tokenizer=file,
        boundary_id=boundary,
        validation_fraction=0.2,
    )
    tokenizer = TokenCache.open(tmp_path / "cache").tokenizer()
    assert tokenizer.boundary_id == boundary != Tokenizer.load(file).boundary_id

    model = module_of(read_checkpoint(checkpoint), checkpoint).model
    new = step_by_step(model, torch.tensor([boundary]), 5)
    options = [checkpoint, "--max_new_tokens", 5, "--temperature", 0]
    done = command("generate", *options, "--tokenizer", tmp_path / "cache")
    assert done.out == "".join(decoded(tokenizer, [], new)) + "\n", done.err
    assert done.out != command("generate", *options, "--tokenizer", file).out


def rewritten(checkpoint: Path, path: Path, **changes: Any) -> Path:
    """The checkpoint with other entries; None takes one away."""
    state = torch.load(checkpoint, weights_only=True) | changes
    torch.save({key: value for key, value in state.items() if value is not None}, path)
    return path


def test_what_cannot_be_sampled_from_is_refused(
    command: Any, checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "text.ckpt").write_text("not a checkpoint")
    cut = tmp_path / "cut.ckpt"
    cut.write_bytes(checkpoint.read_bytes()[:-1000])
    torch.save([1, 2], tmp_path / "list.ckpt")
    refused = {
        tmp_path / "nowhere.ckpt": "there is no checkpoint at",
        tmp_path: "there is no checkpoint at",
        tmp_path / "text.ckpt": "is no checkpoint",
        cut: "is no checkpoint, or was cut off",
        tmp_path / "list.ckpt": "it has no state_dict",
        rewritten(checkpoint, tmp_path / "a.ckpt", TokenDataModule={"tokenizer": None}): (
            "holds no tokenizer, because its data had none; give one with --tokenizer"
        ),
        rewritten(checkpoint, tmp_path / "b.ckpt", TokenDataModule=None): "holds no tokenizer",
        rewritten(checkpoint, tmp_path / "c.ckpt", hyper_parameters={"size": 3}): (
            "is no checkpoint of a TinyLLM: its hyperparameters are size"
        ),
    }
    for path, message in refused.items():
        done = command("generate", path)
        assert (done.code, done.out) == (1, ""), path
        assert message in done.err
        assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--top_k", "0"], "top_k is 0"),
        (["--top_p", "1.5"], "top_p is 1.5"),
        (["--prompt", "word " * 50], "it must have from 1 to 16, the model's context"),
    ],
)
def test_a_bad_option_prints_no_text(
    command: Any, checkpoint: Path, options: list[str], message: str
) -> None:
    done = command("generate", checkpoint, *options)
    assert (done.code, done.out) == (1, "")
    assert message in done.err
