"""`tinyllm doctor`: everything a bug report needs, nothing that names the machine or its user."""

import getpass
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tinyllm
from tinyllm.doctor import anonymous

NAMES = [
    *("tinyllm", "python", "lightning", "triton", "torchmetrics", "numpy", "jsonargparse"),
    *("extras", "torch", "CUDA", "driver", "GPU", "backend", "C++ compiler", "processors"),
    *("memory", "working folder", "Triton cache", "compile cache"),
]


def facts(output: str) -> dict[str, str]:
    return {line[:16].strip(): line[16:] for line in output.splitlines()}


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # so that it is put back
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)


def test_says_what_a_bug_report_needs(command: Any) -> None:
    done = command("doctor")
    assert (done.code, done.err) == (0, "")
    found = facts(done.out)
    assert list(found) == NAMES
    assert found["tinyllm"] == tinyllm.__version__
    assert torch.__version__.startswith(found["torch"])  # some builds say less of themselves
    assert found["torch"].count(".") >= 2
    assert found["python"].startswith(f"{platform.python_version()}, linux")
    assert found["C++ compiler"] != ""
    for name in ("working folder", "Triton cache", "compile cache"):
        assert found[name].endswith(" GiB free")
    assert "tinyllm_kernels_" in found["Triton cache"]


def test_without_a_gpu_it_says_why_the_backend_is_native(
    command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = facts(command("doctor").out)
    assert found["GPU"] == "none that torch can use"
    reason = "it needs a Hopper GPU, and this run is on the cpu"
    assert found["backend"] == f"native ({reason})"


@pytest.mark.parametrize(
    ("capability", "backend"),
    [
        ((9, 0), "gh200 (NVIDIA X is a Hopper GPU)"),
        ((8, 6), "native (it needs compute capability 9.0, and NVIDIA X has 8.6)"),
    ],
)
def test_with_a_gpu(
    command: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capability: tuple[int, int],
    backend: str,
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho '580.1.2, NVIDIA X'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    properties = SimpleNamespace(name="NVIDIA X", major=capability[0], minor=capability[1])
    fakes: dict[str, Any] = {
        "is_available": True,
        "device_count": 1,
        "get_device_properties": properties,
        "mem_get_info": (3 << 30, 4 << 30),
        "get_device_capability": capability,
        "get_device_name": "NVIDIA X",
    }
    for name, value in fakes.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    found = facts(command("doctor").out)
    assert found["driver"] == "580.1.2"
    version = ".".join(map(str, capability))
    expected = f"NVIDIA X, compute capability {version}, 4.0 GiB, 3.0 GiB free"
    assert found["GPU 0"] == expected
    assert found["backend"] == backend
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    listed = "none that torch can use; nvidia-smi lists NVIDIA X"
    assert facts(command("doctor").out)["GPU"] == listed


@pytest.mark.parametrize("missing", ["triton", "torch", "lightning"])
def test_what_is_missing_is_a_line_of_its_own(missing: str, tmp_path: Path) -> None:
    code = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from tinyllm.cli import main; main(['doctor'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    found = facts(done.stdout)
    assert found["processors"].endswith("for this process")
    assert ("ModuleNotFoundError" in done.stdout) == (missing != "triton")
    assert ("backend" in found) == (missing == "triton")


def test_names_neither_the_machine_nor_its_user(
    command: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home = tmp_path / "secret_home"
    (home / "work").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("LOGNAME", "jane_doe")
    monkeypatch.chdir(home / "work")
    done = command("doctor")
    assert getpass.getuser() == "jane_doe"
    for private in ("jane_doe", "secret_home", platform.node()):
        assert private not in done.out
    found = facts(done.out)
    assert found["working folder"].startswith("~/work, ")
    assert found["compile cache"].startswith("/tmp/torchinductor_$USER, ")


def test_only_whole_names_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/al")
    monkeypatch.setenv("LOGNAME", "al")
    hidden = anonymous("/home/al/x /home/also /data/al/y torchinductor_al also")
    assert hidden == "~/x /home/also /data/$USER/y torchinductor_$USER also"
