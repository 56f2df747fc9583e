"""How far is each part of a gh200 update from what the GPU allows?

Usage: python benchmarks/roofline.py FOLDER [PRESET WORKERS ROWS CONTEXT]

Default: 20m 1 128 1024, which is 20m sync production. Writes ``roofline.json``, ``roofline.csv``
and ``roofline.svg`` to the folder.

Each part is captured alone in a CUDA graph, on random data of the update's shapes, and replayed;
the figure is the median of five, times how often the part runs in an update. Its floor is the
larger of two times: its floating-point operations at the rate of a large bf16 product, and the
fewest bytes it must move at the rate of a large copy, both measured in the same run. The whole
update is measured, too, as the engine runs it.
"""

import csv
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from setting import versions
from torch import Tensor

from tinyllm.arena import Arena, ArenaLayout
from tinyllm.config import PRESETS, LlamaConfig
from tinyllm.kernels import attention, head, norm
from tinyllm.kernels.adamw import gradient_squares
from tinyllm.kernels.embedding import embed, embed_backward
from tinyllm.kernels.gemm import input_gradient, linear, weight_gradient
from tinyllm.kernels.rope import rotated_linear
from tinyllm.kernels.stream import Stream
from tinyllm.kernels.swiglu import swiglu_input_gradient, swiglu_linear
from tinyllm.model import Llama
from tinyllm.strategies.engine import GroupHyperparameters, Ranks
from tinyllm.strategies.gh200 import Gh200Engine

LOW, STREAM, HIGH = 2, 3, 4
"""Bytes of a bf16 number, of one of the residual stream, and of an fp32 one."""


@dataclass
class Part:
    """A part of an update.

    Attributes:
        name: What it does.
        count: How often it runs in an update.
        flop: Floating-point operations of one run.
        moved_bytes: Fewest bytes that one run reads and writes.
        seconds: Of one run.
    """

    name: str
    count: int
    flop: float
    moved_bytes: float
    seconds: float = 0.0


def seconds_of(run: Callable[[], object]) -> float:
    """Median time of one run inside a replayed graph."""
    run()
    torch.cuda.synchronize()
    graph, repeats = torch.cuda.CUDAGraph(), 3
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            run()
    times = []
    for _ in range(6):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3 / repeats)
    return statistics.median(times[1:])


def ceilings() -> tuple[float, float]:
    """Floating-point operations and bytes a second: a large bf16 product, and a large copy."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    rate = 2 * 8192**3 / seconds_of(lambda: a @ b)
    source = torch.randn(2**30, device="cuda")
    target = torch.empty_like(source)
    # by a kernel: in a graph, copy_ becomes a transfer of the copy engines, which are slower
    return rate, 2 * HIGH * source.numel() / seconds_of(lambda: torch.neg(source, out=target))


class Update:
    """Tensors of an update's shapes, and its parts over them."""

    def __init__(self, config: LlamaConfig, workers: int, rows: int, context: int) -> None:
        self.config, self.workers = config, workers
        self.tokens, self.context = rows // workers * context, context
        self.all_tokens = rows * context
        self.ids = torch.randint(
            config.vocab_size, (workers, rows // workers, context + 1), device="cuda"
        )

    def low(self, *shape: int) -> Tensor:
        return torch.randn(self.workers, *shape, device="cuda").bfloat16()

    def high(self, *shape: int) -> Tensor:
        return torch.randn(self.workers, *shape, device="cuda")

    def product(
        self,
        name: str,
        inner: int,
        outer: int,
        forward: Callable[[Tensor, Tensor], object] = linear,
        more_bytes: float = 0.0,
        backward: Callable[[Tensor, Tensor], object] = input_gradient,
        more_bytes_back: float = 0.0,
    ) -> list[Part]:
        """A linear layer's three products, in every layer.

        Args:
            name: Of the layer.
            inner: Width of its inputs.
            outer: Width of its results.
            forward: The first product, with what is done in the same kernel.
            more_bytes: That this writes beside.
            backward: The second product, likewise.
            more_bytes_back: That this reads and writes beside.
        """
        m, layers, w = self.tokens, self.config.layers, self.workers
        x, y, weight = self.low(m, inner), self.low(m, outer), self.low(outer, inner)
        gradient = self.high(outer, inner)
        flop = 2.0 * w * m * inner * outer
        both = LOW * w * m * (inner + outer)
        size = w * inner * outer
        return [
            Part(
                name,
                *(layers, flop, both + LOW * size + more_bytes),
                seconds_of(lambda: forward(x, weight)),
            ),
            Part(
                f"{name}, input gradient",
                *(layers, flop, both + LOW * size + more_bytes_back),
                seconds_of(lambda: backward(y, weight)),
            ),
            Part(
                f"{name}, weight gradient",
                *(layers, flop, both + HIGH * size),
                seconds_of(lambda: weight_gradient(y, x, gradient, False)),
            ),
        ]

    def norms(self) -> list[Part]:
        m, c, count = self.tokens, self.config.width, 2 * self.config.layers + 1
        x, out, branch, normed = (self.low(m, c) for _ in range(4))
        stream, sums = (Stream(t, torch.empty_like(t, dtype=torch.int8)) for t in (x, out))
        rstd, weight = self.high(m), self.high(c)
        dweight = self.high(norm.partials(self.workers, m), c)
        elements = self.workers * m * c
        return [
            Part(
                "residual and norm",
                *(count, 0.0, (2 * STREAM + 2 * LOW) * elements),
                seconds_of(
                    lambda: norm.residual_rms_norm(stream, branch, weight, 1e-5, sums, normed, rstd)
                ),
            ),
            Part(
                "residual and norm, backward",
                *(count, 0.0, (2 * STREAM + 2 * LOW) * elements),
                seconds_of(
                    lambda: norm.rms_norm_backward(
                        branch, None, normed, weight, rstd, stream, sums, dweight
                    )
                ),
            ),
        ]

    def attention(self) -> list[Part]:
        m, c, heads, layers = self.tokens, self.config.width, self.config.heads, self.config.layers
        qkv, dout = self.low(m, 3 * c), self.low(m, c)
        tables = torch.ones(self.context, c // heads // 2, device="cuda")
        attended = attention.attend(qkv, heads, self.context)
        packed = torch.empty_like(qkv)
        elements = self.workers * m * c
        flop = 2.0 * self.all_tokens * self.context * c  # q·k and p·v, half of them masked
        return [
            Part(
                "attention",
                *(layers, flop, 4 * LOW * elements),
                seconds_of(lambda: attention.attend(qkv, heads, self.context)),
            ),
            Part(
                "attention and rotary positions, backward",
                *(layers, 2.5 * flop, 8 * LOW * elements),
                seconds_of(
                    lambda: attention.attend_backward(dout, qkv, attended, tables, tables, packed)
                ),
            ),
        ]

    def qkv(self) -> list[Part]:
        c, heads, context = self.config.width, self.config.heads, self.context
        tables = torch.ones(context, c // heads // 2, device="cuda")
        out = self.low(self.tokens, 3 * c)
        return self.product(
            *("qkv, rotary positions", c, 3 * c),
            lambda x, weight: rotated_linear(x, weight, tables, tables, heads, context, out),
        )

    def feed_forward(self) -> list[Part]:
        m, f = self.tokens, self.config.ffn_width
        gate_up, out, activated = self.low(m, 2 * f), self.low(m, 2 * f), self.low(m, f)
        elements = self.workers * m * f
        return [
            *self.product(
                *("gate and up, SwiGLU", self.config.width, 2 * f),
                lambda x, weight: swiglu_linear(x, weight, gate_up, activated),
                LOW * elements,
            ),
            # of a gradient of F columns, which is not stored, it makes 2·F, and reads as many
            *self.product(
                *("down, SwiGLU", f, self.config.width),
                backward=lambda y, weight: swiglu_input_gradient(y, weight, gate_up, out),
                more_bytes_back=3 * LOW * elements,
            ),
        ]

    def embedding_and_head(self) -> list[Part]:
        m, c, v, w = self.tokens, self.config.width, self.config.vocab_size, self.workers
        h, table, low_table = self.low(m, c), self.high(v, c), self.low(v, c)
        x = Stream(self.low(m, c), torch.empty_like(h, dtype=torch.int8))
        low_table *= 0.05
        exps = self.low(m, head.padded(v))
        sums, inverse, scaled = self.high(head.tiles(v, c), m), self.high(m), self.low(m, c)
        tally = self.high(-(-m // head.FINISHED_ROWS), 2)
        dlogits = exps[:, :, :v]
        flop, logits, hidden = 2.0 * w * m * v * c, LOW * w * m * v, LOW * w * m * c
        return [
            Part(
                "embedding",
                *(1, 0.0, (HIGH + STREAM) * w * m * c),
                seconds_of(lambda: embed(self.ids, table, x)),
            ),
            Part(
                "head, exponentials",
                *(1, flop, logits + hidden + LOW * w * v * c),
                seconds_of(lambda: head.exponentials(h, low_table, exps, sums)),
            ),
            Part(
                "head, loss",
                *(1, 0.0, 3.0 * hidden + HIGH * sums.numel()),
                seconds_of(
                    lambda: head.finish(h, low_table, self.ids, exps, sums, inverse, scaled, tally)
                ),
            ),
            Part(
                "head, input gradient",
                *(1, flop, logits + hidden + LOW * w * v * c),
                seconds_of(lambda: input_gradient(dlogits, low_table)),
            ),
            Part(
                "head, weight gradient",
                *(1, flop, logits + hidden + HIGH * w * v * c),
                seconds_of(lambda: weight_gradient(dlogits, scaled, table, False)),
            ),
            Part(
                "embedding, backward",
                *(1, 0.0, (HIGH + STREAM) * w * m * c),
                seconds_of(lambda: embed_backward(self.ids, x, table)),
            ),
        ]

    def parts(self) -> list[Part]:
        """All but the optimizer."""
        c = self.config.width
        return [
            *self.embedding_and_head(),
            *self.norms(),
            *self.qkv(),
            *self.attention(),
            *self.product("attention's output", c, c),
            *self.feed_forward(),
        ]


def whole_update(config: LlamaConfig, workers: int, ids: Tensor) -> tuple[float, float, list[Part]]:
    """Seconds of an update without mixing, of mixing on top of it, and the optimizer's parts."""
    llama = Llama(config).cuda()
    parameters = {f"model.{n}": p for n, p in llama.named_parameters()}
    shapes = {name: tuple(p.shape[1:]) for name, p in parameters.items()}
    layout = ArenaLayout.of(
        [{name: shape for name, shape in shapes.items() if len(shape) == size} for size in (2, 1)]
    )
    arena = Arena(layout, workers, torch.float32, torch.device("cuda"))
    for name, view in layout.views(arena.weights).items():
        view.copy_(parameters[name].detach())
    engine = Gh200Engine(arena, llama, micro_batch_size=None, ranks=Ranks(workers, workers, 1))
    groups = [GroupHyperparameters(1e-4, (0.9, 0.98), 1e-8, 0.1) for _ in layout.groups]
    batch = ids.transpose(0, 1).flatten(0, 1)

    def update() -> None:
        engine.accumulate(batch)
        engine.finish_gradients(False)
        engine.update(groups, 1.0)

    for _ in range(5):
        update()
    times = []
    for _ in range(5):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(10):
            update()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e4)
    elements = arena.weights.numel()
    squares = torch.empty(workers, 1_024, device="cuda")
    optimizer = [
        Part(
            "gradient norms",
            *(1, 0.0, HIGH * elements),
            seconds_of(lambda: gradient_squares(arena.gradients, squares)),
        ),
        Part(
            "AdamW",
            *(1, 0.0, (7 * HIGH + LOW) * elements),
            seconds_of(lambda: engine._adamw("none")),
        ),
    ]
    mixing = seconds_of(lambda: engine._adamw("awc")) - optimizer[1].seconds if workers > 1 else 0.0
    return statistics.median(times), mixing, optimizer


def draw(parts: list[Part], floors: list[float], file: Path) -> None:
    """Measured times as bars, floors as lines across them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.24 * len(parts) + 1))
    axes = figure.subplots()
    places = range(len(parts))
    axes.barh(places, [p.count * p.seconds * 1e3 for p in parts], color="#7f9fbf")
    axes.barh(places, [floor * 1e3 for floor in floors], height=0.35, color="#1f3f5f")
    axes.set_yticks(places, [f"{p.count} x {p.name}" for p in parts], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("ms of an update: measured (light), floor (dark)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    folder = Path(sys.argv[1])
    preset, *sizes = sys.argv[2:] or ["20m", "1", "128", "1024"]
    workers, rows, context = map(int, sizes)
    folder.mkdir(parents=True, exist_ok=True)
    flop_rate, byte_rate = ceilings()
    update = Update(PRESETS[preset], workers, rows, context)
    parts = update.parts()
    seconds, mixing, optimizer = whole_update(PRESETS[preset], workers, update.ids)
    parts += optimizer
    floors = [p.count * max(p.flop / flop_rate, p.moved_bytes / byte_rate) for p in parts]
    table = [
        {**asdict(p), "total_seconds": p.count * p.seconds, "floor_seconds": floor}
        for p, floor in zip(parts, floors, strict=True)
    ]
    for row in table:
        row["ratio"] = row["total_seconds"] / row["floor_seconds"]
    result = {
        **versions(),
        "workload": f"{preset}, {workers} workers, {rows} x {context}",
        "method": __doc__,
        "flop_per_second": flop_rate,
        "bytes_per_second": byte_rate,
        "update_seconds": seconds,
        "mixing_seconds": mixing,
        "floor_seconds": sum(floors),
        "ratio": seconds / sum(floors),
        "parts": table,
    }
    (folder / "roofline.json").write_text(json.dumps(result, indent=2))
    with (folder / "roofline.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, table[0])
        writer.writeheader()
        writer.writerows(table)
    draw(parts, floors, folder / "roofline.svg")
    for row in table:
        print(f"{row['name']:34}{row['total_seconds'] * 1e3:8.2f} ms {row['ratio']:6.2f} x floor")
    print(f"update {seconds * 1e3:.2f} ms, {result['ratio']:.2f} times the sum of floors")


if __name__ == "__main__":
    main()
