"""Projections and table look-ups."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from params.quant.values import QuantizedWeight, SplitWeight

from ..errors import LoweringError
from ..op import op
from ..weights import PreparedWeight
from .quant import quantized_linear


@op
def linear(
    x: Float[Tensor, "*lead inputs"], weight: Float[Tensor, "outputs inputs"] | QuantizedWeight | PreparedWeight
) -> Float[Tensor, "*lead outputs"]:
    """x @ weight.T; with a quantised weight x is quantised too, see `lowering.ops.quant`.

    The weight may also be a prepared one (see `lowering.prepare`), whose kernel knows its layout.

    Raises `LoweringError` for a prepared weight where its kernel is refused: under gradients and function transforms,
    for x of another dtype, for another target. A quantised weight raises it under gradients alone.
    """
    if isinstance(weight, SplitWeight):
        return torch.cat([linear.body(x, part) for part in weight.parts], -1)
    if isinstance(weight, QuantizedWeight):
        return quantized_linear(x, weight)
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
