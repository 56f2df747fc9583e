"""How many batches and tokens a second does the loader serve, from the host and from a device?

Usage: python benchmarks/loader_throughput.py [seconds per case]

The tokens are random and in memory-mapped files like a cache's; nothing trains.
"""

import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from tinyllm.data.loader import TokenLoader
from tinyllm.data.stream import TokenStream

STREAM_TOKENS = 64_000_000
SHARD_TOKENS = 1 << 24
SHAPES = ((4, 512), (128, 1024))


def make_stream(folder: Path) -> TokenStream:
    rng = np.random.default_rng(0)
    parts: list[np.ndarray] = []
    for index, start in enumerate(range(0, STREAM_TOKENS, SHARD_TOKENS)):
        path = folder / f"train-{index:05d}.bin"
        size = min(SHARD_TOKENS, STREAM_TOKENS - start)
        rng.integers(0, 32_000, size, dtype=np.uint16).tofile(path)
        parts.append(np.memmap(path, np.uint16, mode="r"))
    return TokenStream(parts, identity="synthetic")


def measure(loader: TokenLoader, device: torch.device | None, seconds: float) -> tuple[int, float]:
    """Batches served, as they would arrive at the device, and the seconds that they took."""
    batches = 0
    iterator = iter(loader)
    next(iterator)
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        batch = next(iterator, None)
        if batch is None:
            iterator = iter(loader)
            continue
        if device is not None:
            batch.to(device, non_blocking=True)
        batches += 1
    if device is not None:
        torch.cuda.synchronize(device)
    return batches, time.perf_counter() - start


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 3.0
    cuda = torch.device("cuda", 0) if torch.cuda.is_available() else None
    print("residency  rows x context    batches/s        tokens/s")
    with tempfile.TemporaryDirectory() as folder:
        stream = make_stream(Path(folder))
        for residency in ("host", "device") if cuda is not None else ("host",):
            for rows, context in SHAPES:
                loader = TokenLoader(
                    stream,
                    context=context,
                    batch_size=rows,
                    shuffle=True,
                    pin_memory=cuda is not None and residency == "host",
                    device=cuda if residency == "device" else None,
                )
                batches, elapsed = measure(loader, cuda, seconds)
                loader.close()
                rate = batches / elapsed
                shape = f"{rows} x {context}"
                print(
                    f"{residency:<9}  {shape:>14}  {rate:>11,.0f}  {rate * rows * context:>14,.0f}"
                )


if __name__ == "__main__":
    main()
