"""Many ranks, with gloo: every layout gives one trajectory, resumes another's, and fails as one."""

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import classifier
import numpy as np
import pytest
import rank_jobs
import simulation
import torch
from ranks import RanksError, run_on_ranks
from simulation import CONFIG, UPDATES, gammas, learning_rates, token_cache
from torch import Tensor

from tinyllm.strategies.consensus import AdaptiveConsensus

# Float64 rounding of another order of summation, grown over 12 updates: differences seen are
# below 1e-14.
TOLERANCE = 1e-10

ROWS = 122  # of an epoch: 7 batches of 16 and one of 10


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("ranks")
    rng = np.random.default_rng(0)
    documents = [[*rng.integers(1, CONFIG.vocab_size, 23).tolist(), 0] for _ in range(45)]
    return token_cache(
        folder, [i for d in documents for i in d], validation_fraction=0.1, test_fraction=0.0
    )


def train(ranks: int, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Trains on several ranks, which agree on everything, and returns what they say."""
    first, *others = run_on_ranks(rank_jobs.train, ranks, *args, **kwargs)
    for other in others:
        assert torch.equal(first["weights"], other["weights"])
        assert torch.equal(first["losses"], other["losses"])
        assert torch.equal(first["grad_norms"], other["grad_norms"])
        assert first["gammas"] == other["gammas"]
    return first


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """The same trajectory, or its last part if one of them is resumed."""
    length = min(len(one["losses"]), len(other["losses"]))
    for name in ("weights", "losses", "grad_norms"):
        torch.testing.assert_close(
            one[name][-length:], other[name][-length:], rtol=0, atol=TOLERANCE, msg=name
        )
    assert one["gammas"][-length:] == other["gammas"][-length:]


AWC = {
    "workers": 8,
    "scheme": "awc",
    "topology": "exponential",  # cyclic offsets 1, 2, 4
    "adaptive_consensus": AdaptiveConsensus(start_fraction=0.3, power=0.5),
}
ATC = {"workers": 8, "scheme": "atc", "topology": "one_peer_ring"}


@pytest.fixture(scope="module", params=[AWC, ATC], ids=["awc", "atc"])
def on_one_rank(request: pytest.FixtureRequest, cache: str) -> tuple[dict[str, Any], Any]:
    return request.param, train(1, cache, request.param, gradient_clip_val=0.5)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_layout_gives_the_same_trajectory(
    cache: str, on_one_rank: tuple[dict[str, Any], Any], ranks: int
) -> None:
    strategy, expected = on_one_rank
    assert_same(train(ranks, cache, strategy, gradient_clip_val=0.5), expected)
    assert expected["gammas"][3::4] == pytest.approx(gammas_at_log_points(strategy))


def gammas_at_log_points(strategy: dict[str, Any]) -> list[float]:
    if "adaptive_consensus" not in strategy:
        return [1.0] * 3
    return gammas(learning_rates(), 0.3, 0.5)[3::4]


def test_a_checkpoint_resumes_in_another_layout(
    tmp_path: Path, cache: str, on_one_rank: tuple[dict[str, Any], Any]
) -> None:
    strategy, expected = on_one_rank
    resume: str | None = None
    for saving, resuming in pairwise((4, 2, 1) if strategy == AWC else (1, 4)):
        batch = 3 if resume is None else 6
        saved = str(tmp_path / f"{saving}.ckpt")
        options: dict[str, Any] = {"gradient_clip_val": 0.5}
        train(saving, cache, strategy, save=(batch, saved), resume=resume, **options)
        resume = saved
        resumed = train(resuming, cache, strategy, resume=saved, **options)
        assert len(resumed["losses"]) == UPDATES - batch
        assert_same(resumed, expected)


def test_sums_of_half_an_update_resume_in_another_layout(tmp_path: Path, cache: str) -> None:
    strategy = {"workers": 4, "topology": "base_k"}
    options = {"accumulate_grad_batches": 2, "batch_size": 8}
    saved = str(tmp_path / "saved.ckpt")
    expected = train(2, cache, strategy, save=(5, saved), **options)
    assert "pending" in torch.load(saved, weights_only=True)["optimizer_states"][0]
    assert_same(train(1, cache, strategy, resume=saved, **options), expected)


@pytest.mark.parametrize(
    ("scheme", "events"),
    [
        ("awc", ["exchange", "forward", "forward", "combine", "adapt"]),
        ("atc", ["forward", "forward", "adapt", "combine", "exchange"]),
    ],
)
def test_awc_exchanges_while_it_computes(cache: str, scheme: str, events: list[str]) -> None:
    assert run_on_ranks(rank_jobs.order_of_events, 2, cache, scheme) == [events, events]


# --- sync -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch_size", "micro_batch_size"),
    [(16, None), (9, 3)],  # 9 rows are dealt out as 5 and 4; the last batch of an epoch is partial
)
def test_sync_training_is_the_same_on_two_ranks(
    cache: str, batch_size: int, micro_batch_size: int | None
) -> None:
    options: dict[str, Any] = {"batch_size": batch_size, "gradient_clip_val": 0.5}
    one = train(1, cache, None, **options)
    two = train(2, cache, None, micro_batch_size=micro_batch_size, **options)
    assert len(one["losses"]) == UPDATES
    assert_same(two, one)


def test_half_an_update_of_sync_training_resumes_on_one_rank(tmp_path: Path, cache: str) -> None:
    options = {"accumulate_grad_batches": 2, "batch_size": 8}
    saved = str(tmp_path / "saved.ckpt")
    expected = train(2, cache, None, save=(5, saved), **options)
    pending = torch.load(saved, weights_only=True)["optimizer_states"][0]["pending"]
    assert pending["targets"].tolist() == [8 * CONFIG.context]
    assert_same(train(1, cache, None, resume=saved, **options), expected)
    assert_same(train(2, cache, None, resume=saved, **options), expected)


@pytest.mark.parametrize("strategy", [None, {"workers": 4}], ids=["sync", "decentralized"])
def test_validation_is_the_same_on_two_ranks(cache: str, strategy: dict[str, Any] | None) -> None:
    options = {"limit_val_batches": 1.0, "val_check_interval": 4}
    one, two = (train(ranks, cache, strategy, **options) for ranks in (1, 2))
    loss = one["logged"]["validation/loss"]
    assert two["logged"]["validation/loss"] == pytest.approx(loss, rel=1e-12)


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("log_every", [1, 4])
def test_all_ranks_stop_and_the_last_good_state_is_saved(
    tmp_path: Path, cache: str, log_every: int
) -> None:
    strategy = {"workers": 4, "scheme": "atc"}
    saved = str(tmp_path / "failed.ckpt")
    with pytest.raises(RanksError) as error:
        train(
            2,
            cache,
            strategy,
            poison=3,
            save_on_exception=saved,
            log_every_n_steps=log_every,
        )
    lines = str(error.value).splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("NonFiniteError: loss or gradient of worker 3 is not finite")
        assert "at update 5;" in line
    expected = train(1, cache, strategy)
    state = torch.load(saved, weights_only=True)["optimizer_states"][0]["state"]
    assert state[0]["step"] == 5
    embedding = state[0]["weights"].flatten(1)
    torch.testing.assert_close(
        embedding, expected["weights"][4][:, : embedding.shape[1]], rtol=0, atol=TOLERANCE
    )
    resumed = train(2, cache, strategy, resume=saved)
    assert len(resumed["losses"]) == UPDATES - 5
    assert resumed["weights"].isfinite().all()


def test_no_rank_waits_for_one_that_is_gone(cache: str) -> None:
    with pytest.raises(RanksError) as error:
        run_on_ranks(rank_jobs.fail_on_rank_1, 2, cache)
    assert "RuntimeError: no fourth forward" in str(error.value)


def test_workers_that_do_not_divide_among_the_ranks_are_refused(cache: str) -> None:
    with pytest.raises(RanksError) as error:
        train(2, cache, {"workers": 3})
    for line in str(error.value).splitlines():
        assert line.startswith("MisconfigurationException: 3 workers cannot be placed evenly on 2")


# --- launchers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("launcher", "nodes"), [("torchrun", 2), ("slurm", 1), ("slurm", 2)], ids=str
)
def test_finds_its_place_under_a_launcher(cache: str, launcher: Any, nodes: int) -> None:
    strategy = {"workers": 4, "topology": "ring"}
    ranks = 2 * nodes
    results = run_on_ranks(
        rank_jobs.train,
        ranks,
        cache,
        strategy,
        devices=2,
        num_nodes=nodes,
        launcher=launcher,
        nodes=nodes,
        max_steps=2,
    )
    expected = train(1, cache, strategy, max_steps=2)
    for result in results:
        assert_same(result, expected)


def test_lightnings_launcher_starts_the_ranks(tmp_path: Path, cache: str) -> None:
    script = tmp_path / "script.py"
    strategy = {"workers": 4, "topology": "ring"}
    script.write_text(
        f"import os, sys, torch\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"from rank_jobs import train\n"
        f"result = train({cache!r}, {strategy!r}, devices=2)\n"
        f"torch.save(result, {str(tmp_path)!r} + '/' + os.environ['LOCAL_RANK'] + '.pt')\n"
    )
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_PORT")
    }
    subprocess.run([sys.executable, str(script)], env=environment, check=True, timeout=600)
    expected = train(1, cache, strategy)
    for rank in range(2):
        assert_same(torch.load(tmp_path / f"{rank}.pt"), expected)


# --- any other module -----------------------------------------------------------------------------


def dealt(workers: int) -> list[list[classifier.Batch]]:
    """Row r of each batch goes to worker r mod N."""
    return [
        [(x[worker::workers], y[worker::workers]) for worker in range(workers)]
        for x, y in classifier.examples(5 * workers)
    ]


def averaged(states: list[dict[str, Tensor]], name: str) -> Tensor:
    return torch.stack([state[name].double() for state in states]).mean(0)


@pytest.mark.parametrize("buffers", ["local", "average"])
def test_any_module_trains_as_one_worker_per_rank(tmp_path: Path, buffers: str) -> None:
    path = str(tmp_path / "saved.ckpt")
    mix = torch.full((2, 2), 0.5).double()
    models = classifier.simulate(dealt(2), [mix] * classifier.UPDATES, clip=0.5)
    states = [model.state_dict() for model in models]
    results = run_on_ranks(rank_jobs.train_classifier, 2, 2, buffers, path, save_at=3)
    assert [result["validated_rows"] for result in results] == [5, 5]
    buffer_names = {name for name, _ in models[0].named_buffers()}
    for own, result in zip(states, results, strict=True):
        for name, value in own.items():
            close = {"rtol": 0, "atol": 1e-12, "msg": name}
            torch.testing.assert_close(result["own"][name], value, **close)
            is_local = name in buffer_names and (
                buffers == "local" or not value.is_floating_point()
            )
            average = value if is_local else averaged(states, name)
            torch.testing.assert_close(result["average"][name], average, **close)
            torch.testing.assert_close(result["left"][name], average, **close)
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["optimizer_states"][0]["buffers"]["norm.running_mean"].shape == (2, 4)
    resumed = run_on_ranks(rank_jobs.train_classifier, 2, 2, buffers, path, resume=path)
    for result, again in zip(results, resumed, strict=True):
        for kind in ("own", "average", "left"):
            assert all(
                torch.equal(result[kind][name], again[kind][name]) for name in result[kind]
            ), kind


def test_a_plain_ddp_trainer_trains_the_module() -> None:
    """TinyLLM needs none of this library's strategies: two ranks under DDP equal one process."""
    batches = simulation.batches(workers=2)
    both = run_on_ranks(rank_jobs.train_under_ddp, 2, batches)
    module = simulation.tiny()
    simulation.new_trainer("auto").fit(module, simulation.Batches(batches))
    for on_rank in both:
        for mine, alone in zip(on_rank, module.parameters(), strict=True):
            torch.testing.assert_close(mine, alone.detach(), rtol=1e-10, atol=1e-12)


def test_a_signal_to_one_rank_stops_all_at_one_update(tmp_path: Path, cache: str) -> None:
    """They hear of it at the next log point, 8, and the state of all is saved."""
    stopped = run_on_ranks(rank_jobs.terminate_one_rank, 2, cache, str(tmp_path))
    assert stopped == [8, 8]
    path = str(tmp_path / "stopped.ckpt")
    assert torch.load(path, weights_only=True)["global_step"] == 8
    strategy = {"workers": 4}
    assert_same(train(2, cache, strategy, resume=path), train(1, cache, strategy))


def test_after_a_fit_on_several_ranks_there_are_only_weights(tmp_path: Path, cache: str) -> None:
    for said in run_on_ranks(rank_jobs.save_after_fit, 2, cache, str(tmp_path)):
        assert said.startswith("after Trainer.fit on several ranks the other ranks' workers")
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["weights.ckpt"]
