"""Rotary positions beside a product on Hopper GPUs; see :mod:`tinyllm.kernels.hopper`."""

# kernels are typed by Triton
# mypy: disable-error-code="no-untyped-def"

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tinyllm.kernels import hopper

HEAD = hopper.PART
"""Dimension of the heads that can be rotated here."""


@gluon.jit
def load_turns(z, worker, row, tile_n, extra):
    """Cosines and sines of a tile's rows, for heads that are laid out as parts of z."""
    cos_ptr, sin_ptr, length, _turned_columns = extra
    half, _other = hopper.halves(hopper.parts(z)[0])
    layout: gl.constexpr = half.type.layout
    position = (row + gl.arange(0, z.shape[0], gl.SliceLayout(1, layout))) % length
    column = gl.arange(0, half.shape[1], gl.SliceLayout(0, layout))
    at = position[:, None] * half.shape[1] + column[None, :]
    return gl.load(cos_ptr + at), gl.load(sin_ptr + at)


@gluon.jit
def finish_rotation(z, turns, worker, row, tile_n, tiles_n, outputs, buffers, extra):
    """Turns the heads of queries and keys by their positions; see :mod:`tinyllm.kernels.rope`."""
    cos, sin = turns
    _cos_ptr, _sin_ptr, _length, turned_columns = extra
    COLUMNS: gl.constexpr = z.shape[1]
    pieces = hopper.parts(z)
    HEAD: gl.constexpr = pieces[0].shape[1]
    for number in gl.static_range(COLUMNS // HEAD):
        column = tile_n * COLUMNS + number * HEAD
        head = pieces[number]
        if column < turned_columns:
            turned_head = hopper.turned(head, cos, sin)
            head = gl.convert_layout(turned_head, head.type.layout, assert_trivial=True)
        hopper.send(head, outputs[0], [worker, row, column], buffers, number)


ROTATION = hopper.Product(finish_rotation, load_turns)


def rotated(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, heads: int, length: int, qkv: Tensor
) -> None:
    """``x · Wᵀ`` with queries and keys turned; see :data:`tinyllm.kernels.rope.rotated_linear`."""
    hopper.launch(ROTATION, x, weight, [qkv], (cos, sin, length, 2 * heads * HEAD))
