"""Greedy choice among ranks: each finds its own best token, and only these are exchanged.

No rank makes or gets the logits of the whole vocabulary. What goes around is a value and an id for each rank and row.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from params.quant.values import QuantizedWeight
from params.shards import VocabularyWeight

from ..ops.collective import all_gather
from ..ops.greedy import greedy_markov_token, greedy_token, rounded_sum
from ..ops.linear import linear
from ..ops.widen import wide
from ..target import EVERY
from .linear import PackedWeight

NOBODY = torch.iinfo(torch.int32).max
"""The id of a rank that has no token of the vocabulary: larger than any, so that it never wins among equals."""


def own_best(
    logits: Float[Tensor, "*lead part"], tokens: range
) -> tuple[Float[Tensor, "*lead 1"], Int[Tensor, "*lead 1"]]:
    """The largest of a rank's logits, in float32 or wider, and its id. They begin with those of `tokens`."""
    logits = logits[..., : len(tokens)]
    if not tokens:
        shape = (*logits.shape[:-1], 1)
        return wide(logits.new_full(shape, -torch.inf)), logits.new_full(shape, NOBODY, dtype=torch.int32)
    at = logits.argmax(-1, keepdim=True)
    return wide(logits.gather(-1, at)), at.int() + tokens.start


def best_of(values: Float[Tensor, "*lead ranks"], ids: Int[Tensor, "*lead ranks"]) -> Int[Tensor, "*lead"]:
    """The id that comes with the largest value, the lowest among equals; a NaN is larger than every number."""
    # Where there is a NaN it is the maximum, which then equals nothing.
    wins = (values == values.amax(-1, keepdim=True)) | values.isnan()
    return torch.where(wins, ids, NOBODY).amin(-1).long()


def _exchanged(logits: Tensor, head: VocabularyWeight) -> Tensor:
    """The ids of the largest of all ranks' logits."""
    values, ids = (all_gather(x, group=head.group, ranks=head.ranks) for x in own_best(logits, head.tokens))
    return best_of(values, ids)


def _refuse(x, head, only=None) -> str | None:
    if only is not None:
        return "compares all tokens that a rank has; the draft has a vocabulary of its own, in an order of its own"
    if not isinstance(head, VocabularyWeight):
        return "takes a head that ranks share; this one is whole"
    if not isinstance(head.weight, (Tensor, PackedWeight)):
        return (
            f"takes a head of plain rows; this one is quantised ({type(head.weight).__name__}), its logits are gathered"
        )
    return None


def _refuse_markov(base, x, weight, head=None, only=None) -> str | None:
    if isinstance(weight, QuantizedWeight):
        return f"takes some rows of a plain weight of the Markov head; this one is quantised ({type(weight).__name__})"
    return _refuse(x, head, only)


@greedy_token.kernel("best_of_ranks", targets=EVERY, refuse=_refuse, weights=(VocabularyWeight,))
def _best_of_ranks(x, head, only=None):
    return _exchanged(linear(x, head.weight), head)


@greedy_markov_token.kernel(
    "best_of_ranks", targets=EVERY, refuse=_refuse_markov, weights=(VocabularyWeight, QuantizedWeight)
)
def _best_of_corrected(base, x, weight, head: Any = None, only=None):
    """Of the weight, which every rank has whole, the rows are multiplied that the rank has of the head."""
    own = head.tokens
    bias = linear(x, weight[own.start : own.stop])
    return _exchanged(rounded_sum(base[..., : len(own)], bias), head)
