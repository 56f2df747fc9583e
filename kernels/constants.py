"""Numbers that kernels share."""

import math

import triton.language as tl

LOG2_E = tl.constexpr(math.log2(math.e))
"""Exponentials are powers of two on a GPU: exp(x) is exp2(x · log2 e)."""
