"""What holds for every test: GPU tests on request, threads, the interpreter, forks, a seed."""

import multiprocessing
import os

import pytest

# Read when torch is first imported. With one thread, sums come in the same order on every
# machine, and pytest-xdist's workers do not compete for cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

# Kernels run in Triton's interpreter where there is no GPU. Read whenever Triton, or a kernel, is
# first imported, so before any test module is.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# One process imports everything once, and the processes that tests start are forks of it. It has
# started no thread and holds no lock, unlike the one that runs the tests.
multiprocessing.set_forkserver_preload(
    ["tinyllm.trainer_cli", "tinyllm.strategies.registry", "tinyllm.acceptance.measure"]
)


@pytest.hookimpl(trylast=True)  # after pytest's own -m selection
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect gpu tests, unless -m names them; then insist on a GPU that can run them."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    if "gpu" in config.getoption("markexpr"):
        if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
            found = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
            raise pytest.UsageError(
                f"-m gpu needs a Hopper GPU (compute capability 9.0); found: {found}. "
                "Leave -m gpu out to run the other tests."
            )
        return
    config.hook.pytest_deselected(items=gpu_items)
    items[:] = [item for item in items if item not in gpu_items]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Start every test from the same torch seed, whatever ran before it in this process."""
    torch.manual_seed(0)
