"""Filters of a law over tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..op import op
from .widen import wide


@op
def keep_top(
    logits: Float[Tensor, "rows vocab"],
    k: Int[Tensor, " rows"] | None,
    p: Float[Tensor, " rows"] | None,
    *,
    largest_k: int,
    p_alone: bool,
) -> Bool[Tensor, "rows vocab"]:
    """The tokens that top-k, then top-p leave of each row.

    Top-k keeps a token if fewer than k are larger; k = 0 keeps all, as does `k=None`. Top-p works on what top-k left
    and keeps a token if the larger ones have less than the share p of that mass; p = 1 keeps all, as does `p=None`.
    Equal tokens stay or go together, so ties at a threshold are all kept, and the largest always stays.
    `largest_k` is at least any k, and `p_alone` tells whether some row with p < 1 has k = 0: hints for kernels.
    """
    ordered = wide(logits).sort(-1, descending=True).values
    least = torch.full_like(ordered[:, :1], -torch.inf)
    if k is not None:
        kth = ordered.gather(-1, k.long().clamp(1, logits.shape[1])[:, None] - 1)
        least = torch.where(k[:, None] > 0, kth, least)
    if p is not None:
        weights = (torch.where(ordered >= least, ordered, -torch.inf) - ordered[:, :1]).exp()
        stays = _sum_of_larger(weights) < torch.where(p < 1, p * weights.sum(-1), torch.inf)[:, None]
        least = torch.maximum(least, torch.where(stays, ordered, torch.inf).amin(-1, keepdim=True))
    return wide(logits) >= least


def _sum_of_larger(weights: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows vocab"]:
    """Of numbers in falling order, the sum of those larger than each; equal ones share one sum."""
    before = F.pad(weights.cumsum(-1), (1, 0))[:, :-1]
    begins = F.pad(weights[:, 1:] < weights[:, :-1], (1, 0))
    places = torch.arange(weights.shape[1], device=weights.device)
    return before.gather(-1, torch.where(begins, places, 0).cummax(-1).values)
