"""SwiGLU beside products, both ways, on Hopper GPUs; see :mod:`tinyllm.kernels.hopper`."""

# kernels are typed by Triton
# mypy: disable-error-code="no-untyped-def"

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tinyllm.kernels import hopper
from tinyllm.kernels.constants import LOG2_E

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
"""How warps hold a part that was loaded: each thread 16 bytes of a row at a time, and each warp its
rows of a product, so that numbers change hands within a warp when it is laid out as that."""

_ENOUGH_ROWS = 32_768
"""Of all workers, on the way back: with fewer it takes as long as its parts apart."""

_WIDEST = 512
"""On the way back: a wider layer leaves room for so few slices that it takes longer."""


def pays(x: Tensor, activated: int) -> bool:
    """Whether gates and ups for ``activated`` columns can be made here of x, in less time."""
    return hopper.pays(x) and activated % GATES == 0


def backward_pays(dy: Tensor, activated: int) -> bool:
    """Whether their gradients can be made here of dy, in less time."""
    workers, rows, width = dy.shape
    enough = workers * rows >= _ENOUGH_ROWS and width <= _WIDEST
    return enough and activated % _COLUMNS == 0 and hopper.fits(dy)


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
        activated = gate * _sigmoid(gate) * up
        hopper.send(activated, outputs[1], [worker, row, column], buffers, 3 * number + 2)


FORWARD = hopper.Product(finish_swiglu, boxes=2, columns=_COLUMNS)


def swiglu(x: Tensor, weight: Tensor, gate_up: Tensor, activated: Tensor) -> None:
    """``x · Wᵀ`` and its activation; see :data:`tinyllm.kernels.swiglu.swiglu_linear`."""
    hopper.launch(FORWARD, x, weight, [gate_up, activated], (activated.shape[2],))


@gluon.jit
def load_gates(z, worker, row, tile_n, extra):
    """Gates and ups that go with a tile z, one part after the other, laid out as ``_LOADED``."""
    pointer, rows, up_at = extra
    LAYOUT: gl.constexpr = _LOADED
    PART: gl.constexpr = hopper.parts(z)[0].shape[1]
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


BACKWARD = hopper.Product(finish_swiglu_backward, load_gates, columns=_COLUMNS, exchange=True)


def swiglu_backward(dy: Tensor, weight: Tensor, gate_up: Tensor, dgate_up: Tensor) -> None:
    """``dy · W`` and back through the activation; see
    :data:`tinyllm.kernels.swiglu.swiglu_input_gradient`.
    """
    turned = weight.transpose(1, 2).contiguous()
    hopper.launch(BACKWARD, dy, turned, [dgate_up], (gate_up, dy.shape[1], weight.shape[2]))
