"""Projections and look-ups: torch_npu has nothing to add to the device's own matrix product and gather.

Quantised projections are in `quant_linear`.
"""

from __future__ import annotations

from ..ops.linear import embedding, linear
from ..target import ASCEND

linear.without(ASCEND, "Torch's own product is the device's; no fused operator adds to it for a plain weight")
embedding.without(ASCEND, "a look-up is one gather of the device; no fused operator replaces it")
