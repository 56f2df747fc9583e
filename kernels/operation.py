"""What every kernel module exports: one operation, as a reference and as a Triton launcher."""

from collections.abc import Callable
from typing import Generic, ParamSpec

import torch

Arguments = ParamSpec("Arguments")


class Operation(Generic[Arguments]):
    """Writes its results into tensors that are given to it.

    Calling it launches the Triton kernel on a GPU and runs the reference on a CPU, so the same list
    of calls is a fast step there and a checked one here.

    Args:
        reference: The mathematics in plain PyTorch, for any device and dtype.
        launch: Launches the kernel with the same arguments.
    """

    def __init__(
        self, reference: Callable[Arguments, None], launch: Callable[Arguments, None]
    ) -> None:
        self.reference = reference
        self.launch = launch
        self.__doc__ = reference.__doc__

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        """Runs where the first argument, a tensor or a tuple of them, lies."""
        first = args[0][0] if isinstance(args[0], tuple) else args[0]
        assert isinstance(first, torch.Tensor)
        (self.launch if first.is_cuda else self.reference)(*args, **kwargs)
