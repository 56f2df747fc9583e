"""What a run leaves in its folder, what it keeps of earlier ones, and what it says."""

import os
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from ranks import run_on_ranks
from run_files import Run, assert_same_state, copy, load, metrics
from stopping import tinyllm_on_this_rank
from torch.utils.data import DataLoader

from tinyllm import LlamaConfig, TinyLLM
from tinyllm.checkpoint import find_checkpoint
from tinyllm.data.cache import TokenCache
from tinyllm.module import AdamWConfig
from tinyllm.run_checkpoint import RunCheckpoint, _same
from tinyllm.strategies import SyncStrategy


def test_a_run_leaves_its_configuration_log_and_checkpoints(finished: Path, tiny: Path) -> None:
    config = yaml.safe_load((finished / "config.yaml").read_text())
    assert config["model"]["optimizer"]["lr"] == 0.01
    assert config["trainer"]["default_root_dir"] == str(finished)
    assert {path.name for path in (finished / "checkpoints").iterdir()} == {
        *("last.ckpt", "best.ckpt"),
    }
    assert load(finished / "checkpoints/last.ckpt")["global_step"] == 12
    rows = metrics(finished)
    assert rows["train/loss"].count() == 12
    assert rows[rows["validation/loss"].notna()]["step"].tolist() == [3, 7, 11]


def test_a_runs_configuration_starts_the_same_run(
    command: Any, finished: Path, tmp_path: Path
) -> None:
    options = ["--config", finished / "config.yaml", "--trainer.default_root_dir", "again"]
    assert command("fit", *options).code == 0
    pd.testing.assert_frame_equal(metrics("again"), metrics(finished))


@pytest.mark.parametrize("interval", [None, 4, 5])
def test_last_holds_the_newest_state(fit: Run, interval: int | None) -> None:
    saved: list[int] = []

    save = RunCheckpoint._save_checkpoint

    def spying(self: Any, trainer: Any, path: str) -> None:
        saved.append(trainer.global_step)
        save(self, trainer, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunCheckpoint, "_save_checkpoint", spying)
        options = [] if interval is None else ["--checkpoint.every_n_train_steps", interval]
        fit("run", "--trainer.max_steps", 11, *options)
    expected = {None: [4, 8, 11], 5: [5, 10, 11], 4: [4, 8, 11]}
    assert saved == expected[interval]
    assert load(Path("run/checkpoints/last.ckpt"))["global_step"] == 11


def test_last_holds_what_was_trained_beside_an_average(fit: Run) -> None:
    """Lightning's callback ends with the average in the weights' place."""
    options = ["--trainer.callbacks+=WeightAveraging", "--model.schedule.updates", 12]
    fit("whole", *options)
    fit("run", *options, "--trainer.max_steps", 7)
    state = load(Path("run/checkpoints/last.ckpt"))
    fit("plain", *options[1:], "--trainer.max_steps", 7)
    assert _same(
        state["current_model_state"], load(Path("plain/checkpoints/last.ckpt"))["state_dict"]
    )
    fit("run", *options, "--ckpt_path", "last")
    assert_same_state("run", Path("whole"))


def states(folder: Path | str) -> list[dict[str, Any]]:
    """Those in last.ckpt of the callbacks for the last checkpoint and for the best one."""
    callbacks = load(Path(folder) / "checkpoints/last.ckpt")["callbacks"]
    return [callbacks[next(key for key in callbacks if key.startswith(kind))]
            for kind in ("RunCheckpoint", "ModelCheckpoint")]  # fmt: skip


EPOCHS = ["--trainer.limit_train_batches", "4"]


@pytest.mark.parametrize("options", [[], ["--checkpoint.every_n_train_steps", "4"], EPOCHS])
def test_last_is_a_second_name_of_the_best_of_the_same_update(
    fit: Run, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    def run() -> tuple[dict[str, Any], bool]:
        fit("run", *options)
        last, best = (Path(f"run/checkpoints/{name}.ckpt") for name in ("last", "best"))
        return load(last), last.samefile(best)

    linked, is_link = run()
    assert is_link
    monkeypatch.setattr(RunCheckpoint, "_links", lambda *_: False)
    written, is_link = run()
    assert not is_link
    assert linked.keys() == written.keys()
    assert _same(linked, written)


def test_last_knows_the_best_of_its_own_validation(fit: Run) -> None:
    """Or a resumed run might replace best.ckpt by a worse one."""
    fit("run", "--trainer.callbacks", "stopping.KeepAside", "--trainer.callbacks.updates", 4)
    Path("run/checkpoints").rename("run/later")
    Path("run/aside").rename("run/checkpoints")
    last, best = states("run")
    assert last["last_model_path"] == ""  # it was linked to a file written before it was there
    losses = metrics("run")["validation/loss"].dropna().tolist()
    assert best["best_model_score"].item() == pytest.approx(losses[0])
    fit("run", "--ckpt_path", "last")
    last, best = states("run")
    assert last["last_model_path"] == best["best_model_path"].replace("best", "last")
    assert best["best_model_score"].item() == pytest.approx(min(losses))
    assert sorted(path.name for path in Path("run/checkpoints").iterdir()) == [
        *("best.ckpt", "last.ckpt")
    ]


def gone(find: Any) -> Any:
    def find_nothing(self: Any, state: Any, paths: list[str]) -> Any:
        for path in paths:
            Path(path).rename(f"{path}.moved")
        return find(self, state, paths)

    return find_nothing


def refused(*_: Any) -> None:
    raise OSError(18, "Invalid cross-device link")


@pytest.mark.parametrize(
    "options",
    [
        ["--best_checkpoint.save_weights_only", "true"],
        ["--checkpoint.save_weights_only", "true"],
        ["--checkpoint.enable_version_counter", "true"],
        ["--checkpoint.dirpath", "memory://last"],
        ["--best_checkpoint.dirpath", "memory://best"],
        ["--trainer.strategy", "auto"],  # whose files are not known to be replaced
        # saved before the validation, and one whose state is never the same again
        ["--best_checkpoint.monitor", "null", "--best_checkpoint.every_n_train_steps", "4"],
        ["--trainer.callbacks", "stopping.Restless"],
        ["gone"],
        ["refused"],
    ],
)
def test_last_is_written_where_no_file_can_be_shared(
    fit: Run, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    saved: list[str] = []
    save = Trainer.save_checkpoint

    def spying(self: Any, path: Any, *args: Any) -> None:
        saved.append(Path(path).name)
        save(self, path, *args)

    monkeypatch.setattr(Trainer, "save_checkpoint", spying)
    if options == ["gone"]:
        monkeypatch.setattr(RunCheckpoint, "_first_with", gone(RunCheckpoint._first_with))
    if options == ["refused"]:
        monkeypatch.setattr(Path, "hardlink_to", refused)
    fit("run", "--trainer.max_steps", 8, *(options if len(options) > 1 else []))
    assert saved == ["best.ckpt", "last.ckpt"] * 2
    left = [path for path in Path().rglob("*") if "partial" in path.name or path.name == "memory:"]
    assert not left


def test_a_callback_of_an_earlier_fit_lends_no_file(tmp_path: Path) -> None:
    """The second fit is worse at the update after which the first one saved its best."""
    names: dict[str, Any] = {"dirpath": tmp_path, "enable_version_counter": False}
    best = ModelCheckpoint(filename="best", monitor="validation/loss", **names)
    rows = torch.randint(16, (8, 9), generator=torch.Generator().manual_seed(0))
    config = LlamaConfig(layers=1, width=8, heads=2, ffn_width=8, vocab_size=16, context=8)
    for rate in (0.01, 0.0):
        module = TinyLLM(config=config, optimizer=AdamWConfig(lr=rate))
        last = RunCheckpoint(save_top_k=0, save_last=True, **names)
        trainer = Trainer(
            accelerator="cpu",
            max_steps=2,
            num_sanity_val_steps=0,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[best, last],
            strategy=SyncStrategy(compile=False),
        )
        trainer.fit(module, DataLoader(rows, batch_size=4), DataLoader(rows, batch_size=4))
        weights = torch.load(last.last_model_path, weights_only=True)["state_dict"]
        for name, weight in module.state_dict().items():
            assert torch.equal(weights[name], weight), name


@pytest.mark.parametrize("refusing", [False, True])
def test_ranks_share_a_file_or_write_it_together(
    tiny: Path, tmp_path: Path, refusing: bool
) -> None:
    options = ["--trainer.devices", "2", "--trainer.default_root_dir", str(tmp_path / "run")]
    args = ["fit", "--config", str(tiny), *options, "--trainer.max_steps", "8"]
    run_on_ranks(tinyllm_on_this_rank, 2, args, without_links_on=0 if refusing else None)
    last, best = (tmp_path / f"run/checkpoints/{name}.ckpt" for name in ("last", "best"))
    assert last.samefile(best) != refusing
    assert load(last)["global_step"] == 8


def test_a_checkpoint_for_each_epoch(fit: Run, tmp_path: Path) -> None:
    epochs = "trainer: {max_steps: -1, max_epochs: 2, check_val_every_n_epoch: 1, "
    (tmp_path / "epochs.yaml").write_text(epochs + "val_check_interval: 1.0}\n")
    fit("run", "--config", "epochs.yaml", "--trainer.limit_train_batches", 3)
    state = load(Path("run/checkpoints/last.ckpt"))
    assert (state["global_step"], state["epoch"]) == (6, 1)
    fit("other", "--config", "epochs.yaml", "--trainer.limit_train_batches", 3,
        "--trainer.limit_val_batches", 0)  # fmt: skip
    assert load(Path("other/checkpoints/last.ckpt"))["global_step"] == 6


def test_pitfall_13_a_new_run_keeps_an_earlier_one_aside(fit: Run, finished: Path) -> None:
    used = copy(finished, "used")
    before = {path.name: path.read_bytes() for path in used.rglob("[!.]*") if path.is_file()}
    done = fit("used", "--trainer.max_steps", 2, "--trainer.log_every_n_steps", 2)
    assert "used holds an earlier run; it is kept in used/earlier-1" in done.err
    aside = {path.name: path.read_bytes() for path in Path("used/earlier-1").rglob("*.*")}
    aside.pop("checkpoints", None)
    assert aside == before
    assert metrics("used")["step"].tolist() == [1]
    assert load(Path("used/checkpoints/last.ckpt"))["global_step"] == 2
    fit("used", "--trainer.max_steps", 2)
    assert Path("used/earlier-2/metrics.csv").exists()
    assert metrics("used/earlier-1")["train/loss"].count() == 12


def test_a_run_without_log_and_checkpoints_is_kept_aside_too(fit: Run) -> None:
    bare = ["--trainer.logger", "false", "--trainer.enable_checkpointing", "false"]
    bare += ["--trainer.callbacks", "tinyllm.callbacks.MemoryMonitor", "--trainer.max_steps", 2]
    fit("bare", *bare)
    before = {path.name: path.read_bytes() for path in Path("bare").iterdir()}
    assert {"config.yaml", "memory.json"} <= set(before)
    fit("bare", *bare, "--trainer.gradient_clip_val", 0.3)
    aside = {path.name: path.read_bytes() for path in Path("bare/earlier-1").iterdir()}
    assert aside == before
    assert Path("bare/config.yaml").read_bytes() != before["config.yaml"]


def test_the_users_own_files_are_no_versions_of_a_checkpoint(tmp_path: Path) -> None:
    for name in ("last", "last-v2", "last-verified", "last-v", "lasting"):
        (tmp_path / f"{name}.ckpt").touch()
    os.utime(tmp_path / "last.ckpt", (1, 1))
    assert find_checkpoint(tmp_path, "last") == tmp_path / "last-v2.ckpt"
    assert find_checkpoint(tmp_path, "best") is None


def test_nothing_is_kept_aside_when_a_run_is_refused(fit: Run, finished: Path) -> None:
    copy(finished, "used")
    fit("used", "--trainer.gradient_clip_algorithm", "value", code=1)
    fit("used", "--ckpt_path", "nowhere.ckpt", code=1)
    fit("used", "--data.cache", "nowhere", code=1)
    assert not Path("used/earlier-1").exists()
    assert (Path("used/config.yaml").read_bytes()) == (finished / "config.yaml").read_bytes()


def test_a_run_from_another_runs_checkpoint_is_a_new_one(fit: Run, finished: Path) -> None:
    copy(finished, "used")
    start = finished / "checkpoints/last.ckpt"
    fit("used", "--ckpt_path", start, "--trainer.max_steps", 14)
    assert metrics("used")["step"].tolist() == [12, 13]
    assert metrics("used/earlier-1")["train/loss"].count() == 12


def test_an_earlier_run_goes_on_as_a_new_one(fit: Run, finished: Path) -> None:
    """Its checkpoint lies below the run's folder, whose own run must not be lost."""
    copy(finished, "used")
    fit("used", "--trainer.max_steps", 2)
    fit("used", "--ckpt_path", "used/earlier-1/checkpoints/last.ckpt", "--trainer.max_steps", 14)
    assert metrics("used/earlier-2")["train/loss"].count() == 2
    assert metrics("used")["step"].tolist() == [12, 13]


def test_fast_dev_run_leaves_an_earlier_run_alone(fit: Run, finished: Path) -> None:
    copy(finished, "used")
    fit("used", "--trainer.fast_dev_run", "true")
    assert not Path("used/earlier-1").exists()
    pd.testing.assert_frame_equal(metrics("used"), metrics(finished))


@pytest.mark.parametrize(
    "options",
    [
        ["--trainer.enable_checkpointing", "false"],
        ["--trainer.barebones", "true"],
        ["--trainer.logger", "false"],
        ["--trainer.limit_val_batches", "0"],
        ["--trainer.strategy", "auto"],
        ["--trainer.enable_progress_bar", "true"],
        ["--trainer.enable_model_summary", "true"],
    ],
)
def test_lightnings_switches_work(fit: Run, options: list[str]) -> None:
    if "--trainer.barebones" in options:
        options = [*options, "--trainer.log_every_n_steps", "0"]
    fit("run", "--trainer.max_steps", "2", *options)
    has_checkpoint = Path("run/checkpoints/last.ckpt").exists()
    assert has_checkpoint == ("checkpointing" not in options[0] and "barebones" not in options[0])
    assert Path("run/metrics.csv").exists() == (options[0][10:] not in ("barebones", "logger"))


PLAN = """
backend: native (it needs a Hopper GPU, and this run is on the cpu)
device:  cpu with 1 thread, precision 32-true
model:   {parameters:,} parameters: 1 layer, width 16, 2 heads, feed-forward 32
workers: {workers}
data:    {cache}: {tokens:,} tokens to train on, {validation:,} to validate on
batch:   {batch} of 16 tokens = {per_update:,} tokens
plan:    {updates}, {per_parameter:.2g} per parameter, {epochs:.2g} epochs
files:   run
"""


def plan(cache: Path, workers: str, batch: str, per_update: int, updates: int) -> str:
    config = {"layers": 1, "width": 16, "heads": 2, "ffn_width": 32, "vocab_size": 280}
    parameters = TinyLLM(config=config).config.num_parameters
    tokens = len(TokenCache.open(cache).split("train"))
    seen = updates * per_update
    return PLAN.format(
        **{"parameters": parameters, "workers": workers, "cache": cache, "tokens": tokens},
        **{"validation": len(TokenCache.open(cache).split("validation")), "batch": batch},
        **{"per_update": per_update, "per_parameter": seen / parameters, "epochs": seen / tokens},
        updates=f"{updates} update{'s' * (updates > 1)} = {seen:,} tokens",
    )


def test_a_run_introduces_itself_and_says_where_its_files_are(fit: Run, text_cache: Path) -> None:
    done = fit("run", "--trainer.max_steps", 4)
    said = done.err.replace("INFO: ", "")
    assert plan(text_cache, "1", "8 rows", 128, 4) in said
    last, best = "run/checkpoints/last.ckpt", "run/checkpoints/best.ckpt"
    assert f"\ndone:    4 updates; last {last}; best {best}\n" in said
    for noise in ("TPU", "litlogger", "litmodels", "Trainer.fit` stopped", "not empty", "💡"):
        assert noise not in done.err + done.out


@pytest.mark.parametrize("adaptive", ["", ", adaptive consensus"])
def test_a_packed_run_says_how_its_workers_train(fit: Run, text_cache: Path, adaptive: str) -> None:
    strategy = ["class_path: tinyllm.strategies.DecentralizedStrategy"]
    strategy += ["init_args: {workers: 2, scheme: atc, topology: ring, compile: false}"]
    options = ["--trainer.accumulate_grad_batches", 3, "--trainer.max_steps", 1]
    if adaptive:
        options += ["--trainer.strategy.adaptive_consensus.power", 1]
    done = fit("run", "--trainer.strategy", f"{{{', '.join(strategy)}}}", *options)
    workers = f"2: ring, adapt then combine{adaptive}"
    said = done.err.replace("INFO: ", "")
    assert plan(text_cache, workers, "3 x 2 x 4 rows", 3 * 128, 1) in said


def test_a_strategy_of_lightnings_introduces_itself_too(fit: Run) -> None:
    done = fit("run", "--trainer.max_steps", 2, "--trainer.strategy", "auto")
    assert "\nworkers: 1, SingleDeviceStrategy\n" in done.err
    assert "backend" not in done.err
