"""The arena's layout, for any shapes and groups; and how the update kernel cuts it up."""

from fractions import Fraction
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tinyllm.arena import ALIGNMENT, ArenaLayout
from tinyllm.kernels.adamw import block_columns, column_blocks, hyperparameter_row

shapes = st.lists(st.integers(1, 9), max_size=3).map(tuple) | st.tuples(
    st.sampled_from([0, 1, 63, 64, 65, 128, 1000])
)


@st.composite
def layouts(draw: st.DrawFn) -> ArenaLayout:
    groups = draw(st.lists(st.lists(shapes, max_size=5), min_size=1, max_size=4))
    if not any(groups):
        groups[0].append(draw(shapes))
    return ArenaLayout.of(
        [{f"{g}.{i}": s for i, s in enumerate(group)} for g, group in enumerate(groups)]
    )


def columns_of(layout: ArenaLayout) -> dict[str, range]:
    return {slot.name: range(slot.offset, slot.offset + slot.numel) for slot in layout.slots}


@given(layouts())
def test_parameters_are_aligned_disjoint_and_inside(layout: ArenaLayout) -> None:
    used = [column for columns in columns_of(layout).values() for column in columns]
    assert len(set(used)) == len(used) == layout.num_parameters
    assert all(slot.offset % ALIGNMENT == 0 for slot in layout.slots)
    assert layout.row_numel % ALIGNMENT == 0
    assert max(used, default=-1) < max(layout.row_numel, 1)


@given(layouts())
def test_no_more_padding_than_alignment_needs(layout: ArenaLayout) -> None:
    needed = sum(-(-slot.numel // ALIGNMENT) for slot in layout.slots)
    assert layout.row_numel == needed * ALIGNMENT


@given(layouts())
def test_groups_follow_one_another_and_hold_their_parameters(layout: ArenaLayout) -> None:
    bounds = [bound for group in layout.groups for bound in group]
    assert bounds[0] == 0
    assert bounds[-1] == layout.row_numel
    assert bounds == sorted(bounds)
    assert all(a == b for a, b in zip(bounds[1::2], bounds[2::2], strict=False))
    for slot in layout.slots:
        start, stop = layout.groups[int(slot.name.split(".")[0])]
        assert start <= slot.offset
        assert slot.offset + slot.numel <= stop


@given(layouts(), st.lists(st.integers(1, 4), max_size=2), st.integers(0, 99))
def test_views_take_and_give_values_and_leave_padding(
    layout: ArenaLayout, leading: list[int], seed: int
) -> None:
    flat = torch.zeros(*leading, layout.row_numel)
    generator = torch.Generator().manual_seed(seed)
    values = {s.name: torch.randn((*leading, *s.shape), generator=generator) for s in layout.slots}
    for name, view in layout.views(flat).items():
        view.copy_(values[name])
    for name, view in layout.views(flat).items():
        assert torch.equal(view, values[name])
        assert view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
    assert (flat != 0).sum().item() == layout.num_parameters * prod(leading)


@given(layouts(), st.integers(0, 4000))
def test_rows_of_another_length_are_refused(layout: ArenaLayout, length: int) -> None:
    if length != layout.row_numel:
        with pytest.raises(ValueError, match=f"rows hold {length} elements; this layout needs"):
            layout.views(torch.zeros(2, length))


# --- the update kernel's blocks ---------------------------------------------------------------


@given(layouts(), st.integers(1, 32))
def test_blocks_cover_every_column_once_within_its_group(layout: ArenaLayout, workers: int) -> None:
    blocks = column_blocks(layout.groups, workers)
    covered = [column for start, stop, _ in blocks for column in range(start, stop)]
    assert covered == list(range(layout.row_numel))
    for start, stop, group in blocks:
        assert layout.groups[group][0] <= start < stop <= layout.groups[group][1]
        assert stop - start <= block_columns(workers)
        assert start % ALIGNMENT == stop % ALIGNMENT == 0


@given(st.lists(st.integers(0, 5000), min_size=2, max_size=6).map(sorted), st.integers(1, 8))
def test_ranges_that_are_not_aligned_are_refused(bounds: list[int], workers: int) -> None:
    groups = list(zip(bounds[::2], bounds[1::2], strict=False))
    if all(bound % ALIGNMENT == 0 for group in groups for bound in group):
        column_blocks(groups, workers)
        return
    with pytest.raises(ValueError, match="multiples of 64"):
        column_blocks(groups, workers)


betas = st.floats(0, 0.9999999) | st.sampled_from([0.9, 0.95, 0.98, 0.99, 0.999, 0.99943, 0.999999])


@given(st.floats(1e-8, 1), betas, betas, st.floats(0, 1), st.integers(1, 2_000))
def test_hyperparameters_are_right_to_a_millionth(
    lr: float, beta1: float, beta2: float, decay: float, step: int
) -> None:
    row = hyperparameter_row(lr, (beta1, beta2), 1e-8, decay, step)
    first, second = (1 - Fraction(beta) ** step for beta in (beta1, beta2))
    exact = [
        Fraction(lr) * Fraction(decay),
        1 - Fraction(beta1),
        1 - Fraction(beta2),
        Fraction(1e-8),
        Fraction(lr) / first,
    ]
    for found, wanted in zip(row, exact, strict=False):
        assert found == pytest.approx(float(wanted), rel=1e-7, abs=1e-300)
    assert row[5] ** -2 == pytest.approx(float(second), rel=1e-7)
