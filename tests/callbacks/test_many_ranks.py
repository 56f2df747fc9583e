"""The callbacks on two ranks: one set of files, and the figures of a run on one."""

import csv
import json
from pathlib import Path
from typing import Any

import callback_jobs
import numpy as np
import pytest
import torch
from ranks import RanksError, run_on_ranks
from safetensors.torch import load_file
from simulation import CONFIG, token_cache


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """118 rows: in an epoch the eighth batch has 6 rows and 10 of padding."""
    folder = tmp_path_factory.mktemp("ranks")
    tokens = np.random.default_rng(0).integers(1, CONFIG.vocab_size, 1_060)
    tokens[23::24] = 0
    return token_cache(folder, tokens, validation_fraction=0.1, test_fraction=0.0)


def table(path: Path) -> list[dict[str, float]]:
    with path.open(newline="") as file:
        return [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]


@pytest.mark.parametrize("workers", [None, 4])
def test_two_ranks_see_what_one_sees(cache: str, tmp_path: Path, workers: int | None) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    (alone,) = run_on_ranks(callback_jobs.observe, 1, cache, str(one), workers)
    first, second = run_on_ranks(callback_jobs.observe, 2, cache, str(two), workers)

    # tokens are those of all ranks, seconds those of the slowest
    assert first == second
    counted = [window[:2] for window in first["windows"]]
    assert counted == [window[:2] for window in alone["windows"]]
    full = 4 * 16 * CONFIG.context
    assert counted[0] == (4, full)
    assert counted[1][1] < full  # the epoch's last batch is in it

    mine, wanted = (json.loads((f / "trace" / "trace.json").read_text()) for f in (two, one))
    for record, other in zip(mine["updates"], wanted["updates"], strict=True):
        assert record.pop("loss") == pytest.approx(other.pop("loss"), rel=1e-12)
        assert record == other  # the rows' hash among it
    for number in range(5):
        name = f"trace/update-{number:05d}.safetensors"
        found, expected = load_file(two / name), load_file(one / name)
        assert set(found) == set(expected)
        for key, value in found.items():
            assert len(value) == (workers or 1)
            torch.testing.assert_close(value, expected[key], rtol=2e-7, atol=1e-12, msg=key)

    assert set(json.loads((two / "memory.json").read_text())["phases"]) == {"startup", "training"}
    if workers is not None:
        for row, other in zip(
            table(two / "consensus.csv"), table(one / "consensus.csv"), strict=True
        ):
            assert row == pytest.approx(other, rel=1e-9)


def test_ranks_agree_on_the_length_of_a_window(cache: str, tmp_path: Path) -> None:
    first, second = run_on_ranks(callback_jobs.calibrate, 2, cache, str(tmp_path))
    assert first == second


def test_other_modules_get_their_distances_logged(tmp_path: Path) -> None:
    logged: dict[str, Any] = run_on_ranks(callback_jobs.observe_classifier, 2, str(tmp_path))[0]
    (row,) = table(tmp_path / "consensus.csv")
    for name in ("distance", "relative_distance"):
        assert logged[f"consensus/{name}"] == pytest.approx(row[name], rel=1e-6)


def test_a_trace_of_ranks_that_cannot_be_brought_together(tmp_path: Path) -> None:
    with pytest.raises(RanksError, match="UpdateTrace cannot bring together what 2 ranks of DDP"):
        run_on_ranks(callback_jobs.trace_under_ddp, 2, str(tmp_path))
