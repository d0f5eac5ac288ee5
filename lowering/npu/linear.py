"""Projections and look-ups: torch_npu has nothing to add to the device's own matrix product and gather.

Quantised projections are in `quant_linear`.
"""

from __future__ import annotations

from ..ops.greedy import greedy_markov_token, greedy_token
from ..ops.linear import embedding, linear
from ..target import ASCEND

_NO_CHOICE = "no fused operator multiplies and keeps the largest alone: the product is that of linear, then argmax"

linear.without(ASCEND, "Torch's own product is the device's; no fused operator adds to it for a plain weight")
greedy_token.without(ASCEND, _NO_CHOICE)
greedy_markov_token.without(ASCEND, _NO_CHOICE)
embedding.without(ASCEND, "a look-up is one gather of the device; no fused operator replaces it")
