"""The residual stream and its gradient: numbers of fp32 kept as bf16 ones and a byte of the rest.

The matrix products take a number rounded to the compute dtype; kept beside it, the next eight bits
give it 16 significant ones, in three bytes where an fp32 number and its rounded copy take six::

    value = x in the compute dtype          rest = round((bits(x) − bits(value)) / 2⁸)
    x ≈ float(bits(value) + 2⁸ · rest)      within 2⁻¹⁶ of its size, and 2⁻¹⁵ near ties

with ``bits`` an fp32 number's 32 bits read as an integer, in which neighbouring numbers differ by
one. A compute dtype that holds every number of the stream leaves no rest.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Stream(NamedTuple):
    """Numbers in two parts.

    Attributes:
        value: ``[W, M, C]`` compute dtype, the numbers rounded.
        rest: ``[W, M, C]`` int8, what that took from them.
    """

    value: Tensor
    rest: Tensor

    @classmethod
    def empty(cls, like: Tensor) -> "Stream":
        """Room for as many numbers as ``like`` has, of its dtype."""
        return cls(torch.empty_like(like), torch.empty_like(like, dtype=torch.int8))

    def beside(self, value: Tensor) -> "Stream":
        """Room that takes its rounded numbers to ``value``, and their rest where this one's is."""
        return Stream(value, self.rest)

    def joined(self, dtype: torch.dtype) -> Tensor:
        """The numbers in the stream's dtype."""
        if self.value.dtype == dtype:
            return self.value
        bits = self.value.to(dtype).view(torch.int32) + self.rest.to(torch.int32) * 256
        return bits.view(dtype)

    def take(self, x: Tensor) -> None:
        """Writes ``x``, of the stream's dtype."""
        self.value.copy_(x)
        if self.value.dtype == x.dtype:
            self.rest.zero_()
            return
        gone = x.view(torch.int32) - self.value.to(x.dtype).view(torch.int32)
        self.rest.copy_((gone + 128 >> 8).clamp(-128, 127))


@triton.jit
def joined(value: tl.tensor, rest: tl.tensor) -> tl.tensor:
    """:meth:`Stream.joined` of what a kernel has loaded."""
    bits = value.to(tl.float32).to(tl.int32, bitcast=True) + rest.to(tl.int32) * 256
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def store(value_ptr: tl.tensor, rest_ptr: tl.tensor, x: tl.tensor, mask: tl.tensor) -> None:
    """:meth:`Stream.take` of what a kernel has computed."""
    value = x.to(value_ptr.dtype.element_ty)
    bits = x.to(tl.int32, bitcast=True)
    gone = bits - value.to(tl.float32).to(tl.int32, bitcast=True)
    rest = tl.minimum(gone + 128 >> 8, 127)
    tl.store(value_ptr, value, mask=mask)
    tl.store(rest_ptr, rest.to(tl.int8), mask=mask)
