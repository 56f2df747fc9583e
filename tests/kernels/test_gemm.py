import pytest
import torch
from torch import Tensor

from tinyllm.kernels.gemm import input_gradient, linear, weight_gradient

from .checks import FLOAT32_EPS, assert_surroundings_kept, normal, poisoned, replicas

M, IN, OUT = 21, 64, 96


def products(workers: int, **options: str) -> tuple[Tensor, Tensor, Tensor]:
    """x, a weight with a gap between workers, and dy; in float64 on a CPU."""
    x, weight = normal(workers, M, IN, **options), normal(workers, OUT, IN, gap=64, **options)
    dy = normal(workers, M, OUT, **options)
    x, weight, dy = replicas((x, weight, dy), double=True)
    return x, weight, dy


def weight_gradients(dy: Tensor, x: Tensor) -> Tensor:
    return torch.einsum("wmo,wmi->woi", dy, x)


@pytest.mark.parametrize("workers", [1, 3])
def test_forward_and_input_gradient(workers: int) -> None:
    x, weight, dy = products(workers)
    expected = torch.einsum("wmi,woi->wmo", x, weight)
    torch.testing.assert_close(linear(x, weight), expected, rtol=0, atol=1e-12)
    expected = torch.einsum("wmo,woi->wmi", dy, weight)
    torch.testing.assert_close(input_gradient(dy, weight), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("accumulate", [False, True])
def test_weight_gradient_goes_into_an_arena(workers: int, accumulate: bool) -> None:
    x, _, dy = products(workers)
    (out,) = replicas([(normal if accumulate else poisoned)(workers, OUT, IN, gap=128)], True)
    (before,) = replicas([out])
    weight_gradient(dy, x, out, accumulate)
    expected = weight_gradients(dy, x) + (before if accumulate else 0)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    assert_surroundings_kept(out, before)


@pytest.mark.parametrize("workers", [1, 3])
def test_weight_gradient_of_a_part_of_wider_rows(workers: int) -> None:
    x, _, wide = products(workers)
    dy = wide[:, :, : OUT - 5]  # as the head's rows of exponentials
    out = torch.empty(workers, OUT - 5, IN, dtype=x.dtype)
    weight_gradient(dy, x, out, False)
    torch.testing.assert_close(out, weight_gradients(dy, x), rtol=0, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [1, 8])
@pytest.mark.parametrize("accumulate", [False, True])
def test_weight_gradient_on_gpu(workers: int, accumulate: bool) -> None:
    """bf16 factors, and sums in fp32 that are not rounded to bf16 on the way out."""
    low = {"dtype": torch.bfloat16, "device": "cuda"}
    x, dy = normal(workers, 2_048, 320, **low), normal(workers, 2_048, 896, **low)
    make = normal if accumulate else poisoned
    out = make(workers, 896, 320, device="cuda", gap=4_096)
    (before,) = replicas([out])
    weight_gradient(dy, x, out, accumulate)
    expected = weight_gradients(dy.double(), x.double()) + (before.double() if accumulate else 0)
    error = (out.double() - expected).abs().max().item()
    # sums of 2,048 terms, whose size is that of the largest result
    assert error <= FLOAT32_EPS * 2_048**0.5 * expected.abs().max().item()
    assert_surroundings_kept(out, before)


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [1, 8])
def test_forward_and_input_gradient_on_gpu(workers: int) -> None:
    low = {"dtype": torch.bfloat16, "device": "cuda"}
    x, dy = normal(workers, 1_031, 320, **low), normal(workers, 1_031, 896, **low)
    weight = normal(workers, 896, 320, gap=4_096, **low)
    for mine, expected in (
        (linear(x, weight), torch.einsum("wmi,woi->wmo", x.double(), weight.double())),
        (input_gradient(dy, weight), torch.einsum("wmo,woi->wmi", dy.double(), weight.double())),
    ):
        # one rounding to bf16; sums of up to 896 terms in fp32
        torch.testing.assert_close(mine.double(), expected, rtol=2.0**-8, atol=1e-3)
