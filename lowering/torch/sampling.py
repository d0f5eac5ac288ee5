"""Filters of a law over tokens without a sort of the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.sampling import keep_top
from ..ops.widen import wide
from ..target import EVERY


def _refuse(logits, k, p, *, largest_k, p_alone) -> str | None:
    return "searches the bits of float32 numbers; logits are torch.float64" if logits.dtype == torch.float64 else None


@keep_top.kernel("torch_search", targets=EVERY, refuse=_refuse)
def _searched(logits, k, p, *, largest_k, p_alone):
    scaled = wide(logits)
    keep = torch.ones_like(scaled, dtype=torch.bool)
    top = scaled[:, :0]
    if k is not None:
        top = scaled.topk(min(largest_k, scaled.shape[1])).values
        kth = top.gather(-1, k.long().clamp(1, top.shape[1])[:, None] - 1)
        least = torch.where(k[:, None] > 0, kth, -torch.inf)
        keep, scaled, top = scaled >= least, *(x.masked_fill(x < least, -torch.inf) for x in (scaled, top))
    if p is None:
        return keep
    largest = scaled.amax(-1, keepdim=True)
    weights = (scaled - largest).exp()
    limit = torch.where(p < 1, p * weights.sum(-1), torch.inf)
    # With top-k in every row, what decides is among the top: tokens below it have no mass.
    among = weights if p_alone else (top - largest).exp()
    return keep & (weights >= smallest_kept(among, limit)[:, None])


def smallest_kept(weights: Tensor, limit: Tensor) -> Tensor:
    """The least value [rows], in 0..1, whose larger weights [rows choices] sum to less than `limit` [rows].

    Non-negative floats order as their bit patterns do, so 30 halvings of the patterns find it without a sort: the
    loop counts the patterns that are too small, from the highest bit down.
    """
    count = torch.zeros_like(limit, dtype=torch.int32)
    for bit in range(29, -1, -1):
        trial = count + (1 << bit)
        larger = torch.where(weights > (trial - 1).view(torch.float32)[:, None], weights, 0).sum(-1)
        count = torch.where(larger < limit, count, trial)
    return count.view(torch.float32)
