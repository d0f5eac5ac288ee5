"""Projections and table look-ups."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from ..op import op


@op
def linear(x: Float[Tensor, "*lead inputs"], weight: Float[Tensor, "outputs inputs"] | Any) -> Float[Tensor, "*lead outputs"]:
    """x @ weight.T. The weight may also be a prepared one (see `lowering.prepare`); the kernel then knows its layout."""
    return F.linear(x, weight)


@op
def embedding(ids: Int[Tensor, "*lead"], table: Float[Tensor, "vocab hidden"]) -> Float[Tensor, "*lead hidden"]:
    """The rows of `table` at `ids`."""
    return F.embedding(ids, table)
