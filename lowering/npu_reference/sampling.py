"""The filter of a law over tokens: top-k, then top-p of what that leaves."""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import FLOATS, need, need_dtype, need_rank, need_shape, need_values
from .registration import operator

MOST_K = 1024


def _filtered_like(logits: Tensor, p: Tensor | None, k: Tensor | None) -> Tensor:
    need_dtype(FLOATS, logits=logits)
    need_rank(2, 2, logits=logits)
    need(p is not None or k is not None, "p and k are both left out; the operator wants one of them")
    need_dtype((logits.dtype,), p=p)
    need_dtype((torch.int32,), k=k)
    need_shape(logits.shape[:1], "one a row", p=p, k=k)
    return torch.empty_like(logits)


@operator("npu_top_k_top_p", shapes=_filtered_like)
def npu_top_k_top_p(logits: Tensor, p: Tensor | None, k: Tensor | None) -> Tensor:
    """Logits, -inf in the place of those that are left out.

    Sorted in rising order, a logit goes that is below the k-th largest; of the rest one goes where the mass up to it,
    its own included, is at most 1 - p, so that equal ones at that threshold part. The largest stays.
    """
    ordered, places = logits.float().sort(dim=-1, stable=True)
    if k is not None:
        need_values(1, min(MOST_K, logits.shape[1]), "tokens that stay", k=k)
        ordered = ordered.where(ordered >= ordered.gather(-1, logits.shape[1] - k.long()[:, None]), -torch.inf)
    if p is not None:
        gone = ordered.softmax(-1).cumsum(-1) <= 1 - p.float()[:, None]
        gone[:, -1] = False
        ordered = ordered.where(~gone, -torch.inf)
    return torch.full_like(ordered, -torch.inf).scatter(-1, places, ordered).to(logits.dtype)
