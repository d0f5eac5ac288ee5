"""How near two results must be: the only bounds, for tests and for the device check.

A bound is relative to the expected value, plus the same fraction of its root mean square (so that it means the same
for small and large tensors). It grows with the square root of the length of the longest sum, as rounding errors do.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

BASE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Bound by dtype for sums of up to 64 terms."""

VANISHED = 1e-28
"""Values below this may be taken as zero: kernels drop decays and states below 1e-30, far above denormal numbers."""


def bound(dtype: torch.dtype, length: int = 1) -> float:
    """The relative bound for values of `dtype` made by sums of `length` terms."""
    return BASE[dtype] * max(1.0, math.sqrt(length / 64))


def allowed(expected: Tensor, relative: float, scale: float = 0.0) -> Tensor:
    """How far each value may be from the expected one. `scale` stands in for a smaller root mean square."""
    y = expected.double()
    return relative * (y.abs() + y.square().mean().sqrt().clamp(min=scale)) + VANISHED
