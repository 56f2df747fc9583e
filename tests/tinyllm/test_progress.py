"""The progress bar: what it shows, and that it reads nothing between log points."""

import io
import re
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from tinyllm import TinyLLM
from tinyllm.config import LlamaConfig
from tinyllm.logger import RunLogger
from tinyllm.metrics import UpdateMetrics
from tinyllm.module import AdamWConfig
from tinyllm.progress import RunProgressBar, _short
from tinyllm.strategies import SyncStrategy

CONFIG = LlamaConfig(layers=1, width=8, heads=2, ffn_width=16, vocab_size=32, context=8)


class Screen(io.StringIO):
    """Output that takes itself for a terminal, or not."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal

    def frames(self) -> list[str]:
        """What was drawn, one after the other."""
        return [
            part.strip() for part in re.split(r"[\r\n]|\x1b\[A", self.getvalue()) if part.strip()
        ]


class Clock:
    """A second for each look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def terminal() -> Screen:
    return Screen(is_terminal=True)


@pytest.fixture
def log_file() -> Screen:
    return Screen(is_terminal=False)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("tinyllm.progress.time.perf_counter", clock)
    return clock


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Global steps at which values of an update are read from the device, in order."""
    read: list[int] = []
    scalars = UpdateMetrics.scalars

    def counting(self: UpdateMetrics) -> dict[str, float]:
        read.append(TRAINERS[-1].global_step)
        return scalars(self)

    monkeypatch.setattr(UpdateMetrics, "scalars", counting)
    yield read
    TRAINERS.clear()


TRAINERS: list[Trainer] = []


def fit(screen: Screen, module: LightningModule | None = None, **options: Any) -> Trainer:
    rows = torch.randint(32, (48, 9))
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "strategy": SyncStrategy(compile=False),
        "max_steps": 12,
        "log_every_n_steps": 4,
        "val_check_interval": 6,
        "check_val_every_n_epoch": None,
        "logger": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "callbacks": [RunProgressBar()],
    }
    module = module or TinyLLM(config=CONFIG, optimizer=AdamWConfig(lr=0.02))
    ckpt_path = options.pop("ckpt_path", None)
    trainer = Trainer(**(defaults | options))
    TRAINERS.append(trainer)
    loaders = DataLoader(rows, batch_size=4), DataLoader(rows[:8], batch_size=4)
    with redirect_stdout(screen):
        trainer.fit(module, *loaders, ckpt_path=ckpt_path)
    return trainer


def test_pitfall_10_reads_at_log_points_only(
    terminal: Screen, clock: Clock, reads: list[int]
) -> None:
    fit(terminal)
    assert set(reads) == {3, 4, 7, 8, 11, 12}  # within the update, and when it is counted
    updates = {int(n) for n in re.findall(r"(\d+)/12 updates", terminal.getvalue())}
    assert updates == set(range(13))  # though the bar moves with every update


def test_pitfall_10_reads_nothing_without_log_points(terminal: Screen, reads: list[int]) -> None:
    fit(terminal, log_every_n_steps=0)
    assert not reads


def test_shows_loss_learning_rate_rate_and_validation(terminal: Screen, tmp_path: Path) -> None:
    trainer = fit(terminal, logger=RunLogger(tmp_path))
    last = [frame for frame in terminal.frames() if frame.startswith("Training")][-1]
    assert last.startswith("Training: 100%")
    assert "12/12 updates" in last
    loss = float(trainer.callback_metrics["train/loss"])
    lr = float(trainer.callback_metrics["train/lr"])
    validation = float(trainer.callback_metrics["validation/loss"])
    for shown in (f"loss={loss:.3f}", f"lr={lr:.1e}", "tok/s=", f"val={validation:.3f}"):
        assert shown in last
    assert "Epoch" not in terminal.getvalue()
    assert "/-" not in terminal.getvalue()  # as in "0/-2", for a limit that is not set


def test_each_validation_leaves_a_line(terminal: Screen) -> None:
    trainer = fit(terminal)
    lines = [frame for frame in terminal.frames() if frame.startswith("update ")]
    found = [re.fullmatch(r"update (\d+): validation loss (.*), perplexity (.*)", x) for x in lines]
    assert [match[1] for match in found if match] == ["6", "12"]
    assert found[1]
    loss = float(trainer.callback_metrics["validation/loss"])
    assert found[1][2] == f"{loss:.4f}"
    assert float(found[1][3]) == pytest.approx(torch.tensor(loss).exp().item(), rel=1e-3)


def test_the_bar_goes_on_through_epochs_and_accumulation(terminal: Screen, clock: Clock) -> None:
    fit(terminal, max_steps=-1, max_epochs=2, accumulate_grad_batches=5, val_check_interval=1.0,
        check_val_every_n_epoch=1)  # fmt: skip
    counts = [int(n) for n in re.findall(r"(\d+)/6 updates", terminal.getvalue())]
    assert counts == sorted(counts)
    assert set(counts) == set(range(7))


def test_a_resumed_run_starts_where_it_was(terminal: Screen, clock: Clock, tmp_path: Path) -> None:
    fit(terminal, max_steps=6).save_checkpoint(tmp_path / "at_6.ckpt")
    resumed = Screen(is_terminal=True)
    fit(resumed, ckpt_path=tmp_path / "at_6.ckpt")
    counts = [int(n) for n in re.findall(r"(\d+)/12 updates", resumed.getvalue())]
    assert counts
    assert min(counts) == 6


def test_tokens_per_second_are_those_since_the_last_log_point(
    terminal: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("tinyllm.progress.time.perf_counter", clock)
    bar = RunProgressBar()
    rates = []
    renew = RunProgressBar._renew

    def watched(self: RunProgressBar, *args: Any) -> None:
        tokens, started = sum(number for _, number in self._batches), self._started
        renew(self, *args)
        assert started is not None
        rates.append((tokens, self._started - started))  # type: ignore[operator]

    monkeypatch.setattr(RunProgressBar, "_renew", watched)
    fit(terminal, callbacks=[bar], limit_val_batches=0)
    # 4 rows of 8 targets an update; the first update may have compiled, and is left out
    assert [tokens for tokens, _ in rates] == [3 * 32, 4 * 32, 4 * 32]
    assert all(seconds > 0 for _, seconds in rates)


def test_validation_is_not_in_the_rate(terminal: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = []
    renew = RunProgressBar._renew

    def watched(self: RunProgressBar, *args: Any) -> None:
        tokens.append(sum(number for _, number in self._batches))
        renew(self, *args)

    monkeypatch.setattr(RunProgressBar, "_renew", watched)
    fit(terminal)
    # after the validation at 6, update 7 only starts the clock
    assert tokens == [3 * 32, 1 * 32, 4 * 32]


class Seconds:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("resumed", [False, True])
def test_the_time_left_goes_by_all_updates_but_the_first(
    terminal: Screen, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, resumed: bool
) -> None:
    """The first takes a minute, as if compiled, then each five seconds, a validation 100."""
    clock = Seconds()
    start = None
    if resumed:
        start = tmp_path / "at_4.ckpt"
        fit(Screen(is_terminal=True), max_steps=4).save_checkpoint(start)

    class Slow(TinyLLM):
        begun = False

        def on_train_batch_start(self, *_: Any) -> None:
            clock.now += 5.0 if self.begun else 60.0
            self.begun = True

        def on_validation_start(self) -> None:
            clock.now += 100.0 * self.begun

    monkeypatch.setattr("tinyllm.progress.time.perf_counter", clock)
    fit(terminal, Slow(config=CONFIG), ckpt_path=start)
    shown = dict(re.findall(r"(\d+)/12 updates \[\d+:\d+<([?:\d]+)", terminal.getvalue()))
    first = 5 if resumed else 1
    assert shown.pop(str(first - 1)) == shown.pop(str(first)) == "?"
    for update, left in shown.items():
        done = int(update) - first
        seconds = (5.0 * done + 100.0 * (int(update) > 6)) / done * (12 - int(update))
        assert left == f"{int(seconds) // 60:02}:{int(seconds) % 60:02}", update
    assert len(shown) == 12 - first


@pytest.mark.parametrize("with_logger", [True, False])
def test_works_under_a_strategy_of_lightnings(
    terminal: Screen, tmp_path: Path, with_logger: bool
) -> None:
    logger: Any = RunLogger(tmp_path) if with_logger else False
    trainer = fit(terminal, strategy="auto", logger=logger)
    last = [frame for frame in terminal.frames() if frame.startswith("Training")][-1]
    loss = float(trainer.callback_metrics["train/loss"])
    for shown in ("12/12 updates", f"loss={loss:.3f}", "lr=", "tok/s=", "val="):
        assert shown in last


class Other(LightningModule):
    """A module that knows nothing of this library."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(9, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch.float()).square().mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("own", self.layer(batch.float()).mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


def test_works_with_any_module(terminal: Screen) -> None:
    fit(terminal, Other(), strategy="auto")
    last = [frame for frame in terminal.frames() if frame.startswith("Training")][-1]
    assert "12/12 updates" in last
    assert "lr=1.0e-06" in last
    assert "loss=" not in last
    assert "update 6:" not in terminal.getvalue()


class Failing(TinyLLM):
    """Fails in its third update."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            raise RuntimeError("out of luck")


def test_an_error_leaves_the_bars_line(terminal: Screen) -> None:
    with pytest.raises(RuntimeError, match="out of luck"):
        fit(terminal, Failing(config=CONFIG))
    assert terminal.getvalue().endswith("\n")


def test_draws_at_a_readers_pace(terminal: Screen) -> None:
    began = time.perf_counter()
    fit(terminal, limit_val_batches=0, max_steps=200)
    seconds = time.perf_counter() - began
    drawn = len(re.findall(r"/200 updates", terminal.getvalue()))
    assert drawn < 50 + 10 * seconds  # ten a second, and a few more at both ends


def test_a_file_gets_lines_and_no_bar(log_file: Screen, clock: Clock) -> None:
    trainer = fit(log_file)
    text = log_file.getvalue()
    assert "\r" not in text
    assert "\x1b" not in text
    lines = text.splitlines()
    loss = float(trainer.callback_metrics["train/loss"])
    assert any(
        re.match(rf"update 12 of 12: loss {loss:.3f}, lr .*, tok/s .*, left 00:00", x)
        for x in lines
    )
    assert len([line for line in lines if "validation loss" in line]) == 2
    # a second for each look at the clock, of which an update takes at least one
    assert 2 < len(lines) < 12


class Tuner(Callback):
    """Switches the bar off and on, as Lightning's BatchSizeFinder and LearningRateFinder do."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        bar = trainer.progress_bar_callback
        assert bar is not None
        bar.disable()
        bar.enable()


def test_a_file_gets_no_bar_after_tuning_either(log_file: Screen, clock: Clock) -> None:
    fit(log_file, callbacks=[RunProgressBar(), Tuner()])
    assert "\r" not in log_file.getvalue()
    assert "update 12 of 12: loss" in log_file.getvalue()


def test_a_terminal_has_its_bar_after_tuning(terminal: Screen) -> None:
    fit(terminal, callbacks=[RunProgressBar(), Tuner()])
    assert "12/12 updates" in terminal.getvalue()


def test_evaluation_has_its_bars(terminal: Screen, clock: Clock) -> None:
    module = TinyLLM(config=CONFIG)
    loader = DataLoader(torch.randint(32, (12, 9)), batch_size=4)
    trainer = Trainer(accelerator="cpu", logger=False, callbacks=[RunProgressBar()])
    with redirect_stdout(terminal):
        trainer.validate(module, loader, verbose=False)
        trainer.predict(module, loader)
    assert terminal.getvalue().count("3/3") >= 2
    assert "update 0:" not in terminal.getvalue()
    assert "Predicting" in terminal.getvalue()


def test_a_rate_is_short() -> None:
    rates = {0.0: "0", 0.5: "0.5", 999.4: "999", 1_000: "1k", 15_340: "15.3k", 2_130_000: "2.13M"}
    rates |= {999.7: "1k", 999_400: "999k", 999_700: "1M", 999_700_000: "1G", 2.5e9: "2.5G"}
    assert {rate: _short(rate) for rate in rates} == rates
