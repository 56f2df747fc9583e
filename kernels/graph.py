"""A fixed list of launches as a CUDA graph: warm-up, capture, replay and teardown in one place."""

from collections.abc import Callable

import torch


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
        self._pool = pool
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
        try:
            # other threads, such as a loader's, may go on talking to the device meanwhile
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self._function()
        except BaseException as error:
            graph.reset()
            torch.cuda.empty_cache()
            if isinstance(error, RuntimeError):
                raise RuntimeError(
                    f"an update could not be captured in a CUDA graph: {error}; set the strategy's "
                    "backend to native to train without graphs"
                ) from error
            raise
        return graph

    def release(self) -> None:
        """Gives the graph's memory back; the next call starts afresh."""
        if self._graph is not None:
            self._graph.reset()
            self._graph = None
        self._warm = False
