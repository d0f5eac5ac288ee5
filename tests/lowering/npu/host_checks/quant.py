"""Calls of the operators that quantise activations."""

from __future__ import annotations

import torch

from .calls import Bad, meta

GOOD = {
    "npu_quantize": {
        "input": meta(6, 64), "scales": meta(64), "zero_points": meta(64), "dtype": torch.qint8, "axis": -1,
        "div_mode": False,
    }
}  # fmt: skip
BAD = {
    "npu_quantize": [
        Bad("scales of x's dtype", {"scales": meta(64, dtype=torch.float32), "zero_points": None}),
        Bad("offsets of the scales", {"zero_points": meta(64, dtype=torch.float32)}),
    ]
}
