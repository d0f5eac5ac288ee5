"""Calls of the rotary embeddings."""

from __future__ import annotations

import torch

from .calls import Bad, meta

WIDE, WIDER = meta(1, 6, 4, 898), meta(1, 6, 4, 1026)
A5 = "ascend950"

GOOD = {
    "npu_rotary_mul": {"input": meta(1, 6, 4, 64), "r1": meta(1, 6, 1, 64), "r2": meta(1, 6, 1, 64)},
    "npu_interleave_rope": {"x": meta(6, 4, 1, 64), "cos": meta(6, 1, 1, 64), "sin": meta(6, 1, 1, 64)},
    "npu_apply_rotary_pos_emb": {
        "query": meta(6, 4, 128),
        "key": meta(6, 2, 128),
        "cos": meta(6, 1, 64),
        "sin": meta(6, 1, 64),
        "layout": "TND",
        "rotary_mode": "half",
    },
}
BAD = {
    "npu_rotary_mul": [
        Bad("cosines and sines of one shape", {"r2": meta(1, 6, 1, 32)}),
        Bad("up to 896", {"input": WIDE, "r1": WIDE, "r2": WIDE}),
        Bad("x of 3 or 4 axes", {"input": meta(1, 1, 6, 4, 64)}),
        Bad("up to 1024", {"input": WIDER, "r1": WIDER, "r2": WIDER}, A5),
        Bad("no matrix to rotate by", {"rotate": meta(64, 64)}, A5),
    ],
    "npu_interleave_rope": [
        Bad("x of [batch", {"x": meta(6, 4, 1, 32)}),
        Bad("cosines and sines of [batch", {"cos": meta(6, 4, 1, 64), "sin": meta(6, 4, 1, 64)}),
    ],
    "npu_apply_rotary_pos_emb": [
        Bad("layout BSND or TND", {"cos": meta(6, 1, 32), "sin": meta(6, 1, 32)}),
        Bad("one dtype, cosines of one head", {"sin": meta(6, 1, 64, dtype=torch.float32)}),
        Bad("up to 1024 channels", {"query": meta(6, 4, 1026)}, A5),
    ],
}
