"""How these tests make tensors and judge results, shared by all kernels.

Each operation runs three times on copies of the same arguments: its kernel, its plain-torch
reference in the same dtypes, and the reference in float64, the oracle. The kernel's error may
exceed the plain error only by what another order of fp32 operations explains.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tinyllm.kernels.operation import Operation
from tinyllm.kernels.stream import Stream

FLOAT32_EPS = 2.0**-23
GUARD = 1_024.0
"""Fills the storage around a tensor; exact in every floating-point dtype."""
BYTE_GUARD = 77
"""The same for bytes."""

INTERPRETED_LOW = torch.float16
"""Stands for bf16 in Triton's interpreter, which truncates to bf16 where a GPU rounds."""

interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels are compiled where there is a GPU: see gpu tests"
)


def compiled_by(script: str, cases: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """What a script beside this one says of each case, in a process in which Triton compiles."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    file = Path(__file__).with_name(script)
    command = [sys.executable, str(file), *(",".join(map(str, case)) for case in cases)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def normal(
    *shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", gap: int = 0
) -> Tensor:
    """Random values between guards, with ``gap`` guard elements between rows of the first axis."""
    size = torch.Size(shape[1:]).numel()
    guard = GUARD if dtype.is_floating_point else BYTE_GUARD
    storage = torch.full((64 + shape[0] * (size + gap) + 64,), guard, dtype=dtype, device=device)
    view = storage[64:-64].view(shape[0], size + gap)[:, :size].view(shape)
    return view.copy_(torch.randn(shape, device=device))


def poisoned(
    *shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", gap: int = 0
) -> Tensor:
    """As ``normal``, with NaN in place of values: an element that nobody writes stays NaN."""
    return normal(*shape, dtype=dtype, device=device, gap=gap).fill_(torch.nan)


def normal_stream(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Stream:
    """Random values of a residual stream, whose parts lie between guards."""
    stream = poisoned_stream(*shape, dtype=dtype, device=device)
    stream.take(torch.randn(shape, device=device))
    return stream


def poisoned_stream(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Stream:
    """Room between guards for values of a residual stream."""
    rest = normal(*shape, dtype=torch.int8, device=device).fill_(BYTE_GUARD)
    return Stream(poisoned(*shape, dtype=dtype, device=device), rest)


def replicas(arguments: Sequence[Any], double: bool = False) -> list[Any]:
    """Copies with the same strides, guards and aliases, if need be in float64."""
    storages: dict[int, Tensor] = {}

    def replica(value: Any) -> Any:
        if isinstance(value, Stream):
            copy = Stream(*map(replica, value))
            if double:
                copy.value.copy_(value.joined(torch.float32))
            return copy
        if not isinstance(value, Tensor):
            return value
        pointer = value.untyped_storage().data_ptr()
        if pointer not in storages:
            whole = _storage(value)
            convert = double and whole.is_floating_point()
            storages[pointer] = whole.double() if convert else whole.clone()
        return storages[pointer].as_strided(value.shape, value.stride(), value.storage_offset())

    return [replica(value) for value in arguments]


def assert_surroundings_kept(tensor: Tensor, before: Tensor) -> None:
    """What lies in a tensor's storage around it is as it was ``before``, in a replica of it."""
    wholes = [_storage(tensor).clone(), _storage(before).clone()]
    for whole in wholes:
        whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).zero_()
    assert torch.equal(*wholes), "the kernel wrote outside its output"


def assert_accurate(
    operation: Operation[Any],
    arguments: Sequence[Any],
    results: Callable[..., dict[str, Tensor]],
    terms: int = 1,
) -> None:
    """The launcher's results against the oracle.

    Args:
        operation: What to run.
        arguments: Its arguments, outputs among them; they stay as they are.
        results: Takes the arguments after a run and names the results.
        terms: Length of the longest sum behind a result.

    The tolerance on top of the plain error: a sum of n terms in fp32 errs by about ε·√n of its
    size, and a handful of roundings surround it. Results of lower dtype are rounded once, by
    either side: half a unit in the last place of the largest.
    """
    kernel, plain, oracle = replicas(arguments), replicas(arguments), replicas(arguments, True)
    operation.launch(*kernel)
    operation.reference(*plain)
    operation.reference(*oracle)
    expected = results(*oracle)
    for name, result in results(*kernel).items():
        truth = expected[name]
        plain_error = (results(*plain)[name].double() - truth).abs().max().item()
        error = (result.double() - truth).abs().max().item()
        allowed = plain_error + 8 * FLOAT32_EPS * terms**0.5 * truth.abs().max().item()
        assert error <= allowed, f"{name} errs by {error:.3g}; allowed {allowed:.3g}"
    for argument, before in zip(_tensors(kernel), _tensors(arguments), strict=True):
        assert_surroundings_kept(argument, before)


def _tensors(arguments: Sequence[Any]) -> list[Tensor]:
    """All of them, those in streams too."""
    parts = [[*each] if isinstance(each, Stream) else [each] for each in arguments]
    return [part for each in parts for part in each if isinstance(part, Tensor)]


def _storage(tensor: Tensor) -> Tensor:
    """The whole storage of a tensor, flat."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((size,), (1,), 0)
