"""Filters and draws: why they run in Torch."""

from __future__ import annotations

from ..ops.sampling import draw, keep_top
from ..target import ASCEND

keep_top.without(
    ASCEND,
    "npu_top_k_top_p keeps some and drops others of equal logits at the top-p threshold, and ours stay or go together",
)
draw.without(
    ASCEND,
    "npu_top_k_top_p_sample cuts equal logits at the top-p threshold apart, and cannot be captured into a graph",
)
