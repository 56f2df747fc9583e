"""What a measurement ran on: versions, and each GPU with its driver and clocks."""

import platform
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

_PACKAGES = ("torch", "triton", "lightning", "numpy", "pandas", "safetensors", "tinyllm")
_GPU_FIELDS = ("name", "uuid", "driver_version", "clocks.max.sm", "clocks.max.mem", "power.limit")


@cache
def environment() -> dict[str, Any]:
    """Versions, and each GPU with its driver and clocks; no names of hosts or users."""
    packages = {}
    for name in _PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": packages,
        "gpus": _gpus(),
    }


def _gpus() -> list[dict[str, str]]:
    query = f"--query-gpu={','.join(_GPU_FIELDS)}"
    try:
        done = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    lines = [line.split(", ") for line in done.stdout.splitlines() if line.strip()]
    return [dict(zip(_GPU_FIELDS, line, strict=False)) for line in lines]
