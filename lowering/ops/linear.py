"""Projections and table look-ups."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import LoweringError
from ..op import op
from ..weights import PreparedWeight


@op
def linear(
    x: Float[Tensor, "*lead inputs"], weight: Float[Tensor, "outputs inputs"] | PreparedWeight
) -> Float[Tensor, "*lead outputs"]:
    """x @ weight.T. The weight may also be a prepared one (see `lowering.prepare`), whose kernel knows its layout.

    Raises `LoweringError` for a prepared weight where its kernel is refused: under gradients and function transforms,
    for x of another dtype, for another target.
    """
    if not isinstance(weight, Tensor):
        raise LoweringError(
            f"linear: the weight is a {type(weight).__name__}, which only the kernel it was prepared for can read, and "
            "that kernel is refused here (gradients, function transforms, another dtype or target); use the plain "
            "parameters, or see lowering.OPS['linear'].explain(x, weight).refused"
        )
    return F.linear(x, weight)


@op
def embedding(ids: Int[Tensor, "*lead"], table: Float[Tensor, "vocab hidden"]) -> Float[Tensor, "*lead hidden"]:
    """The rows of `table` at `ids`."""
    return F.embedding(ids, table)
