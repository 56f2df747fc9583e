"""Model shapes: the presets are pinned, and impossible shapes refused."""

import pytest

from tinyllm import LlamaConfig, TinyLLM
from tinyllm.config import PRESETS


@pytest.mark.parametrize(
    ("preset", "parameters"), [("20m", 20_403_520), ("50m", 48_507_392), ("90m", 91_605_120)]
)
def test_presets_count_exactly(preset: str, parameters: int) -> None:
    """The count by formula and that of the built model; the tied embedding counts once."""
    assert PRESETS[preset].num_parameters == parameters
    assert sum(p.numel() for p in TinyLLM(preset=preset).parameters()) == parameters


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
