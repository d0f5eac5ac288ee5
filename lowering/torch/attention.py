"""Attention through `scaled_dot_product_attention`, reading keys and values where they lie."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.attention import attention, paged_attention
from ..ops.ragged import to_flat, to_rectangle
from ..target import EVERY


def _grouped(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, mask: Tensor | None = None) -> Tensor:
    """q [rows queries heads dim], k and v [rows keys kv_heads dim]; key/value heads are shared by stride, not copied."""
    rows, queries, heads, _ = q.shape
    kv_heads = k.shape[2]
    shared = heads // kv_heads
    q = q.unflatten(2, (kv_heads, shared)).permute(0, 2, 3, 1, 4).flatten(0, 1)
    k, v = (x.transpose(1, 2).flatten(0, 1)[:, None].expand(-1, shared, -1, -1) for x in (k, v))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)
    return y.unflatten(0, (rows, kv_heads)).permute(0, 3, 1, 2, 4).flatten(2, 3)


@attention.kernel("torch_sdpa", targets=EVERY, batches=False)
def _rectangle(q, k, v, query_start, *, max_query, uniform, scale):
    # A row's missing cells come after its tokens, so the causal mask hides them.
    q3, k3, v3 = (to_rectangle(x, query_start, max_query, uniform) for x in (q, k, v))
    return to_flat(_grouped(q3, k3, v3, scale, causal=True), query_start, q.shape[0], uniform)


def _refuse_rows(q, k_pages, v_pages, page_table, lengths, query_start, host, *, max_query, uniform, scale) -> str | None:
    if not host.exact:
        return "needs exact row lengths on the host, and only an upper bound is known"
    return None


@paged_attention.kernel("torch_sdpa", targets=("cpu",), refuse=_refuse_rows, host_reads=True)
def _rows(q, k_pages, v_pages, page_table, lengths, query_start, host, *, max_query, uniform, scale):
    out = torch.zeros(q.shape[0], q.shape[1], v_pages.shape[3], dtype=q.dtype)
    at = 0
    for queries, length, pages in zip(host.query, host.length, host.pages, strict=True):
        if queries:
            k, v = (_held(pool, pages, length).to(q.dtype)[None] for pool in (k_pages, v_pages))
            out[at : at + queries] = _newest(q[None, at : at + queries], k, v, scale)[0]
        at += queries
    return out


def _newest(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attention of the newest tokens of one row over all of it."""
    queries, keys = q.shape[1], k.shape[1]
    if queries == 1 or queries == keys:
        return _grouped(q, k, v, scale, causal=queries > 1)
    mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    return _grouped(q, k, v, scale, causal=False, mask=mask)


def _held(pool: Tensor, pages: tuple[int, ...], length: int) -> Tensor:
    """[length kv_heads dim]: a view where the row's pages follow each other, else a copy of the pages it fills."""
    count = -(-length // pool.shape[1])
    first = pages[0]
    if pages[count - 1] - first == count - 1 and pages[:count] == tuple(range(first, first + count)):
        return pool[first : first + count].flatten(0, 1)[:length]
    return pool[list(pages[:count])].flatten(0, 1)[:length]
