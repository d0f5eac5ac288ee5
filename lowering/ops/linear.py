"""Projections and table look-ups."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from params.quant.values import QuantizedWeight, SplitWeight
from params.shards import AddendWeight, VocabularyWeight
from params.weights import WeightValue

from ..errors import LoweringError
from ..op import op
from ..weights import PreparedWeight, restored
from .collective import all_gather, all_reduce
from .quant import quantized_linear


@op
def linear(
    x: Float[Tensor, "*lead inputs"], weight: Float[Tensor, "outputs inputs"] | WeightValue | PreparedWeight
) -> Float[Tensor, "*lead outputs"]:
    """x @ weight.T; with a quantised weight x is quantised too, see `lowering.ops.quant`.

    Of a weight that several ranks share (`params.shards`) the result is the whole's, on every rank.

    The weight may also be a prepared one (see `lowering.prepare`), whose kernel knows its layout.

    Raises `LoweringError` for a prepared weight where its kernel is refused: under gradients and function transforms,
    for x of another dtype, for another target. A quantised weight raises it under gradients alone.
    """
    weight = restored(weight)
    if isinstance(weight, SplitWeight):
        return torch.cat([linear.body(x, part) for part in weight.parts], -1)
    if isinstance(weight, AddendWeight):
        return all_reduce.body(linear.body(x, weight.weight), group=weight.group)
    if isinstance(weight, VocabularyWeight):
        found = all_gather.body(linear.body(x, weight.weight), group=weight.group, ranks=weight.ranks)
        return found[..., : weight.vocab]
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
def embedding(
    ids: Int[Tensor, "*lead"], table: Float[Tensor, "vocab hidden"] | VocabularyWeight
) -> Float[Tensor, "*lead hidden"]:
    """The rows of `table` at `ids`; of one that several ranks share, the whole's rows on every rank."""
    if isinstance(table, VocabularyWeight):
        return all_reduce.body(own_rows(ids, table), group=table.group)
    return F.embedding(ids, table)


def own_rows(ids: Int[Tensor, "*lead"], table: VocabularyWeight) -> Float[Tensor, "*lead hidden"]:
    """The rows at `ids` that this rank has, zeros for the others'."""
    at = ids - table.first
    own = (at >= 0) & (at < table.weight.shape[0])
    return torch.where(own[..., None], F.embedding(torch.where(own, at, 0), table.weight), 0)
