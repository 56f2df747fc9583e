"""What an update tells loggers, by value."""

import pytest
import torch

from tinyllm.metrics import UpdateMetrics


def test_scalars_weigh_by_targets_and_leave_out_idle_workers() -> None:
    """At an epoch's end workers may have no row: they are no loss of 0."""
    metrics = UpdateMetrics(
        loss=torch.tensor([2.0, 4.0, 0.0]),
        targets=torch.tensor([30, 10, 0]),
        grad_norm=torch.tensor([1.0, 3.0, 0.0]),
        learning_rate=0.5,
        failed=torch.tensor(0),
        gamma=0.25,
        consensus_distance=torch.tensor([3.0, 4.0, 0.0]),
        average_norm=torch.tensor([10.0]),
    )
    overall = (25 / 3) ** 0.5
    assert metrics.scalars() == pytest.approx(
        {
            "train/loss": 2.5,
            "train/grad_norm": 2.0,
            "train/lr": 0.5,
            "train/gamma": 0.25,
            "consensus/distance": overall,
            "consensus/relative_distance": overall / 10,
            "worker_loss/0": 2.0,
            "worker_loss/1": 4.0,
            "worker_distance/0": 3.0,
            "worker_distance/1": 4.0,
            "worker_distance/2": 0.0,
            "worker_relative_distance/0": 0.3,
            "worker_relative_distance/1": 0.4,
            "worker_relative_distance/2": 0.0,
        }
    )


def test_the_device_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = UpdateMetrics(torch.ones(1), torch.ones(1), torch.ones(1), 0.1, torch.tensor(False))
    reads: list[int] = []
    cat = torch.cat
    monkeypatch.setattr(torch, "cat", lambda tensors: reads.append(1) or cat(tensors))
    assert metrics.scalars() == metrics.scalars()
    assert reads == [1]


def test_an_update_without_any_target_has_no_loss() -> None:
    metrics = UpdateMetrics(
        torch.zeros(1), torch.zeros(1), torch.zeros(1), 0.1, torch.tensor(False)
    )
    assert metrics.scalars()["train/loss"] == 0.0


@pytest.mark.parametrize("flag", [torch.tensor(1, dtype=torch.int32), torch.tensor(True)])
def test_values_are_those_of_when_they_were_sent(flag: torch.Tensor) -> None:
    loss = torch.tensor([2.0])
    metrics = UpdateMetrics(loss, torch.ones(1), torch.ones(1), 0.1, torch.zeros_like(flag))
    assert not metrics.arrived
    metrics.send()
    assert metrics.arrived
    loss.fill_(5.0)
    metrics.failed.copy_(flag)
    assert metrics.scalars()["train/loss"] == 2.0
    assert not metrics.has_failed
    assert UpdateMetrics(loss, torch.ones(1), torch.ones(1), 0.1, flag).has_failed
