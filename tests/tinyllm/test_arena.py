"""The arena's layout: aligned, disjoint, in group order, and shared with parameters."""

import pytest
import torch
from torch import nn

from tinyllm.arena import ALIGNMENT, Arena, ArenaLayout, bind

LAYOUT = ArenaLayout.of([{"a": (3, 5), "b": (64,)}, {"c": (), "d": (2, 1, 7)}])


def test_parameters_are_aligned_and_groups_are_column_ranges() -> None:
    assert [(slot.name, slot.offset) for slot in LAYOUT.slots] == [
        ("a", 0),
        ("b", 64),
        ("c", 128),
        ("d", 192),
    ]
    assert LAYOUT.groups == ((0, 128), (128, 256))
    assert LAYOUT.row_numel == 256
    assert LAYOUT.num_parameters == 15 + 64 + 1 + 14
    assert all(slot.offset % ALIGNMENT == 0 for slot in LAYOUT.slots)


def test_views_share_memory_and_do_not_overlap() -> None:
    flat = torch.zeros(2, 256)
    views = LAYOUT.views(flat)
    assert {name: tuple(view.shape) for name, view in views.items()} == {
        "a": (2, 3, 5),
        "b": (2, 64),
        "c": (2,),
        "d": (2, 2, 1, 7),
    }
    for number, view in enumerate(views.values(), start=1):
        view += number
    assert flat.sum().item() == 2 * (1 * 15 + 2 * 64 + 3 * 1 + 4 * 14)
    assert (flat != 0).sum().item() == 2 * LAYOUT.num_parameters  # the padding stays zero


def test_rows_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="rows hold 255 elements; this layout needs 256"):
        LAYOUT.views(torch.zeros(2, 255))


@pytest.mark.parametrize("groups", [[], [{}], [{"a": (1,)}, {"a": (2,)}]])
def test_nothing_and_a_name_twice_are_refused(groups: list[dict[str, tuple[int, ...]]]) -> None:
    with pytest.raises(ValueError, match="named once"):
        ArenaLayout.of(groups)


def test_bound_parameters_are_views() -> None:
    layout = ArenaLayout.of([{"weight": (4, 3), "bias": (4,)}])
    arena = Arena(layout, 2, torch.float32, torch.device("cpu"))
    linear = nn.Linear(3, 4)
    parameters = dict(linear.named_parameters())
    bind(parameters, layout, arena.weights[1])
    with torch.no_grad():
        linear.weight.fill_(2.0)
    assert arena.weights[1, :12].eq(2.0).all()
    assert arena.weights[0].eq(0).all()
