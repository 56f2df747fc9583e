from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tinyllm.kernels.swiglu import swiglu, swiglu_backward, swiglu_input_gradient, swiglu_linear

from .checks import INTERPRETED_LOW, assert_accurate, interpreted, normal, poisoned

LOWS = [torch.float32, INTERPRETED_LOW]
SHAPES = [(2, 7, 64), (3, 5, 192), (1, 9, 896)]
"""W, M, F."""


def forward_arguments(
    *shape: int, low: torch.dtype = torch.float32, device: str = "cpu"
) -> list[Any]:
    workers, rows, width = shape
    gate_up = normal(workers, rows, 2 * width, dtype=low, device=device)
    return [gate_up.mul_(3), poisoned(*shape, dtype=low, device=device)]


def backward_arguments(
    *shape: int, low: torch.dtype = torch.float32, device: str = "cpu", in_place: bool = False
) -> list[Any]:
    gate_up, _ = forward_arguments(*shape, low=low, device=device)
    dgate_up = gate_up if in_place else poisoned(*gate_up.shape, dtype=low, device=device)
    return [normal(*shape, dtype=low, device=device), gate_up, dgate_up]


def last(*arguments: Any) -> dict[str, Tensor]:
    return {"result": arguments[-1]}


def plain_swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@pytest.mark.parametrize("shape", SHAPES)
def test_forward_is_the_formula(shape: tuple[int, ...]) -> None:
    gate_up, activated = (tensor.double() for tensor in forward_arguments(*shape))
    swiglu(gate_up, activated)
    torch.testing.assert_close(activated, plain_swiglu(gate_up), rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("in_place", [True, False])
def test_backward_is_autograds(shape: tuple[int, ...], in_place: bool) -> None:
    dactivated, gate_up, dgate_up = (tensor.double() for tensor in backward_arguments(*shape))
    leaf = gate_up.clone().requires_grad_()
    (expected,) = torch.autograd.grad(plain_swiglu(leaf), leaf, dactivated)
    result = gate_up if in_place else dgate_up
    swiglu_backward(dactivated, gate_up, result)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)


def extremes(device: str = "cpu") -> Tensor:
    """Gates whose exponentials overflow or vanish, beside up-projections of 2."""
    gate = torch.tensor([-1e4, -200.0, -88.0, 0.0, 88.0, 200.0, 1e4, 1.0], device=device)
    return torch.stack((gate.repeat(8), torch.full((64,), 2.0, device=device))).view(1, 1, 128)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("launch", ["reference", pytest.param("launch", marks=interpreted)])
def test_extreme_gates_stay_finite(launch: str) -> None:
    check_extremes(getattr(swiglu, launch), getattr(swiglu_backward, launch), "cpu")


def check_extremes(forward: Any, backward: Any, device: str) -> None:
    gate_up = extremes(device)
    activated, dgate_up = gate_up.new_full((1, 1, 64), torch.nan), torch.empty_like(gate_up)
    forward(gate_up, activated)
    torch.testing.assert_close(activated, plain_swiglu(gate_up), rtol=1e-5, atol=1e-30)
    backward(torch.ones_like(activated), gate_up, dgate_up)
    expected = torch.tensor([0.0, 0.0, 0.0, 1.0, 2.0, 2.0, 2.0], device=device)
    torch.testing.assert_close(dgate_up[0, 0, :7], expected, rtol=1e-5, atol=1e-30)


@interpreted
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("low", LOWS)
def test_forward_kernel(shape: tuple[int, ...], low: torch.dtype) -> None:
    assert_accurate(swiglu, forward_arguments(*shape, low=low), last)


@interpreted
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("low", LOWS)
@pytest.mark.parametrize("in_place", [True, False])
def test_backward_kernel(shape: tuple[int, ...], low: torch.dtype, in_place: bool) -> None:
    arguments = backward_arguments(*shape, low=low, in_place=in_place)
    assert_accurate(swiglu_backward, arguments, last)


def linear_arguments(
    *shape: int, low: torch.dtype = torch.float32, device: str = "cpu"
) -> list[Any]:
    workers, tokens, inner, width = shape
    weight = normal(workers, 2 * width, inner, dtype=low, device=device, gap=64)
    weight *= inner**-0.5
    return [
        normal(workers, tokens, inner, dtype=low, device=device),
        weight,
        poisoned(workers, tokens, 2 * width, dtype=low, device=device),
        poisoned(workers, tokens, width, dtype=low, device=device),
    ]


def both(*arguments: Any) -> dict[str, Tensor]:
    return {"gate_up": arguments[2], "activated": arguments[3]}


@interpreted
@pytest.mark.parametrize("shape", [(2, 7, 64, 96), (1, 33, 32, 64)])
def test_linear_kernel(shape: tuple[int, ...]) -> None:
    assert_accurate(swiglu_linear, linear_arguments(*shape), both, terms=shape[2])


def input_gradient_arguments(
    *shape: int, low: torch.dtype = torch.float32, device: str = "cpu", in_place: bool = False
) -> list[Any]:
    workers, tokens, inner, width = shape
    _, gate_up, dgate_up = backward_arguments(
        *(workers, tokens, width), low=low, device=device, in_place=in_place
    )
    weight = normal(workers, inner, width, dtype=low, device=device, gap=64)
    weight *= inner**-0.5
    return [normal(workers, tokens, inner, dtype=low, device=device), weight, gate_up, dgate_up]


def test_input_gradient_is_autograds() -> None:
    arguments = input_gradient_arguments(2, 7, 64, 96)
    dy, weight, gate_up, dgate_up = (tensor.double() for tensor in arguments)
    leaf = gate_up.clone().requires_grad_()
    y = plain_swiglu(leaf) @ weight.transpose(1, 2)
    (expected,) = torch.autograd.grad(y, leaf, dy)
    swiglu_input_gradient(dy, weight, gate_up, dgate_up)
    torch.testing.assert_close(dgate_up, expected, rtol=0, atol=1e-12)


@interpreted
@pytest.mark.parametrize("shape", [(2, 7, 64, 96), (1, 33, 32, 64)])
def test_input_gradient_kernel(shape: tuple[int, ...]) -> None:
    arguments = input_gradient_arguments(*shape)
    assert_accurate(swiglu_input_gradient, arguments, last, terms=shape[2])


LINEAR_GPU_SHAPES = [
    *((3, 7, 320, 896), (1, 2_048, 320, 896), (1, 33_001, 320, 896), (8, 5_003, 320, 896)),
    *((2, 17_003, 512, 1_408), (1, 17_001, 640, 1_792), (2, 2_077, 64, 128)),
    *((2, 17_003, 64, 128), (2, 2_077, 320, 96)),
    (2, 17_003, 320, 192),  # a tile has 64 gates, on the way back 128
]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", LINEAR_GPU_SHAPES)
@pytest.mark.parametrize("in_place", [True, False])
def test_input_gradient_on_gpu(shape: tuple[int, ...], in_place: bool) -> None:
    options: dict[str, Any] = {"low": torch.bfloat16, "device": "cuda", "in_place": in_place}
    arguments = input_gradient_arguments(*shape, **options)
    assert_accurate(swiglu_input_gradient, arguments, last, terms=shape[2])


@pytest.mark.gpu
def test_extreme_gates_stay_finite_in_products_on_gpu() -> None:
    """The weight is one, so that each activation's gradient is one."""
    gates, ups = extremes("cuda").bfloat16().expand(1, 40_000, -1).chunk(2, dim=-1)
    gate_up = torch.cat((gates, gates, ups, ups), dim=-1)
    one = torch.eye(128, dtype=torch.bfloat16, device="cuda")[None]
    dgate_up = torch.full_like(gate_up, torch.nan)
    swiglu_input_gradient(torch.ones_like(gate_up[..., :128]), one, gate_up, dgate_up)
    expected = torch.tensor([0.0, 0.0, 0.0, 1.0, 2.0, 2.0, 2.0], device="cuda").bfloat16()
    found = dgate_up[0, :, :7]
    torch.testing.assert_close(found, expected.expand_as(found), rtol=1e-2, atol=1e-30)
    assert dgate_up.isfinite().all()


@pytest.mark.gpu
def test_extreme_products_stay_finite_on_gpu() -> None:
    """The weight is one, so that gates and ups are the inputs."""
    gates, ups = extremes("cuda").bfloat16().expand(1, 5_000, -1).chunk(2, dim=-1)
    x = torch.cat((gates, ups), dim=-1)
    gate_up, activated = torch.full_like(x, torch.nan), torch.full_like(gates, torch.nan)
    swiglu_linear(x, torch.eye(128, dtype=torch.bfloat16, device="cuda")[None], gate_up, activated)
    assert torch.equal(gate_up, x)
    expected = plain_swiglu(x.float()).bfloat16()
    torch.testing.assert_close(activated, expected, rtol=1e-2, atol=1e-30)


@pytest.mark.gpu
def test_products_past_two_to_the_31_elements_on_gpu() -> None:
    rows, tail = 2**23 + 5, 9
    gate_up = torch.empty(1, rows, 256, dtype=torch.bfloat16, device="cuda")
    gate_up[:, -tail:].normal_()
    dy = torch.randn(1, rows, 64, device="cuda").bfloat16()
    weight = torch.randn(1, 64, 128, device="cuda").bfloat16() / 8
    expected = gate_up[:, -tail:].double()
    swiglu_input_gradient.reference(dy[:, -tail:].double(), weight.double(), expected, expected)
    swiglu_input_gradient(dy, weight, gate_up, gate_up)
    torch.testing.assert_close(gate_up[:, -tail:].double(), expected, rtol=2.0**-7, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", LINEAR_GPU_SHAPES)
def test_linear_on_gpu(shape: tuple[int, ...]) -> None:
    arguments = linear_arguments(*shape, low=torch.bfloat16, device="cuda")
    assert_accurate(swiglu_linear, arguments, both, terms=shape[2])


GPU_SHAPES = [(3, 7, 896), (1, 2_048, 896), (3, 512, 1_408), (1, 1_031, 1_792)]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_SHAPES)
def test_forward_on_gpu(shape: tuple[int, ...]) -> None:
    arguments = forward_arguments(*shape, low=torch.bfloat16, device="cuda")
    assert_accurate(swiglu, arguments, last)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_SHAPES)
def test_backward_on_gpu(shape: tuple[int, ...]) -> None:
    in_place = shape[0] == 1
    arguments = backward_arguments(*shape, low=torch.bfloat16, device="cuda", in_place=in_place)
    assert_accurate(swiglu_backward, arguments, last)


@pytest.mark.gpu
def test_extreme_gates_stay_finite_on_gpu() -> None:
    check_extremes(swiglu, swiglu_backward, "cuda")


@pytest.mark.gpu
def test_rows_past_two_to_the_31_elements_on_gpu() -> None:
    gate_up = torch.empty(1, 2**24 + 5, 128, dtype=torch.bfloat16, device="cuda")
    activated = torch.empty(1, 2**24 + 5, 64, dtype=torch.bfloat16, device="cuda")
    tail = gate_up[:, -9:].normal_()
    leaf = tail.double().requires_grad_()
    expected = plain_swiglu(leaf)
    (expected_gradient,) = torch.autograd.grad(expected, leaf, torch.ones_like(expected))
    swiglu(gate_up, activated)
    torch.testing.assert_close(
        activated[:, -9:].double(), expected.detach(), rtol=2.0**-8, atol=1e-6
    )
    swiglu_backward(activated.fill_(1), gate_up, gate_up)
    torch.testing.assert_close(tail.double(), expected_gradient, rtol=2.0**-8, atol=1e-6)
