"""Timed runs take turns."""

import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from tinyllm.acceptance import locks
from tinyllm.acceptance.turns import Turns


def test_runs_are_timed_one_by_one_and_end_when_all_of_a_round_are_timed(tmp_path: Path) -> None:
    turns, together, events = Turns(tmp_path / "lock"), threading.Barrier(3), []

    def work(name: str) -> None:
        with turns.untimed():
            together.wait(10)
        with turns.timed():
            events.append(("begin", name))
            time.sleep(0.05)  # until the others wait for it
            events.append(("end", name))
        with turns.untimed():
            events.append(("gone", name))

    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    timed, gone = events[:6], events[6:]
    assert [what for what, _ in timed] == ["begin", "end"] * 3
    assert all(one[1] == two[1] for one, two in list(pairwise(timed))[::2])
    assert sorted(gone) == [("gone", name) for name in "abc"]


def test_nobody_is_set_up_while_one_is_timed_or_waits_for_that(tmp_path: Path) -> None:
    turns, events = Turns(tmp_path / "lock"), []
    timed, go = threading.Event(), threading.Event()

    def time_one() -> None:
        with turns.timed():
            timed.set()
            go.wait(10)
            events.append("timed")

    def set_up() -> None:
        with turns.untimed():
            events.append("set up")

    threads = [threading.Thread(target=time_one)]
    threads[0].start()
    assert timed.wait(10)
    threads += [threading.Thread(target=set_up), threading.Thread(target=time_one)]
    for thread in threads[1:]:
        thread.start()
        time.sleep(0.05)
    assert events == []
    go.set()
    for thread in threads:
        thread.join(10)
    assert events == ["timed", "timed", "set up"]


@pytest.mark.parametrize("first", ["timed", "untimed"])
def test_launchers_of_one_device_do_not_time_beside_each_other(tmp_path: Path, first: str) -> None:
    ours, others = (Turns(tmp_path / "lock") for _ in range(2))
    second = "untimed" if first == "timed" else "timed"
    entered = threading.Event()

    def other() -> None:
        with getattr(others, second)():
            entered.set()

    thread = threading.Thread(target=other)
    with getattr(ours, first)():
        thread.start()
        assert not entered.wait(0.2)
    assert entered.wait(10)
    thread.join(10)


def test_launchers_set_up_beside_each_other(tmp_path: Path) -> None:
    ours, others = (Turns(tmp_path / "lock") for _ in range(2))
    with ours.untimed(), others.untimed():
        pass


def test_launchers_with_several_runs_each_all_get_their_turns(tmp_path: Path) -> None:
    launchers = [Turns(tmp_path / "lock") for _ in range(2)]
    alone, timed = threading.Lock(), []

    def work(turns: Turns) -> None:
        with turns.untimed():
            time.sleep(0.01)
        with turns.timed():
            assert alone.acquire(blocking=False)
            time.sleep(0.005)
            alone.release()
            timed.append(turns)
        with turns.untimed():
            pass

    threads = [threading.Thread(target=work, args=[launchers[k % 2]]) for k in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(timed) == 12


@pytest.fixture
def lock_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """The lock with some GPUs in the machine and a value of CUDA_VISIBLE_DEVICES."""

    def lock_with(visible: str, *uuids: str) -> Path:
        gpus = [{"uuid": uuid} for uuid in uuids]
        monkeypatch.setattr(locks, "environment", lambda: {"gpus": gpus})
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return locks.device_lock()

    return lock_with


@pytest.mark.parametrize("uuids", [(), ("GPU-ab", "GPU-cd")])
def test_each_device_has_a_lock(lock_of: Callable[..., Path], uuids: tuple[str, ...]) -> None:
    first = lock_of("", *uuids)
    assert lock_of("0,1", *uuids) == first
    assert lock_of("1", *uuids) != first
    assert lock_of("MIG-ab/1", *uuids).parent == first.parent


def test_a_device_has_one_lock_whatever_it_is_called(lock_of: Callable[..., Path]) -> None:
    second = lock_of("1", "GPU-ab", "GPU-cd")
    assert lock_of("GPU-c", "GPU-ab", "GPU-cd") == second
    assert lock_of("0", "GPU-cd") == second  # a job that sees no other
    assert lock_of("0", "GPU-ab") != second


def test_an_error_ends_a_turn(tmp_path: Path) -> None:
    turns = Turns(tmp_path / "lock")
    for turn in (turns.untimed, turns.timed):
        try:
            with turn():
                raise RuntimeError
        except RuntimeError:
            pass
    with turns.timed():
        pass
