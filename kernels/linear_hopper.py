"""Linear layers on Hopper GPUs with what follows them; see :mod:`tinyllm.kernels.hopper`."""

# kernels are typed by Triton
# mypy: disable-error-code="no-untyped-def"

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tinyllm.kernels import hopper

HEAD = 64
"""Dimension of the heads that can be rotated here: a part of a result."""


COLUMNS_BACKWARD = 128
"""Of a tile of gradients, so that registers have room for its gates and ups."""


def columns_of(width: int) -> int:
    """Of a tile, as many as shared memory has room for."""
    return 256 if width <= 320 else 128


def gates_of(width: int) -> int:
    """In a tile of gates and ups."""
    return columns_of(width) // 2


def fits(x: Tensor) -> bool:
    """Whether a layer of these inputs can run here."""
    return hopper.fits(x, columns_of(x.shape[2]))


@gluon.jit
def _turned(head, row, turns, cos_ptr, sin_ptr, length):
    """A head ``[64, 64]`` of rows from ``row`` on, turned if it is one of queries or keys."""
    HALF: gl.constexpr = head.shape[1] // 2
    first, second = hopper.halves(head)
    layout: gl.constexpr = first.type.layout
    position = (row + gl.arange(0, head.shape[0], gl.SliceLayout(1, layout))) % length
    at = position[:, None] * HALF + gl.arange(0, HALF, gl.SliceLayout(0, layout))[None, :]
    cos = gl.where(turns, gl.load(cos_ptr + at), 1.0)
    sin = gl.where(turns, gl.load(sin_ptr + at), 0.0)
    both = gl.join(first * cos - second * sin, second * cos + first * sin)
    return both.permute([0, 2, 1]).reshape([head.shape[0], head.shape[1]])


@gluon.jit
def finish_rotation(z, fetched, worker, row, tile_n, tiles_n, outputs, buffers, extra):
    """Turns the heads of queries and keys by their positions; see :mod:`tinyllm.kernels.rope`."""
    cos_ptr, sin_ptr, length, turned = extra
    COLUMNS: gl.constexpr = z.shape[1]
    HEAD: gl.constexpr = 64
    pieces = hopper.parts(z)
    for number in gl.static_range(COLUMNS // HEAD):
        column = tile_n * COLUMNS + number * HEAD
        head = _turned(pieces[number], row, column < turned, cos_ptr, sin_ptr, length)
        hopper.send(head, outputs[0], [worker, row, column], buffers, number)


def rotated(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, heads: int, length: int, qkv: Tensor
) -> None:
    """``x · Wᵀ`` with queries and keys turned; see :data:`tinyllm.kernels.rope.rotated_linear`."""
    extra = (cos, sin, length, 2 * heads * HEAD)
    columns = columns_of(x.shape[2])
    hopper.launch(x, weight, [qkv], finish=finish_rotation, extra=extra, columns=columns)


@gluon.jit
def finish_swiglu(z, fetched, worker, row, tile_n, tiles_n, outputs, buffers, extra):
    """Stores gates, ups and silu(gate) · up; a tile has as many gates as ups."""
    (up_at,) = extra
    PART: gl.constexpr = 64
    HALF: gl.constexpr = z.shape[1] // 2
    PARTS: gl.constexpr = HALF // PART
    pieces = hopper.parts(z)
    for number in gl.static_range(PARTS):
        column = tile_n * HALF + number * PART
        gate = pieces[number]
        up = pieces[PARTS + number]
        hopper.send(gate, outputs[0], [worker, row, column], buffers, 3 * number)
        hopper.send(up, outputs[0], [worker, row, up_at + column], buffers, 3 * number + 1)
        activated = gate * up / (1.0 + gl.exp2(gate * -1.4426950408889634))
        hopper.send(activated, outputs[1], [worker, row, column], buffers, 3 * number + 2)


def swiglu(x: Tensor, weight: Tensor, gate_up: Tensor, activated: Tensor) -> None:
    """``x · Wᵀ`` and its activation; see :data:`tinyllm.kernels.swiglu.swiglu_linear`."""
    hopper.launch(
        *(x, weight, [gate_up, activated]),
        finish=finish_swiglu,
        extra=(activated.shape[2],),
        columns=columns_of(x.shape[2]),
        boxes=2,
    )


@gluon.jit
def fetch_gate_up(PART: gl.constexpr, worker, row, tile_n, extra):
    """Gates and ups of a tile of 128 columns, two parts of each."""
    gate_up, rows, width = extra
    at = row + gl.arange(0, 64, gl.SliceLayout(1, PART))
    columns = tile_n * 128 + gl.arange(0, 64, gl.SliceLayout(0, PART))[None, :]
    place = gate_up + (worker.to(gl.int64) * rows + at)[:, None] * (2 * width) + columns
    mask = (at < rows)[:, None]
    gate_0 = gl.load(place, mask=mask, other=0.0)
    gate_1 = gl.load(place + 64, mask=mask, other=0.0)
    up_0 = gl.load(place + width, mask=mask, other=0.0)
    up_1 = gl.load(place + width + 64, mask=mask, other=0.0)
    return gate_0, gate_1, up_0, up_1


@gluon.jit
def finish_swiglu_backward(z, fetched, worker, row, tile_n, tiles_n, outputs, buffers, extra):
    """Turns gradients of the activation into those of gates and ups."""
    _, _, width = extra
    PART: gl.constexpr = 64
    pieces = hopper.parts(z)
    for number in gl.static_range(2):
        column = tile_n * 128 + number * PART
        gate = fetched[number].to(gl.float32)
        up = fetched[2 + number].to(gl.float32)
        sigmoid = 1.0 / (1.0 + gl.exp2(gate * -1.4426950408889634))
        silu = gate * sigmoid
        dgate = pieces[number] * up * (sigmoid + silu * (1.0 - sigmoid))
        hopper.send(dgate, outputs[0], [worker, row, column], buffers, 2 * number)
        dup = pieces[number] * silu
        hopper.send(dup, outputs[0], [worker, row, width + column], buffers, 2 * number + 1)


def swiglu_backward(dy: Tensor, weight: Tensor, gate_up: Tensor, dgate_up: Tensor) -> None:
    """``dy · W`` and on through the activation.

    See :data:`tinyllm.kernels.swiglu.swiglu_input_gradient`.
    """
    hopper.launch(
        *(dy, weight, [dgate_up]),
        finish=finish_swiglu_backward,
        fetch=fetch_gate_up,
        extra=(gate_up, dy.shape[1], weight.shape[2]),
        columns=COLUMNS_BACKWARD,
        transposed=True,
    )
