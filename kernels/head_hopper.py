"""The head's exponentials on Hopper GPUs; see :mod:`tinyllm.kernels.hopper`."""

# kernels are typed by Triton
# mypy: disable-error-code="no-untyped-def"

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tinyllm.kernels import hopper
from tinyllm.kernels.constants import LOG2_E


@gluon.jit
def finish_exponentials(z, prepared, worker, row, tile_n, tiles_n, outputs, buffers, extra):
    """Stores exp2(z · log2 e − offset), zero beyond the vocabulary, and its sums of rows."""
    sums, offset_log2, rows, vocab, masked = extra
    COLUMNS: gl.constexpr = z.shape[1]
    pieces = hopper.parts(z)
    PART: gl.constexpr = pieces[0].shape[1]
    total = gl.zeros((z.shape[0],), gl.float32, gl.SliceLayout(1, pieces[0].type.layout))
    for number in gl.static_range(COLUMNS // PART):
        column = tile_n * COLUMNS + number * PART
        e = gl.exp2(pieces[number] * LOG2_E - offset_log2)
        if masked:
            at = column + gl.arange(0, PART, gl.SliceLayout(0, e.type.layout))
            e = gl.where((at < vocab)[None, :], e, 0.0)
        hopper.send(e, outputs[0], [worker, row, column], buffers, number)
        total += gl.sum(e, 1)
    at = row + gl.arange(0, z.shape[0], total.type.layout)
    place = sums + (worker.to(gl.int64) * tiles_n + tile_n) * rows
    gl.store(place + at, total, mask=at < rows)


EXPONENTIALS = hopper.Product(finish_exponentials)


def exponentials(
    h: Tensor, embedding: Tensor, exps: Tensor, sums: Tensor, offset_log2: float
) -> None:
    """Launches the kernel; see :data:`tinyllm.kernels.head.exponentials`.

    Args:
        h: ``[W, M, C]`` bf16.
        embedding: ``[W, V, C]`` bf16.
        exps: ``[W, M, Vp]`` bf16, written.
        sums: ``[W, tiles, M]`` fp32, written.
        offset_log2: What is taken from every exponent of two.
    """
    rows, vocab = h.shape[1], embedding.shape[1]
    masked = gl.constexpr(vocab % hopper.columns_of(h.shape[2]) != 0)
    extra = (sums, offset_log2, rows, vocab, masked)
    hopper.launch(EXPONENTIALS, h, embedding, [exps], extra)
