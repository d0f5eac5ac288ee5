"""Calls of the gated activations."""

from __future__ import annotations

from .calls import Bad, meta

GOOD = {
    "npu_swiglu": {"input": meta(6, 64), "dim": -1},
    "npu_geglu": {"input": meta(6, 64), "dim": -1, "approximate": 1, "activate_left": True},
}
BAD = {
    "npu_swiglu": [Bad("an even size", {"input": meta(6, 63)})],
    "npu_geglu": [
        Bad("an even size along the axis, and no", {"input": meta(0, 64)}),
        Bad("approximate 0 or 1", {"approximate": 2}),
    ],
}
