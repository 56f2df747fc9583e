from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tinyllm.arena import ArenaLayout, bind
from tinyllm.config import PRESETS, LlamaConfig
from tinyllm.kernels.llama import LlamaStep, LlamaTensors, Totals
from tinyllm.model import Llama, is_matrix, split_rows

SMALL = LlamaConfig(layers=2, width=128, heads=2, ffn_width=192, vocab_size=300, context=16)
ODD = LlamaConfig(layers=3, width=24, heads=2, ffn_width=20, vocab_size=67, context=16)
"""Nothing in it is a multiple of anything; norm scales in an arena have gaps between them."""


class Setting(NamedTuple):
    """W Llamas in an arena, and their gradients twice: the step's and autograd's."""

    llama: Llama
    layout: ArenaLayout
    gradients: Tensor
    tensors: LlamaTensors

    def totals(self) -> Totals:
        workers = self.llama.workers
        nan = torch.full((workers,), torch.nan, dtype=torch.float64)
        return Totals(nan, torch.full((workers,), -1), nan[:1].clone())

    def expected(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Summed losses, number of targets, gradients ``[W, D]``: by autograd."""
        self.llama.zero_grad()
        nll, targets = self.llama(*split_rows(rows))
        nll.sum().backward()
        gradients = torch.zeros_like(self.gradients)
        views = self.layout.views(gradients)
        for name, parameter in self.llama.named_parameters():
            assert parameter.grad is not None
            views[name].copy_(parameter.grad)
        return nll.detach(), targets, gradients


def setting(
    config: LlamaConfig, workers: int, groups: Sequence[Sequence[str]] | None = None
) -> Setting:
    """Workers with weights of their own.

    Args:
        config: Of all of them.
        workers: W.
        groups: Names of the parameters in the order of the arena; matrices come first otherwise.
    """
    llama = Llama(config).double()
    parameters = dict(llama.named_parameters())
    if groups is None:
        matrices = [name for name, p in parameters.items() if is_matrix(p)]
        groups = [matrices, [name for name in parameters if name not in matrices]]
    layout = ArenaLayout.of(
        [{name: tuple(parameters[name].shape[1:]) for name in group} for group in groups]
    )
    weights = torch.zeros(workers, layout.row_numel, dtype=torch.float64)
    for view in layout.views(weights).values():
        view.normal_(std=0.1) if view.ndim > 2 else view.normal_(1.0, 0.1)
    gradients = torch.full_like(weights, torch.nan)
    bind(parameters, layout, weights)
    by_module = {
        name.removesuffix(".weight"): (view, gradient)
        for (name, view), gradient in zip(
            layout.views(weights).items(), layout.views(gradients).values(), strict=True
        )
    }
    tensors = LlamaTensors(
        layers=config.layers,
        heads=config.heads,
        norm_eps=config.norm_eps,
        weights={name: view for name, (view, _) in by_module.items()},
        gradients={name: gradient for name, (_, gradient) in by_module.items()},
        embedding=by_module["embed_tokens"][0],
        cos=llama.cos,
        sin=llama.sin,
    )
    return Setting(llama, layout, gradients, tensors)


def token_rows(workers: int, sequences: int, length: int, vocab: int) -> Tensor:
    """Ids with targets missing in the middle and at the end of rows."""
    rows = torch.randint(vocab, (workers, sequences, length + 1))
    rows[0, 0, 3] = -100
    rows[-1, -1, -2:] = -100
    return rows


def assert_is_autograds(case: Setting, totals: Totals, rows: Tensor) -> None:
    """Relative to its own norm, each gradient is right to 1e-10; observed are 1e-14."""
    nll, targets, gradients = case.expected(rows)
    torch.testing.assert_close(totals.nll, nll, rtol=1e-10, atol=0)
    assert totals.targets.tolist() == targets.tolist()
    torch.testing.assert_close(totals.loss[0], nll.sum() / targets.sum(), rtol=1e-10, atol=0)
    mine: Mapping[str, Tensor] = case.layout.views(case.gradients)
    for name, truth in case.layout.views(gradients).items():
        for worker in range(len(truth)):
            error = (mine[name][worker] - truth[worker]).norm() / truth[worker].norm()
            assert error < 1e-10, f"{name} of worker {worker} errs by {error}"


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("preset", PRESETS)
def test_is_autograds_step_for_every_preset(preset: str, workers: int) -> None:
    # widths as they are; fewer layers and a smaller vocabulary, which is no multiple of a tile
    layers = 2 if preset == "20m" else 1
    config = replace(PRESETS[preset], layers=layers, vocab_size=517, context=16)
    case = setting(config, workers)
    rows = token_rows(workers, 2, 11, config.vocab_size)
    LlamaStep(case.tensors, rows, totals := case.totals(), accumulate=False)()
    assert_is_autograds(case, totals, rows)


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("config", [SMALL, ODD], ids=["small", "odd"])
@pytest.mark.parametrize("length", [1, 7, 16])
def test_is_autograds_step_at_odd_shapes(config: LlamaConfig, workers: int, length: int) -> None:
    case = setting(config, workers)
    rows = torch.randint(config.vocab_size, (workers, 3, length + 1))
    LlamaStep(case.tensors, rows, totals := case.totals(), accumulate=False)()
    assert_is_autograds(case, totals, rows)


@pytest.mark.parametrize("workers", [1, 3])
def test_ragged_micro_batches_are_one_batch(workers: int) -> None:
    case, rows = setting(SMALL, workers), token_rows(workers, 11, 7, SMALL.vocab_size)
    totals = case.totals()
    for number, micro in enumerate(rows.split(4, dim=1)):  # 4, 4 and 3
        LlamaStep(case.tensors, micro.contiguous(), totals, accumulate=number > 0)()
    assert_is_autograds(case, totals, rows)


def test_a_step_can_be_taken_again() -> None:
    """It reads rows anew and overwrites what it wrote, which a graph's replays rely on."""
    case, rows = setting(SMALL, 2), token_rows(2, 3, 7, SMALL.vocab_size)
    step = LlamaStep(case.tensors, rows, totals := case.totals(), accumulate=False)
    step()
    rows.copy_(torch.randint_like(rows, SMALL.vocab_size))
    step()
    assert_is_autograds(case, totals, rows)


def test_rows_without_any_target() -> None:
    case, rows = setting(SMALL, 3), token_rows(3, 2, 7, SMALL.vocab_size)
    rows[1] = -100
    rows[2, 1] = -100
    LlamaStep(case.tensors, rows, totals := case.totals(), accumulate=False)()
    nll, targets, gradients = case.expected(rows)
    torch.testing.assert_close(totals.nll, nll, rtol=1e-10, atol=0)
    assert totals.targets.tolist() == targets.tolist() == [targets[0].item(), 0, 7]
    for name, mine in case.layout.views(case.gradients).items():
        truth = case.layout.views(gradients)[name]
        assert not mine[1].any(), name
        torch.testing.assert_close(mine, truth, rtol=0, atol=1e-12)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("order", ["reversed", "mixed", "as in the model"])
def test_an_unusual_order_of_parameters_in_the_arena(order: str, accumulate: bool) -> None:
    names = [name for name, _ in Llama(SMALL).named_parameters()]
    groups = {
        "reversed": [names[::-1]],
        "mixed": [names[1::3], names[2::3], names[::3]],
        "as in the model": [names],
    }[order]
    case, rows = setting(SMALL, 2, groups), token_rows(2, 4, 7, SMALL.vocab_size)
    totals = case.totals()
    parts = rows.split(2, dim=1) if accumulate else [rows]
    for number, part in enumerate(parts):
        LlamaStep(case.tensors, part.contiguous(), totals, accumulate=number > 0)()
    assert_is_autograds(case, totals, rows)


@pytest.mark.parametrize("bad", [300, -1])
def test_a_target_outside_the_vocabulary_is_a_loss_of_nan(bad: int) -> None:
    case, rows = setting(SMALL, 2), token_rows(2, 2, 7, SMALL.vocab_size)
    rows[1, 0, 7] = bad  # the last one, which is no input
    LlamaStep(case.tensors, rows, totals := case.totals(), accumulate=False)()
    assert totals.nll.isnan().tolist() == [False, True]
    assert totals.loss.isnan()
