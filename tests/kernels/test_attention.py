"""Attention and its gradients, against PyTorch's and autograd's."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tinyllm.kernels import attention_backward as backward
from tinyllm.kernels import attention_forward as forward
from tinyllm.kernels.attention import attend, attend_backward
from tinyllm.kernels.attention_backward import attention_backward
from tinyllm.kernels.attention_forward import attention_forward
from tinyllm.kernels.attention_hopper import even_programs

from .checks import (
    INTERPRETED_LOW,
    assert_accurate,
    compiled_by,
    interpreted,
    normal,
    poisoned,
)

SHAPES = [(1, 2, 7, 1, 4), (2, 3, 5, 3, 64), (3, 1, 16, 2, 128)]
"""W, B, T, H, K."""


def tensors(
    workers: int, sequences: int, length: int, heads: int, size: int, **options: Any
) -> dict[str, Tensor]:
    """Packed queries, keys and values, the gradient of the result, and tables of positions."""
    tokens, width = sequences * length, heads * size
    angle = torch.rand(length + 2, size // 2, dtype=torch.float64) * 6.3
    made = {
        "qkv": torch.randn(workers, tokens, 3 * width, dtype=torch.float64).to(**options),
        "dout": torch.randn(workers, tokens, width, dtype=torch.float64).to(**options),
    }
    device = made["qkv"].device
    high = torch.float64 if made["qkv"].dtype == torch.float64 else torch.float32
    return made | {
        n: f(angle).to(device, high) for n, f in (("cos", torch.cos), ("sin", torch.sin))
    }


def expected(
    qkv: Tensor, dout: Tensor, cos: Tensor, sin: Tensor, heads: int, length: int
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """PyTorch's attention, and autograd's gradients of queries, keys and values before turning."""
    parts = heads_of(qkv, 3 * heads, length).chunk(3, dim=1)
    q, k, v = (part.detach().contiguous().requires_grad_() for part in parts)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), heads_of(dout, heads, length))
    turn = torch.complex(cos, -sin)[:length]

    def back(gradient: Tensor) -> Tensor:
        turned = torch.complex(*gradient.to(cos.dtype).chunk(2, dim=-1)) * turn
        return torch.cat((turned.real, turned.imag), dim=-1)

    return out.detach(), (back(dq), back(dk), dv)


def log_sums(qkv: Tensor, heads: int, length: int) -> Tensor:
    """Logarithms of the sums of each row's exponentials ``[N, H, T, 1]``."""
    q, k, _ = heads_of(qkv, 3 * heads, length).chunk(3, dim=1)
    ahead = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return scores.masked_fill(ahead, -torch.inf).logsumexp(-1, keepdim=True)


def heads_of(packed: Tensor, heads: int, length: int) -> Tensor:
    """``[W, B·T, G·K]`` as ``[W·B, G, T, K]``."""
    return packed.view(-1, length, heads, packed.shape[-1] // heads).transpose(1, 2)


def parts_of(dqkv: Tensor, heads: int, length: int) -> list[Tensor]:
    """Gradients of queries, keys and values."""
    return list(heads_of(dqkv, 3 * heads, length).chunk(3, dim=1))


@pytest.mark.parametrize("shape", SHAPES)
def test_is_pytorchs_attention(shape: tuple[int, ...]) -> None:
    length, heads = shape[2:4]
    given = tensors(*shape, device="cpu")
    out, gradients = expected(**given, heads=heads, length=length)
    attended = attend(given["qkv"], heads, length)
    torch.testing.assert_close(attended.out, out, rtol=0, atol=1e-12)
    expected_lse = log_sums(given["qkv"], heads, length)
    torch.testing.assert_close(attended.lse, expected_lse, rtol=0, atol=1e-12)
    dqkv = torch.full_like(given["qkv"], torch.nan)
    attend_backward(**given, attended=attended, dqkv=dqkv)
    found = parts_of(dqkv, heads, length)
    for name, mine, truth in zip("qkv", found, gradients, strict=True):
        torch.testing.assert_close(mine, truth, rtol=0, atol=1e-12, msg=name)


def backward_arguments(*shape: int, low: torch.dtype = torch.float32) -> list[Any]:
    """Of the backward pass alone, between guards."""
    workers, batch, length, heads, size = shape
    tokens, width = batch * length, heads * size
    qkv = normal(workers, tokens, 3 * width, dtype=low)
    dout = normal(workers, tokens, width, dtype=low)
    attended = attend(qkv.float(), heads, length)
    angle = torch.rand(length + 2, size // 2) * 6.3
    dqkv = poisoned(workers, tokens, 3 * width, dtype=low)
    out = attended.out.transpose(1, 2).to(low).transpose(1, 2)
    return [dout, qkv, out, attended.lse, angle.cos(), angle.sin(), dqkv]


def blocks(monkeypatch: pytest.MonkeyPatch, queries: int, keys: int) -> None:
    """Small ones, which the interpreter gets through."""
    for module in (forward, backward):
        monkeypatch.setattr(module, "BLOCK_Q", queries)
        monkeypatch.setattr(module, "BLOCK_K", keys)


BLOCKED = [
    ((1, 2, 7, 1, 16), 16, 16),  # less than a block
    ((2, 1, 40, 2, 16), 16, 16),  # a remainder
    ((1, 1, 64, 1, 32), 16, 32),  # two blocks of queries see a part of a block of keys
    ((1, 1, 80, 1, 16), 32, 16),
    ((1, 1, 130, 1, 64), 64, 64),
    ((1, 1, 33, 1, 128), 16, 16),
]
"""Shapes, and how many queries and keys a block has."""


@pytest.fixture(params=BLOCKED, ids=str)
def shape(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, ...]:
    """A shape, where blocks are as large as it wants them."""
    of_tensors, queries, keys = request.param
    blocks(monkeypatch, queries, keys)
    return of_tensors  # type: ignore[no-any-return]


@interpreted
@pytest.mark.parametrize("low", [torch.float32, INTERPRETED_LOW])
def test_forward_kernel(shape: tuple[int, ...], low: torch.dtype) -> None:
    workers, batch, length, heads, size = shape
    qkv = normal(workers, batch * length, 3 * heads * size, dtype=low)
    qkv[0, 0] *= 40  # a key that all others vanish beside
    out = poisoned(workers * batch, length, heads, size, dtype=low).transpose(1, 2)
    lse = poisoned(workers * batch, heads, length, 1)
    assert_accurate(
        attention_forward,
        [qkv, out, lse],
        lambda *args: {"out": args[1], "lse": args[2]},
        terms=length,
    )


@interpreted
@pytest.mark.parametrize("low", [torch.float32, INTERPRETED_LOW])
def test_backward_kernels(shape: tuple[int, ...], low: torch.dtype) -> None:
    arguments = backward_arguments(*shape, low=low)
    assert_accurate(attention_backward, arguments, lambda *args: {"dqkv": args[-1]}, terms=shape[2])


@interpreted
def test_forward_keeps_what_is_not_finite_in_its_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks(monkeypatch, 16, 16)
    qkv = normal(2, 21, 48)
    qkv[1] = torch.nan
    out, lse = poisoned(2, 21, 1, 16).transpose(1, 2), poisoned(2, 1, 21, 1)
    attention_forward.launch(qkv, out, lse)
    for result in (out, lse):
        assert result.isfinite().flatten(1).all(dim=1).tolist() == [True, False]


@interpreted
@pytest.mark.parametrize("name", ["dout", "qkv"])
def test_what_is_not_finite_stays_in_its_sequence(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tile that ends after a sequence takes nothing from the next one."""
    blocks(monkeypatch, 16, 16)
    arguments = backward_arguments(2, 1, 21, 1, 16)
    {"dout": arguments[0], "qkv": arguments[1]}[name][1] = torch.nan
    attention_backward.launch(*arguments)
    assert arguments[-1][0].isfinite().all()
    assert not arguments[-1][1].isfinite().any()


KERNELS = ("forward", "queries", "keys")
CASES = [*((name, width) for name in KERNELS for width in (64, 128))]
CASES += [(f"{name}_hopper", 64) for name in KERNELS]


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    return compiled_by("compile_attention.py", CASES)


@pytest.mark.parametrize(("name", "width"), CASES)
def test_compiles_for_hopper(compiled: dict[str, Any], name: str, width: int) -> None:
    """As it is on a GPU: the tensor cores do not wait within a product of tiles; nothing spills."""
    kernel = compiled[f"{name},{width}"]
    assert 0 < kernel["products_waited_for"] <= kernel["products"] // 4
    assert kernel["spills"] == 0
    assert kernel["shared_bytes"] + 1_024 <= 228 * 1024 // kernel["programs"]


@pytest.mark.parametrize(
    ("items", "tiles", "most", "programs"),
    [(5, 1, 264, 5), (264, 8, 264, 264), (10_240, 16, 264, 263), (600, 15, 264, 263), (9, 3, 1, 1)],
)
def test_programs_get_items_of_each_length(
    items: int, tiles: int, most: int, programs: int
) -> None:
    assert even_programs(items, tiles, most) == programs
    if programs < items:
        work = [sum(i % tiles + 1 for i in range(p, items, programs)) for p in range(programs)]
        assert max(work) <= sum(work) / programs + 2 * tiles


def test_leaves_its_inputs_alone() -> None:
    given = tensors(2, 3, 5, 3, 64, device="cpu")
    before = {name: tensor.clone() for name, tensor in given.items()}
    attended = attend(given["qkv"], 3, 5)
    attend_backward(**given, attended=attended, dqkv=torch.empty_like(given["qkv"]))
    for name, tensor in given.items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape",
    [
        *(
            (1, 1, 64, 1, 64),
            (1, 2, 7, 5, 64),
            (3, 2, 130, 5, 64),
            (4, 2, 1_024, 5, 64),
            (2, 3, 65, 1, 64),
        ),
        *((1, 2, 256, 2, 128), (2, 2, 70, 3, 128), (1, 3, 1, 2, 64), (1, 3, 4, 2, 64)),
        *((2, 40, 1_000, 5, 64), (1, 128, 132, 8, 64)),  # programs take many tiles one by one
    ],
)
def test_on_gpu(shape: tuple[int, ...]) -> None:
    """Errors against float64, in the 2-norm, are those of PyTorch's own attention in bf16.

    Other kernels round at other places. Each result is a short chain of sums of products that are
    rounded to bf16, each of which is good to half a unit in the last place, 2⁻⁹.
    """
    length, heads = shape[2:4]
    given = tensors(*shape, dtype=torch.bfloat16, device="cuda")
    before = {name: tensor.clone() for name, tensor in given.items()}
    exact = {name: tensor.double() for name, tensor in given.items()}
    out, gradients = expected(**exact, heads=heads, length=length)
    plain_out, plain_gradients = expected(**given, heads=heads, length=length)
    attended = attend(given["qkv"], heads, length)
    dqkv = torch.full_like(given["qkv"], torch.nan)
    attend_backward(**given, attended=attended, dqkv=dqkv)
    again = torch.full_like(dqkv, torch.nan)
    attend_backward(**given, attended=attended, dqkv=again)
    assert torch.equal(dqkv, again)  # nothing is summed in an order that may change
    for name, tensor in given.items():
        assert torch.equal(tensor, before[name]), name
    torch.testing.assert_close(
        attended.lse.double(), log_sums(exact["qkv"], heads, length), rtol=1e-5, atol=1e-5
    )
    for name, mine, plain, truth in zip(
        ("out", "dq", "dk", "dv"),
        (attended.out, *parts_of(dqkv, heads, length)),
        (plain_out, *plain_gradients),
        (out, *gradients),
        strict=True,
    ):
        size = truth.norm()
        error = ((mine.double() - truth).norm() / size).item()
        plain_error = ((plain.double() - truth).norm() / size).item()
        assert error <= 1.1 * plain_error + 2.0**-9, f"{name}: {error} of {plain_error}"


@pytest.mark.gpu
def test_is_the_same_each_time_on_gpu() -> None:
    """Warps that bring, multiply and send never take a tile too early."""
    given = tensors(1, 64, 1_024, 5, 64, dtype=torch.bfloat16, device="cuda")
    first, dqkv = attend(given["qkv"], 5, 1_024), torch.empty_like(given["qkv"])
    attend_backward(**given, attended=first, dqkv=dqkv)
    for _ in range(50):
        attended, again = attend(given["qkv"], 5, 1_024), torch.full_like(dqkv, torch.nan)
        attend_backward(**given, attended=attended, dqkv=again)
        assert torch.equal(attended.out, first.out)
        assert torch.equal(attended.lse, first.lse)
        assert torch.equal(again, dqkv)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [68, 70])  # of Hopper kernels, and of the others
def test_what_is_not_finite_stays_in_its_sequence_on_gpu(length: int) -> None:
    given = tensors(3, 1, length, 2, 64, dtype=torch.bfloat16, device="cuda")
    given["qkv"][1] = torch.nan
    attended = attend(given["qkv"], 2, length)
    dqkv = torch.empty_like(given["qkv"])
    attend_backward(**given, attended=attended, dqkv=dqkv)
    for result in (attended.out, dqkv):
        finite = result.isfinite().flatten(1).all(dim=1)
        assert finite.tolist() == [True, False, True]


@pytest.mark.gpu
@pytest.mark.parametrize(("sequences", "width"), [(10_923, 64), (5_462, 128)])
def test_tokens_past_two_to_the_31_elements_on_gpu(sequences: int, width: int) -> None:
    """The last sequence's results are those that it has alone."""
    length = 1_024
    qkv = torch.empty(1, sequences * length, 3 * width, dtype=torch.bfloat16, device="cuda")
    assert qkv.numel() > 2**31
    given = tensors(1, 1, length, 1, width, dtype=torch.bfloat16, device="cuda")
    qkv[:, :-length] = 0
    qkv[:, -length:] = given["qkv"]
    dout = torch.zeros(1, sequences * length, width, dtype=torch.bfloat16, device="cuda")
    dout[:, -length:] = given["dout"]
    tables = {"cos": given["cos"], "sin": given["sin"]}
    results = []
    for of in ({"qkv": qkv, "dout": dout}, {"qkv": given["qkv"], "dout": given["dout"]}):
        attended = attend(of["qkv"], 1, length)
        dqkv = torch.empty_like(of["qkv"])
        attend_backward(**of, **tables, attended=attended, dqkv=dqkv)
        results.append((attended.out[-1:], dqkv[:, -length:]))
    for whole, alone in zip(*results, strict=True):
        assert torch.equal(whole, alone)
