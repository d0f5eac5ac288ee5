"""Calls of the short convolution's operator."""

from __future__ import annotations

import torch

from .calls import Bad, ints, meta

CONV = {
    "x": meta(6, 128), "weight": meta(3, 128), "conv_states": meta(3, 2, 128), "query_start_loc": ints(4),
    "cache_indices": ints(3), "max_query_len": 2,
}  # fmt: skip
HALF = torch.float16

GOOD = {"npu_fused_causal_conv1d": CONV}
BAD = {
    "npu_fused_causal_conv1d": [
        Bad("max_query_len where x", {"max_query_len": -1}, "ascend950"),
        Bad("three taps", {"weight": meta(4, 128), "conv_states": meta(3, 3, 128)}, "ascend950"),
        Bad("channels in multiples of 16", {"x": meta(6, 120)}, "ascend950"),
        Bad("1 to 256 rows", {"cache_indices": ints(3, dtype=torch.int64)}, "ascend950"),
        Bad("windows of taps - 1 entries", {"conv_states": meta(3, 1, 128)}, "ascend950"),
        Bad("of one dtype", {"weight": meta(3, 128, dtype=HALF)}, "ascend950"),
    ]
}
