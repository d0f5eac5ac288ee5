"""Calls of the merge of partial attention, of ATB's ring, and of products by head."""

from __future__ import annotations

import torch

from .calls import Bad, ints, meta

UPDATE, RING, BY_HEAD = "npu_attention_update", "atb.npu_ring_mla", "npu_transpose_batchmatmul"
FP32 = torch.float32

LSE, OUT = meta(12, dtype=FP32), meta(12, 128, dtype=FP32)
GOOD = {
    UPDATE: {"lse": [LSE, LSE], "local_out": [OUT, OUT], "update_type": 0},
    RING: {
        "q_nope": meta(6, 4, 128),
        "q_rope": meta(6, 4, 64),
        "k_nope": meta(9, 2, 128),
        "k_rope": meta(9, 2, 64),
        "value": meta(9, 2, 128),
        "mask": meta(512, 512),
        "seqlen": torch.zeros(2, 2, dtype=torch.int32),
        "head_num": 4,
        "kv_head_num": 2,
        "pre_out": meta(6, 4, 128),
        "prev_lse": meta(4, 6, dtype=FP32),
    },
    BY_HEAD: {"input": meta(6, 4, 128), "weight": meta(4, 128, 512), "perm_x1": [1, 0, 2]},
}
BAD = {
    UPDATE: [
        Bad("1 to 16 parts", {"lse": [LSE] * 17, "local_out": [OUT] * 17}),
        Bad("float32 lse of one axis", {"lse": [LSE, meta(12)]}),
        Bad("outputs of two axes", {"local_out": [meta(12, 516, dtype=FP32)] * 2}),
        Bad("outputs of one dtype", {"local_out": [OUT, meta(12, 128)]}),
        Bad("an update_type of 0 or 1", {"update_type": 2}),
    ],
    RING: [
        Bad("multiples of key heads", {"kv_head_num": 3}),
        Bad("128 plain channels", {"q_rope": meta(6, 4, 32)}),
        Bad("a mask of two axes", {"mask": meta(512)}),
        Bad("lengths on the host", {"seqlen": ints(3, 2)}),
        Bad("an earlier output", {"prev_lse": meta(6, 4, dtype=FP32)}),
    ],
    BY_HEAD: [
        Bad("factors of three axes", {"input": meta(1, 6, 4, 128)}),
        Bad("one dtype, float32", {"weight": meta(4, 128, 512, dtype=FP32)}),
        Bad("perm_x1 of", {"perm_x1": [2, 1, 0]}),
        Bad("perm_x2 of", {"weight": meta(128, 4, 512), "perm_x2": [1, 0, 2]}),
        Bad("perm_y of", {"perm_y": [0, 1, 2]}),
        Bad("as many inner channels", {"input": meta(6, 4, 64)}),
        Bad("fewer than 65536", {"weight": meta(4, 128, 65536)}),
        Bad("beside an x that is turned alone", {"weight": meta(6, 512, 128), "perm_x1": None, "perm_x2": [0, 2, 1]}),
    ],
}
