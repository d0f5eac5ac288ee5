"""Gated activations: float32 inside, one rounding at the end."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .checks import FLOATS, need, need_dtype, need_rank, shown
from .registration import operator


def _half_like(input: Tensor, dim: int) -> Tensor:
    need_dtype(FLOATS, input=input)
    need_rank(1, 8, input=input)
    need(-input.dim() <= dim < input.dim(), f"dim is {dim} for an input of shape {shown(input)}")
    need(input.shape[dim] % 2 == 0, f"axis {dim} of the input {shown(input)} has no two halves: its size is odd")
    halves = list(input.shape)
    halves[dim] //= 2
    return input.new_empty(halves)


@operator("npu_swiglu", shapes=_half_like)
def npu_swiglu(input: Tensor, dim: int) -> Tensor:
    """a * sigmoid(a) * b, where a is the first half along `dim` and b the second."""
    a, b = input.float().chunk(2, dim)
    return (a * a.sigmoid() * b).to(input.dtype)


def _geglu_like(input: Tensor, dim: int, approximate: int, activate_left: bool) -> tuple[Tensor, Tensor]:
    need(approximate in (0, 1), f"approximate is {approximate}; expected 0 (none) or 1 (tanh)")
    return _half_like(input, dim), _half_like(input, dim)


@operator("npu_geglu", shapes=_geglu_like)
def npu_geglu(input: Tensor, dim: int, approximate: int, activate_left: bool) -> tuple[Tensor, Tensor]:
    """(gelu(b) * a, gelu(b)), where a is the first half along `dim` and b the second; `activate_left` swaps the two."""
    a, b = input.float().chunk(2, dim)
    left, gate = (b, a) if activate_left else (a, b)
    gelu = F.gelu(gate, approximate=("none", "tanh")[approximate])
    return (left * gelu).to(input.dtype), gelu.to(input.dtype)
