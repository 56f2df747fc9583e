"""The loader, for any stream, batch, context, order, groups, ranks and resume point."""

import json
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tinyllm.data.loader import TokenLoader
from tinyllm.data.stream import TokenStream
from tinyllm.model import IGNORED


@dataclass(frozen=True)
class Case:
    """A stream of distinct ids and how it is served; ids tell where they stand."""

    tokens: int
    cuts: tuple[int, ...]  # where one shard ends and the next begins
    wide: bool
    context: int
    batch_size: int
    seed: int
    groups: int
    ranks: int
    shuffle: bool

    @property
    def ids(self) -> np.ndarray:
        first = (1 << 31) - 1 - self.tokens if self.wide else (1 << 16) - self.tokens
        return np.arange(first, first + self.tokens, dtype="<u4" if self.wide else "<u2")

    def loader(self, rank: int, epoch: int = 0) -> TokenLoader:
        ends = sorted({0, self.tokens, *(cut for cut in self.cuts if cut < self.tokens)})
        parts = [self.ids[start:stop] for start, stop in pairwise(ends)]
        local = self.groups // self.ranks
        return TokenLoader(
            TokenStream(parts, "stream"),
            context=self.context,
            batch_size=self.batch_size,
            shuffle=self.shuffle,
            seed=self.seed,
            groups=self.groups,
            local_groups=range(rank * local, (rank + 1) * local),
            epoch=epoch,
        )

    def whole_batches(self, epoch: int = 0) -> list[torch.Tensor]:
        """An epoch's global batches, put together again from those of all ranks."""
        return [
            self.joined(parts)
            for parts in zip(*(self.loader(r, epoch) for r in range(self.ranks)), strict=True)
        ]

    def joined(self, parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """The rows in the order of their numbers in the batch; row r is of group r mod N."""
        rows = sum(len(part) for part in parts)
        local, whole = self.groups // self.ranks, torch.empty(rows, self.context + 1, dtype=int)
        for rank, part in enumerate(parts):
            mine = [r for r in range(rows) if r % self.groups // local == rank]
            whole[mine] = part
        return whole


@st.composite
def cases(draw: st.DrawFn, shuffle: bool | None = None) -> Case:
    ranks = draw(st.integers(1, 4))
    context = draw(st.integers(1, 24))
    return Case(
        tokens=draw(st.integers(context + 1, 400)),
        cuts=tuple(draw(st.lists(st.integers(1, 399), max_size=4))),
        wide=draw(st.booleans()),
        context=context,
        batch_size=draw(st.integers(1, 40)),
        seed=draw(st.integers(0, 1 << 64)),
        groups=ranks * draw(st.integers(1, 4)),
        ranks=ranks,
        shuffle=draw(st.booleans()) if shuffle is None else shuffle,
    )


epochs = st.integers(0, 1_000)


def served_rows(batches: list[torch.Tensor]) -> list[list[int]]:
    """All rows that are not padding, in order."""
    rows = torch.cat(batches)
    return rows[(rows != IGNORED).any(dim=1)].tolist()


@given(cases(shuffle=True), epochs)
def test_every_row_exactly_once_per_epoch(case: Case, epoch: int) -> None:
    full_rows = (case.tokens - 1) // case.context
    starts = range(0, full_rows * case.context, case.context)
    expected = [case.ids[start : start + case.context + 1].tolist() for start in starts]
    assert sorted(served_rows(case.whole_batches(epoch))) == expected


@given(cases(shuffle=False))
def test_evaluation_scores_every_target_exactly_once_in_order(case: Case) -> None:
    targets = torch.cat(case.whole_batches())[:, 1:]
    assert targets[targets != IGNORED].tolist() == case.ids[1:].tolist()


@given(cases())
def test_a_target_follows_its_input_in_the_stream(case: Case) -> None:
    rows = torch.cat(case.whole_batches())
    is_target = rows[:, 1:] != IGNORED
    assert (rows[:, 1:] - rows[:, :-1])[is_target].eq(1).all()


@given(cases())
def test_all_ranks_batches_have_one_shape(case: Case) -> None:
    shapes = {tuple(b.shape) for rank in range(case.ranks) for b in case.loader(rank)}
    local = -(-case.batch_size // case.groups) * (case.groups // case.ranks)
    assert shapes == {(local, case.context + 1)}


@given(cases(), epochs, st.integers(1, 40), st.integers(1, 4))
def test_order_is_of_seed_and_epoch_alone(
    case: Case, epoch: int, batch_size: int, groups: int
) -> None:
    other = replace(case, batch_size=batch_size, groups=groups, ranks=1, cuts=())
    assert served_rows(case.whole_batches(epoch)) == served_rows(other.whole_batches(epoch))


@given(cases(shuffle=True), epochs, epochs)
def test_epochs_have_orders_of_their_own(case: Case, epoch: int, other: int) -> None:
    full_rows = (case.tokens - 1) // case.context
    if full_rows < 20 or epoch == other:  # few rows may come in one order twice
        return
    assert served_rows(case.whole_batches(epoch)) != served_rows(case.whole_batches(other))


def passes(loader: TokenLoader, batches: int) -> list[torch.Tensor]:
    """So many batches, over as many epochs as that takes."""
    found: list[torch.Tensor] = []
    while len(found) < batches:
        for batch in loader:
            found.append(batch)
            if len(found) == batches:
                break
    return found


@given(cases(), epochs, st.data())
def test_resumed_is_as_uninterrupted(case: Case, epoch: int, data: st.DataObject) -> None:
    limit = data.draw(st.none() | st.integers(1, 5), label="limit_batches")

    def loader(rank: int, start: int) -> TokenLoader:
        made = case.loader(rank, start)
        made.limit_batches = limit
        return made

    per_epoch = len(case.loader(0)) if limit is None else min(len(case.loader(0)), limit)
    stop = data.draw(st.integers(0, 2 * per_epoch + 1), label="stopped after")
    rank = data.draw(st.integers(0, case.ranks - 1), label="rank")
    more = per_epoch + 2
    expected = passes(loader(rank, epoch), stop + more)[stop:]
    stopped = loader(rank, epoch)
    passes(stopped, stop)
    state = json.loads(json.dumps(stopped.state_dict()))
    stopped.close()
    resumed = loader(rank, 0)
    resumed.load_state_dict(state)
    assert all(map(torch.equal, passes(resumed, more), expected))


@given(cases(), st.integers(1, 4), st.data())
def test_a_position_holds_for_other_ranks(case: Case, ranks: int, data: st.DataObject) -> None:
    # as many groups, spread over another number of processes
    other = replace(case, ranks=ranks, groups=case.groups * ranks)
    stop = data.draw(st.integers(0, len(case.loader(0)) - 1), label="stopped after")
    stopped = case.loader(0)
    passes(stopped, stop)
    resumed = [other.loader(rank) for rank in range(ranks)]
    for loader in resumed:
        loader.load_state_dict(stopped.state_dict())
    stopped.close()
    rest = [other.joined(parts) for parts in zip(*resumed, strict=True)]
    assert served_rows(rest) == served_rows(case.whole_batches()[stop:])


@given(cases(), st.data())
def test_a_stream_reads_as_one_array_whatever_its_shards(case: Case, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, case.tokens))
    length = data.draw(st.integers(0, case.tokens - start))
    stream = case.loader(0)._stream
    found = stream.read(start, length)
    assert found.dtype == case.ids.dtype
    assert found.tolist() == case.ids[start : start + length].tolist()
