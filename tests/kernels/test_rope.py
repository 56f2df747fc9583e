from typing import Any

import pytest
import torch
from torch import Tensor

from tinyllm.kernels.rope import rotate, rotated_linear

from .checks import INTERPRETED_LOW, assert_accurate, interpreted, normal, poisoned

LOWS = [torch.float32, INTERPRETED_LOW]
SHAPES = [(2, 2, 7, 5, 64), (1, 3, 33, 3, 32), (3, 1, 5, 1, 128)]
"""W, B, T, H, K."""


def tables(length: int, width: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Cosines and sines with positions to spare."""
    angle = torch.rand(length + 3, width // 2, device=device) * 6.3
    return angle.cos(), angle.sin()


def rotate_arguments(
    *shape: int, low: torch.dtype = torch.float32, device: str = "cpu"
) -> list[Any]:
    workers, batch, length, heads, width = shape
    qkv = normal(workers, batch * length, 3 * heads * width, dtype=low, device=device)
    cos, sin = tables(length, width, device)
    return [qkv, cos, sin, heads, length]


def linear_arguments(
    *shape: int, low: torch.dtype = torch.float32, device: str = "cpu"
) -> list[Any]:
    workers, batch, length, heads, width = shape
    inner, tokens = heads * width, batch * length
    weight = normal(workers, 3 * inner, inner, dtype=low, device=device, gap=64)
    weight *= inner**-0.5
    cos, sin = tables(length, width, device)
    qkv = poisoned(workers, tokens, 3 * inner, dtype=low, device=device)
    x = normal(workers, tokens, inner, dtype=low, device=device)
    return [x, weight, cos, sin, heads, length, qkv]


def first(*arguments: Any) -> dict[str, Tensor]:
    return {"qkv": arguments[0]}


def last(*arguments: Any) -> dict[str, Tensor]:
    return {"dqkv": arguments[-1]}


def plain_rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x`` ``[N, H, T, K]`` as complex numbers, turned."""
    length, half = x.shape[2], x.shape[3] // 2
    pairs = torch.complex(x[..., :half], x[..., half:])
    turned = pairs * torch.complex(cos, sin)[:length]
    return torch.cat((turned.real, turned.imag), dim=-1)


def heads_of(qkv: Tensor, heads: int, length: int) -> Tensor:
    """``[W, M, 3·C]`` as ``[3, W·B, H, T, K]``."""
    return qkv.view(-1, length, 3, heads, qkv.shape[-1] // 3 // heads).permute(2, 0, 3, 1, 4)


@pytest.mark.parametrize("shape", SHAPES)
def test_queries_and_keys_turn_and_values_stay(shape: tuple[int, ...]) -> None:
    qkv, cos, sin, heads, length = rotate_arguments(*shape)
    qkv, cos, sin = qkv.double(), cos.double(), sin.double()
    q, k, v = heads_of(qkv.clone(), heads, length)
    rotate(qkv, cos, sin, heads, length)
    expected = torch.stack((plain_rotation(q, cos, sin), plain_rotation(k, cos, sin), v))
    torch.testing.assert_close(heads_of(qkv, heads, length), expected, rtol=0, atol=1e-12)


@interpreted
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("low", LOWS)
def test_rotate_kernel(shape: tuple[int, ...], low: torch.dtype) -> None:
    assert_accurate(rotate, rotate_arguments(*shape, low=low), first)


@interpreted
@pytest.mark.parametrize("shape", SHAPES)
def test_linear_kernel(shape: tuple[int, ...]) -> None:
    assert_accurate(rotated_linear, linear_arguments(*shape), last, terms=shape[3] * shape[4])


GPU_SHAPES = [(3, 2, 7, 5, 64), (1, 4, 512, 5, 64), (3, 2, 128, 10, 64), (1, 2, 65, 4, 128)]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_SHAPES)
def test_rotate_on_gpu(shape: tuple[int, ...]) -> None:
    arguments = rotate_arguments(*shape, low=torch.bfloat16, device="cuda")
    assert_accurate(rotate, arguments, first)


@pytest.mark.gpu
def test_tokens_past_two_to_the_31_elements_on_gpu() -> None:
    length, sequences = 1_024, 10_923  # 192 elements per token
    qkv = torch.empty(1, sequences * length, 192, dtype=torch.bfloat16, device="cuda")
    assert qkv.numel() > 2**31
    cos, sin = tables(length, 64, "cuda")
    tail = qkv[:, -length:].normal_()
    q, k, v = heads_of(tail.double(), 1, length)
    rotate(qkv, cos, sin, 1, length)
    cos, sin = cos.double(), sin.double()
    expected = torch.stack((plain_rotation(q, cos, sin), plain_rotation(k, cos, sin), v))
    torch.testing.assert_close(
        heads_of(tail.double(), 1, length), expected, rtol=2.0**-8, atol=1e-6
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape",
    [
        *((3, 2, 7, 5, 64), (1, 4, 512, 5, 64), (1, 17, 600, 5, 64), (8, 4, 128, 5, 64)),
        *((2, 90, 100, 8, 64), (1, 17, 1_024, 10, 64), (3, 50, 33, 1, 64)),
        (2, 40, 65, 3, 32),  # heads that are not the Hopper kernel's
    ],
)
def test_linear_on_gpu(shape: tuple[int, ...]) -> None:
    arguments = linear_arguments(*shape, low=torch.bfloat16, device="cuda")
    assert_accurate(rotated_linear, arguments, last, terms=shape[3] * shape[4])
