"""Greedy choice: the token with the largest logit, of logits that need not leave the ranks that made them.

The largest wins, the lowest id among equals. A NaN is larger than every number, and the lowest such id wins: what
`argmax` says of all logits in one row.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from params.shards import VocabularyWeight
from params.weights import WeightValue

from ..op import op
from ..weights import PreparedWeight
from .collective import all_gather
from .linear import linear
from .widen import wide


@op
def greedy_token(
    x: Float[Tensor, "*lead inputs"],
    head: Float[Tensor, "vocab inputs"] | WeightValue | PreparedWeight,
    only: Int[Tensor, " draft_vocab"] | None = None,
) -> Int[Tensor, "*lead"]:
    """The id of the largest of `linear(x, head)`.

    `only` are the ids to choose among, each once; the first in their order wins among equals. Of a head that several
    ranks share the choice is the whole's, on every rank.
    """
    logits = linear(x, head)
    return logits.argmax(-1) if only is None else only[logits[..., only].argmax(-1)]


@op
def greedy_markov_token(
    base: Float[Tensor, "*lead part"],
    x: Float[Tensor, "*lead rank"],
    weight: Float[Tensor, "outputs rank"] | WeightValue | PreparedWeight,
    head: Float[Tensor, "vocab inputs"] | WeightValue | PreparedWeight | None = None,
    only: Int[Tensor, " draft_vocab"] | None = None,
) -> Int[Tensor, "*lead"]:
    """The id of the largest logit after `linear(x, weight)` is added, as `rounded_sum` does: a Markov head's choice.

    `base` are logits that `own_logits` made: of a head that ranks share one rank's, and then this is the `head`; else
    all of them, and `head` is not read. `weight` has a row for each of the
    vocabulary, or for each of `only`, which is that of `greedy_token`; further ones are padding. Every rank has all of
    it.
    """
    if isinstance(head, VocabularyWeight):
        base = all_gather(base, group=head.group, ranks=head.ranks)[..., : head.vocab]
    best = rounded_sum(base if only is None else base[..., only], linear(x, weight)).argmax(-1)
    return best if only is None else only[best]


def own_logits(
    x: Float[Tensor, "*lead inputs"], head: Float[Tensor, "vocab inputs"] | WeightValue | PreparedWeight
) -> Float[Tensor, "*lead part"]:
    """Logits of the rows of `head` that are here: all, or this rank's with its padding. Nothing is exchanged."""
    return linear(x, head.weight if isinstance(head, VocabularyWeight) else head)


def rounded_sum(
    base: Float[Tensor, "*lead vocab"], bias: Float[Tensor, "*lead outputs"]
) -> Float[Tensor, "*lead vocab"]:
    """Logits and what is added to them, summed in float32 and rounded once, to the wider of their dtypes.

    The rounded sum is what tokens are chosen from, greedy or drawn. `bias` may be longer: its rest is padding.
    """
    return (wide(base) + wide(bias[..., : base.shape[-1]])).to(torch.promote_types(base.dtype, bias.dtype))
