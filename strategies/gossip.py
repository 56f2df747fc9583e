"""Combining rows with a mixing matrix, exchanging between ranks only those that are needed."""

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tinyllm.strategies.topology import Matrix


class Gossip:
    """Combines this rank's workers with their peers, wherever those are.

    Worker i lives on rank ``i // W``. Sends read the arena itself, so it must not change between
    :meth:`start` and :meth:`combine`.

    Args:
        num_workers: N, on all ranks.
        rank: This process.
        like: This rank's rows ``[W, D]``; buffers are made like it once they are needed.
    """

    def __init__(self, num_workers: int, rank: int, like: Tensor) -> None:
        self._local = range(rank * len(like), (rank + 1) * len(like))
        self._num_workers = num_workers
        self._combined: Tensor | None = None
        self._received: dict[int, Tensor] = {}
        self._requests: list[dist.Work] = []
        self._started = False

    def start(self, rows: Tensor, matrix: Matrix) -> None:
        """Begins to exchange the rows that ``matrix`` ``[N, N]`` asks for.

        Args:
            rows: ``[W, D]``.
            matrix: Row i holds the weights with which worker i combines.
        """
        self._started = True
        per_rank = len(self._local)
        operations = []
        for worker in range(self._num_workers):  # every pair of ranks sees one order
            owner = worker // per_rank
            readers = {int(i) // per_rank for i in np.flatnonzero(matrix[:, worker])} - {owner}
            if worker in self._local:
                row = rows[worker - self._local.start]
                operations += [dist.P2POp(dist.isend, row, reader) for reader in sorted(readers)]
            elif self._local.start // per_rank in readers:
                if worker not in self._received:
                    self._received[worker] = torch.empty_like(rows[0])
                operations.append(dist.P2POp(dist.irecv, self._received[worker], owner))
        if operations:
            self._requests = dist.batch_isend_irecv(operations)

    def combine(self, rows: Tensor, failed: Tensor, matrix: Matrix) -> None:
        """Replaces each row by its combination, ``x_i ← Σ_j W_ij x_j``.

        Args:
            rows: ``[W, D]``, changed in place.
            failed: Scalar bool on the rows' device; where true, rows stay as they are.
            matrix: The one given to :meth:`start`, which is called here if it was not.
        """
        if not self._started:
            self.start(rows, matrix)
        for request in self._requests:
            request.wait()
        self._requests, self._started = [], False
        if self._combined is None:  # an engine may combine local rows itself
            self._combined = torch.empty_like(rows)
        for combined, worker in zip(self._combined, self._local, strict=True):
            # elementwise, and not a matrix product, which might round to TF32; in one order for
            # all workers, so that those who mix alike come to agree to the last bit
            first, *others = map(int, np.flatnonzero(matrix[worker]))
            torch.mul(self._row(rows, first), float(matrix[worker, first]), out=combined)
            for peer in others:
                combined.add_(self._row(rows, peer), alpha=float(matrix[worker, peer]))
        torch.where(failed, rows, self._combined, out=rows)

    def _row(self, rows: Tensor, worker: int) -> Tensor:
        if worker in self._local:
            return rows[worker - self._local.start]
        return self._received[worker]
