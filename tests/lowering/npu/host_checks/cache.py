"""Calls of the writers of caches."""

from __future__ import annotations

import torch

from .calls import Bad, ints, meta

SCATTER, FUSED = "npu_scatter_pa_kv_cache", "npu_kv_rmsnorm_rope_cache_v2"
FP32, FP16, INT64 = torch.float32, torch.float16, torch.int64
PAIR = {"key": meta(6, 2, 128, dtype=FP32), "key_cache": meta(9, 16, 2, 128, dtype=FP32)}

GOOD = {
    SCATTER: {
        "key": meta(6, 2, 128),
        "value": meta(6, 2, 64),
        "key_cache": meta(9, 16, 2, 128),
        "value_cache": meta(9, 16, 2, 64),
        "slot_mapping": ints(6),
        "cache_mode": "Norm",
    },
    FUSED: {
        "kv": meta(6, 1, 1, 576),
        "gamma": meta(512),
        "cos": meta(6, 1, 1, 64),
        "sin": meta(6, 1, 1, 64),
        "index": ints(6, dtype=INT64),
        "k_cache": meta(9, 16, 1, 64),
        "ckv_cache": meta(9, 16, 1, 512),
        "cache_mode": "PA_BNSD",
    },
}
WHOLE = {
    "key": meta(6, 2, 128, dtype=FP32),
    "value": meta(6, 2, 64, dtype=FP32),
    "key_cache": meta(9, 16, 2, 128, dtype=FP32),
    "value_cache": meta(9, 16, 2, 64, dtype=FP32),
}
BAD = {
    SCATTER: [
        Bad("float16, bfloat16 or int8", WHOLE),
        Bad("caches of the dtypes", {"key_cache": meta(9, 16, 2, 128, dtype=FP16)}),
        Bad("keys and values of one dtype", {k: x.to(FP16) for k, x in GOOD[SCATTER].items() if k in PAIR}),
        Bad("int32 or int64 slots", {"slot_mapping": ints(6, dtype=torch.int16)}),
        Bad("keys of three or four axes", {"key": meta(2, 128)}),
        Bad("caches of [blocks, page", {"value_cache": meta(9, 16, 2, 128)}),
        Bad("no more tokens than", {"slot_mapping": ints(145)}),
        Bad(
            "tiles of 32 bytes",
            {"cache_mode": "PA_NZ", "key_cache": meta(9, 32, 16, 8), "value_cache": meta(9, 16, 16, 8)},
        ),
    ],
    FUSED: [
        Bad("kv of four axes", {"kv": meta(6, 2, 1, 576)}),
        Bad("gamma of one axis", {"gamma": meta(512, 1)}),
        Bad("cosines of [rows", {"cos": meta(5, 1, 1, 64)}),
        Bad("int64 places", {"index": ints(6)}),
        Bad("its six cache modes", {"cache_mode": "PA_ND"}),
        Bad("rope keys of 64", {"cos": meta(6, 1, 1, 32)}),
        Bad("pages in multiples of 16", {"k_cache": meta(9, 24, 1, 64), "ckv_cache": meta(9, 24, 1, 512)}),
        Bad("an even number of rope", {"gamma": meta(512, dtype=FP32)}, "ascend950"),
        Bad("caches of kv's dtype", {"ckv_cache": meta(9, 16, 1, 512, dtype=torch.int8)}, "ascend950"),
    ],
}
