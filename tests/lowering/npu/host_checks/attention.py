"""Calls of fused inference attention."""

from __future__ import annotations

from typing import Any

import torch

from .calls import Bad, ints, meta

FIA = "npu_fused_infer_attention_score_v2"
HALF, BOOL = torch.float16, torch.bool
OLD, A5 = {"cann": "8.5.0"}, {"target": "ascend950"}


def heads(width: int, kv_heads: int = 2, page: int = 128, **more: Any) -> dict[str, Any]:
    """Packed queries of 4 heads so wide, over pages."""
    pages = meta(6, page, kv_heads * width)
    return {
        "query": meta(8, 4, width),
        "key": pages,
        "value": pages,
        "num_query_heads": 4,
        "num_key_value_heads": kv_heads,
        "block_size": page,
        **more,
    }


def latents(query_heads: int, **more: Any) -> dict[str, Any]:
    """Heads over one latent, in pages."""
    shared = {"key": meta(6, 128, 512), "value": meta(6, 128, 512), "key_rope": meta(6, 128, 64)}
    return {
        "query": meta(8, query_heads, 512),
        "query_rope": meta(8, query_heads, 64),
        "num_query_heads": query_heads,
        "num_key_value_heads": 1,
        **shared,
        **more,
    }


def padded(width: int, **more: Any) -> dict[str, Any]:
    """Two rows of three queries and one, in a rectangle."""
    return {**heads(width), "query": meta(2, 3, 4, width), "actual_seq_qlen": [3, 1], "input_layout": "BSND", **more}


CALL = {
    **heads(128),
    "atten_mask": meta(2048, 2048, dtype=BOOL),
    "actual_seq_qlen": [3, 8],
    "actual_seq_kvlen": [4, 9],
    "block_table": ints(2, 2),
    "softmax_scale": 0.1,
    "input_layout": "TND",
    "sparse_mode": 3,
}
MANY = {"actual_seq_qlen": [*range(8), *[8] * 4090], "actual_seq_kvlen": [9] * 4098, "block_table": ints(4098, 2)}
ROPE = {"query_rope": meta(8, 4, 32), "key_rope": meta(6, 128, 64)}
TILES = meta(6, 2, 4, 128, 32)
V3 = {"inner_precise": 1}
"""What keeps a call from FAI."""

GOOD = {FIA: CALL}
BAD = {
    FIA: [
        Bad("int32 block tables", {"block_table": ints(2, 2, dtype=torch.int64)}),
        Bad("running sums of queries", {"actual_seq_qlen": [3, 7]}),
        Bad("query lengths of 0 up", padded(128, actual_seq_qlen=[3, 4])),
        Bad("a mask with every sparse_mode", {"atten_mask": None}),
        Bad("page sizes by CANN", heads(128, page=24)),
        Bad("page sizes by CANN", heads(128, page=64), **OLD),
        Bad("page sizes by CANN", heads(256, page=640)),
        Bad("page sizes by CANN", padded(256, **{k: v for k, v in heads(256, page=64).items() if k != "query"}), **A5),
        Bad("over one latent", latents(3)),
        Bad("over one latent", latents(4, sparse_mode=2), **A5),
        Bad("one dtype, float16", {"query": meta(8, 4, 128, dtype=HALF)}),
        Bad("no mask in mode 0", {"sparse_mode": 0}),
        Bad("no mask in mode 0", {"atten_mask": meta(8, 9, dtype=BOOL)}),
        Bad("a band whose bounds", {"sparse_mode": 4, "pre_tokens": 2, "next_tokens": -3}),
        Bad("layout TND, in V3", heads(256, **V3)),
        Bad("keys as wide as values", {"value": meta(6, 128, 128)}),
        Bad("beside values of 128 or 512", ROPE),
        Bad("widths in multiples of 16", padded(40)),
        Bad("no more queries than keys in mode 9", latents(4, sparse_mode=9, actual_seq_kvlen=[2, 9])),
        Bad("masks of two axes in layout BSND", {"sparse_mode": 0, **V3}),
        Bad("keys of 192 beside values of 128, in layout", heads(256, kv_heads=4), **OLD),
        Bad("as many key heads as query heads", heads(192, page=256), **OLD),
        Bad("mode 4 for values", heads(192, kv_heads=4, sparse_mode=4), **OLD),
        Bad("no more queries than keys in mode 3", heads(192, kv_heads=4, actual_seq_kvlen=[2, 9]), **OLD),
        Bad("bounds of a band that are not", padded(256, sparse_mode=4, pre_tokens=-1), **OLD),
        Bad("lists of up to 4096", heads(192, kv_heads=4, **MANY), **OLD),
        Bad("up to 64 query heads", padded(32, query=meta(2, 3, 130, 32), num_query_heads=130), **OLD),
        Bad("heads of up to 512 in layout TND", heads(528), **A5),
        Bad("other values than keys", {"value": meta(6, 128, 128)}, **A5),
        Bad("beside queries of 128 or 512", ROPE, **A5),
        Bad("masks of three or four axes", {"sparse_mode": 0}, **A5),
        Bad("as many lengths of keys", {"actual_seq_kvlen": [4, 9, 1]}, **A5),
        Bad("tiled pages of 16 channels", {"key": TILES, "value": TILES}, **A5),
    ]
}
