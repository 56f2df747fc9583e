from itertools import pairwise

import pytest
import torch

from tinyllm.kernels.stage import SLOTS, Stage

CPU = torch.device("cpu")


def test_values_are_what_was_sent_last_in_the_same_memory() -> None:
    stage = Stage(3, torch.float64, CPU)
    values, place = stage.values, stage.values.data_ptr()
    assert values.tolist() == [0, 0, 0]
    for sent in ([1.0, 2.0, float("inf")], [0.1, 1e-30, -7.0]):
        stage.send(sent)
        assert values.tolist() == sent
    assert stage.values.data_ptr() == place


def test_values_are_rounded_once() -> None:
    stage = Stage(1, torch.float32, CPU)
    value = 1 + 2.0**-24 + 2.0**-50  # just above a tie, which float64 can tell
    stage.send([value])
    assert stage.values.item() == 1 + 2.0**-23


def test_another_number_of_values_is_an_error() -> None:
    with pytest.raises(ValueError, match="shape"):
        Stage(3, torch.float64, CPU).send([1.0, 2.0])


@pytest.mark.gpu
def test_arrives_in_the_stream_s_order_on_gpu() -> None:
    """Three times as many as there are slots, all sent while the device is busy."""
    stage = Stage(5, torch.float32, torch.device("cuda"))
    seen = torch.zeros(3 * SLOTS, 5, device="cuda")
    torch.cuda._sleep(200_000_000)  # cycles: about 0.1 s
    for number in range(len(seen)):
        stage.send([float(number + i) for i in range(5)])
        seen[number].copy_(stage.values)
    for earlier, later in pairwise(seen.tolist()):
        assert [value + 1 for value in earlier] == later
    assert seen[0].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.gpu
def test_the_host_does_not_wait_on_gpu() -> None:
    stage = Stage(5, torch.float32, torch.device("cuda"))
    stage.send([0.0] * 5)
    torch.cuda._sleep(200_000_000)
    busy = torch.cuda.Event()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(SLOTS - 1):
            stage.send([1.0] * 5)
        busy.record()
        assert not busy.query(), "the host has waited"
    finally:
        torch.cuda.set_sync_debug_mode("default")
