"""Model shapes: the presets are pinned, and impossible shapes refused."""

import numpy as np
import pytest
import torch

from tinyllm import LlamaConfig, TinyLLM
from tinyllm.config import PRESETS


@pytest.mark.parametrize(
    ("preset", "parameters"), [("20m", 20_403_520), ("50m", 48_507_392), ("90m", 91_605_120)]
)
def test_presets_count_exactly(preset: str, parameters: int) -> None:
    """The count by formula and that of the built model; the tied embedding counts once."""
    assert PRESETS[preset].num_parameters == parameters
    assert sum(p.numel() for p in TinyLLM(preset=preset).parameters()) == parameters


def test_numpys_numbers_become_pythons() -> None:
    """A checkpoint of weights alone holds no others."""
    layers, width = np.array([1, 64])
    config = LlamaConfig(layers, width, 2, 128, init_std=np.float32(0.5))
    found = {type(value) for value in config.to_dict().values()}
    assert found == {int, float}
    assert config == LlamaConfig(1, 64, 2, 128, init_std=0.5)
    with pytest.raises(ValueError, match="layers is of bool; it must be a whole number"):
        LlamaConfig(True, 64, 2, 128)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"layers": 0}, "layers is 0"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"heads": 3}, "width 64 over 3 heads"),
        ({"heads": 64}, "no even head dimension"),
        ({"norm_eps": 0.0}, "norm_eps is 0.0"),
        ({"init_std": float("nan")}, "init_std is nan"),
    ],
)
def test_impossible_shapes_are_refused(wrong: dict[str, float], message: str) -> None:
    shape = {"layers": 1, "width": 64, "heads": 2, "ffn_width": 128} | wrong
    with pytest.raises(ValueError, match=message):
        LlamaConfig(**shape)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("layers", torch.zeros(1, 1).expand(1 << 20, 1 << 20), "layers is of Tensor; it must be a"),
        ("width", 16.0, "width is of float; it must be a whole number"),
        ("rope_theta", "10000", "rope_theta is of str; it must be a number"),
    ],
)
def test_other_types_are_refused_before_they_are_compared(
    name: str, value: object, shown: str
) -> None:
    with pytest.raises(ValueError, match=shown):
        LlamaConfig(**{"layers": 1, "width": 16, "heads": 2, "ffn_width": 32, name: value})  # type: ignore[arg-type]
