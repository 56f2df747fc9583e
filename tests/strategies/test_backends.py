"""Which engine is chosen, and what a user is told about it."""

import logging
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from simulation import CONFIG, OPTIMIZER, SCHEDULE, batches, fit, tiny
from torch import Tensor

from tinyllm import LlamaConfig, TinyLLM
from tinyllm.model import Llama
from tinyllm.strategies import DecentralizedStrategy, SyncStrategy
from tinyllm.strategies import backends as backends_module
from tinyllm.strategies.backends import choose_backend
from tinyllm.strategies.native import NativeEngine

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
BF16 = MixedPrecision("bf16-mixed", "cuda")


def llama(**changes: int) -> Llama:
    shape = {"layers": 1, "width": 128, "heads": 2, "ffn_width": 192, "vocab_size": 31}
    return Llama(LlamaConfig(**(shape | changes)))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A pretended GPU; a Hopper one until the test changes it."""
    properties: dict[str, Any] = {"capability": (9, 0), "name": "NVIDIA H200"}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: properties["capability"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: properties["name"])
    return properties


def assert_cannot_run(obstacle: str, *arguments: Any) -> None:
    """Auto goes on with native and says why; asking for gh200 is an error that says what to do."""
    assert choose_backend("auto", *arguments) == ("native", obstacle)
    with pytest.raises(MisconfigurationException) as error:
        choose_backend("gh200", *arguments)
    assert str(error.value) == (
        f"backend gh200 cannot run here: {obstacle}; pass backend: auto or native"
    )


@pytest.mark.parametrize("backend", ["auto", "gh200"])
def test_takes_gh200_on_a_hopper_gpu(gpu: dict[str, Any], backend: Any) -> None:
    chosen = choose_backend(backend, llama(), BF16, CUDA)
    assert chosen == ("gh200", "NVIDIA H200 is a Hopper GPU")


def test_takes_native_when_it_is_asked_for(gpu: dict[str, Any]) -> None:
    assert choose_backend("native", llama(), BF16, CUDA) == ("native", "asked for")


def test_needs_a_gpu() -> None:
    obstacle = "it needs a Hopper GPU, and this run is on the cpu"
    assert_cannot_run(obstacle, llama(), BF16, CPU)


@pytest.mark.parametrize(
    ("name", "capability", "said"),
    [("NVIDIA A100", (8, 0), "8.0"), ("NVIDIA B200", (10, 0), "10.0")],
)
def test_needs_hopper(
    gpu: dict[str, Any], name: str, capability: tuple[int, int], said: str
) -> None:
    gpu.update(name=name, capability=capability)
    obstacle = f"it needs compute capability 9.0, and {name} has {said}"
    assert_cannot_run(obstacle, llama(), BF16, CUDA)


def test_needs_triton(gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends_module, "find_spec", lambda name: None)
    assert_cannot_run("it needs Triton, which is not installed", llama(), BF16, CUDA)


def test_needs_a_tinyllm(gpu: dict[str, Any]) -> None:
    obstacle = "it trains a TinyLLM with its own loss, and this is another module"
    assert_cannot_run(obstacle, None, BF16, CUDA)


@pytest.mark.parametrize(
    ("precision", "said"),
    [(Precision(), "32-true"), (MixedPrecision("16-mixed", "cuda"), "16-mixed")],
)
def test_needs_bf16(gpu: dict[str, Any], precision: Precision, said: str) -> None:
    obstacle = f"it computes in bf16-mixed, and the precision is {said}"
    assert_cannot_run(obstacle, llama(), precision, CUDA)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"width": 96, "heads": 1}, "width 96, ffn_width 192 and heads of 96"),
        ({"ffn_width": 200}, "width 128, ffn_width 200 and heads of 64"),
        ({"heads": 4}, "width 128, ffn_width 192 and heads of 32"),
        ({"width": 256, "heads": 1}, "width 256, ffn_width 192 and heads of 256"),
    ],
)
def test_needs_widths_that_its_kernels_have(
    gpu: dict[str, Any], changes: dict[str, int], said: str
) -> None:
    obstacle = (
        "it needs widths in multiples of 64 and heads of 64 or 128, and the model has " + said
    )
    assert_cannot_run(obstacle, llama(**changes), BF16, CUDA)


@pytest.mark.parametrize("changes", [{}, {"heads": 1}, {"width": 64, "heads": 1}])
def test_widths_that_its_kernels_have(gpu: dict[str, Any], changes: dict[str, int]) -> None:
    assert choose_backend("auto", llama(**changes), BF16, CUDA)[0] == "gh200"


def test_needs_all_parameters_to_be_trained(gpu: dict[str, Any]) -> None:
    model = llama()
    model.norm.weight.requires_grad_(False)
    assert_cannot_run("it trains all parameters, and some are frozen", model, BF16, CUDA)


def test_needs_all_parameters_in_the_optimizer(gpu: dict[str, Any]) -> None:
    model = llama()
    whole = torch.optim.AdamW(model.parameters())
    assert choose_backend("auto", model, BF16, CUDA, [whole])[0] == "gh200"
    most = torch.optim.AdamW([p for n, p in model.named_parameters() if "embed" not in n])
    obstacle = "it trains all parameters, and some are not in the optimizer"
    assert_cannot_run(obstacle, model, BF16, CUDA, [most])


def test_needs_parameters_in_float32(gpu: dict[str, Any]) -> None:
    obstacle = "it keeps parameters in torch.float32, and the model has torch.bfloat16"
    assert_cannot_run(obstacle, llama().bfloat16(), BF16, CUDA)


# --- through the Trainer --------------------------------------------------------------------------


class Kind(Callback):
    """Which engine runs."""

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        self.kind = type(trainer.strategy.engine)


class OwnLoss(TinyLLM):
    """Has a loss of its own, which only autograd can differentiate."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return 2 * super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "it needs a Hopper GPU, and this run is on the cpu"),
        ({"backend": "native"}, "asked for"),
    ],
)
def test_logs_one_line(
    caplog: pytest.LogCaptureFixture, options: dict[str, Any], reason: str
) -> None:
    kind = Kind()
    with caplog.at_level(logging.INFO):
        strategy = DecentralizedStrategy(2, compile=False, **options)
        fit(tiny(), strategy, batches(2), callbacks=[kind], max_steps=1)
    assert kind.kind is NativeEngine
    lines = [r.getMessage() for r in caplog.records if "backend" in r.getMessage()]
    assert lines == [f"backend: native ({reason})"]


@pytest.mark.parametrize("module", [TinyLLM, OwnLoss])
def test_asking_for_gh200_on_a_cpu_is_an_error(module: type[TinyLLM]) -> None:
    trained = module(config=CONFIG, optimizer=OPTIMIZER, schedule=SCHEDULE)
    with pytest.raises(MisconfigurationException, match="on the cpu; pass backend: auto or native"):
        fit(trained, SyncStrategy(backend="gh200"), batches(1))
