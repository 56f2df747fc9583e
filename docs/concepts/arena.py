"""How parameters lie in an arena; shown on the page about it, and run by a test."""

import torch

# --8<-- [start:layout]
from tinyllm.arena import Arena, ArenaLayout

matrices = {"embed": (1000, 96), "proj": (96, 96)}
scales = {"norm": (96,)}
layout = ArenaLayout.of([matrices, scales])  # a dictionary for each optimizer group
arena = Arena(layout, workers=4, dtype=torch.float32, device=torch.device("cpu"))

assert arena.weights.shape == (4, layout.row_numel)
assert layout.groups == ((0, 105_216), (105_216, 105_344))  # 128 columns for 96 scales
views = layout.views(arena.weights)
assert views["proj"].shape == (4, 96, 96)  # no copy: the arena's own memory
# --8<-- [end:layout]
