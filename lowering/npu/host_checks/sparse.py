"""The lightning indexer."""

from __future__ import annotations

from typing import Any

import torch

from .check import ASCEND_910, ASCEND_950, OT, HostCheck, enter

TILING = "attention/lightning_indexer/op_host/lightning_indexer_tiling.cpp"
HEADS_950 = (8, 16, 24, 32, 64)
"""Numbers of query heads that Ascend 950 takes."""
FAR = 2**63 - 1


def _paged(c: Any) -> bool:
    return c.layout_key == "PA_BSND"


enter(
    "npu_lightning_indexer",
    HostCheck(
        "heads of 128 channels, and one of keys",
        lambda c: c.query.shape[-1] == c.key.shape[-1] == 128 and c.key.shape[-2] == 1,
        f"{OT} v8.5.0 {TILING}",
    ),
    HostCheck(
        "up to 64 query heads",
        lambda c: c.query.shape[-2] <= 64,
        f"{OT} v8.5.0 {TILING} GetN1Size",
        targets=ASCEND_910,
    ),
    HostCheck(
        "8, 16, 24, 32 or 64 query heads",
        lambda c: c.query.shape[-2] in HEADS_950,
        f"{OT} v9.1.0.pre {TILING} GetN1Size",
        targets=ASCEND_950,
    ),
    HostCheck(
        "sparse_mode 0 or 3, with pre_tokens and next_tokens left alone",
        lambda c: c.sparse_mode in (0, 3) and c.pre_tokens == c.next_tokens == FAR,
        f"{OT} v8.5.0 {TILING}",
    ),
    HostCheck(
        "a sparse_count of 1 to 2048",
        lambda c: 1 <= c.sparse_count <= 2048,
        f"{OT} v8.5.0 {TILING}",
        until="9.0.0",
    ),
    HostCheck(
        "1 to 2048 keys of each query, or more in steps of 1024",
        lambda c: 1 <= c.sparse_count <= 2048 or (c.sparse_count > 0 and c.sparse_count % 1024 == 0),
        f"{OT} v9.0.0 {TILING}",
        since="9.0.0",
    ),
    HostCheck(
        "pages in multiples of 16 keys, up to 1024",
        lambda c: not _paged(c) or c.key.shape[1] in range(16, 1025, 16),
        f"{OT} v8.5.0 {TILING}",
    ),
    HostCheck(
        "keys in the layout of queries, or in pages",
        lambda c: _paged(c) or c.layout_key == c.layout_query,
        f"{OT} v8.5.0 {TILING}",
    ),
    HostCheck(
        "no values out of pages",
        lambda c: not (_paged(c) and c.return_value),
        f"{OT} v8.5.0 {TILING}",
    ),
    HostCheck(
        "int32 lengths, with pages one of keys a row",
        lambda c: (
            all(x is None or x.dtype == torch.int32 for x in (c.actual_seq_lengths_query, c.actual_seq_lengths_key))
            and (not _paged(c) or c.actual_seq_lengths_key is not None)
        ),
        f"{OT} v8.5.0 {TILING}",
    ),
    HostCheck(
        "weights of the queries' dtype, or float32",
        lambda c: c.weights.dtype in (c.query.dtype, torch.float32),
        f"{OT} v8.5.0 {TILING}",
        targets=ASCEND_910,
    ),
    HostCheck(
        "weights of the queries' own dtype",
        lambda c: c.weights.dtype == c.query.dtype,
        f"{OT} v9.1.0.pre {TILING}",
        targets=ASCEND_950,
    ),
)
