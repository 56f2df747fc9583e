from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tinyllm.kernels.embedding import embed, embed_backward
from tinyllm.kernels.stream import Stream

from .checks import (
    INTERPRETED_LOW,
    assert_accurate,
    interpreted,
    normal,
    normal_stream,
    poisoned_stream,
    replicas,
)

VOCABULARY = 13
SHAPES = [(1, 3, 7, 64), (2, 2, 7, 192), (3, 1, 5, 320)]
"""W, B, T, C."""


def token_rows(*shape: int, device: str = "cpu", vocabulary: int = VOCABULARY) -> Tensor:
    """Ids with some tokens missing; each input id comes back, and the last token is no input."""
    workers, batch, length = shape
    rows = torch.randint(vocabulary, (workers, batch, length + 1), device=device)
    rows[:, 0, -2:] = -100
    return rows


def forward_arguments(
    *shape: int,
    low: torch.dtype = INTERPRETED_LOW,
    device: str = "cpu",
    vocabulary: int = VOCABULARY,
) -> list[Any]:
    workers, batch, length, width = shape
    return [
        token_rows(workers, batch, length, device=device, vocabulary=vocabulary),
        normal(workers, vocabulary, width, device=device, gap=64),
        poisoned_stream(workers, batch * length, width, dtype=low, device=device),
    ]


def backward_arguments(
    *shape: int,
    low: torch.dtype = INTERPRETED_LOW,
    device: str = "cpu",
    vocabulary: int = VOCABULARY,
) -> list[Any]:
    workers, batch, length, width = shape
    rows, dweight, _ = forward_arguments(*shape, device=device, vocabulary=vocabulary)
    dx = normal_stream(workers, batch * length, width, dtype=low, device=device)
    return [rows, dx, dweight]


def found(*arguments: Any) -> dict[str, Tensor]:
    return {"x": arguments[2].joined(arguments[1].dtype)}


def last(*arguments: Any) -> dict[str, Tensor]:
    return {"result": arguments[-1]}


def plain_embedding(rows: Tensor, weight: Tensor) -> Tensor:
    ids = rows[..., :-1].clamp_min(0).flatten(1)
    return torch.stack([F.embedding(ids[w], weight[w]) for w in range(len(rows))])


@pytest.mark.parametrize("shape", SHAPES)
def test_forward_looks_rows_up(shape: tuple[int, ...]) -> None:
    rows, weight, x = replicas(forward_arguments(*shape), double=True)
    embed(rows, weight, x)
    assert torch.equal(x.value, plain_embedding(rows, weight))


@pytest.mark.parametrize("shape", SHAPES)
def test_backward_adds_autograds(shape: tuple[int, ...]) -> None:
    rows, dx, dweight = replicas(backward_arguments(*shape), double=True)
    leaf = torch.randn(dweight.shape, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(plain_embedding(rows, leaf), leaf, dx.value)
    expected = dweight + gradient
    embed_backward(rows, dx, dweight)
    torch.testing.assert_close(dweight, expected, rtol=0, atol=1e-12)


@interpreted
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_kernel(shape: tuple[int, ...]) -> None:
    assert_accurate(embed, forward_arguments(*shape), found)


@interpreted
@pytest.mark.parametrize("shape", SHAPES)
def test_backward_kernel(shape: tuple[int, ...]) -> None:
    assert_accurate(embed_backward, backward_arguments(*shape), last, terms=21)


def check_ids_past_the_vocabulary(forward: Any, backward: Any, device: str) -> None:
    """They give NaN, read nothing outside the table, and add no gradient."""
    low = torch.bfloat16 if device == "cuda" else INTERPRETED_LOW
    rows, weight, x = forward_arguments(2, 2, 7, 64, low=low, device=device)
    expected = plain_embedding(rows, weight)
    rows[1, 0, 2], rows[0, 1, 3] = VOCABULARY, 2**62
    forward(rows, weight, x)
    for worker, token in ((1, 2), (0, 10)):
        assert x.value[worker, token].isnan().all()
        expected[worker, token] = torch.nan
    joined = x.joined(torch.float32)
    torch.testing.assert_close(joined, expected, rtol=2.0**-15, atol=0, equal_nan=True)

    dweight = torch.zeros_like(weight)
    x.take(torch.ones_like(joined))
    backward(rows, x, dweight)
    inputs = (rows[..., :-1] < VOCABULARY).sum((1, 2))
    assert torch.equal(dweight.sum((1, 2)), inputs * 64.0)


@pytest.mark.parametrize("launch", ["reference", pytest.param("launch", marks=interpreted)])
def test_ids_past_the_vocabulary(launch: str) -> None:
    check_ids_past_the_vocabulary(getattr(embed, launch), getattr(embed_backward, launch), "cpu")


GPU_SHAPES = [(3, 2, 7, 320), (1, 4, 512, 320), (3, 2, 128, 640)]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_SHAPES)
def test_forward_on_gpu(shape: tuple[int, ...]) -> None:
    arguments = forward_arguments(*shape, low=torch.bfloat16, device="cuda", vocabulary=1_000)
    assert_accurate(embed, arguments, found)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_SHAPES)
@pytest.mark.parametrize("vocabulary", [2, 1_000])  # with two ids, thousands of sums collide
def test_backward_on_gpu(shape: tuple[int, ...], vocabulary: int) -> None:
    arguments = backward_arguments(*shape, low=torch.bfloat16, device="cuda", vocabulary=vocabulary)
    assert_accurate(embed_backward, arguments, last, terms=shape[1] * shape[2])


@pytest.mark.gpu
def test_ids_past_the_vocabulary_on_gpu() -> None:
    check_ids_past_the_vocabulary(embed, embed_backward, "cuda")


@pytest.mark.gpu
def test_tokens_past_two_to_the_31_elements_on_gpu() -> None:
    batch, length, width = 2**15 + 1, 1_024, 64
    rows = torch.zeros(1, batch, length + 1, dtype=torch.int64, device="cuda")
    rows[:, -1] = torch.arange(length + 1, device="cuda")
    weight = torch.randn(1, length + 1, width, device="cuda")
    low = torch.empty(1, batch * length, width, dtype=torch.bfloat16, device="cuda")
    x = Stream.empty(low)
    embed(rows, weight, x)
    last_x = Stream(*(part[:, -length:] for part in x)).joined(torch.float32)
    torch.testing.assert_close(last_x, weight[:, :length], rtol=2.0**-15, atol=0)

    dweight = torch.zeros_like(weight)
    rows[:, :-1] = length + 1  # out of the table: only the last sequence counts
    embed_backward(rows, x, dweight)
    torch.testing.assert_close(dweight[:, :length], last_x, rtol=0, atol=0)
