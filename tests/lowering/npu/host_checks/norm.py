"""Calls of the norms."""

from __future__ import annotations

import torch

from .calls import Bad, meta

FP32, FP16 = torch.float32, torch.float16

GOOD = {
    "npu_rms_norm": {"input": meta(6, 64), "gamma": meta(64, dtype=FP32)},
    "npu_gemma_rms_norm": {"input": meta(6, 64), "gamma": meta(64)},
    "npu_add_rms_norm": {"x1": meta(6, 64), "x2": meta(6, 64), "gamma": meta(64)},
}
BAD = {
    "npu_rms_norm": [
        Bad("x of 1 to 8 axes", {"gamma": meta(32)}),
        Bad("float16, bfloat16 or float32", {"input": meta(6, 64, dtype=FP32), "gamma": meta(64)}),
    ],
    "npu_gemma_rms_norm": [
        Bad("one dtype", {"gamma": meta(64, dtype=FP32)}),
        Bad("a gamma of x's last axes", {"input": meta(0, 64)}),
    ],
    "npu_add_rms_norm": [
        Bad("one dtype", {"gamma": meta(64, dtype=FP32)}),
        Bad("x1 and x2 of one shape", {"x2": meta(1, 64)}),
    ],
}
