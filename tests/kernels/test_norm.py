from typing import Any

import pytest
import torch
from torch import Tensor

from tinyllm.kernels.norm import partials, residual_rms_norm, rms_norm_backward, sum_partials
from tinyllm.kernels.stream import Stream

from .checks import (
    INTERPRETED_LOW,
    assert_accurate,
    interpreted,
    normal,
    normal_stream,
    poisoned,
    poisoned_stream,
    replicas,
)

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
    x = normal_stream(*shape, dtype=low, device=device)
    room = poisoned_stream(*shape, dtype=low, device=device)
    out = x.beside(room.value) if in_place else room
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
    out, normed, rstd = arguments[4:]
    results = {"normed": normed, "rstd": rstd}
    return results if out is None else {"out": out.joined(rstd.dtype), **results}


def backward_arguments(
    workers: int,
    rows: int,
    width: int,
    low: torch.dtype = torch.float32,
    device: str = "cpu",
    scaled: bool = True,
    residual: bool = True,
    in_place: bool = False,
    count: int = 3,
) -> list[Any]:
    shape = (workers, rows, width)
    x = normal(*shape, dtype=low, device=device)
    row_scale = normal(workers, rows, device=device) if scaled else None
    if row_scale is not None:
        row_scale[:, ::3] = 0
    dresidual = normal_stream(*shape, dtype=low, device=device) if residual else None
    dx = poisoned_stream(*shape, dtype=low, device=device)
    rstd = normal(workers, rows, device=device)
    return [
        normal(*shape, dtype=low, device=device),
        row_scale,
        x,
        normal(workers, width, device=device, gap=64),
        rstd.copy_((x.float().square().mean(-1) + EPS).rsqrt()),
        dresidual,
        dresidual.beside(dx.value) if dresidual is not None and in_place else dx,
        poisoned(workers, count, width, device=device, gap=64),
    ]


def backward_results(*arguments: Any) -> dict[str, Tensor]:
    dx, dweight = arguments[6:]
    return {"dx": dx.joined(dweight.dtype), "dweight": dweight.double().sum(1)}


def double(arguments: list[Any]) -> list[Any]:
    return replicas(arguments, double=True)


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight[:, None]


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("branch", [True, False])
def test_forward_is_the_formula(workers: int, branch: bool) -> None:
    arguments = double(forward_arguments(workers, 14, 64, branch=branch))
    x, added, weight, _, out, normed, rstd = arguments
    total = x.value + added if branch else x.value
    residual_rms_norm(*arguments)
    torch.testing.assert_close(normed, plain_norm(total, weight), rtol=0, atol=1e-12)
    torch.testing.assert_close(rstd, (total.square().mean(-1) + EPS) ** -0.5, rtol=0, atol=1e-12)
    assert not branch or torch.equal(out.value, total)


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("residual", [True, False])
def test_backward_is_autograds(workers: int, scaled: bool, residual: bool) -> None:
    arguments = double(backward_arguments(workers, 14, 64, scaled=scaled, residual=residual))
    dnormed, row_scale, x, weight, rstd, dresidual, dx, dweight = arguments
    rstd.copy_((x.square().mean(-1) + EPS).rsqrt())
    x.requires_grad_(), weight.requires_grad_()
    dy = dnormed if row_scale is None else dnormed * row_scale[..., None]
    expected_dx, expected_dweight = torch.autograd.grad(plain_norm(x, weight), (x, weight), dy)
    if dresidual is not None:
        expected_dx += dresidual.value
    with torch.no_grad():
        rms_norm_backward(*arguments)
    torch.testing.assert_close(dx.value, expected_dx, rtol=0, atol=1e-12)
    torch.testing.assert_close(dweight.sum(1), expected_dweight, rtol=0, atol=1e-12)


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
    assert torch.equal(arguments[6].value[:, ::3], arguments[5].value[:, ::3])
    assert arguments[7].isfinite().all()


@pytest.mark.parametrize(
    ("workers", "rows", "expected"), [(1, 131_072, 1_056), (8, 16_384, 132), (1, 2_048, 256)]
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
    arguments = backward_arguments(2, 64, 320, torch.bfloat16, "cuda", scaled=False)
    assert_accurate(rms_norm_backward, arguments, backward_results, terms=320)


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [1, 3])
def test_sum_on_gpu(workers: int) -> None:
    arguments = sum_arguments(workers, 17, partials(workers, 10_000), 320, True, "cuda")
    assert_accurate(sum_partials, arguments, lambda *a: {"out": a[1]}, terms=1_000)


@pytest.mark.gpu
def test_rows_past_two_to_the_31_elements_on_gpu() -> None:
    shape, low = (1, 2**25 + 5, 64), torch.bfloat16
    y = torch.empty(shape, dtype=low, device="cuda")
    branch, x, rstd = torch.empty_like(y), Stream.empty(y), y[..., 0].float()
    weight = torch.randn(1, 64, device="cuda")
    last = [t[:, -9:] for t in (*x, branch, y, rstd)]
    last[0].normal_(), last[1].zero_(), last[2].normal_(), last[3].fill_(torch.nan)
    total = last[0].double() + last[2].double()
    expected = plain_norm(total, weight.double())
    residual_rms_norm(x, branch, weight, EPS, x, y, rstd)
    # rounded once, by at most half a unit in bf16's last place
    torch.testing.assert_close(last[3].double(), expected, rtol=2.0**-8, atol=1e-6)
    out = Stream(last[0], last[1]).joined(torch.float32)
    torch.testing.assert_close(out.double(), total, rtol=2.0**-15, atol=0)

    dx, dweight = Stream.empty(y), torch.empty(1, 1_024, 64, device="cuda")
    expected_dx = last[3].double() * weight.double() * last[4].double()[..., None]
    normed = last[0].double() * last[4].double()[..., None]
    expected_dx -= normed * (expected_dx * normed).mean(-1, keepdim=True)
    rms_norm_backward(y, None, x.value, weight, rstd, None, dx, dweight)
    got = Stream(*(part[:, -9:] for part in dx)).joined(torch.float32).double()
    torch.testing.assert_close(got, expected_dx, rtol=1e-5, atol=1e-4)
