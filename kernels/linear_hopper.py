"""Linear layers on Hopper GPUs with what follows them; see :mod:`tinyllm.kernels.hopper`."""

# kernels are typed by Triton
# mypy: disable-error-code="no-untyped-def"

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tinyllm.kernels import hopper
from tinyllm.kernels.constants import LOG2_E

_ENOUGH_ROWS = ((320, 2_048), (512, 4_096), (1 << 30, 16_384))
"""Of all workers, for layers up to a width: with fewer, fetching weights takes too long."""

_ENOUGH_ROWS_BACKWARD, _WIDEST_BACKWARD = 32_768, 512
"""For gates' and ups' gradients, which need room in shared memory for more than results."""

HEAD = hopper.PART
"""Dimension of the heads that can be rotated here."""

_COLUMNS = 128
"""Of a tile with gates and ups. More slices of x are worth more than a larger tile."""

GATES = _COLUMNS // 2
"""Of a tile, beside as many ups."""

_LOADED = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 32], [8, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[hopper.ROWS, hopper.PART],
    )
)
"""How warps hold a part that was loaded: each warp its rows of a product, so that no warp waits for
another when it is laid out as that; each thread 16 bytes of a row at a time."""


def pays(x: Tensor) -> bool:
    """Whether a layer of these inputs can run here, and takes less time than its parts apart."""
    workers, rows, width = x.shape
    enough = next(count for widest, count in _ENOUGH_ROWS if width <= widest)
    return workers * rows >= enough and hopper.fits(x)


def backward_pays(dy: Tensor, activated: int) -> bool:
    """The same for the way back from ``activated`` columns to gates and ups."""
    workers, rows, width = dy.shape
    enough = workers * rows >= _ENOUGH_ROWS_BACKWARD and width <= _WIDEST_BACKWARD
    return enough and activated % _COLUMNS == 0 and hopper.fits(dy)


@gluon.jit
def load_turns(z, worker, row, tile_n, extra):
    """Cosines and sines of a tile's rows, for heads as :func:`finish_rotation` has them."""
    cos_ptr, sin_ptr, length, _turned = extra
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
    _cos_ptr, _sin_ptr, _length, turned = extra
    COLUMNS: gl.constexpr = z.shape[1]
    pieces = hopper.parts(z)
    HEAD: gl.constexpr = pieces[0].shape[1]
    for number in gl.static_range(COLUMNS // HEAD):
        column = tile_n * COLUMNS + number * HEAD
        head = pieces[number]
        if column < turned:
            turned_head = hopper.turned(head, cos, sin)
            head = gl.convert_layout(turned_head, head.type.layout, assert_trivial=True)
        hopper.send(head, outputs[0], [worker, row, column], buffers, number)


def rotated(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, heads: int, length: int, qkv: Tensor
) -> None:
    """``x · Wᵀ`` with queries and keys turned; see :data:`tinyllm.kernels.rope.rotated_linear`."""
    extra = (cos, sin, length, 2 * heads * HEAD)
    hopper.launch(x, weight, [qkv], prepare=load_turns, finish=finish_rotation, extra=extra)


@gluon.jit
def _sigmoid(z):
    """1 / (1 + exp(−z)); zero where the exponential is beyond 2¹²⁶."""
    below = 1.0 + gl.exp2(z * -LOG2_E)
    # a division would scale what is larger, in five more instructions
    reciprocal: gl.constexpr = "rcp.approx.ftz.f32 $0, $1;"
    return gl.inline_asm_elementwise(
        reciprocal, "=f,f", [below], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def finish_swiglu(z, prepared, worker, row, tile_n, tiles_n, outputs, buffers, extra):
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
        activated = gate * up * _sigmoid(gate)
        hopper.send(activated, outputs[1], [worker, row, column], buffers, 3 * number + 2)


def swiglu(x: Tensor, weight: Tensor, gate_up: Tensor, activated: Tensor) -> None:
    """``x · Wᵀ`` and its activation; see :data:`tinyllm.kernels.swiglu.swiglu_linear`."""
    hopper.launch(
        *(x, weight, [gate_up, activated]),
        finish=finish_swiglu,
        extra=(activated.shape[2],),
        boxes=2,
        columns=_COLUMNS,
    )


@gluon.jit
def load_gates(z, worker, row, tile_n, extra):
    """Gates and ups of a tile, one part after the other, 16 bytes of a row in each thread."""
    pointer, rows, up_at = extra
    PART: gl.constexpr = hopper.PART
    LAYOUT: gl.constexpr = _LOADED
    down = gl.arange(0, z.shape[0], gl.SliceLayout(1, LAYOUT))
    across = gl.arange(0, PART, gl.SliceLayout(0, LAYOUT))
    inside = (row + down < rows)[:, None]
    start = pointer + (worker.to(gl.int64) * rows + row) * (2 * up_at) + tile_n * z.shape[1]
    at = start + (down[:, None] * (2 * up_at) + across[None, :])
    loaded: gl.tuple = ()
    for number in gl.static_range(z.shape[1] // PART):
        loaded += (gl.load(at + number * PART, mask=inside, other=0.0),)
        loaded += (gl.load(at + up_at + number * PART, mask=inside, other=0.0),)
    return loaded


@gluon.jit
def finish_swiglu_backward(z, gates, worker, row, tile_n, tiles_n, outputs, buffers, extra):
    """Of gradients of activations makes those of gates and ups, and stores them."""
    _pointer, _rows, up_at = extra
    pieces = hopper.parts(z)
    PART: gl.constexpr = pieces[0].shape[1]
    layout: gl.constexpr = pieces[0].type.layout
    for number in gl.static_range(z.shape[1] // PART):
        column = tile_n * z.shape[1] + number * PART
        dactivated = pieces[number]
        gate = gl.convert_layout(gates[2 * number], layout).to(gl.float32)
        up = gl.convert_layout(gates[2 * number + 1], layout).to(gl.float32)
        sigmoid = _sigmoid(gate)
        silu = gate * sigmoid
        dup = dactivated * silu
        hopper.send(dup, outputs[0], [worker, row, up_at + column], buffers, 2 * number)
        dgate = dactivated * up * (sigmoid + silu * (1.0 - sigmoid))
        hopper.send(dgate, outputs[0], [worker, row, column], buffers, 2 * number + 1)


def swiglu_backward(dy: Tensor, weight: Tensor, gate_up: Tensor, dgate_up: Tensor) -> None:
    """``dy · W`` and back through the activation; see
    :data:`tinyllm.kernels.swiglu.swiglu_input_gradient`.
    """
    hopper.launch(
        *(dy, weight.transpose(1, 2).contiguous(), [dgate_up]),
        prepare=load_gates,
        finish=finish_swiglu_backward,
        extra=(gate_up, dy.shape[1], weight.shape[2]),
        columns=_COLUMNS,
        exchange=True,
    )
