"""Attention without a rectangle of scores: fused where it is differentiated, over pages where they lie."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from ..ops.attention import attention, paged_attention
from ..ops.ragged import to_flat, to_rectangle
from ..ops.widen import wide
from ..target import EVERY

BLOCK = 64
"""Queries that are worked on at a time: no block looks at keys past its last query."""
FEW = 8
"""Queries of a row up to which keys and values are read in their own dtype, without a float32 copy of the cache."""


@attention.kernel("torch_sdpa", targets=EVERY, batches=False, forward_ad=False)
def _rectangle(q, k, v, query_start, *, max_query, uniform, scale):
    # A row's missing cells come after its tokens, so the causal mask hides them.
    q4, k4, v4 = (to_rectangle(x, query_start, max_query, uniform).transpose(1, 2) for x in (q, k, v))
    y = F.scaled_dot_product_attention(q4, k4, v4, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return to_flat(y.transpose(1, 2), query_start, q.shape[0], uniform)


def _refuse_rows(
    q, k_pages, v_pages, page_table, lengths, query_start, host, *, max_query, uniform, scale
) -> str | None:
    return None if host.exact else "needs exact row lengths on the host, and only an upper bound is known"


@paged_attention.kernel("torch_rows", targets=("cpu",), refuse=_refuse_rows, host_reads=True, forward_ad=False)
def _rows(q, k_pages, v_pages, page_table, lengths, query_start, host, *, max_query, uniform, scale):
    out = q.new_zeros(q.shape[0], q.shape[1], v_pages.shape[3])
    at = 0
    for queries, length, pages in zip(host.query, host.length, host.pages, strict=True):
        if queries:
            k, v = (_held(pool, pages, length).to(q.dtype) for pool in (k_pages, v_pages))
            out[at : at + queries] = _newest(q[at : at + queries], k, v, scale)
        at += queries
    return out


def _held(pool: Tensor, pages: tuple[int, ...], length: int) -> Tensor:
    """[length kv_heads dim]: a view where the row's pages follow each other, else a copy of the pages it fills."""
    count = -(-length // pool.shape[1])
    first = pages[0]
    if pages[count - 1] - first == count - 1 and pages[:count] == tuple(range(first, first + count)):
        return pool[first : first + count].flatten(0, 1)[:length]
    return pool[list(pages[:count])].flatten(0, 1)[:length]


def _newest(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attention of one row's newest tokens, q [queries heads dim], over all of it, k and v [keys kv_heads dim]."""
    # Heads that share a key/value head are further queries of it, so keys and values are read once for all of them.
    grouped = rearrange(q, "queries (kv_heads shared) dim -> kv_heads shared queries dim", kv_heads=k.shape[1])
    y = (_few if q.shape[0] <= FEW else _many)(grouped, k, v, scale)
    return rearrange(y, "kv_heads shared queries dim -> queries (kv_heads shared) dim").to(q.dtype)


def _few(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Decoding and verifying: keys and values are read as they lie, q [kv_heads shared queries dim]."""
    shared, queries = q.shape[1:3]
    k4, v4 = (x.transpose(0, 1)[:, None] for x in (k, v))
    mask = None
    if queries > 1:
        mask = q.new_full((queries, k.shape[0]), -torch.inf).triu(k.shape[0] - queries + 1).repeat(shared, 1)
    y = F.scaled_dot_product_attention(q.flatten(1, 2)[:, None], k4, v4, attn_mask=mask, scale=scale)
    return y[:, 0].unflatten(1, (shared, queries))


def _many(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Prefilling: blocks of queries in float32 or wider, q [kv_heads shared queries dim]."""
    queries = q.shape[2]
    heads, keys, values = wide(q) * scale, wide(k).permute(1, 2, 0), wide(v).transpose(0, 1)
    outputs = []
    for at in range(0, queries, BLOCK):
        part = heads[:, :, at : at + BLOCK]
        seen = k.shape[0] - queries + at + part.shape[2]
        scores = torch.bmm(part.flatten(1, 2), keys[..., :seen]).unflatten(1, part.shape[1:3])
        later = torch.full((part.shape[2],) * 2, -torch.inf).triu(1)
        scores[..., seen - part.shape[2] :] += later
        outputs.append(torch.bmm(scores.softmax(-1).flatten(1, 2), values[:, :seen]).unflatten(1, part.shape[1:3]))
    return torch.cat(outputs, 2)
