"""Calls of the hyper-connections' operator."""

from __future__ import annotations

import torch

from .calls import Bad, meta

FP32 = torch.float32

GOOD = {
    "npu_mhc_post": {
        "x": meta(6, 4, 128), "h_res": meta(6, 4, 4, dtype=FP32), "h_out": meta(6, 128),
        "h_post": meta(6, 4, dtype=FP32),
    }
}  # fmt: skip
BAD = {
    "npu_mhc_post": [
        Bad("h_res", {"h_res": None}),
        Bad("h_res, which it needs here", {"h_res": None}, cann="master"),
        Bad("float16 or bfloat16 streams", {"h_out": meta(6, 128, dtype=torch.float16)}),
        Bad("float32 weights and matrices", {"h_post": meta(6, 4)}),
        Bad("4 streams", {"x": meta(6, 4, 96), "h_out": meta(6, 96)}),
    ]
}
