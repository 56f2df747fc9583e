"""What a bug report needs to say about a machine: what ``tinyllm doctor`` prints.

Nothing in it names the machine or its user, and whatever cannot be found out is a line of its own,
so that it also helps where torch cannot be imported.
"""

import getpass
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tinyllm.extras import cpp_compiler
from tinyllm.kernel_cache import use_local_kernel_cache

Lines = Iterator[tuple[str, str]]

_PACKAGES = ("lightning", "triton", "torchmetrics", "numpy", "jsonargparse")
_EXTRAS = ("datasets", "tokenizers", "sentencepiece", "safetensors", "transformers", "matplotlib")
_GIB = 1 << 30


def doctor(backends: Callable[[], Any]) -> None:
    """Print versions, GPUs, the backend that a run would take and why, and free space.

    Args:
        backends: Imports the module that chooses a backend; called late, since it needs torch.
    """
    sections: tuple[Callable[[], Lines], ...] = (
        _versions,
        _torch,
        _gpus,
        lambda: _backend(backends()),
        _machine,
        _space,
    )
    for section in sections:
        try:
            for name, text in section():
                print(f"{name:<16}{text}", flush=True)
        except Exception as error:  # the other sections are still of use
            reason = (str(error).splitlines() or [""])[0]
            print(f"{'':<16}{anonymous(f'{type(error).__name__}: {reason}')}", flush=True)


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _versions() -> Lines:
    yield "tinyllm", _installed("tinyllm")
    libc = " ".join(platform.libc_ver())
    yield "python", f"{platform.python_version()}, {sys.platform} {platform.machine()}, {libc}"
    for package in _PACKAGES:
        yield package, _installed(package)
    yield "extras", ", ".join(f"{package} {_installed(package)}" for package in _EXTRAS)


def _torch() -> Lines:
    yield "torch", _installed("torch")
    import torch

    cuda = torch.version.cuda
    yield "CUDA", f"torch is built for {cuda}" if cuda else "torch is built without it"


def _gpus() -> Lines:
    listed = _output("nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader")
    rows = [row.split(", ", 1) for row in listed.splitlines() if ", " in row]
    yield "driver", rows[0][0] if rows else "no NVIDIA driver found"
    import torch

    if not torch.cuda.is_available():
        unseen = "".join(f"; nvidia-smi lists {name}" for _, name in rows)
        yield "GPU", f"none that torch can use{unseen}"
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        yield (
            f"GPU {index}",
            f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
            f"{total / _GIB:.1f} GiB, {free / _GIB:.1f} GiB free",
        )


def _backend(backends: Any) -> Lines:
    """What ``auto`` chooses for a model that no backend has anything against."""
    import torch
    from lightning.pytorch.plugins.precision import MixedPrecision

    from tinyllm.config import LlamaConfig
    from tinyllm.model import Llama

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    llama = Llama(LlamaConfig(layers=1, width=64, heads=1, ffn_width=64, vocab_size=64))
    precision = MixedPrecision("bf16-mixed", device.type)
    backend, reason = backends.choose_backend("auto", llama, precision, device)
    yield "backend", f"{backend} ({reason})"


def _machine() -> Lines:
    compiler = cpp_compiler()
    said = _output(compiler, "--version").splitlines() if compiler else []
    yield "C++ compiler", said[0] if said else "none; models are not compiled on the native backend"
    yield "processors", f"{os.cpu_count()}, {len(os.sched_getaffinity(0))} for this process"
    memory = dict(re.findall(r"^(\w+): +(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE))
    total, available = (int(memory[key]) / (1 << 20) for key in ("MemTotal", "MemAvailable"))
    yield "memory", f"{total:.1f} GiB, {available:.1f} GiB available"


def _space() -> Lines:
    yield "working folder", _free(Path.cwd())
    use_local_kernel_cache()  # which says where it is
    yield "Triton cache", _free(Path(os.environ["TRITON_CACHE_DIR"]))
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir()
    yield "compile cache", _free(Path(compiled))


def _free(folder: Path) -> str:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free / _GIB
    return f"{anonymous(str(folder))}, {free:.1f} GiB free"


def _output(program: str, *arguments: str) -> str:
    """What a program prints; nothing if it is missing or fails."""
    try:
        done = subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def anonymous(text: str) -> str:
    """The text with ``~`` for the home folder, and ``$USER`` for the user's name."""
    home = str(Path.home())
    if home != "/":
        text = re.sub(rf"{re.escape(home)}(?=/|$|\W)", "~", text)
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name
        return text
    return re.sub(rf"(?<![a-zA-Z0-9]){re.escape(user)}(?![a-zA-Z0-9])", "$USER", text)
