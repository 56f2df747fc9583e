"""Ranks that cannot be: variables of a launcher that is not at work, or that started more."""

import pytest
from simulation import new_trainer

from tinyllm.strategies import SyncStrategy


@pytest.mark.parametrize(
    ("name", "value", "option"),
    [
        ("LOCAL_RANK", "1", "devices"),
        ("LOCAL_RANK", "-1", "devices"),
        ("NODE_RANK", "1", "num_nodes"),
        ("GROUP_RANK", "2", "num_nodes"),
    ],
)
def test_a_variable_that_a_launcher_left_behind_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, option: str
) -> None:
    monkeypatch.setenv(name, value)
    message = f"variable {name} is {value}, and with {option}=1 .* must be 0. .* unset {name};"
    with pytest.raises(ValueError, match=message):
        new_trainer(SyncStrategy(compile=False))


def test_a_launcher_of_more_processes_than_devices_is_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {
        **{"TORCHELASTIC_RUN_ID": "test", "RANK": "3", "WORLD_SIZE": "4"},
        **{"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "0"},
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"LOCAL_RANK is 3, and with devices=2 .* from 0 to 1\."):
        new_trainer(SyncStrategy(compile=False), devices=2)


@pytest.mark.parametrize("name", ["LOCAL_RANK", "NODE_RANK", "GROUP_RANK"])
def test_the_first_rank_is_welcome(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "0")
    assert new_trainer(SyncStrategy(compile=False)).global_rank == 0
