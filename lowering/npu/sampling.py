"""Filters and draws: npu_top_k_top_p for those who ask for it by name, and Torch else.

Of equal logits at the top-p threshold the operator keeps some and drops others, by the place that its sort gives them,
where ours stay or go together: what a row draws could turn on that, so no call gets it unasked. Its k lies in 1 to
1,024, and must be given: its shape function knows no call without.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.sampling import draw, first_of, keep_top, scaled_down
from ..target import ASCEND
from .features import npu
from .kernel import FLOATS, above, fused, wrong_dtype

NAME = "npu_top_k_top_p"
MOST_K = 1024

keep_top.without(
    ASCEND, f"{NAME} cuts equal logits at the top-p threshold apart; it runs where it is asked for by name"
)
draw.without(ASCEND, f"{NAME} cuts equal logits at the top-p threshold apart; it runs where it is asked for by name")


def _wrong_filter(k: Tensor | None, largest_k: int, p_alone: bool) -> str | None:
    if k is None or p_alone:
        return "takes a k wherever there is a p; this call has rows with p alone"
    return above(MOST_K, k=largest_k)


def _refuse_filter(logits, k, p, *, largest_k, p_alone) -> str | None:
    return _wrong_filter(k, largest_k, p_alone) or wrong_dtype(FLOATS, logits=logits)


def _refuse_draw(logits, keys, temperature, k, p, min_p, *, largest_k, p_alone) -> str | None:
    return _wrong_filter(k, largest_k, p_alone) or wrong_dtype(FLOATS, logits=logits)


@fused(keep_top, NAME, NAME, refuse=_refuse_filter, only_by_name=True)
def _kept(logits, k, p, *, largest_k, p_alone):
    logits = logits.float().contiguous()
    shares = torch.ones_like(k, dtype=torch.float32) if p is None else p.float()
    found = npu.npu_top_k_top_p(logits, p=shares, k=k.clamp(1, min(MOST_K, logits.shape[1])).int())
    return (found > -torch.inf) | (k == 0)[:, None]


@fused(draw, NAME, NAME, refuse=_refuse_draw, only_by_name=True)
def _drawn(logits, keys, temperature, k, p, min_p, *, largest_k, p_alone):
    scaled = scaled_down(logits, temperature)
    keep = _kept(scaled, k, p, largest_k=largest_k, p_alone=p_alone)
    return first_of(scaled, keep if min_p is None else keep & (scaled >= min_p.log()[:, None]), keys)
