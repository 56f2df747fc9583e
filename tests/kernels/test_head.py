from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tinyllm.kernels.gemm import input_gradient, weight_gradient
from tinyllm.kernels.head import (
    FINISHED_ROWS,
    IGNORED,
    exponentials,
    finish,
    padded,
    tiles,
    total,
)
from tinyllm.kernels.operation import Operation

from .checks import FLOAT32_EPS, assert_accurate, interpreted, normal, poisoned

# the interpreter's 1/0 in rows beyond the last, which count for nothing
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

Side = Literal["reference", "launch"]


def run(side: Side) -> Callable[..., None]:
    """The head's operations one after the other."""

    def head(*arguments: Any) -> None:
        h, embedding, rows, exps, sums, inverse, scaled, tally, nll, targets, loss, add = arguments
        getattr(exponentials, side)(h, embedding, exps, sums)
        getattr(finish, side)(h, embedding, rows, exps, sums, inverse, scaled, tally)
        getattr(total, side)(tally, nll, targets, loss, add)

    return head


whole_head = Operation(run("reference"), run("launch"))


def token_rows(
    workers: int, sequences: int, length: int, vocab: int, device: str = "cpu"
) -> Tensor:
    """Ids with some targets missing: one in the middle, and the end of the last row."""
    rows = torch.randint(vocab, (workers, sequences, length + 1), device=device)
    rows[0, 0, 3:4] = IGNORED
    rows[-1, -1, -2:] = IGNORED
    return rows


def arguments(
    workers: int,
    sequences: int,
    length: int,
    width: int,
    vocab: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    add: bool = False,
) -> list[Any]:
    """Of ``whole_head``; logits are about normal."""
    tokens, low = sequences * length, {"dtype": dtype, "device": device}
    high = {"dtype": torch.promote_types(dtype, torch.float32), "device": device}
    embedding = normal(workers, vocab, width, gap=64, **low)
    embedding *= width**-0.5
    return [
        normal(workers, tokens, width, **low),
        embedding,
        token_rows(workers, sequences, length, vocab, device),
        poisoned(workers, tokens, padded(vocab), **low),
        poisoned(workers, tiles(vocab, width), tokens, **high),
        poisoned(workers, tokens, **high),
        poisoned(workers, tokens, width, **low),
        poisoned(workers, -(-tokens // FINISHED_ROWS), 2, **high),
        (normal if add else poisoned)(workers, **high),
        torch.full((workers,), 5, dtype=torch.int64, device=device),
        poisoned(1, **high),
        add,
    ]


def results(*given: Any) -> dict[str, Tensor]:
    """What the rest of the step makes of the head's outputs, in float64."""
    _, embedding, _, exps, _, inverse, scaled, tally, nll, targets, loss, _ = given
    vocab = embedding.shape[1]
    wide = exps.double()
    return {
        "padding": F.pad(wide[:, :, vocab:], (0, 1)),  # none for some vocabularies
        "dlogits": wide[:, :, :vocab] * inverse.double()[:, :, None],
        "dh": (wide[:, :, :vocab] @ embedding.double()) * inverse.double()[:, :, None],
        "dembedding": wide[:, :, :vocab].transpose(1, 2) @ scaled.double(),
        "scored": tally[:, :, 1],
        "nll": nll,
        "targets": targets.double(),
        "loss": loss,
    }


def scale_row(given: list[Any], row: int, size: float, sign: float = 0.0) -> None:
    """Makes a row's largest logit ±size; with a sign, all its logits lie near sign · size."""
    h, embedding = given[0], given[1]
    if sign:
        embedding[:, :, :16] = 1.0
        h[:, row] = 0.0
        h[:, row, :16] = sign * size / 16
        h[:, row, 16:] = 0.01
    else:
        logits = embedding.float() @ h[:, row].float()[:, :, None]
        h[:, row] *= size / logits.abs().amax((1, 2))[:, None].to(h.dtype)


def plain_head(h: Tensor, embedding: Tensor, rows: Tensor) -> dict[str, Tensor]:
    """PyTorch's loss and its gradients in the dtypes of what is given."""
    h, embedding = h.detach().requires_grad_(), embedding.detach().requires_grad_()
    logits, targets = torch.bmm(h, embedding.transpose(1, 2)), rows[:, :, 1:].flatten(1)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    losses = F.cross_entropy(
        wide.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none"
    )
    nll = losses.view(len(h), -1).sum(1)
    dh, dembedding = torch.autograd.grad(nll.sum(), (h, embedding))
    return {"nll": nll.detach(), "dh": dh, "dembedding": dembedding}


def in_double(given: list[Any]) -> list[Any]:
    floats = (torch.float16, torch.bfloat16, torch.float32)
    return [a.double() if isinstance(a, Tensor) and a.dtype in floats else a for a in given]


def assert_is_cross_entropy(given: list[Any], tolerance: float = 1e-12) -> None:
    whole_head.reference(*given)
    found, expected = results(*given), plain_head(*given[:3])
    for name, truth in expected.items():
        scale = max(1.0, truth.abs().max().item())
        torch.testing.assert_close(found[name], truth, rtol=0, atol=tolerance * scale, msg=name)
    targets = given[2][:, :, 1:].flatten(1)
    scored = (targets != IGNORED).sum(1)
    assert found["targets"].tolist() == scored.tolist()
    mean = expected["nll"].sum() / scored.sum().clamp_min(1)
    torch.testing.assert_close(found["loss"][0], mean, rtol=1e-12, atol=1e-12)
    assert not found["padding"].any()


# --- the reference is cross-entropy ---------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("vocab", [300, 512, 513])
def test_is_cross_entropy(workers: int, vocab: int) -> None:
    assert_is_cross_entropy(in_double(arguments(workers, 3, 7, 64, vocab)))


def test_rows_without_any_target_cost_nothing() -> None:
    given = in_double(arguments(2, 2, 7, 64, 300))
    given[2][1] = IGNORED
    assert_is_cross_entropy(given)
    found = results(*given)
    assert found["nll"][1] == found["targets"][1] == 0
    assert not found["dh"][1].any()
    assert not found["dembedding"][1].any()


def test_no_target_at_all_is_a_loss_of_zero() -> None:
    given = in_double(arguments(1, 2, 7, 64, 300))
    given[2][:] = IGNORED
    assert_is_cross_entropy(given)
    assert given[10].item() == 0


@pytest.mark.parametrize("sign", [-1.0, 0.0, 1.0])
def test_logits_near_80_share_the_offset(sign: float) -> None:
    given = in_double(arguments(2, 2, 7, 64, 300))
    for row in (1, 5):
        scale_row(given, row, 79.0, sign)
    assert_is_cross_entropy(given)


@pytest.mark.parametrize("size", [130.0, 1_000.0, 20_000.0])
@pytest.mark.parametrize("sign", [-1.0, 0.0, 1.0])
def test_rows_with_an_offset_of_their_own(size: float, sign: float) -> None:
    given = in_double(arguments(2, 2, 7, 64, 300))
    for row in (1, 5, 13):
        scale_row(given, row, size, sign)
    # logits have digits in proportion to their size
    assert_is_cross_entropy(given, 1e-12 * max(1.0, size / 80))


@pytest.mark.parametrize("side", ["reference", pytest.param("launch", marks=interpreted)])
@pytest.mark.parametrize("target", [300, 319, 320, 2**31, 2**40, -1, -99, -101])
def test_a_target_outside_the_vocabulary_is_a_loss_of_nan(side: Side, target: int) -> None:
    given = arguments(3, 2, 7, 64, 300)
    expected = [a.clone() if isinstance(a, Tensor) else a for a in given]
    given[2][1, 1, 4] = target
    run(side)(*given)
    run(side)(*expected)
    nll, others = given[8], expected[8]
    assert nll.isnan().tolist() == [False, True, False]
    assert torch.equal(nll[[0, 2]], others[[0, 2]])
    assert given[10].isnan()
    assert given[3].isfinite().all()


def test_adds_to_earlier_micro_batches() -> None:
    given = in_double(arguments(3, 2, 7, 64, 300, add=True))
    before = given[8].clone()
    whole_head.reference(*given)
    new = plain_head(*given[:3])["nll"]
    torch.testing.assert_close(given[8], before + new, rtol=1e-12, atol=1e-12)
    counts = 5 + (given[2][:, :, 1:] != IGNORED).flatten(1).sum(1)
    assert given[9].tolist() == counts.tolist()
    torch.testing.assert_close(given[10][0], given[8].sum() / counts.sum())


# --- kernels in Triton's interpreter --------------------------------------------------------------

SHAPES = [
    *((2, 2, 7, 64, 300), (1, 5, 7, 128, 513), (3, 1, 7, 192, 256)),
    *((1, 19, 7, 64, 64), (1, 3, 7, 384, 300)),
]
"""W, B, T, C, V; no M is a multiple of a tile, 133 is more than one."""


@interpreted
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels(shape: tuple[int, ...]) -> None:
    given = arguments(*shape)
    assert_accurate(whole_head, given, results, terms=max(shape))


@interpreted
@pytest.mark.parametrize("length", [1, 2])
def test_kernels_on_the_shortest_rows(length: int) -> None:
    given = arguments(1, 1, length, 64, 300)
    given[2][:] = 17
    assert_accurate(whole_head, given, results, terms=300)


@interpreted
def test_kernels_on_extreme_rows() -> None:
    given = arguments(2, 5, 7, 64, 300)
    for row, size in enumerate((79.0, 130.0, 1_000.0), start=1):
        for shift, sign in enumerate((-1.0, 0.0, 1.0)):
            scale_row(given, 3 * row + shift, size, sign)
    given[2][1, 2] = IGNORED  # rows whose offset is their own, without a target
    # logits of 1,000 have a thousandth of the digits that those of size 1 have
    assert_accurate(whole_head, given, results, terms=64 * 1_000**2)


@interpreted
def test_kernels_add() -> None:
    assert_accurate(whole_head, arguments(3, 2, 7, 64, 300, add=True), results, terms=300)


@interpreted
def test_kernels_without_any_target() -> None:
    given = arguments(2, 3, 7, 64, 300)
    given[2][:] = IGNORED
    whole_head.launch(*given)
    found = results(*given)
    for name in ("nll", "targets", "loss", "dh", "dembedding"):
        assert torch.equal(found[name], torch.zeros_like(found[name])), name


# --- on a GPU -------------------------------------------------------------------------------------


def assert_as_good_as_pytorch(given: list[Any]) -> None:
    """Errors against float64, in the 2-norm, are at most plain PyTorch's in bf16.

    The tolerance is for sums in fp32: ε·√n of their size, for n = M and V at most. Beside it, the
    factor of each row is rounded once in h where plain PyTorch may have none: 2^-8/√3 of the
    embedding's gradient. R's rounding, the same again, is a part of all probabilities of a row: in
    dh it has the size of their mean embedding, which is large where embeddings have a part in
    common.
    """
    rounding = 2**-8 / 3**0.5
    h, embedding, rows = given[:3]
    truth = plain_head(h.double(), embedding.double(), rows)
    plain = plain_head(h, embedding, rows)
    whole_head.launch(*given)
    exps, inverse, scaled, nll = given[3], given[5], given[6], given[8]
    dlogits = exps[:, :, : embedding.shape[1]]
    dembedding = torch.empty(embedding.shape, device=h.device)
    weight_gradient(dlogits, scaled, dembedding, False)
    dh = input_gradient(dlogits, embedding).float() * inverse[:, :, None]
    found = {"nll": nll, "dh": dh, "dembedding": dembedding}
    probabilities = (h.double() @ embedding.double().transpose(1, 2)).softmax(2)
    mean_embedding = (probabilities @ embedding.double()) * (inverse != 0)[:, :, None]
    rounded = {
        "nll": 0.0,
        "dh": rounding * mean_embedding.norm().item(),
        "dembedding": rounding * truth["dembedding"].norm().item(),
    }
    for name, value in found.items():
        size = truth[name].norm().item()
        error = (value.double() - truth[name]).norm().item()
        plain_error = (plain[name].double() - truth[name]).norm().item()
        slack = 4 * FLOAT32_EPS * max(exps.shape[1:]) ** 0.5 * size + rounded[name]
        assert error <= plain_error + slack, f"{name}: {error / size} of {plain_error / size}"
    assert given[9].tolist() == (rows[:, :, 1:] != IGNORED).flatten(1).sum(1).tolist()
    assert not exps[:, :, embedding.shape[1] :].any()


GPU_SHAPES = [
    *((1, 3, 7, 320, 32_001), (3, 11, 7, 128, 1_000), (1, 4, 512, 320, 32_000)),
    *((2, 3, 700, 512, 4_001), (1, 5, 300, 640, 32_000)),
    (1, 3, 7, 704, 1_000),  # too wide for the Hopper kernel
    *((1, 17, 600, 320, 8_001), (3, 4, 1_024, 640, 1_024)),  # many rows, which change its memory
]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_SHAPES)
def test_on_gpu(shape: tuple[int, ...]) -> None:
    assert_as_good_as_pytorch(arguments(*shape, dtype=torch.bfloat16, device="cuda"))


@pytest.mark.gpu
def test_extreme_rows_on_gpu() -> None:
    given = arguments(1, 9, 7, 320, 32_001, dtype=torch.bfloat16, device="cuda")
    for row, size in enumerate((79.0, 130.0, 1_000.0), start=1):
        for shift, sign in enumerate((-1.0, 0.0, 1.0)):
            scale_row(given, 3 * row + shift, size, sign)
    given[2][0, 1] = IGNORED
    assert_as_good_as_pytorch(given)


@pytest.mark.gpu
def test_the_shortest_row_on_gpu() -> None:
    given = arguments(1, 1, 1, 128, 1_000, dtype=torch.bfloat16, device="cuda")
    given[2][:] = 17
    assert_as_good_as_pytorch(given)


@pytest.mark.gpu
def test_a_target_outside_the_vocabulary_on_gpu() -> None:
    given = arguments(3, 11, 7, 128, 1_000, dtype=torch.bfloat16, device="cuda")
    given[2][1, 1, 4], given[2][2, 2, 4] = 1_000, -3
    whole_head.launch(*given)
    assert given[8].isnan().tolist() == [False, True, True]
    assert given[3].isfinite().all()


@pytest.mark.gpu
def test_exponentials_past_two_to_the_31_elements_on_gpu() -> None:
    vocab, sequences, length = 32_001, 9_600, 7
    tokens, low = sequences * length, {"dtype": torch.bfloat16, "device": "cuda"}
    assert tokens * padded(vocab) > 2**31
    h, embedding = torch.zeros(1, tokens, 64, **low), torch.randn(1, vocab, 64, **low)
    rows = torch.randint(vocab, (1, sequences, length + 1), device="cuda")
    h[:, -9:] = torch.randn(9, 64, **low) / 8
    h[:, -1] *= 400  # needs an offset of its own
    exps = torch.empty(1, tokens, padded(vocab), **low)
    exps[:, -9:] = torch.nan
    sums = torch.empty(1, tiles(vocab, 64), tokens, device="cuda")
    inverse, scaled = torch.empty(1, tokens, device="cuda"), torch.empty_like(h)
    tally = torch.empty(1, -(-tokens // FINISHED_ROWS), 2, device="cuda")
    exponentials.launch(h, embedding, exps, sums)
    finish.launch(h, embedding, rows, exps, sums, inverse, scaled, tally)
    logits = h[0, -9:].double() @ embedding[0].double().T
    targets = rows[0, :, 1:].flatten()[-9:]
    expected = logits.softmax(1) - F.one_hot(targets, vocab)
    found = exps[0, -9:, :vocab].double() * inverse[0, -9:, None].double()
    # two roundings to bf16, and fp32 logits up to 200 in the last row
    torch.testing.assert_close(found, expected, rtol=2.0**-7, atol=1e-7)
    losses = F.cross_entropy(logits, targets, reduction="sum")
    uniform = (tokens - 9) * torch.tensor(vocab).log().item()  # rows of zeros
    torch.testing.assert_close(
        tally[0, :, 0].double().sum().item(), uniform + losses.item(), rtol=1e-6, atol=0.0
    )
    assert tally[0, :, 1].sum().item() == tokens
