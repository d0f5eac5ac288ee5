"""The lightning indexer: for each query the keys with the greatest weighted sums of relu(query head . key)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .checks import (
    need,
    need_contiguous,
    need_default,
    need_dtype,
    need_one_dtype,
    need_rank,
    need_shape,
    need_values,
    shown,
)
from .registration import operator

HALVES = (torch.float16, torch.bfloat16)
WIDTH = 128
"""The one head size."""
COUNTS = (*range(1, 2049), 3072, 4096, 5120, 6144, 7168, 8192)
"""What sparse_count is documented to take."""
FAR = 2**63 - 1


def _indexer_like(
    query: Tensor, key: Tensor, weights: Tensor, actual_seq_lengths_query: Tensor | None,
    actual_seq_lengths_key: Tensor | None, block_table: Tensor | None, layout_query: str, layout_key: str,
    sparse_count: int, sparse_mode: int, pre_tokens: int, next_tokens: int, return_value: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    need(layout_query in ("BSND", "TND"), f"layout_query is {layout_query!r}; expected 'BSND' or 'TND'")
    need(layout_key == "PA_BSND", f"layout_key is {layout_key!r}; the reference covers 'PA_BSND'")
    need(not return_value, "return_value is not supported with layout_key 'PA_BSND'")
    need_default(
        pre_tokens=None if pre_tokens == FAR else pre_tokens, next_tokens=None if next_tokens == FAR else next_tokens
    )
    need(sparse_mode in (0, 3), f"sparse_mode is {sparse_mode}; expected 0 or 3")
    need(sparse_count in COUNTS, f"sparse_count is {sparse_count}; expected 1 to 2048, or 3072 to 8192 by 1024")
    _need_tensors(query, key, weights, layout_query)
    requests = _requests(query, actual_seq_lengths_query, layout_query)
    _need_pages(key, actual_seq_lengths_key, block_table, requests)
    tokens = query.shape[:-2]
    return query.new_empty((*tokens, 1, sparse_count), dtype=torch.int32), query.new_empty(0)


def _need_tensors(query: Tensor, key: Tensor, weights: Tensor, layout: str) -> None:
    rank = 4 if layout == "BSND" else 3
    need_rank(rank, rank, query=query)
    need_rank(4, 4, key=key)
    need_dtype(HALVES, query=query, key=key, weights=weights)
    need_one_dtype(query=query, key=key, weights=weights)
    need_contiguous(query=query, key=key, weights=weights)
    need_shape(query.shape[:-1], "one weight a query head", weights=weights)
    need(query.numel() > 0, f"query is {shown(query)}, without elements")
    need(query.shape[-2] <= 64, f"query is {shown(query)}; expected at most 64 heads")
    need(
        query.shape[-1] == key.shape[-1] == WIDTH,
        f"query is {shown(query)} and key {shown(key)}; expected heads of {WIDTH} channels",
    )
    need(key.shape[2] == 1, f"key is {shown(key)}; expected one head in blocks [blocks, block_size, 1, {WIDTH}]")
    need(
        key.shape[1] % 16 == 0 and 0 < key.shape[1] <= 1024,
        f"key is {shown(key)}; expected a block_size in multiples of 16, up to 1024",
    )


def _requests(query: Tensor, lengths: Tensor | None, layout: str) -> int:
    need_dtype((torch.int32,), actual_seq_lengths_query=lengths)
    if layout == "BSND":
        need_shape(query.shape[:1], "one length a request", actual_seq_lengths_query=lengths)
        return query.shape[0]
    if lengths is None:
        need(False, "actual_seq_lengths_query is missing; layout TND needs it, as running sums")
    need_rank(1, 1, actual_seq_lengths_query=lengths)
    return lengths.shape[0] if lengths is not None else 0


def _need_pages(key: Tensor, lengths: Tensor | None, table: Tensor | None, requests: int) -> None:
    need(lengths is not None and table is not None, "layout_key 'PA_BSND' needs actual_seq_lengths_key and block_table")
    need_dtype((torch.int32,), actual_seq_lengths_key=lengths, block_table=table)
    need_contiguous(actual_seq_lengths_key=lengths, block_table=table)
    need_shape((requests,), "one length a request", actual_seq_lengths_key=lengths)
    need_rank(2, 2, block_table=table)
    if table is not None:
        need(
            table.shape[0] == requests,
            f"block_table is {shown(table)}; expected a line for each of {requests} requests",
        )


@operator("npu_lightning_indexer", shapes=_indexer_like)
def npu_lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    actual_seq_lengths_query: Tensor | None,
    actual_seq_lengths_key: Tensor,
    block_table: Tensor,
    layout_query: str,
    sparse_count: int,
    sparse_mode: int,
    **rest: Any,
) -> tuple[Tensor, Tensor]:
    """Ids of the best keys of each query, valid ones first, then -1; of equal ones the lower. Keys have no order else.

    Mode 3 lets the last query of a request see its last key, the one before it one less. Values are not returned.
    """
    block_size = key.shape[1]
    need_values(1, block_table.shape[1] * block_size, "keys that a request may have", lengths=actual_seq_lengths_key)
    need_values(0, key.shape[0] - 1, "blocks of key", block_table=block_table)
    found = torch.full((*query.shape[:-2], 1, sparse_count), -1, dtype=torch.int32)
    for row, held in enumerate(actual_seq_lengths_key.tolist()):
        at = _queries(query, actual_seq_lengths_query, layout_query, row)
        blocks = block_table[row, : math.ceil(held / block_size)].long()
        keys = key[blocks].flatten(0, 2)[:held].float()
        scores = (weights[at].float()[..., None] * (query[at].float() @ keys.T).relu()).sum(1)
        for index, line in enumerate(scores):
            seen = held if sparse_mode == 0 else held - (len(scores) - 1 - index)
            best = line[: max(seen, 0)].sort(descending=True, stable=True).indices[:sparse_count]
            found[at][index, 0, : len(best)] = best.sort().values.int()
    return found, query.new_empty(0)


def _queries(query: Tensor, lengths: Tensor | None, layout: str, row: int) -> Any:
    """Where the queries of a request lie: an index of query that keeps a view."""
    if layout == "BSND":
        return row, slice(0, query.shape[1] if lengths is None else int(lengths[row]))
    ends = [0, *([] if lengths is None else lengths.tolist())]
    return slice(ends[row], ends[row + 1])
