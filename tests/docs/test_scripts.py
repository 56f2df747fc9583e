"""The scripts that the documentation shows do what it says of them."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fences import ROOT

from tinyllm.cli import main
from tinyllm.data.prepare import prepare

SCRIPTS = ROOT / "docs" / "guides" / "scripts"
SMALL = """
trainer:
  accelerator: cpu
  max_steps: {updates}
  val_check_interval: {updates}
  check_val_every_n_epoch: null
  log_every_n_steps: 1
  num_sanity_val_steps: 0
  enable_progress_bar: false
  strategy:
    class_path: tinyllm.strategies.DecentralizedStrategy
    init_args: {{workers: 2, compile: false}}
model:
  config: {{layers: 1, width: 16, heads: 2, ffn_width: 32, vocab_size: 64, context: 16}}
data: {{cache: {cache}, context: 16, batch_size: 8}}
"""


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration of a run that takes no time, in an empty folder."""
    return _configuration(tmp_path, monkeypatch, updates=4)


def _configuration(folder: Path, monkeypatch: pytest.MonkeyPatch, updates: int) -> Path:
    tokens = np.random.default_rng(0).integers(1, 64, 8_000, dtype=np.uint16)
    tokens[18::19] = 0
    tokens.tofile(folder / "tokens.bin")
    prepare(folder / "cache", "tokens", str(folder / "tokens.bin"), vocab_size=64, boundary_id=0)
    path = folder / "small.yaml"
    path.write_text(SMALL.format(cache=folder / "cache", updates=updates), encoding="utf-8")
    monkeypatch.chdir(folder)
    return path


def shell(*args: object, code: int = 0, **variables: str) -> str:
    """What a command prints, with this environment's programs in reach."""
    programs = os.pathsep.join(
        [variables.pop("first", ""), str(Path(sys.executable).parent), os.environ["PATH"]]
    ).lstrip(os.pathsep)
    done = subprocess.run(
        [str(arg) for arg in args],
        env=os.environ | {"PATH": programs} | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}", encoding="utf-8")
    path.chmod(0o755)


def test_the_arena_is_laid_out_as_shown() -> None:
    runpy.run_path(str(ROOT / "docs" / "concepts" / "arena.py"))


def test_figures_are_those_of_the_code(tmp_path: Path) -> None:
    import matplotlib as mpl

    draw: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "concepts" / "figures.py"))
    draw["main"].__globals__["FOLDER"] = tmp_path
    draw["main"]()
    committed = ROOT / "docs" / "concepts" / "figures"
    assert {p.name for p in tmp_path.iterdir()} == {p.name for p in committed.iterdir()}
    for path in committed.iterdir():
        text = path.read_text(encoding="utf-8")
        if f"Matplotlib v{mpl.__version__}," in text:  # another one lays text out differently
            assert (tmp_path / path.name).read_text(encoding="utf-8") == text, path.name


@pytest.mark.parametrize("variable", ["TMPDIR", "TRITON_CACHE_DIR"])
def test_kernels_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    script, archive = SCRIPTS / "keep_kernels.sh", tmp_path / "kernels.tar"
    places = {"TMPDIR": f"tinyllm_kernels_{os.getuid()}", "TRITON_CACHE_DIR": ""}

    def node(name: str) -> tuple[Path, dict[str, str]]:
        folder = tmp_path / name
        folder.mkdir()
        return folder / places[variable], {variable: str(folder)}

    (old, old_node), (new, new_node) = node("old"), node("new")
    (old / "kernel").mkdir(parents=True)
    (old / "kernel" / "code.cubin").write_text("compiled")
    shell("bash", script, "save", archive, **old_node)
    shell("bash", script, "load", archive, **new_node)
    assert (new / "kernel" / "code.cubin").read_text() == "compiled"
    shell("bash", script, "keep", archive, code=2)


def test_the_folder_of_kernels_is_the_one_that_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tinyllm import kernel_cache

    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setattr(kernel_cache.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    kernel_cache.use_local_kernel_cache()
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / f"tinyllm_kernels_{os.getuid()}")


@pytest.fixture
def pretended(small: Path, tmp_path: Path) -> Path:
    """A folder with a ``tinyllm`` that notes its arguments and leaves a real run's log."""
    main(["fit", "--config", str(small), "--trainer.default_root_dir", "real"])
    folder = tmp_path / "bin"
    executable(
        folder / "tinyllm",
        f'printf "%s\\n" "$*" >> {tmp_path}/noted\n'
        'while [ $# -gt 0 ]; do [ "$1" = --trainer.default_root_dir ] && run=$2; shift; done\n'
        f'mkdir -p "$run" && cp {tmp_path}/real/metrics.csv "$run"\n',
    )
    return folder


def noted(folder: Path) -> list[str]:
    """Commands that were given to the pretended ``tinyllm``; the real one understands them."""
    commands = (folder / "noted").read_text(encoding="utf-8").splitlines()
    for command in commands[:3]:
        with pytest.raises(SystemExit) as stop:
            main([*command.split(), "--print_config"])
        assert stop.value.code == 0
    return commands


def last_loss(folder: Path) -> float:
    header, *rows = (folder / "metrics.csv").read_text(encoding="utf-8").splitlines()
    column = header.split(",").index("validation/loss")
    return float(next(row.split(",")[column] for row in reversed(rows) if row.split(",")[column]))


def test_a_sweep(small: Path, tmp_path: Path, pretended: Path) -> None:
    options = ["--trainer.log_every_n_steps", "2"]
    out = shell("bash", SCRIPTS / "sweep.sh", small, "swept", *options, first=str(pretended))
    rates = ["2e-3", "4e-3", "8e-3"]
    assert out.splitlines() == [f"lr-{rate} {last_loss(Path('real'))}" for rate in rates]
    commands = noted(tmp_path)
    assert [c for c in commands if c.endswith(" ".join(options))] == commands
    assert re.findall(r"--model.optimizer.lr (\S+)", "\n".join(commands)) == rates


def test_a_search(small: Path, tmp_path: Path, pretended: Path) -> None:
    """With the few names of Optuna that it uses."""
    (tmp_path / "optuna.py").write_text(
        "class Trial:\n"
        "    def __init__(self, number): self.number, self.params = number, {}\n"
        "    def suggest_float(self, name, low, high, *, log=False):\n"
        "        return self.params.setdefault(name, low + (high - low) * self.number / 20)\n"
        "class Study:\n"
        "    def optimize(self, objective, n_trials):\n"
        "        trials = [Trial(number) for number in range(n_trials)]\n"
        "        tried = [(objective(t), t.number, t.params) for t in trials]\n"
        "        self.best_value, _, self.best_params = min(tried)\n"
        "create_study = Study\n"
    )
    out = shell(
        *(sys.executable, SCRIPTS / "optuna_sweep.py", small, "search"),
        first=str(pretended),
        PYTHONPATH=str(tmp_path),
    )
    assert out == f"{{'lr': 0.001, 'weight_decay': 0.01}} {last_loss(Path('real'))}\n"
    assert len({re.sub(r"\S*trial\S*", "", command) for command in noted(tmp_path)}) == 20


def weights(folder: str) -> dict[str, torch.Tensor]:
    state = torch.load(f"{folder}/checkpoints/last.ckpt", weights_only=True)
    found: dict[str, torch.Tensor] = state["state_dict"]
    return found


def test_two_processes_of_torchrun(small: Path) -> None:
    shell(
        *("torchrun", "--standalone", "--nproc_per_node", 2, "--no_python"),
        *("tinyllm", "fit", "--config", small, "--trainer.devices", 2),
        *("--trainer.default_root_dir", "two"),
        OMP_NUM_THREADS="1",
    )
    main(["fit", "--config", str(small), "--trainer.default_root_dir", "one"])
    for name, expected in weights("one").items():
        torch.testing.assert_close(weights("two")[name], expected)


def test_a_job_that_runs_out_of_time_is_queued_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an ``srun`` that sends what Slurm sends, in the middle of the run."""
    small = _configuration(tmp_path, monkeypatch, updates=300)
    programs = tmp_path / "bin"
    executable(
        programs / "srun",
        f'"$@" & pid=$!\n'
        f"if [ ! -e {tmp_path}/requeued ]; then\n"
        f"  until [ $(wc -l < {tmp_path}/job/metrics.csv || echo 0) -gt 20 ]; do sleep 0.01; done\n"
        f"  kill -USR1 $pid\n"
        f"fi 2> {tmp_path}/waiting\n"
        f"wait $pid\n",
    )
    executable(programs / "scontrol", f'echo "$*" >> {tmp_path}/requeued\n')
    job = {
        **{"SLURM_JOB_ID": "17", "SLURM_JOB_NAME": "tinyllm", "SLURM_NODELIST": "node"},
        **{"SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "1", "SLURM_NNODES": "1"},
        **{"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"},
    }
    command = ["bash", SCRIPTS / "fit.sbatch", "--config", small]
    command += ["--trainer.default_root_dir", "job"]
    shell(*command, code=138, first=str(programs), **job)
    assert (tmp_path / "requeued").read_text() == "requeue 17\n"
    stopped = torch.load("job/checkpoints/last.ckpt", weights_only=True)["global_step"]
    assert 20 <= stopped < 300

    shell(*command, first=str(programs), SLURM_RESTART_COUNT="1", **job)
    assert (tmp_path / "requeued").read_text() == "requeue 17\n"  # once
    main(["fit", "--config", str(small), "--trainer.default_root_dir", "whole"])
    for name, expected in weights("whole").items():
        assert torch.equal(weights("job")[name], expected)
    assert Path("job/metrics.csv").read_text() == Path("whole/metrics.csv").read_text()
