"""The loader: token rows of one split, batch by batch, from a position that can be saved.

Letters: T context length, R rows in the global batch, G groups (workers, or ranks in evaluation).
"""

import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinyllm.data.prefetch import Prefetcher
from tinyllm.data.rows import PADDING_ROW, DeviceRows, HostRows
from tinyllm.data.stream import TokenStream


class TokenLoader:
    """Batches of token rows: int64 tensors [rows on this rank, T+1], all of one shape.

    Row `i` of the stream is `tokens[i*T : i*T + T + 1]`. In training (`shuffle=True`) the full
    rows are served, each once per epoch, in an order that is a function of (seed, epoch) alone.
    In evaluation (`shuffle=False`) rows come in stream order and the last partial row is served
    too, so every target is seen exactly once. Whatever is missing, at a partial row's end or in
    place of a partial batch's rows, is :data:`IGNORED`.

    Row `r` of a global batch belongs to group `r mod G`, and a rank serves the rows of its
    groups in the order of `r`; so neither groups nor ranks change which tokens a batch holds.
    R is padded up to a multiple of G with ignored rows.

    Lightning saves and restores the position through :meth:`state_dict` and
    :meth:`load_state_dict`. It counts batches that were handed out, not prefetched ones.

    Args:
        stream: The tokens of a split.
        context: T, the number of targets in a row.
        batch_size: R, rows in the global batch, over all groups and ranks.
        shuffle: Training (True) or evaluation (False), as above.
        seed: Decides the order, together with the epoch.
        groups: G, the number of groups that a batch is dealt to.
        local_groups: The groups of this rank.
        pin_memory: Page-lock the host batches; needs CUDA.
        device: Hold the stream on this device and make batches there; None reads from the host.
        epoch: The epoch to start in.

    Raises:
        ValueError: The stream is too short for a row, or a number is out of range.
    """

    def __init__(
        self,
        stream: TokenStream,
        *,
        context: int,
        batch_size: int,
        shuffle: bool,
        seed: int = 0,
        groups: int = 1,
        local_groups: range = range(1),
        pin_memory: bool = False,
        device: torch.device | None = None,
        epoch: int = 0,
    ) -> None:
        _check(context, batch_size, seed, groups, local_groups)
        targets = len(stream) - 1
        needed = context if shuffle else 1
        if targets < needed:
            raise ValueError(
                f"the split holds {len(stream)} tokens; context={context} needs at least "
                f"{needed + 1} for one row. Use a smaller context or prepare more text."
            )
        self._stream = stream
        self._shuffle = shuffle
        self._seed = seed
        self._context = context
        self._batch_size = batch_size
        self._groups = groups
        self._local_groups = local_groups
        self._rows = targets // context if shuffle else -(-targets // context)
        self._full_rows = targets // context
        self._batches = -(-self._rows // batch_size)
        self.limit_batches: int | None = None
        """An epoch ends after so many batches, though `len()` counts all; None for no limit.

        Lightning stops asking at its `limit_train_batches`. A loader that knows this limit can
        tell the end of such an epoch, where a resumed run begins the next, from its middle.
        """
        self._host_rows = HostRows(stream, context, pin_memory) if device is None else None
        self._device_rows = None if device is None else DeviceRows(stream, context, device)
        self._device = device
        self._epoch = epoch
        self._batch = 0
        # Whether the present pass has handed out a batch: tells an abandoned pass, after which
        # the next epoch follows, from a fresh one, which may be started again.
        self._handed_out = False
        self._pass: weakref.ref[_Pass] | None = None

    def __len__(self) -> int:
        """Batches in one pass over the split, the last partial one included."""
        return self._batches

    def __iter__(self) -> "Iterator[Tensor]":
        """Continue at the saved position; after a pass that was left early, the next epoch."""
        self.close()
        if self._handed_out:
            self._start_epoch(self._epoch + 1)
        new = _Pass(self)
        self._pass = weakref.ref(new)
        return new

    @property
    def _epoch_batches(self) -> int:
        return min(self._batches, self.limit_batches or self._batches)

    def close(self) -> None:
        """End the present pass and its prefetch thread, if there is one."""
        current = self._pass() if self._pass is not None else None
        if current is not None:
            current.close()
        self._pass = None

    def state_dict(self) -> dict[str, Any]:
        """The position (the next batch to hand out) and what it is a position in."""
        return {"epoch": self._epoch, "batch": self._batch, **self._setting()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position; the next pass starts there, or one that waits to be started.

        Raises:
            ValueError: The position belongs to other data or another batch, context, order or
                seed; it would continue with the wrong rows.
        """
        for name, here in self._setting().items():
            saved = state.get(name)
            if saved != here:
                raise ValueError(
                    f"the checkpoint's loader position was saved with {name}={saved!r}, and this "
                    f"run has {name}={here!r}. Resume with the saved value, or start a new run "
                    f"from the checkpoint's weights."
                )
        current = self._pass() if self._pass is not None else None
        if current is not None and current.started:
            current.close()
        self._start_epoch(int(state["epoch"]))
        self._batch = int(state["batch"])
        if self._batch >= self._epoch_batches:
            self._start_epoch(self._epoch + 1)

    def _setting(self) -> dict[str, Any]:
        return {
            "seed": self._seed,
            "context": self._context,
            "batch_size": self._batch_size,
            "shuffle": self._shuffle,
            "stream_tokens": len(self._stream),
            "stream_identity": self._stream.identity,
        }

    def _start_epoch(self, epoch: int) -> None:
        self._epoch, self._batch, self._handed_out = epoch, 0, False

    def _count_batch(self) -> None:
        """A batch was handed out; after an epoch's last, the position is the next one's start."""
        self._batch += 1
        self._handed_out = True
        if self._batch == self._epoch_batches:
            self._start_epoch(self._epoch + 1)

    def _order(self) -> np.ndarray:
        if not self._shuffle:
            return np.arange(self._rows)
        # Philox's raw output and a stable sort are fixed for all time; the order that NumPy's
        # `permutation` gives may change between versions, and a resumed run with it.
        bits = np.random.Philox(np.random.SeedSequence([self._seed, self._epoch]))
        return np.argsort(bits.random_raw(self._rows), kind="stable")

    def _plan(self) -> np.ndarray:
        """Row numbers of this rank for a whole epoch: [batches, rows on this rank] int64."""
        padded = -(-self._batch_size // self._groups) * self._groups
        plan = np.full((self._batches, padded), PADDING_ROW, np.int64)
        order = np.full(self._batches * self._batch_size, PADDING_ROW, np.int64)
        order[: self._rows] = self._order()
        plan[:, : self._batch_size] = order.reshape(self._batches, self._batch_size)
        is_local = np.isin(np.arange(padded) % self._groups, list(self._local_groups))
        return plan[:, is_local]

    def _make_batches(self) -> Iterator[Tensor]:
        plan = self._plan()
        numbers = range(self._batch, self._epoch_batches)
        if self._host_rows is not None:
            return Prefetcher(_host_batches(self._host_rows, plan, numbers))
        assert self._device_rows is not None
        is_full = (plan != PADDING_ROW) & (plan < self._full_rows)
        has_full_rows: list[bool] = is_full.all(axis=1).tolist()
        # One copy per epoch: batches are then made without any transfer from the host, which
        # would wait for the device.
        on_device = torch.from_numpy(plan).to(self._device)
        return _device_batches(self._device_rows, on_device, has_full_rows, numbers)


def _check(context: int, batch_size: int, seed: int, groups: int, local_groups: range) -> None:
    for name, value in (("context", context), ("batch_size", batch_size), ("groups", groups)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    if seed < 0:
        raise ValueError(f"seed is {seed}; it must not be negative")
    if not local_groups or not set(local_groups) <= set(range(groups)):
        raise ValueError(
            f"local_groups is {local_groups}; it must be a non-empty part of range({groups})"
        )


def _host_batches(gather: HostRows, plan: np.ndarray, numbers: range) -> Iterator[Tensor]:
    for number in numbers:
        yield gather(plan[number])


def _device_batches(
    gather: DeviceRows, plan: Tensor, has_full_rows: list[bool], numbers: range
) -> Iterator[Tensor]:
    for number in numbers:
        yield gather(plan[number], full=has_full_rows[number])


class _Pass:
    """One pass over a loader's epoch; counts what it hands out.

    It starts with its first batch, at the position that the loader has then: Lightning makes
    iterators that it never uses, and some before it restores the position.
    """

    def __init__(self, loader: TokenLoader) -> None:
        self._loader = loader
        self._batches: Iterator[Tensor] | None = None
        self._closed = False

    @property
    def started(self) -> bool:
        """Whether a batch was asked for."""
        return self._batches is not None

    def __iter__(self) -> "_Pass":
        return self

    def __next__(self) -> Tensor:
        if self._closed:
            raise StopIteration
        if self._batches is None:
            self._batches = self._loader._make_batches()
        batch = next(self._batches)
        self._loader._count_batch()
        return batch

    def close(self) -> None:
        """Hand out nothing more; stops the prefetch thread."""
        if isinstance(self._batches, Prefetcher):
            self._batches.close()
        self._closed = True
