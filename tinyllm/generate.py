"""Sampling text from a checkpoint: what ``tinyllm generate`` runs."""

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from tinyllm.checkpoint import read_checkpoint, tokenizer_of
from tinyllm.data.cache import load_tokenizer
from tinyllm.data.tokenizer import Tokenizer
from tinyllm.model import KeyValueCache, Llama
from tinyllm.module import module_of

_SEEDS = range(-(2**63), 2**64)  # what PyTorch takes
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a character decodes to while bytes are missing


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
        checkpoint: A checkpoint that `tinyllm fit` has written, such as
            runs/quickstart/checkpoints/last.ckpt.
        prompt: Text to continue; an empty one starts a new document.
        max_new_tokens: Most tokens to sample; fewer when the document ends or prompt and text fill
            the model's context.
        temperature: Divides the logits; 0 always takes the likeliest token.
        top_k: Sample among this many likeliest tokens only; null for all.
        top_p: Sample among the fewest likeliest tokens that together have this probability; null
            for all.
        seed: Makes the sample repeatable; null draws another every time.
        tokenizer: A tokenizer.json, a SentencePiece .model or a token cache, with whose boundary
            documents start and end; null takes the one in the checkpoint.

    Raises:
        ValueError: An option is out of range, the prompt is longer than the context, or the
            checkpoint is none or has no tokenizer.
        FileNotFoundError: The checkpoint or the tokenizer does not exist.
    """
    state = read_checkpoint(checkpoint)
    text = tokenizer_of(state) if tokenizer is None else load_tokenizer(tokenizer)
    if text is None:
        raise ValueError(
            f"{checkpoint} holds no tokenizer, because its data had none; give one with --tokenizer"
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = module_of(state, checkpoint).model.to(device)
    if text.vocab_size > model.config.vocab_size:
        raise ValueError(
            f"the tokenizer has {text.vocab_size} ids and the model {model.config.vocab_size}; "
            "give the tokenizer that the model was trained with"
        )
    ids = text.encode(prompt).tolist() or [text.boundary_id]
    tokens = sample(
        model,
        torch.tensor(ids, device=model.embed_tokens.weight.device),
        max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        vocab_size=text.vocab_size,
    )
    sys.stdout.write(prompt)
    for piece in decoded(text, ids if prompt else [], tokens):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")


def decoded(text: Tokenizer, before: list[int], tokens: Iterable[int]) -> Iterator[str]:
    """Yields the text of tokens as they come, until the document ends.

    Args:
        text: Turns ids into text.
        before: Ids whose text is already shown; they decide how the next ones are spelled.
        tokens: Ids that follow.
    """
    ids, shown = list(before), text.decode(before)
    for token in tokens:
        if token == text.boundary_id:
            return
        ids.append(token)
        # a character may need several tokens, so what is new is found in the whole text
        whole = text.decode(ids).rstrip(_UNFINISHED)
        if len(whole) > len(shown):
            yield whole[len(shown) :]
            shown = whole


def sample(
    model: Llama,
    prompt: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    vocab_size: int | None = None,
) -> Iterator[int]:
    """Samples token ids, which come one by one.

    Args:
        model: Holds one worker.
        prompt: ``[T]`` int64 ids, at least one.
        max_new_tokens: Most ids to sample; the context may end the text earlier.
        temperature: Divides the logits; 0, or what float32 cannot hold, takes the likeliest id.
        top_k: Keeps this many likeliest ids.
        top_p: Keeps the fewest likeliest ids that together have this probability (Holtzman et al.,
            "The Curious Case of Neural Text Degeneration", 2020).
        seed: Of the draw; None draws anew every time.
        vocab_size: Only ids below it are sampled; None for all of the model's.

    Raises:
        ValueError: If an option is out of range, or the prompt is empty or exceeds the context.
    """
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be at least 0")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature is {temperature}; it must be at least 0 and finite")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k is {top_k}; it must be at least 1")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}; it must be above 0 and at most 1")
    if seed is not None and seed not in _SEEDS:
        raise ValueError(f"seed is {seed}; it must be from {_SEEDS[0]} to {_SEEDS[-1]}")
    room = model.config.context - len(prompt)
    if not len(prompt) or room < 0:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens; it must have from 1 to {model.config.context}, "
            "the model's context"
        )
    generator = torch.Generator(prompt.device)
    generator.seed() if seed is None else generator.manual_seed(seed)

    def choose(logits: Tensor) -> Tensor:
        if temperature < torch.finfo(torch.float32).tiny:
            return logits.argmax(keepdim=True)
        # the largest becomes 0, so that no temperature makes infinities of it
        kept = restrict((logits - logits.max()) / temperature, top_k, top_p)
        return torch.multinomial(kept.softmax(-1), 1, generator=generator)

    # the last id that fits into the context still has a successor
    return _sampled(model, prompt, min(max_new_tokens, room + 1), vocab_size, choose)


@torch.inference_mode()
def _sampled(
    model: Llama,
    prompt: Tensor,
    max_new_tokens: int,
    vocab_size: int | None,
    choose: Callable[[Tensor], Tensor],
) -> Iterator[int]:
    cache = KeyValueCache()
    tokens = prompt
    for _ in range(max_new_tokens):
        logits = model(tokens[None, None], cache=cache)[0, 0, -1, :vocab_size].float()
        tokens = choose(logits)
        yield int(tokens)


def restrict(logits: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """Logits ``[V]`` with −∞ outside the top k, and outside the nucleus of what is left.

    Of equal logits those with lower ids come first. At least one id is kept.
    """
    ordered, order = logits.sort(descending=True, stable=True)
    kept = torch.ones_like(ordered, dtype=torch.bool)
    if top_k is not None:
        kept[top_k:] = False
    if top_p is not None and top_p < 1:
        probability = ordered.double().masked_fill(~kept, -torch.inf).softmax(-1)
        kept &= probability.cumsum(-1) - probability < top_p  # what stands before an id
    return logits.masked_fill(~kept.new_empty(kept.shape).scatter(0, order, kept), -torch.inf)
