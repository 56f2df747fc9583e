"""Which tiles each program of :mod:`tinyllm.kernels.hopper` computes."""

from functools import cache

import torch
import triton
from torch import Tensor

Segment = tuple[int, int, int]
"""A tile of the weight, and the first and last (exclusive) tile of x that go with it."""


def schedule(tiles_w: int, tiles_x: int, programs: int) -> list[list[Segment]]:
    """Deals products of tiles out to programs, each about as many.

    A program takes whole tiles of the weight one after the other. Tiles that are left over have a
    program or several each, which take equal pieces of x, the same pieces at the same time; what
    remains of x goes to programs that have none. So each row of x is read from memory about once.

    Args:
        tiles_w: Tiles of the weight, of all workers.
        tiles_x: Tiles of x that go with each of them.
        programs: Number of programs.
    """
    whole, over = tiles_w // programs * programs, tiles_w % programs
    shares: list[list[Segment]] = [
        [(tile, 0, tiles_x) for tile in range(program, whole, programs)]
        for program in range(programs)
    ]
    if over == 0:
        return shares
    groups = programs // over
    piece = triton.cdiv(over * tiles_x, programs)
    spare = programs - groups * over
    rest = [(t, x) for t in range(whole, tiles_w) for x in range(groups * piece, tiles_x)]
    share = triton.cdiv(len(rest), spare) if spare else 0
    # fetching a tile of the weight takes as long as a product
    fetches = triton.cdiv(share, max(1, tiles_x - groups * piece))
    if rest and (spare == 0 or share + fetches > triton.cdiv(tiles_x, groups)):
        piece, rest = triton.cdiv(tiles_x, groups), []
    for program in range(groups * over):
        low = program // over * piece
        if low < tiles_x:
            shares[program].append((whole + program % over, low, min(low + piece, tiles_x)))
    for number in range(spare):
        rows: dict[int, list[int]] = {}
        for tile, row in rest[number * share : (number + 1) * share]:
            rows.setdefault(tile, []).append(row)
        shares[groups * over + number] += [(t, own[0], own[-1] + 1) for t, own in rows.items()]
    return shares


@cache
def segments_and_starts(tiles_w: int, tiles_x: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Segments of all programs ``[·, 3]``, and where those of each begin and the last end."""
    programs = torch.cuda.get_device_properties(device).multi_processor_count
    shares = [share for share in schedule(tiles_w, tiles_x, programs) if share]
    starts = [0]
    for share in shares:
        starts.append(starts[-1] + len(share))
    segments = [segment for share in shares for segment in share]
    return (
        torch.tensor(segments, dtype=torch.int32, device=device),
        torch.tensor(starts, dtype=torch.int32, device=device),
    )
