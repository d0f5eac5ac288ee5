"""Projections and table look-ups."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from ..op import op
from ..weights import PreparedWeight


@op
def linear(
    x: Float[Tensor, "*lead inputs"], weight: Float[Tensor, "outputs inputs"] | PreparedWeight
) -> Float[Tensor, "*lead outputs"]:
    """x @ weight.T. The weight may also be a prepared one (see `lowering.prepare`), whose kernel knows its layout."""
    assert isinstance(weight, Tensor)
    return F.linear(x, weight)


@op
def embedding(ids: Int[Tensor, "*lead"], table: Float[Tensor, "vocab hidden"]) -> Float[Tensor, "*lead hidden"]:
    """The rows of `table` at `ids`."""
    return F.embedding(ids, table)
