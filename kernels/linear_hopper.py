"""Linear layers on Hopper GPUs with what follows them; see :mod:`tinyllm.kernels.hopper`."""

# kernels are typed by Triton
# mypy: disable-error-code="no-untyped-def"

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tinyllm.kernels import hopper
from tinyllm.kernels.constants import LOG2_E

_ENOUGH_ROWS, _ENOUGH_WIDE_ROWS = 4_096, 16_384
"""Of all workers, for narrow and for wide layers: with fewer, fetching weights takes too long."""

HEAD = hopper.PART
"""Dimension of the heads that can be rotated here."""


def gates_of(width: int) -> int:
    """In a tile of gates and ups."""
    return hopper.columns_of(width) // 2


def pays(x: Tensor) -> bool:
    """Whether a layer of these inputs can run here, and takes less time than its parts apart."""
    workers, rows, width = x.shape
    enough = _ENOUGH_ROWS if hopper.columns_of(width) == 256 else _ENOUGH_WIDE_ROWS
    return workers * rows >= enough and hopper.fits(x)


@gluon.jit
def _turned(head, row, turns, cos_ptr, sin_ptr, length):
    """A head ``[64, 64]`` of rows from ``row`` on, turned if it is one of queries or keys."""
    HALF: gl.constexpr = head.shape[1] // 2
    half, _other = hopper.halves(head)
    layout: gl.constexpr = half.type.layout
    position = (row + gl.arange(0, head.shape[0], gl.SliceLayout(1, layout))) % length
    at = position[:, None] * HALF + gl.arange(0, HALF, gl.SliceLayout(0, layout))[None, :]
    cos = gl.where(turns, gl.load(cos_ptr + at), 1.0)
    sin = gl.where(turns, gl.load(sin_ptr + at), 0.0)
    return hopper.turned(head, cos, sin)


@gluon.jit
def finish_rotation(z, worker, row, tile_n, tiles_n, outputs, buffers, extra):
    """Turns the heads of queries and keys by their positions; see :mod:`tinyllm.kernels.rope`."""
    cos_ptr, sin_ptr, length, turned = extra
    COLUMNS: gl.constexpr = z.shape[1]
    pieces = hopper.parts(z)
    HEAD: gl.constexpr = pieces[0].shape[1]
    for number in gl.static_range(COLUMNS // HEAD):
        column = tile_n * COLUMNS + number * HEAD
        head = _turned(pieces[number], row, column < turned, cos_ptr, sin_ptr, length)
        hopper.send(head, outputs[0], [worker, row, column], buffers, number)


def rotated(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, heads: int, length: int, qkv: Tensor
) -> None:
    """``x · Wᵀ`` with queries and keys turned; see :data:`tinyllm.kernels.rope.rotated_linear`."""
    extra = (cos, sin, length, 2 * heads * HEAD)
    hopper.launch(x, weight, [qkv], finish=finish_rotation, extra=extra)


@gluon.jit
def finish_swiglu(z, worker, row, tile_n, tiles_n, outputs, buffers, extra):
    """Stores gates, ups and silu(gate) · up; a tile has as many gates as ups."""
    (up_at,) = extra
    pieces = hopper.parts(z)
    PART: gl.constexpr = pieces[0].shape[1]
    HALF: gl.constexpr = z.shape[1] // 2
    PARTS: gl.constexpr = HALF // PART
    for number in gl.static_range(PARTS):
        column = tile_n * HALF + number * PART
        gate = pieces[number]
        up = pieces[PARTS + number]
        hopper.send(gate, outputs[0], [worker, row, column], buffers, 3 * number)
        hopper.send(up, outputs[0], [worker, row, up_at + column], buffers, 3 * number + 1)
        activated = gate * up / (1.0 + gl.exp2(gate * -LOG2_E))
        hopper.send(activated, outputs[1], [worker, row, column], buffers, 3 * number + 2)


def swiglu(x: Tensor, weight: Tensor, gate_up: Tensor, activated: Tensor) -> None:
    """``x · Wᵀ`` and its activation; see :data:`tinyllm.kernels.swiglu.swiglu_linear`."""
    hopper.launch(
        *(x, weight, [gate_up, activated]),
        finish=finish_swiglu,
        extra=(activated.shape[2],),
        boxes=2,
    )
