import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tinyllm.kernels.attention import attend, attend_backward, heads_of

SHAPES = [(1, 2, 7, 1, 4), (2, 3, 5, 3, 64), (3, 1, 16, 2, 128)]
"""W, B, T, H, K."""


def tensors(
    workers: int, sequences: int, length: int, heads: int, size: int, **options: object
) -> tuple[Tensor, Tensor]:
    """Packed queries, keys and values, and the gradient of the result."""
    tokens, width = sequences * length, heads * size
    qkv = torch.randn(workers, tokens, 3 * width, dtype=torch.float64).to(**options)
    return qkv, torch.randn(workers, tokens, width, dtype=torch.float64).to(**options)


def expected(
    qkv: Tensor, dout: Tensor, heads: int, length: int
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """PyTorch's attention, and autograd's gradients of queries, keys and values."""
    parts = heads_of(qkv, 3 * heads, length).chunk(3, dim=1)
    q, k, v = (part.detach().contiguous().requires_grad_() for part in parts)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.detach(), torch.autograd.grad(out, (q, k, v), heads_of(dout, heads, length))


@pytest.mark.parametrize("shape", SHAPES)
def test_is_pytorchs_attention(shape: tuple[int, ...]) -> None:
    length, heads = shape[2:4]
    qkv, dout = tensors(*shape, device="cpu")
    out, gradients = expected(qkv, dout, heads, length)
    attended = attend(qkv, heads, length)
    torch.testing.assert_close(attended.out, out, rtol=0, atol=1e-12)
    found = attend_backward(dout, qkv, attended, heads, length)
    for name, mine, truth in zip("qkv", found, gradients, strict=True):
        torch.testing.assert_close(mine, truth, rtol=0, atol=1e-12, msg=name)


def test_leaves_its_inputs_alone() -> None:
    qkv, dout = tensors(2, 3, 5, 3, 64, device="cpu")
    before = qkv.clone(), dout.clone()
    attend_backward(dout, qkv, attend(qkv, 3, 5), 3, 5)
    assert torch.equal(qkv, before[0])
    assert torch.equal(dout, before[1])


def test_heads_are_views_of_what_is_packed() -> None:
    packed = torch.arange(2 * 6 * 8).view(2, 6, 8)  # W = 2, B = 2, T = 3, two heads of 4
    heads = heads_of(packed, 2, 3)
    assert heads.shape == (4, 2, 3, 4)
    assert heads.data_ptr() == packed.data_ptr()
    assert torch.equal(heads[3, 1, 2], packed[1, 5, 4:])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(1, 2, 7, 5, 64), (3, 2, 130, 5, 64), (1, 2, 256, 2, 128), (4, 2, 1_024, 5, 64)]
)
def test_on_gpu(shape: tuple[int, ...]) -> None:
    """Errors against float64, in the 2-norm, are those of PyTorch's own attention in bf16.

    Other kernels round at other places. Each result is a short chain of sums of products that are
    rounded to bf16, each of which is good to half a unit in the last place, 2⁻⁹.
    """
    length, heads = shape[2:4]
    qkv, dout = tensors(*shape, dtype=torch.bfloat16, device="cuda")
    out, gradients = expected(qkv.double(), dout.double(), heads, length)
    plain_out, plain_gradients = expected(qkv, dout, heads, length)
    attended = attend(qkv, heads, length)
    found = attend_backward(dout, qkv, attended, heads, length)
    for name, mine, plain, truth in zip(
        ("out", "dq", "dk", "dv"),
        (attended.out, *found),
        (plain_out, *plain_gradients),
        (out, *gradients),
        strict=True,
    ):
        size = truth.norm()
        error = ((mine.double() - truth).norm() / size).item()
        plain_error = ((plain.double() - truth).norm() / size).item()
        assert error <= 1.1 * plain_error + 2.0**-9, f"{name}: {error} of {plain_error}"
