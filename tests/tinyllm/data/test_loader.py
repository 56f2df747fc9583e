"""Properties of the loader: which rows, in which order, on which rank, from which position."""

import gc
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from tinyllm.data.loader import TokenLoader
from tinyllm.data.stream import TokenStream
from tinyllm.model import IGNORED


def make_stream(tokens: int, dtype: type = np.uint16) -> TokenStream:
    """Ids that count up, so that a row's first id says which row it is."""
    return TokenStream.from_array(np.arange(tokens, dtype=dtype))


def first_ids(batches: list[torch.Tensor]) -> list[int]:
    """The first id of every row that is not padding."""
    ids = torch.cat(batches)[:, 0]
    return ids[ids != IGNORED].tolist()


def prefetch_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "tinyllm-prefetch"]


@pytest.mark.parametrize(("tokens", "rows"), [(1024, 1), (1025, 2), (1537, 3)])
def test_pitfall_15_windows_at_their_edges(tokens: int, rows: int) -> None:
    loader = TokenLoader(make_stream(tokens), context=512, batch_size=1, shuffle=True)
    assert len(loader) == rows
    batches = list(loader)
    assert len(batches) == rows
    assert sorted(first_ids(batches)) == [512 * i for i in range(rows)]
    for batch in batches:
        start = int(batch[0, 0])
        assert batch.dtype == torch.int64
        torch.testing.assert_close(batch, torch.arange(start, start + 513)[None])


@pytest.mark.parametrize(
    ("seed", "batch_size", "groups"), [(0, 1, 1), (1, 4, 1), (2, 7, 2), (3, 8, 4), (4, 5, 3)]
)
def test_every_full_row_exactly_once_per_epoch(seed: int, batch_size: int, groups: int) -> None:
    context, rows = 8, 23
    loader = TokenLoader(
        make_stream(rows * context + 5),
        context=context,
        batch_size=batch_size,
        shuffle=True,
        seed=seed,
        groups=groups,
        local_groups=range(groups),
    )
    padded = -(-batch_size // groups) * groups
    orders = []
    for _ in range(2):
        batches = list(loader)
        assert len(batches) == len(loader) == -(-rows // batch_size)
        assert {tuple(b.shape) for b in batches} == {(padded, context + 1)}
        order = first_ids(batches)
        assert sorted(order) == [context * i for i in range(rows)]
        orders.append(order)
    assert orders[0] != orders[1]


def test_seeds_give_different_orders() -> None:
    orders = {
        tuple(first_ids(list(TokenLoader(make_stream(200), context=4, batch_size=8, shuffle=True,
                                         seed=seed))))
        for seed in range(4)
    }  # fmt: skip
    assert len(orders) == 4


def test_order_is_fixed_for_all_time() -> None:
    """A resumed run relies on it, also after an upgrade of NumPy."""
    loader = TokenLoader(make_stream(33), context=4, batch_size=8, shuffle=True, seed=7)
    assert first_ids(list(loader)) == [16, 12, 24, 8, 4, 0, 20, 28]
    assert first_ids(list(loader)) == [28, 24, 4, 16, 12, 8, 20, 0]


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
@pytest.mark.parametrize("shuffle", [True, False])
def test_token_stream_does_not_depend_on_groups_or_ranks(groups: int, shuffle: bool) -> None:
    stream = make_stream(8 * 29 + 4)
    whole = list(TokenLoader(stream, context=8, batch_size=8, shuffle=shuffle, seed=5))
    for ranks in (r for r in (1, 2, 4) if groups % r == 0):
        per_rank = groups // ranks
        shares = [
            list(
                TokenLoader(
                    stream,
                    context=8,
                    batch_size=8,
                    shuffle=shuffle,
                    seed=5,
                    groups=groups,
                    local_groups=range(rank * per_rank, (rank + 1) * per_rank),
                )
            )
            for rank in range(ranks)
        ]
        for number, batch in enumerate(whole):
            rebuilt = torch.empty_like(batch)
            for rank, share in enumerate(shares):
                local = [r for r in range(8) if r % groups // per_rank == rank]
                rebuilt[local] = share[number]
            torch.testing.assert_close(rebuilt, batch)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [1, 2, 4, 5])
@pytest.mark.parametrize("tokens", [2, 8, 9, 10, 70, 73])
def test_pitfall_17_evaluation_scores_every_target_once(
    tokens: int, batch_size: int, ranks: int
) -> None:
    targets: list[int] = []
    for rank in range(ranks):
        loader = TokenLoader(
            make_stream(tokens),
            context=8,
            batch_size=batch_size,
            shuffle=False,
            groups=ranks,
            local_groups=range(rank, rank + 1),
        )
        batches = list(loader)
        assert {tuple(b.shape) for b in batches} == {(-(-batch_size // ranks), 9)}
        for batch in batches:
            inputs, wanted = batch[:, :-1], batch[:, 1:]
            valid = wanted != IGNORED
            # each valid target follows its own input
            torch.testing.assert_close(inputs[valid] + 1, wanted[valid])
            targets += wanted[valid].tolist()
    assert sorted(targets) == list(range(1, tokens))


@pytest.mark.parametrize("batch_size", [1, 2, 3, 10])
def test_pitfall_16_mean_over_tokens_not_batches(batch_size: int) -> None:
    """Losses 10 on 9 targets and 2 on the last one have the mean 9.2, whatever the batch size."""
    loader = TokenLoader(make_stream(11), context=9, batch_size=batch_size, shuffle=False)
    total, count = 0.0, 0
    for batch in loader:
        targets = batch[:, 1:]
        losses = torch.where(targets == 10, 2.0, 10.0)[targets != IGNORED]
        total, count = total + float(losses.sum()), count + len(losses)
    assert total / count == pytest.approx(9.2)


@pytest.mark.parametrize("batches_before", [0, 1, 5, 6, 8, 11, 12, 13, 17])
@pytest.mark.parametrize("on_device", [False, True])
def test_pitfall_19_resume_anywhere_in_any_epoch(batches_before: int, on_device: bool) -> None:
    def new_loader() -> TokenLoader:
        return TokenLoader(
            make_stream(8 * 23 + 1),
            context=8,
            batch_size=4,
            shuffle=True,
            seed=3,
            device=torch.device("cpu") if on_device else None,
        )

    reference = new_loader()  # 6 batches in an epoch
    expected = [batch for _ in range(4) for batch in reference]
    first = new_loader()
    seen: list[torch.Tensor] = []
    while len(seen) < batches_before:
        for batch in first:
            seen.append(batch)
            if len(seen) == batches_before:
                break
    state = first.state_dict()
    assert (state["epoch"], state["batch"]) == divmod(batches_before, 6)
    second = new_loader()
    second.load_state_dict(state)
    while len(seen) < len(expected):
        seen.extend(second)
    torch.testing.assert_close(torch.stack(seen), torch.stack(expected))


def test_position_counts_batches_handed_out_not_prefetched() -> None:
    loader = TokenLoader(make_stream(8 * 23 + 1), context=8, batch_size=4, shuffle=True)
    iterator = iter(loader)
    next(iterator)
    time.sleep(0.05)  # the thread runs ahead meanwhile
    assert loader.state_dict()["batch"] == 1


def test_new_pass_after_a_partial_one_is_the_next_epoch() -> None:
    loader = TokenLoader(make_stream(8 * 23 + 1), context=8, batch_size=4, shuffle=True)
    next(iter(loader))
    iterator = iter(loader)
    assert (loader.state_dict()["epoch"], loader.state_dict()["batch"]) == (1, 0)
    iter(loader)  # nothing was handed out, so this starts the same epoch again
    assert loader.state_dict()["epoch"] == 1
    assert next(iterator, None) is None  # an older pass has ended


def test_epoch_ends_at_the_limit() -> None:
    def new_loader() -> TokenLoader:
        loader = TokenLoader(make_stream(8 * 23 + 1), context=8, batch_size=4, shuffle=True)
        loader.limit_batches = 2
        return loader

    loader = new_loader()
    assert len(loader) == 6
    assert len(list(loader)) == 2
    assert (loader.state_dict()["epoch"], loader.state_dict()["batch"]) == (1, 0)


@pytest.mark.parametrize(
    "change",
    [{"seed": 1}, {"context": 4}, {"batch_size": 2}, {"shuffle": False}, {"tokens": 200}],
    ids=lambda change: next(iter(change)),
)
def test_state_of_another_setting_is_refused(change: dict[str, int]) -> None:
    def new_loader(seed=0, context=8, batch_size=4, shuffle=True, tokens=185):  # type: ignore[no-untyped-def]
        return TokenLoader(
            make_stream(tokens), context=context, batch_size=batch_size, shuffle=shuffle, seed=seed
        )

    state = new_loader().state_dict()
    name = "stream_tokens" if "tokens" in change else next(iter(change))
    with pytest.raises(ValueError, match=f"saved with {name}=.*this run has {name}="):
        new_loader(**change).load_state_dict(state)


def test_state_of_other_tokens_of_the_same_number_is_refused() -> None:
    state = TokenLoader(make_stream(50), context=4, batch_size=2, shuffle=True).state_dict()
    other = TokenStream.from_array(np.zeros(50, np.uint16))
    with pytest.raises(ValueError, match="stream_identity"):
        TokenLoader(other, context=4, batch_size=2, shuffle=True).load_state_dict(state)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("tokens", [161, 163, 100])
def test_device_residency_gives_the_host_batches(dtype: type, shuffle: bool, tokens: int) -> None:
    """Ids above the signed range of the bit patterns included."""
    top = 65_535 if dtype is np.uint16 else 2_000_000_000
    ids: np.ndarray = np.random.default_rng(0).integers(0, top, tokens).astype(dtype)
    ids[:3] = top, top - 1, 0
    stream = TokenStream([ids[:70], ids[70:71], ids[71:]], "several shards")
    passes = [
        list(
            TokenLoader(
                stream,
                context=8,
                batch_size=7,
                shuffle=shuffle,
                seed=1,
                groups=2,
                local_groups=range(1, 2),
                device=device,
            )
        )
        for device in (None, torch.device("cpu"))
    ]
    assert len(passes[0]) == len(passes[1])
    for host, device in zip(*passes, strict=True):
        assert device.dtype == torch.int64
        torch.testing.assert_close(device, host, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("shuffle", [True, False])
def test_cuda_batches_are_the_host_batches_without_a_sync(shuffle: bool) -> None:
    ids: np.ndarray = np.random.default_rng(0).integers(0, 65_536, 5_000).astype(np.uint16)
    device = torch.device("cuda", 0)
    settings: list[dict[str, Any]] = [{}, {"pin_memory": True}, {"device": device}]
    host, pinned, resident = (
        TokenLoader(
            TokenStream.from_array(ids), context=64, batch_size=8, shuffle=shuffle, **setting
        )
        for setting in settings
    )
    expected = list(host)
    for batch, wanted in zip(pinned, expected, strict=True):
        assert batch.is_pinned()
        assert torch.equal(batch, wanted)
    batches = iter(resident)
    found = [next(batches)]  # the epoch's order is copied with the first
    torch.cuda.set_sync_debug_mode("error")
    try:
        found += list(batches)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for batch, wanted in zip(found, expected, strict=True):
        assert batch.device == device
        assert torch.equal(batch.cpu(), wanted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"context": 0}, "context is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"local_groups": range(1, 3)}, r"range\(2\)"),
        ({"context": 185}, "holds 185 tokens; context=185 needs at least 186"),
    ],
)
def test_bad_settings_are_refused(change: dict[str, object], message: str) -> None:
    setting = {"context": 8, "batch_size": 4, "groups": 2, "local_groups": range(2)} | change
    with pytest.raises(ValueError, match=message):
        TokenLoader(make_stream(185), shuffle=True, **setting)  # type: ignore[arg-type]


def test_threads_end_with_the_pass_with_close_and_with_collection() -> None:
    others = set(prefetch_threads())  # of other tests; they may end at any time

    def mine() -> list[threading.Thread]:
        return [thread for thread in prefetch_threads() if thread not in others]

    loader = TokenLoader(make_stream(1 << 15), context=8, batch_size=1, shuffle=True)
    iterator = iter(loader)
    next(iterator)
    assert len(mine()) == 1
    loader.close()
    assert not mine()

    iterator = iter(loader)
    next(iterator)
    assert len(mine()) == 1
    (abandoned,) = mine()
    del iterator
    gc.collect()
    abandoned.join(timeout=60)
    assert not abandoned.is_alive()

    loader.limit_batches = 3
    list(loader)
    for thread in mine():
        thread.join(timeout=60)
    assert not mine()


def test_an_error_in_the_thread_is_raised_in_the_consumer() -> None:
    class Broken(TokenStream):
        def read(self, start: int, length: int) -> np.ndarray:
            if start == 16:
                raise OSError("the disk is gone")
            return super().read(start, length)

    stream = Broken([np.arange(41, dtype=np.uint16)], "broken")
    iterator = iter(TokenLoader(stream, context=8, batch_size=1, shuffle=False))
    assert int(next(iterator)[0, 0]) == 0
    assert int(next(iterator)[0, 0]) == 8
    with pytest.raises(OSError, match="the disk is gone"):
        next(iterator)
    assert next(iterator, None) is None
