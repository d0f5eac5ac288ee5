"""What a parameter leaf is before it has values: shape, dtype rule, initialiser, and the parts it is merged from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

Init = Literal["normal", "zeros", "ones", "log_uniform", "inverse_softplus", "conv"]


@dataclass(frozen=True)
class TensorSpec:
    """One leaf of a parameter tree.

    `dtype` pins the leaf (delta-rule gates stay float32 whatever the model runs in); `None` follows the model.
    `parts` are the row counts of the checkpoint tensors that are merged along axis 0 into this leaf, in order:
    `(4096, 512, 512)` for a projection that computes query, key and value in one product.
    """

    shape: tuple[int, ...]
    init: Init = "normal"
    dtype: torch.dtype | None = None
    parts: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.parts is not None and sum(self.parts) != self.shape[0]:
            raise ValueError(f"parts {self.parts} add up to {sum(self.parts)}, the leaf has {self.shape[0]} rows")

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)
