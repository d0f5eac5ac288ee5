"""Filters of logits before sampling: float32 inside; what is kept keeps its bits."""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import FLOATS, need, need_dtype, need_one_dtype, need_rank, need_shape, need_values
from .registration import operator

MOST_KEPT = 1024
"""The largest k."""


def _top_like(logits: Tensor, p: Tensor | None, k: Tensor | None) -> Tensor:
    need_dtype(FLOATS, logits=logits)
    need_rank(2, 2, logits=logits)
    need(p is not None or k is not None, "p and k are both missing; the operator takes one of them or both")
    need_one_dtype(logits=logits, p=p)
    need_dtype((torch.int32,), k=k)
    need_shape(logits.shape[:1], "one a row of logits", p=p, k=k)
    return torch.empty_like(logits)


@operator("npu_top_k_top_p", shapes=_top_like)
def npu_top_k_top_p(logits: Tensor, p: Tensor | None, k: Tensor | None) -> Tensor:
    """Logits with -inf outside the k largest, then outside the smallest set of them with probability above p.

    Ties with the k-th largest stay; the largest always stays. p comes before k.
    """
    values, order = logits.float().sort(dim=-1, stable=True)
    if k is not None:
        need_values(1, min(MOST_KEPT, logits.shape[1]), "largest logits to keep", k=k)
        least = values.gather(-1, (logits.shape[1] - k.long())[:, None])
        values = values.masked_fill(values < least, -torch.inf)
    if p is not None:
        need(not len(p) or (float(p.min()) >= 0 and float(p.max()) <= 1), "p has values outside [0, 1]")
        dropped = values.softmax(-1).cumsum(-1) <= 1 - p.float()[:, None]
        dropped[:, -1] = False
        values = values.masked_fill(dropped, -torch.inf)
    return torch.empty_like(values).scatter_(-1, order, values).to(logits.dtype)
