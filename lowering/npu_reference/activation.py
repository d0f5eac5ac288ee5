"""Gated activations: float32 inside, one rounding at the end."""

from __future__ import annotations

from torch import Tensor

from .checks import FLOATS, need, need_dtype, need_rank, shown
from .registration import operator


def _swiglu_like(input: Tensor, dim: int) -> Tensor:
    need_dtype(FLOATS, input=input)
    need_rank(1, 8, input=input)
    need(-input.dim() <= dim < input.dim(), f"dim is {dim} for an input of shape {shown(input)}")
    need(input.shape[dim] % 2 == 0, f"axis {dim} of the input {shown(input)} has no two halves: its size is odd")
    halves = list(input.shape)
    halves[dim] //= 2
    return input.new_empty(halves)


@operator("npu_swiglu", shapes=_swiglu_like)
def npu_swiglu(input: Tensor, dim: int) -> Tensor:
    """a * sigmoid(a) * b, where a is the first half along `dim` and b the second."""
    a, b = input.float().chunk(2, dim)
    return (a * a.sigmoid() * b).to(input.dtype)
