import pytest
import torch

from tinyllm.kernels.stream import Stream


def stream_of(x: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> Stream:
    stream = Stream.empty(x.to(dtype))
    stream.take(x)
    return stream


def test_the_value_is_the_number_rounded_and_both_parts_hold_sixteen_bits() -> None:
    x = torch.randn(1_000_000) * torch.randn(1_000_000).exp2()
    stream = stream_of(x)
    assert torch.equal(stream.value, x.bfloat16())
    error = (stream.joined(torch.float32) - x).abs() / x.abs()
    assert error.max() <= 2.0**-15
    assert (error > 2.0**-16).float().mean() < 0.01
    assert (stream.joined(torch.float32) - x).mean().abs() < 2.0**-20 * x.abs().mean()  # no bias


@pytest.mark.parametrize("x", [0.0, -0.0, 1.0, -1.5, 2.0**-130, 3.3e38, -3.4e38, float("inf")])
def test_the_ends_of_the_range(x: float) -> None:
    """Those near the largest one round to infinity in bf16, and come back finite."""
    joined = stream_of(torch.tensor([x])).joined(torch.float32)
    torch.testing.assert_close(joined, torch.tensor([x]), rtol=2.0**-16, atol=2.0**-140)
    assert torch.equal(joined.signbit(), torch.tensor([x]).signbit())


def test_ties_stay_within_a_byte() -> None:
    """Half a unit of bf16 above an even number is 128 units of the rest, one more than it holds."""
    x = torch.tensor([1.0, -1.0]) * (1 + 2.0**-8)
    stream = stream_of(x)
    assert stream.value.tolist() == [1.0, -1.0]
    assert stream.rest.tolist() == [127, 127]


def test_nan_stays_nan() -> None:
    bits = torch.tensor([0x7FC00000, 0x7FFFFFFF, 0x7F800001, -1, -4194304], dtype=torch.int32)
    x = bits.view(torch.float32)
    assert x.isnan().all()
    stream = stream_of(x)
    assert stream.joined(torch.float32).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_compute_dtype_that_holds_all_leaves_no_rest(dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 5, dtype=dtype)
    stream = stream_of(x, dtype)
    assert torch.equal(stream.joined(dtype), x)
    assert not stream.rest.any()


def test_room_beside_shares_the_rest() -> None:
    stream = stream_of(torch.randn(2, 3, 5))
    value = torch.empty_like(stream.value)
    beside = stream.beside(value)
    assert beside.value is value
    assert beside.rest is stream.rest
