"""Calls of the lightning indexer."""

from __future__ import annotations

import torch

from .calls import Bad, ints, meta

INDEXER = "npu_lightning_indexer"


def heads(count: int) -> dict[str, torch.Tensor]:
    """Queries and weights of so many heads."""
    return {"query": meta(6, 1, count, 128), "weights": meta(6, 1, count)}


GOOD = {
    INDEXER: {
        **heads(8),
        "key": meta(9, 16, 1, 128),
        "actual_seq_lengths_key": ints(6),
        "block_table": ints(6, 3),
        "layout_query": "BSND",
        "layout_key": "PA_BSND",
        "sparse_count": 2048,
        "sparse_mode": 0,
    }
}
BAD = {
    INDEXER: [
        Bad("heads of 128 channels", {"key": meta(9, 16, 2, 128)}),
        Bad("up to 64 query heads", heads(65)),
        Bad("8, 16, 24, 32 or 64 query", heads(4), "ascend950"),
        Bad("sparse_mode 0 or 3", {"pre_tokens": 4}),
        Bad("a sparse_count of 1 to 2048", {"sparse_count": 3072}, cann="8.5.0"),
        Bad("1 to 2048 keys of each query", {"sparse_count": 2049}),
        Bad("pages in multiples of 16", {"key": meta(9, 24, 1, 128)}),
        Bad("keys in the layout of queries", {"layout_key": "TND"}),
        Bad("no values out of pages", {"return_value": True}),
        Bad("int32 lengths", {"actual_seq_lengths_key": ints(6, dtype=torch.int64)}),
        Bad("or float32", {"weights": meta(6, 1, 8, dtype=torch.float16)}),
        Bad("the queries' own dtype", {"weights": meta(6, 1, 8, dtype=torch.float32)}, "ascend950"),
    ]
}
