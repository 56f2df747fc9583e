from typing import Any

import pytest
import torch
from torch import Tensor

from tinyllm.kernels.norm import partials, residual_rms_norm, rms_norm_backward, sum_partials

from .checks import INTERPRETED_LOW, assert_accurate, interpreted, normal, poisoned

EPS = 1e-5


def forward_arguments(
    workers: int,
    rows: int,
    width: int,
    low: torch.dtype = torch.float32,
    device: str = "cpu",
    branch: bool = True,
    in_place: bool = False,
) -> list[Any]:
    shape = (workers, rows, width)
    x = normal(*shape, device=device)
    out = x if in_place else poisoned(*shape, device=device)
    return [
        x,
        normal(*shape, dtype=low, device=device) if branch else None,
        normal(workers, width, device=device, gap=64),
        EPS,
        out if branch else None,
        poisoned(*shape, dtype=low, device=device),
        poisoned(workers, rows, device=device),
    ]


def forward_results(*arguments: Any) -> dict[str, Tensor]:
    names = {"out": arguments[4], "normed": arguments[5], "rstd": arguments[6]}
    return {name: tensor for name, tensor in names.items() if tensor is not None}


def backward_arguments(
    workers: int,
    rows: int,
    width: int,
    low: torch.dtype = torch.float32,
    device: str = "cpu",
    scaled: bool = True,
    residual: bool = True,
    lowered: bool = True,
    in_place: bool = False,
    count: int = 3,
) -> list[Any]:
    shape = (workers, rows, width)
    x = normal(*shape, device=device)
    row_scale = normal(workers, rows, device=device) if scaled else None
    if row_scale is not None:
        row_scale[:, ::3] = 0
    dresidual = normal(*shape, device=device) if residual else None
    rstd = normal(workers, rows, device=device)
    return [
        normal(*shape, dtype=low, device=device),
        row_scale,
        x,
        normal(workers, width, device=device, gap=64),
        rstd.copy_((x.square().mean(-1) + EPS).rsqrt()),
        dresidual,
        dresidual if in_place else poisoned(*shape, device=device),
        poisoned(*shape, dtype=low, device=device) if lowered else None,
        poisoned(workers, count, width, device=device, gap=64),
    ]


def backward_results(*arguments: Any) -> dict[str, Tensor]:
    names = {"dx": arguments[6], "dx_low": arguments[7], "dweight": arguments[8].double().sum(1)}
    return {name: tensor for name, tensor in names.items() if tensor is not None}


def double(arguments: list[Any]) -> list[Any]:
    return [a.double() if isinstance(a, Tensor) else a for a in arguments]


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight[:, None]


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("branch", [True, False])
def test_forward_is_the_formula(workers: int, branch: bool) -> None:
    arguments = double(forward_arguments(workers, 14, 64, branch=branch))
    x, added, weight, _, out, normed, rstd = arguments
    total = x + added if branch else x
    residual_rms_norm(*arguments)
    torch.testing.assert_close(normed, plain_norm(total, weight), rtol=0, atol=1e-12)
    torch.testing.assert_close(rstd, (total.square().mean(-1) + EPS) ** -0.5, rtol=0, atol=1e-12)
    assert not branch or torch.equal(out, total)


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("residual", [True, False])
def test_backward_is_autograds(workers: int, scaled: bool, residual: bool) -> None:
    arguments = double(
        backward_arguments(workers, 14, 64, scaled=scaled, residual=residual, lowered=residual)
    )
    dnormed, row_scale, x, weight, rstd, dresidual, dx, dx_low, dweight = arguments
    rstd.copy_((x.square().mean(-1) + EPS).rsqrt())
    x.requires_grad_(), weight.requires_grad_()
    dy = dnormed if row_scale is None else dnormed * row_scale[..., None]
    expected_dx, expected_dweight = torch.autograd.grad(plain_norm(x, weight), (x, weight), dy)
    if dresidual is not None:
        expected_dx += dresidual
    with torch.no_grad():
        rms_norm_backward(*arguments)
    torch.testing.assert_close(dx, expected_dx, rtol=0, atol=1e-12)
    torch.testing.assert_close(dweight.sum(1), expected_dweight, rtol=0, atol=1e-12)
    assert dx_low is None or torch.equal(dx_low, dx)


@pytest.mark.parametrize("accumulate", [True, False])
def test_partials_are_summed(accumulate: bool) -> None:
    parts, out = normal(2, 3, 5, 64).double(), normal(2, 3, 64).double()
    expected = parts.sum(2) + (out if accumulate else 0)
    sum_partials(parts, out, accumulate)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter's 0·∞
@pytest.mark.parametrize("launch", ["reference", pytest.param("launch", marks=interpreted)])
def test_a_row_of_factor_zero_counts_for_nothing(launch: str) -> None:
    arguments = backward_arguments(1, 6, 64)
    arguments[0][:, ::3] = torch.inf  # an ignored row holds whatever it likes
    getattr(rms_norm_backward, launch)(*arguments)
    assert torch.equal(arguments[6][:, ::3], arguments[5][:, ::3])
    assert arguments[8].isfinite().all()


@pytest.mark.parametrize(
    ("workers", "rows", "expected"), [(1, 131_072, 1_024), (8, 16_384, 128), (1, 2_048, 256)]
)
def test_partials_fill_a_gpu(workers: int, rows: int, expected: int) -> None:
    assert partials(workers, rows) == expected


def test_partials_are_at_least_one_and_no_more_than_tiles() -> None:
    assert partials(2_000, 7) == partials(1, 1) == 1
    assert partials(1, 33) == 5


LOWS = [torch.float32, INTERPRETED_LOW]


@interpreted
@pytest.mark.parametrize(
    ("workers", "rows", "width"), [(2, 7, 64), (3, 21, 192), (1, 17, 320), (1, 9, 640)]
)
@pytest.mark.parametrize("low", LOWS)
def test_forward_kernel(workers: int, rows: int, width: int, low: torch.dtype) -> None:
    arguments = forward_arguments(workers, rows, width, low)
    assert_accurate(residual_rms_norm, arguments, forward_results, terms=width)


@interpreted
@pytest.mark.parametrize("option", [{"branch": False}, {"in_place": True}])
def test_forward_kernel_options(option: dict[str, bool]) -> None:
    arguments = forward_arguments(2, 7, 64, **option)
    assert_accurate(residual_rms_norm, arguments, forward_results, terms=64)


@interpreted
@pytest.mark.parametrize(
    ("workers", "rows", "width"), [(2, 7, 64), (3, 77, 192), (1, 17, 320), (1, 9, 640)]
)
@pytest.mark.parametrize("low", LOWS)
def test_backward_kernel(workers: int, rows: int, width: int, low: torch.dtype) -> None:
    arguments = backward_arguments(workers, rows, width, low)
    assert_accurate(rms_norm_backward, arguments, backward_results, terms=max(width, rows))


@interpreted
@pytest.mark.parametrize(
    "option",
    [
        {"scaled": False, "in_place": True},
        {"residual": False},
        {"lowered": False},
        {"count": 1},
        {"count": 40},
    ],
)
def test_backward_kernel_options(option: dict[str, Any]) -> None:
    arguments = backward_arguments(2, 37, 64, **option)
    assert_accurate(rms_norm_backward, arguments, backward_results, terms=64)


@interpreted
@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("count", [1, 7, 150])
def test_sum_kernel(accumulate: bool, count: int) -> None:
    arguments = sum_arguments(2, 3, count, 96, accumulate)
    assert_accurate(sum_partials, arguments, lambda *a: {"out": a[1]}, terms=count)


def sum_arguments(
    workers: int, norms: int, count: int, width: int, accumulate: bool, device: str = "cpu"
) -> list[Any]:
    make = normal if accumulate else poisoned
    out = make(workers * norms, width, gap=64, device=device)
    out = out.as_strided(
        (workers, norms, width), (norms * (width + 64), width + 64, 1), out.storage_offset()
    )
    return [normal(workers, norms, count, width, device=device), out, accumulate]


SHAPES = [(3, 21, 320), (1, 2_048, 320), (1, 1_031, 512), (3, 512, 640)]


@pytest.mark.gpu
@pytest.mark.parametrize(("workers", "rows", "width"), SHAPES)
def test_forward_on_gpu(workers: int, rows: int, width: int) -> None:
    arguments = forward_arguments(workers, rows, width, torch.bfloat16, "cuda", in_place=rows > 99)
    assert_accurate(residual_rms_norm, arguments, forward_results, terms=width)


@pytest.mark.gpu
@pytest.mark.parametrize(("workers", "rows", "width"), SHAPES)
def test_backward_on_gpu(workers: int, rows: int, width: int) -> None:
    odd = rows % 2 == 1  # a model's last norm: a factor per row, nothing on the residual path
    arguments = backward_arguments(
        *(workers, rows, width, torch.bfloat16, "cuda"),
        scaled=odd,
        residual=not odd,
        in_place=not odd,
        count=partials(workers, rows),
    )
    assert_accurate(rms_norm_backward, arguments, backward_results, terms=max(width, rows))


@pytest.mark.gpu
def test_first_norm_on_gpu() -> None:
    arguments = forward_arguments(2, 64, 320, torch.bfloat16, "cuda", branch=False)
    assert_accurate(residual_rms_norm, arguments, forward_results, terms=320)
    arguments = backward_arguments(2, 64, 320, torch.bfloat16, "cuda", scaled=False, lowered=False)
    assert_accurate(rms_norm_backward, arguments, backward_results, terms=320)


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [1, 3])
def test_sum_on_gpu(workers: int) -> None:
    arguments = sum_arguments(workers, 17, partials(workers, 10_000), 320, True, "cuda")
    assert_accurate(sum_partials, arguments, lambda *a: {"out": a[1]}, terms=1_000)


@pytest.mark.gpu
def test_rows_past_two_to_the_31_elements_on_gpu() -> None:
    shape, low = (1, 2**25 + 5, 64), torch.bfloat16
    x, y = torch.empty(shape, device="cuda"), torch.empty(shape, dtype=low, device="cuda")
    branch, rstd = torch.empty_like(y), torch.empty(shape[:2], device="cuda")
    weight = torch.randn(1, 64, device="cuda")
    last = [t[:, -9:] for t in (x, branch, y, rstd)]
    last[0].normal_(), last[1].normal_(), last[2].fill_(torch.nan)
    expected = plain_norm(last[0].double() + last[1].double(), weight.double())
    residual_rms_norm(x, branch, weight, EPS, x, y, rstd)
    # rounded once, by at most half a unit in bf16's last place
    torch.testing.assert_close(last[2].double(), expected, rtol=2.0**-8, atol=1e-6)

    dx, dweight = torch.empty_like(x), torch.empty(1, 1_024, 64, device="cuda")
    expected_dx = last[2].double() * weight.double() * last[3].double()[..., None]
    normed = last[0].double() * last[3].double()[..., None]
    expected_dx -= normed * (expected_dx * normed).mean(-1, keepdim=True)
    rms_norm_backward(y, None, x, weight, rstd, None, dx, None, dweight)
    torch.testing.assert_close(dx[:, -9:].double(), expected_dx, rtol=1e-5, atol=1e-5)
