"""Weights that several ranks share: each does its part with the kernel that is best for it, then they exchange."""

from __future__ import annotations

import torch

from params.shards import AddendWeight, SomeExperts, VocabularyWeight

from ..ops.collective import all_gather, all_reduce
from ..ops.linear import embedding, linear, own_rows
from ..ops.moe import experts, own_choices
from ..target import EVERY


@linear.kernel("all_reduce", targets=EVERY, weights=(AddendWeight,))
def _added_up(x, weight):
    return all_reduce(linear(x, weight.weight), group=weight.group)


@linear.kernel("all_gather", targets=EVERY, weights=(VocabularyWeight,))
def _side_by_side(x, weight):
    found = all_gather(linear(x, weight.weight), group=weight.group, ranks=weight.ranks)
    return found[..., : weight.vocab]


@embedding.kernel("all_reduce", targets=EVERY, weights=(VocabularyWeight,))
def _looked_up(ids, table):
    return all_reduce(own_rows(ids, table), group=table.group)


@experts.kernel("all_reduce", targets=EVERY, weights=(AddendWeight,))
def _inner_slices(x, weights, ids, gate_up, down, *, caps=None):
    return all_reduce(experts(x, weights, ids, gate_up.weight, down.weight, caps=caps), group=down.group)


@experts.kernel("own_choices", targets=("cpu",), host_reads=True, weights=(SomeExperts,))
def _own_choices(x, weights, ids, gate_up, down, *, caps=None):
    """Only the choices that fall on the rank's experts are run, each as a token with one choice."""
    own, at = own_choices(ids, down)
    tokens, choices = own.nonzero().unbind(1)
    one = weights[tokens, choices, None], at[tokens, choices, None]
    y = experts(x[tokens], *one, gate_up.weight, down.weight, caps=caps)
    return all_reduce(torch.zeros_like(x).index_add(0, tokens, y), group=down.group)


@experts.kernel("whole_experts", targets=EVERY, weights=(SomeExperts,))
def _whole_experts(x, weights, ids, gate_up, down, *, caps=None):
    """With nothing read on the host: choices of other ranks' experts run here too, with weight zero."""
    own, at = own_choices(ids, down)
    y = experts(x, torch.where(own, weights, 0), at, gate_up.weight, down.weight, caps=caps)
    return all_reduce(y, group=down.group)
