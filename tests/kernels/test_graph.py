import gc

import pytest
import torch
from torch import Tensor

from tinyllm.kernels.graph import CapturedCall

CPU = torch.device("cpu")


def test_runs_the_function_at_every_call_on_a_cpu() -> None:
    calls: list[int] = []
    call = CapturedCall(lambda: calls.append(len(calls)), CPU)
    assert not calls
    for _ in range(3):
        call()
    call.release()
    call()
    assert calls == [0, 1, 2, 3]


def test_an_error_of_the_function_is_its_own_on_a_cpu() -> None:
    def broken() -> None:
        raise RuntimeError("no step today")

    with pytest.raises(RuntimeError, match=r"^no step today$"):
        CapturedCall(broken, CPU)()


# --- on a GPU -------------------------------------------------------------------------------------


class Counter:
    """Adds to a static tensor, by way of a large temporary one."""

    def __init__(self) -> None:
        self.total = torch.zeros(1024, device="cuda")
        self.amount = torch.ones(1024, device="cuda")
        self.runs = 0
        self.error: Exception | None = None
        self.waits = False

    def __call__(self) -> None:
        self.runs += 1
        temporary = self.amount.repeat(16_384)  # 64 MB
        if self.error is not None and self.runs > 1:
            raise self.error
        if self.waits and self.runs > 1:
            temporary.sum().item()
        self.total += temporary[-1024:]


def captured(counter: Counter) -> CapturedCall:
    return CapturedCall(counter, torch.device("cuda"), torch.cuda.graph_pool_handle())


@pytest.fixture
def counter() -> Counter:
    first = captured(Counter())  # what a process keeps of its first capture is no test's
    first(), first()
    first.release()
    return Counter()


def held_bytes() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def values(total: Tensor) -> set[float]:
    return set(total.tolist())


@pytest.mark.gpu
def test_every_call_does_the_work_once_on_gpu(counter: Counter) -> None:
    call = captured(counter)
    for number in range(1, 6):
        call()
        assert values(counter.total) == {number}
    assert counter.runs == 2  # as it is, and into the graph


@pytest.mark.gpu
def test_a_replay_reads_anew_on_gpu(counter: Counter) -> None:
    call = captured(counter)
    for amount in (1.0, 10.0, 100.0, 1_000.0):
        counter.amount.fill_(amount)
        call()
    assert values(counter.total) == {1_111.0}


@pytest.mark.gpu
def test_capturing_changes_no_state_and_no_generator_on_gpu(counter: Counter) -> None:
    call = captured(counter)
    call()
    generators = torch.cuda.get_rng_state(), torch.get_rng_state()
    graph = call._capture()
    assert values(counter.total) == {1}
    assert torch.equal(torch.cuda.get_rng_state(), generators[0])
    assert torch.equal(torch.get_rng_state(), generators[1])
    graph.reset()


@pytest.mark.gpu
def test_gives_its_memory_back_on_gpu(counter: Counter) -> None:
    before = held_bytes()
    for _ in range(2):
        call = captured(counter)
        call(), call()
        assert held_bytes() >= before + 2**26
        call.release()
        assert held_bytes() == before
    assert values(counter.total) == {4}


@pytest.mark.gpu
def test_calls_share_the_memory_of_a_pool_on_gpu(counter: Counter) -> None:
    pool, before = torch.cuda.graph_pool_handle(), held_bytes()
    calls = [CapturedCall(counter, torch.device("cuda"), pool) for _ in range(4)]
    for call in calls:
        call(), call()
    assert held_bytes() - before < 2 * 2**26
    for call in calls:
        call.release()
    assert held_bytes() == before


@pytest.mark.gpu
@pytest.mark.parametrize("broken", ["waits", "raises"])
def test_a_failed_capture_says_what_to_do_and_leaves_nothing_on_gpu(
    counter: Counter, broken: str
) -> None:
    if broken == "waits":  # for the device, which a capture forbids
        counter.waits = True
    else:
        counter.error = RuntimeError("no graph today")
    call = captured(counter)
    call()
    before = held_bytes()
    with pytest.raises(RuntimeError, match=r"could not be captured in a CUDA graph; .*native"):
        call()
    # a graph that CUDA broke off keeps the random generator's two numbers, in a block of 2 MB
    assert held_bytes() <= before + (2**21 if broken == "waits" else 0)
    assert values(counter.total) == {1}
    assert torch.ones(8, device="cuda").sum().item() == 8  # the device can be used
    assert torch.rand(8, device="cuda").max().item() < 1  # and its random numbers


@pytest.mark.gpu
def test_other_errors_while_capturing_stay_what_they_are_on_gpu(counter: Counter) -> None:
    counter.error = KeyboardInterrupt()  # type: ignore[assignment]
    call = captured(counter)
    call()
    before = held_bytes()
    with pytest.raises(KeyboardInterrupt):
        call()
    assert held_bytes() == before
