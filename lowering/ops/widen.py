"""The dtype that ops accumulate in: float32, or float64 where that is what they were given."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """`x` for accumulation: float64 stays as it is, every other dtype becomes float32."""
    return x if x.dtype == torch.float64 else x.float()


def wide_dtype(*tensors: Tensor | None) -> torch.dtype:
    """The one dtype in which all of `tensors` meet: float64 if any of them is float64, else float32."""
    return torch.float64 if any(x is not None and x.dtype == torch.float64 for x in tensors) else torch.float32
