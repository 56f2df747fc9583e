"""What engines are given."""

import numpy as np
import pytest
import torch
from engines import EPS

from tinyllm.strategies.engine import Combine, GroupHyperparameters


@pytest.mark.parametrize(
    ("dtype", "rate"),
    [
        (torch.bfloat16, 1.0132789611816406e-06),  # in bf16 it would be 1
        (torch.float32, 1.0132789611816406e-06),
        (torch.float64, 1e-6),
    ],
)
def test_betas_are_numbers_of_the_dtype_that_updates_are_computed_in(
    dtype: torch.dtype, rate: float
) -> None:
    group = {"lr": 0.01, "betas": (0.5, 0.999999), "eps": EPS, "weight_decay": 0.1}
    beta1, beta2 = GroupHyperparameters.of(group, dtype).betas
    assert beta1 == 0.5
    assert 1 - beta2 == pytest.approx(rate, rel=1e-9)


def test_a_scheme_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="scheme is 'adaptive'; choose from awc, atc"):
        Combine("adaptive", np.eye(2), lambda rows, failed: None)  # type: ignore[arg-type]
