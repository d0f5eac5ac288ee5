"""Attention without a rectangle of scores: fused where it is differentiated, over pages where they lie.

With a window no kernel here reads keys that lie before it, but for the rest of a page.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from ..host import symbolic
from ..ops.attention import (
    attend_pages,
    attention,
    block_attention,
    near,
    paged_attention,
    pages_of_window,
    seen,
    window_pages,
)
from ..ops.widen import wide
from ..target import EVERY

BLOCK = 64
"""Queries that are worked on at a time: no block looks at keys past its last query."""
FEW = 8
"""Queries of a row up to which keys and values are read in their own dtype, without a float32 copy of the cache."""


def _refuse_symbol(q, k, v, rows, *, scale, window=None) -> str | None:
    if window is None or not symbolic((rows.max_query,)):
        return None
    return "goes over a window's queries block by block, and their number is a symbol here"


@attention.kernel("torch_sdpa", targets=EVERY, refuse=_refuse_symbol, batches=False, backward_once=True)
def _rectangle(q, k, v, rows, *, scale, window=None):
    # A row's missing cells come after its tokens, so the causal mask hides them.
    q4, k4, v4 = (rows.rectangle(x).transpose(1, 2) for x in (q, k, v))
    shared: dict[str, Any] = {"scale": scale, "enable_gqa": bool(q.shape[1] != k.shape[1])}
    if window is None or window >= rows.max_query:
        y = F.scaled_dot_product_attention(q4, k4, v4, is_causal=True, **shared)
    else:
        starts = range(0, rows.max_query, max(window, BLOCK))
        y = torch.cat([_banded(q4, k4, v4, at, window, shared) for at in starts], 2)
    return rows.flat(y.transpose(1, 2), q.shape[0])


def _banded(q: Tensor, k: Tensor, v: Tensor, at: int, window: int, shared: dict[str, Any]) -> Tensor:
    """Attention of the block of queries that begins at `at`, all [rows heads tokens dim], over the keys it sees."""
    end, first = min(at + max(window, BLOCK), q.shape[2]), max(at - window + 1, 0)
    places = torch.arange(first, end, device=q.device)
    mask = seen(places[at - first :, None], places, window)
    return F.scaled_dot_product_attention(
        q[:, :, at:end], k[:, :, first:end], v[:, :, first:end], attn_mask=mask, **shared
    )


def _refuse_rows(q, k_pages, v_pages, rows, *, scale, window=None) -> str | None:
    return rows.inexact


@paged_attention.kernel("torch_rows", targets=("cpu",), refuse=_refuse_rows, host_reads=True, backward_once=True)
def _rows(q, k_pages, v_pages, rows, *, scale, window=None):
    out = q.new_zeros(q.shape[0], q.shape[1], v_pages.shape[3])
    host, at = rows.host, 0
    for queries, length, pages in zip(host.query, host.length, host.pages, strict=True):
        if queries:
            first = 0 if window is None else max(length - queries - window + 1, 0)
            k, v = (_held(pool, pages, first, length).to(q.dtype) for pool in (k_pages, v_pages))
            out[at : at + queries] = _newest(q[at : at + queries], k, v, scale, window)
        at += queries
    return out


def _held(pool: Tensor, pages: tuple[int, ...], first: int, length: int) -> Tensor:
    """[length - first, kv_heads dim]: a view where the row's pages follow each other, else a copy of those it needs."""
    before, count = first // pool.shape[1], -(-length // pool.shape[1])
    needed = pages[before:count]
    inside = slice(first - before * pool.shape[1], length - before * pool.shape[1])
    if needed[-1] - needed[0] == len(needed) - 1 and needed == tuple(range(needed[0], needed[-1] + 1)):
        return pool[needed[0] : needed[-1] + 1].flatten(0, 1)[inside]
    return pool[list(needed)].flatten(0, 1)[inside]


def _newest(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """Attention of one row's newest tokens, q [queries heads dim], over the last keys, k and v [keys kv_heads dim]."""
    # Heads that share a key/value head are further queries of it, so keys and values are read once for all of them.
    grouped = rearrange(q, "queries (kv_heads shared) dim -> kv_heads shared queries dim", kv_heads=k.shape[1])
    y = (_few if q.shape[0] <= FEW else _many)(grouped, k, v, scale, window)
    return rearrange(y, "kv_heads shared queries dim -> queries (kv_heads shared) dim").to(q.dtype)


def _few(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """Decoding and verifying: keys and values are read as they lie, q [kv_heads shared queries dim]."""
    shared, queries = q.shape[1:3]
    k4, v4 = (x.transpose(0, 1)[:, None] for x in (k, v))
    mask = _unseen(q, queries, k.shape[0], window).repeat(shared, 1) if queries > 1 else None
    y = F.scaled_dot_product_attention(q.flatten(1, 2)[:, None], k4, v4, attn_mask=mask, scale=scale)
    return y[:, 0].unflatten(1, (shared, queries))


def _unseen(like: Tensor, queries: int, keys: int, window: int | None) -> Tensor:
    """[queries keys]: minus infinity at the keys that the newest queries do not see, else 0."""
    mask = like.new_full((queries, keys), -torch.inf).triu(keys - queries + 1)
    if window is not None and window < keys:
        mask += like.new_full((queries, keys), -torch.inf).tril(keys - queries - window)
    return mask


def _many(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """Prefilling: blocks of queries in float32 or wider, q [kv_heads shared queries dim]."""
    queries = q.shape[2]
    heads, keys, values = wide(q) * scale, wide(k).permute(1, 2, 0), wide(v).transpose(0, 1)
    outputs = []
    for at in range(0, queries, BLOCK):
        part = heads[:, :, at : at + BLOCK]
        last = k.shape[0] - queries + at + part.shape[2]
        first = 0 if window is None else max(last - part.shape[2] - window + 1, 0)
        scores = torch.bmm(part.flatten(1, 2), keys[..., first:last]).unflatten(1, part.shape[1:3])
        _hide(scores, window)
        outputs.append(torch.bmm(scores.softmax(-1).flatten(1, 2), values[:, first:last]).unflatten(1, part.shape[1:3]))
    return torch.cat(outputs, 2)


def _hide(scores: Tensor, window: int | None) -> None:
    """Write minus infinity where a block's queries, the last of which sees the last key, must not look."""
    queries, keys = scores.shape[-2:]
    scores[..., keys - queries :] += scores.new_full((queries, queries), -torch.inf).triu(1)
    before = 0 if window is None else max(keys - window, 0)
    scores[..., :before] += scores.new_full((queries, before), -torch.inf).tril(keys - queries - (window or 0))


def _refuse_window(q, k_pages, v_pages, rows, *, scale, window=None) -> str | None:
    if window is None:
        return "reads the pages of a window; this call has none"
    all_pages = rows.paged[1].shape[1]
    if pages_of_window(window, rows.max_query, k_pages.shape[1]) >= all_pages:
        return f"spares pages before a window; one of {window} may take all {all_pages} pages of a row"
    return None


@paged_attention.kernel("torch_window", targets=EVERY, refuse=_refuse_window)
def _window(q, k_pages, v_pages, rows, *, scale, window=None):
    assert window is not None
    pages, at = window_pages(rows, k_pages.shape[1], window)
    return attend_pages(q, k_pages, v_pages, rows, pages, at, scale, window)


def _refuse_block_rows(q, k_pages, v_pages, rows, *, scale, window=None) -> str | None:
    return rows.inexact


@block_attention.kernel("torch_rows", targets=("cpu",), refuse=_refuse_block_rows, host_reads=True, backward_once=True)
def _block_rows(q, k_pages, v_pages, rows, *, scale, window=None):
    outputs, block = [], rows.max_query
    for x, length, pages in zip(q.split(block), rows.host.length, rows.host.pages, strict=True):
        first = 0 if window is None else max(length - block - window + 1, 0)
        k4, v4 = (_held(pool, pages, first, length).to(q.dtype).transpose(0, 1)[:, None] for pool in (k_pages, v_pages))
        # Heads that share a key/value head are further queries of it; without a window all see the same keys.
        grouped = rearrange(x, "queries (kv_heads shared) dim -> kv_heads 1 (queries shared) dim", kv_heads=len(k4))
        mask = None
        if window is not None:
            places = torch.arange(first, length, device=q.device)
            mask = near(places[-block:, None], places, window).repeat_interleave(q.shape[1] // len(k4), 0)
        y = F.scaled_dot_product_attention(grouped, k4, v4, attn_mask=mask, scale=scale)
        outputs.append(rearrange(y, "kv_heads 1 (queries shared) dim -> queries (kv_heads shared) dim", queries=block))
    return torch.cat(outputs)
