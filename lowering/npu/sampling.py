"""Filters and draws: npu_top_k_top_p for those who ask for it by name, and Torch else.

Of equal logits at the top-p threshold the operator keeps some and drops others, by the place that its sort gives them,
where ours stay or go together: what a row draws could turn on that, so no call gets it unasked. Its k lies in 1 to
1,024. Rows without a top-k run in a second call, which has none, where they have a top-p.
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


def _refuse_filter(logits, k, p, *, largest_k, p_alone) -> str | None:
    if k is None and p is None:
        return "takes k or p; this call has neither"
    return above(MOST_K, k=largest_k) or wrong_dtype((torch.float32,), logits=logits)


def _refuse_draw(logits, keys, temperature, k, p, min_p, *, largest_k, p_alone) -> str | None:
    if k is None and p is None:
        return "takes k or p; this call has neither"
    return above(MOST_K, k=largest_k) or wrong_dtype(FLOATS, logits=logits)


@fused(keep_top, NAME, NAME, refuse=_refuse_filter, only_by_name=True)
def _kept(logits, k, p, *, largest_k, p_alone):
    if k is None:
        return _filtered(logits, p, None)
    both = _filtered(logits, p, k.clamp(1, min(MOST_K, logits.shape[1])).int())
    alone = _filtered(logits, p, None) if p_alone else torch.ones_like(both)
    return torch.where((k > 0)[:, None], both, alone)


def _filtered(logits: Tensor, p: Tensor | None, k: Tensor | None) -> Tensor:
    """The tokens that the operator leaves: it puts -inf in the place of the others."""
    # Given by position, p before k: without k the shape function wants it said.
    shares = None if p is None else p.to(logits.dtype)
    return npu.npu_top_k_top_p(logits.contiguous(), shares, k) > -torch.inf


@fused(draw, NAME, NAME, refuse=_refuse_draw, only_by_name=True)
def _drawn(logits, keys, temperature, k, p, min_p, *, largest_k, p_alone):
    scaled = scaled_down(logits, temperature)
    keep = _kept(scaled, k, p, largest_k=largest_k, p_alone=p_alone)
    return first_of(scaled, keep if min_p is None else keep & (scaled >= min_p.log()[:, None]), keys)
