"""From ragged rows (one flat token axis, cut by `query_start`) to a padded rectangle and back.

Every op over rows takes `query_start [rows+1]` (cumulative, from 0), the static `max_query` (the most tokens in any
row) and the static `uniform` (every row has exactly `max_query` tokens and there is no padding). Tokens at or past
`query_start[-1]` are padding and belong to no row.
"""

from __future__ import annotations

import torch
from torch import Tensor


def to_rectangle(x: Tensor, query_start: Tensor, max_query: int, uniform: bool) -> Tensor:
    """[tokens ...] to [rows max_query ...]. Cells past a row's end hold zeros."""
    rows = query_start.shape[0] - 1
    if uniform:
        return x.unflatten(0, (rows, max_query))
    index = query_start[:-1, None] + torch.arange(max_query, device=x.device)
    inside = in_row(query_start, max_query)
    picked = x[index.clamp(0, x.shape[0] - 1)]
    return torch.where(inside.reshape(*inside.shape, *(1,) * (x.ndim - 1)), picked, 0)


def in_row(query_start: Tensor, max_query: int) -> Tensor:
    """[rows max_query], true where the cell holds a token of its row."""
    return torch.arange(max_query, device=query_start.device) < query_start.diff()[:, None]


def to_flat(x: Tensor, query_start: Tensor, tokens: int, uniform: bool) -> Tensor:
    """[rows max_query ...] back to [tokens ...]. Padding tokens get zeros."""
    if uniform:
        return x.flatten(0, 1)
    row = row_of_token(query_start, tokens)
    live = row < x.shape[0]
    row = row.clamp(max=x.shape[0] - 1)
    offset = (torch.arange(tokens, device=x.device) - query_start[row]).clamp(0, x.shape[1] - 1)
    return torch.where(live.reshape(-1, *(1,) * (x.ndim - 2)), x[row, offset], 0)


def row_of_token(query_start: Tensor, tokens: int) -> Tensor:
    """[tokens]: the row each token belongs to; `rows`, the scratch row, for padding."""
    at = torch.arange(tokens, device=query_start.device, dtype=query_start.dtype)
    return torch.searchsorted(query_start[1:].contiguous(), at, right=True)
