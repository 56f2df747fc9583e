"""No file that a reader would open is ever written in place."""

import builtins
import io
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from training import write_config

from tinyllm.cli import main

APPENDED = {"metrics.csv", "consensus.csv"}  # a row in one piece at a time


def test_files_are_written_under_hidden_names_and_renamed(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So there is no moment at which a kill leaves one empty or cut off."""
    folder = tmp_path / "run"
    written: dict[str, set[str]] = {}
    real = io.open

    def noting(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        named = isinstance(file, str | os.PathLike)
        if named and folder in Path(file).parents and set(mode) & set("wxa+"):
            written.setdefault(Path(file).name, set()).add(mode[0])
        return real(file, mode, *args, **kwargs)

    monkeypatch.setattr(io, "open", noting)
    monkeypatch.setattr(builtins, "open", noting)
    config = write_config(tmp_path / "run.yaml", cache, 6)
    fit = ["fit", "--config", str(config), "--trainer.default_root_dir", str(folder)]
    fit += ["--trainer.callbacks+", "tinyllm.callbacks.RunReport"]
    for goes_on in ([], ["--ckpt_path", "last", "--trainer.max_steps", "9"], []):
        main([*fit, *goes_on])
    in_place = {name: modes for name, modes in written.items() if not name.startswith(".")}
    assert in_place == {name: {"a"} for name in APPENDED}
    files = {path.name for path in folder.rglob("[!.]*.*") if path.is_file()}
    assert {f".{name}" for name in files - APPENDED} <= {
        name.split(".partial")[0].rsplit(f".{os.getpid()}")[0] for name in written
    }


def test_moving_an_earlier_run_aside_is_completed_after_a_kill(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    config = write_config(tmp_path / "run.yaml", cache, 3)
    fit = ["fit", "--config", str(config), "--trainer.default_root_dir", str(folder)]
    main(fit)
    before = {path.name for path in folder.iterdir()}

    rename, moved = Path.rename, []

    def dying(self: Path, target: Path) -> Path:
        moved.append(self.name)
        if len(moved) == 3:
            raise KeyboardInterrupt  # as far as files go, a kill
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", dying)
        with pytest.raises(SystemExit):
            main(fit)
    assert not (folder / "earlier-1").exists()
    main([*fit, "--ckpt_path", "last"])
    assert {path.name for path in (folder / "earlier-1").iterdir()} == before
    assert not (folder / "earlier-2").exists()
    assert not (folder / ".earlier").exists()


def test_a_kill_while_settings_are_written_leaves_the_old_ones(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    config = write_config(tmp_path / "run.yaml", cache, 3)
    fit = ["fit", "--config", str(config), "--trainer.default_root_dir", str(folder)]
    main(fit)
    before = (folder / "config.yaml").read_bytes()

    def dying(self: Any, config: Any, path: str, **_: Any) -> None:
        Path(path).write_text("seed_everything: 1\ntrainer:\n  accel")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("jsonargparse.ArgumentParser.save", dying)
        with pytest.raises(SystemExit):
            main([*fit, "--ckpt_path", "last", "--trainer.max_steps", "6"])
    assert (folder / "config.yaml").read_bytes() == before
    main([*fit, "--ckpt_path", "last", "--trainer.max_steps", "6"])
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    assert settings["trainer"]["max_steps"] == 6
