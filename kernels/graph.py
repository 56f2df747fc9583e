"""A fixed list of launches as a CUDA graph: warm-up, capture, replay and teardown in one place."""

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from traceback import clear_frames

import torch

_ABANDONED: list[torch.cuda.CUDAGraph] = []
"""Failed captures; the allocator of pinned memory may go on asking them what is theirs."""


class CapturedCall:
    """Calls a function of static tensors, from its second call on as one CUDA graph.

    The first call runs it as it is, which does its work and compiles what it launches. Capturing
    runs nothing: it needs no data and changes no state and no random generator. On a CPU every call
    runs the function.

    Args:
        function: Reads and writes tensors that stay where they are; what else it allocates lives
            in the graph's memory pool and is free again after each call.
        device: Where it runs.
        pool: Memory shared with other calls, of which no two run at the same time; from
            :func:`torch.cuda.graph_pool_handle`.
    """

    def __init__(
        self,
        function: Callable[[], None],
        device: torch.device,
        pool: tuple[int, int] | None = None,
    ) -> None:
        self._function = function
        self._device = device
        on_gpu = device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if pool is None and on_gpu else pool
        self._warm = False
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        """Runs the function's work once."""
        if self._device.type != "cuda" or not self._warm:
            self._function()
            self._warm = True
            return
        if self._graph is None:
            self._graph = self._capture()
        self._graph.replay()

    def _capture(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        # cuBLAS shall work in the pool's memory, and later not in what is the graph's
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        try:
            with torch.cuda.stream(_capture_stream(torch.cuda.current_device())):
                # other threads, such as a loader's, may go on talking to the device meanwhile
                graph.capture_begin(self._pool, "thread_local")  # type: ignore[arg-type]
                try:
                    self._function()
                except BaseException:
                    with suppress(RuntimeError):  # of which the first error is the cause
                        graph.capture_end()
                    raise
                graph.capture_end()
        except BaseException as error:
            clear_frames(error.__traceback__)  # whose variables hold memory of the pool
            self._abandon(graph)
            del graph  # the error's traceback holds this frame
            if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
                raise RuntimeError(
                    "an update could not be captured in a CUDA graph; set the strategy's backend "
                    f"to native to train without graphs: {error}"
                ) from error
            raise
        finally:
            torch._C._cuda_clearCublasWorkspaces()
        return graph

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """Undoes a failed capture, which torch does not if CUDA itself broke it off."""
        try:
            graph.pool()
        except RuntimeError:  # it has not ended
            assert self._pool is not None
            device = torch.cuda.current_device()
            for undo in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
                with suppress(RuntimeError):
                    undo(device, self._pool)
            _ABANDONED.append(graph)
            _end_capture_of_generator(device)
        graph.reset()
        torch.cuda.empty_cache()

    def release(self) -> None:
        """Gives the graph's memory back; there are no more calls after this."""
        if self._graph is not None:
            self._graph.reset()
            self._graph = None  # a graph that is reset still holds what random generators need


def _end_capture_of_generator(device: int) -> None:
    """Captures something else, without which random numbers stay what a capture alone may draw."""
    something = torch.zeros(1, device=device)
    with suppress(RuntimeError), torch.cuda.stream(_capture_stream(device)):
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        something.zero_()
        graph.capture_end()


@cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """The same for all captures, which can share a pool's memory only on one stream."""
    return torch.cuda.Stream(device)
