"""A small cache with a tokenizer, a small model's configuration, and commands in this process."""

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# for the helper modules of this folder, and for ranks.py
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "strategies")]

VOCAB_SIZE = 280
TINY = """
seed_everything: 1
trainer:
  accelerator: cpu
  max_steps: 12
  val_check_interval: 4
  check_val_every_n_epoch: null
  log_every_n_steps: 1
  num_sanity_val_steps: 0
  enable_progress_bar: false
  strategy: {{class_path: tinyllm.strategies.SyncStrategy, init_args: {{compile: false}}}}
model:
  config: {{layers: 1, width: 16, heads: 2, ffn_width: 32, vocab_size: {vocab_size}, context: 16}}
  optimizer: {{lr: 0.01}}
data: {{cache: {cache}, context: 16, batch_size: 8, validation_batch_size: 16}}
"""


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    code: int
    out: str
    err: str


Command = Callable[..., Outcome]


@pytest.fixture(scope="session")
def text_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of short documents with letters outside ASCII, and the tokenizer that made it."""
    from tinyllm.data.prepare import prepare

    folder = tmp_path_factory.mktemp("texts")
    for number in range(40):
        text = f"{number} größere Äpfel für 日本, naïve and quick.\n" * (1 + number % 3)
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")
    path = folder / "cache"
    prepare(path, "text", [str(folder)], vocab_size=VOCAB_SIZE, validation_fraction=0.2)
    return path


@pytest.fixture(scope="session")
def tiny(text_cache: Path) -> Path:
    """A configuration file of a run of 12 updates, in less than a second."""
    path = text_cache.parent / "tiny.yaml"
    path.write_text(TINY.format(cache=text_cache, vocab_size=VOCAB_SIZE), encoding="utf-8")
    return path


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Command:
    """Runs ``tinyllm`` in this process, in an empty folder."""
    import lightning.pytorch  # noqa: F401  (its handlers are set right below)

    from tinyllm.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    def run(*args: object) -> Outcome:
        capfd.readouterr()
        for name in (
            "lightning",
            "lightning.fabric",
            "lightning.pytorch",
        ):  # made under another test's capture
            for handler in logging.getLogger(name).handlers:
                if isinstance(handler, logging.StreamHandler):
                    handler.stream = sys.stderr  # the old one may be closed
        try:
            main([str(arg) for arg in args])
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        return Outcome(code, *capfd.readouterr())

    return run


@pytest.fixture
def fit(command: Any, tiny: Path) -> Callable[..., Any]:
    """Trains in a folder and expects success, unless another exit code is given."""

    def run(folder: str, *args: object, code: int = 0) -> Any:
        done = command("fit", "--config", tiny, "--trainer.default_root_dir", folder, *args)
        assert done.code == code, done.err
        return done

    return run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    """The folder of a run of 12 updates that was never interrupted."""
    from tinyllm.cli import main

    folder = tmp_path_factory.mktemp("finished")
    main(["fit", "--config", str(tiny), "--trainer.default_root_dir", str(folder)])
    return folder
