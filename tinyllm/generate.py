"""Sampling text from a checkpoint: what ``tinyllm generate`` runs."""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from tinyllm.data.tokenizer import Tokenizer
from tinyllm.model import KeyValueCache, Llama
from tinyllm.module import TinyLLM


def generate(
    checkpoint: Path,
    prompt: str = "",
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    tokenizer: Path | None = None,
) -> None:
    """Sample text from a checkpoint and print it after the prompt.

    Args:
        checkpoint: A checkpoint that `tinyllm fit` has written.
        prompt: Text to continue; nothing starts a new document.
        max_new_tokens: Most tokens to sample; fewer when the document ends or prompt and text fill
            the model's context.
        temperature: Divides the logits; 0 always takes the likeliest token.
        top_k: Sample among this many likeliest tokens only.
        top_p: Sample among the likeliest tokens that together have this probability.
        seed: Makes the sample repeatable; null draws another every time.
        tokenizer: A tokenizer.json, a SentencePiece .model or a token cache; null takes the one in
            the checkpoint.

    Raises:
        ValueError: An option is out of range, or the prompt fills the context.
        FileNotFoundError: The checkpoint or the tokenizer does not exist.
    """
    if not checkpoint.is_file():
        raise FileNotFoundError(f"there is no checkpoint at {checkpoint}")
    state = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
    text = _tokenizer_of(state, checkpoint) if tokenizer is None else Tokenizer.load(tokenizer)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    module = TinyLLM.load_from_checkpoint(checkpoint, map_location=device)
    if text.vocab_size > module.config.vocab_size:
        raise ValueError(
            f"the tokenizer has {text.vocab_size} ids and the model {module.config.vocab_size}; "
            "give the tokenizer that the model was trained with"
        )
    ids = text.encode(prompt).tolist() or [text.boundary_id]
    tokens = sample(
        module.model,
        torch.tensor(ids, device=device),
        max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
    )
    sys.stdout.write(prompt)
    shown = text.decode(ids) if prompt else ""
    for token in tokens:
        if token == text.boundary_id:
            break
        ids.append(token)
        # a character may need several tokens, so what is new is found in the whole text
        whole = text.decode(ids if prompt else ids[1:])
        if not whole.endswith("\N{REPLACEMENT CHARACTER}"):
            sys.stdout.write(whole[len(shown) :])
            sys.stdout.flush()
            shown = whole
    sys.stdout.write("\n")


def _tokenizer_of(state: dict[str, object], checkpoint: Path) -> Tokenizer:
    data = state.get("TokenDataModule")
    if not isinstance(data, dict) or data.get("tokenizer") is None:
        raise ValueError(
            f"{checkpoint} holds no tokenizer, because its data had none; give one with --tokenizer"
        )
    return Tokenizer.from_state(data["tokenizer"])


@torch.inference_mode()
def sample(
    model: Llama,
    prompt: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
) -> Iterator[int]:
    """Yields sampled token ids one by one.

    Args:
        model: Holds one worker.
        prompt: ``[T]`` int64 ids, at least one.
        max_new_tokens: Most ids to yield; the context may end the text earlier.
        temperature: Divides the logits; 0 always takes the likeliest id.
        top_k: Keeps this many likeliest ids.
        top_p: Keeps the likeliest ids that together have this probability (Holtzman et al., 2020).
        seed: Of the draw; None draws anew every time.

    Raises:
        ValueError: If an option is out of range, or the prompt is empty or fills the context.
    """
    if temperature < 0:
        raise ValueError(f"temperature is {temperature}; it must be at least 0")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k is {top_k}; it must be at least 1")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}; it must be above 0 and at most 1")
    room = model.config.context - len(prompt)
    if not len(prompt) or room < 0:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens; it must have from 1 to {model.config.context}"
        )
    generator = torch.Generator(prompt.device)
    generator.seed() if seed is None else generator.manual_seed(seed)
    cache = KeyValueCache()
    tokens = prompt
    for _ in range(min(max_new_tokens, room + 1)):
        logits = model(tokens[None, None], cache=cache)[0, 0, -1].float()
        if temperature == 0:
            tokens = logits.argmax(keepdim=True)
        else:
            kept = restrict(logits / temperature, top_k, top_p)
            tokens = torch.multinomial(kept.softmax(-1), 1, generator=generator)
        yield int(tokens)


def restrict(logits: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """Logits ``[V]`` with −∞ for ids outside the top k and outside the top-p nucleus."""
    if top_k is not None and top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    if top_p is not None and top_p < 1:
        ordered, order = logits.sort(descending=True)
        probability = ordered.softmax(-1)
        # what stands before an id; the likeliest one is always kept
        outside = probability.cumsum(-1) - probability >= top_p
        logits = logits.masked_fill(outside.scatter(0, order, outside), -torch.inf)
    return logits
