"""Views of tensors that lie in one arena."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor


def at_even_distances(tensors: Sequence[Tensor]) -> Tensor | None:
    """L views ``[W, …]`` of one storage and one layout as a view ``[W, L, …]``.

    None if the steps from one to the next differ, as they do in the arena of an optimizer whose
    parameter groups are unusual.
    """
    first = tensors[0]
    offsets = [tensor.storage_offset() for tensor in tensors]
    step, *others = {after - before for before, after in pairwise(offsets)} or {0}
    if others or step < 0:
        return None
    workers, *rest = first.shape
    stride, *inner = first.stride()
    return first.as_strided((workers, len(tensors), *rest), (stride, step, *inner))
