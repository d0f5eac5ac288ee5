"""Causal grouped-query attention over ragged rows, with and without pages of past keys and values.

Query head h reads key/value head h // (heads / kv_heads). Softmax runs in float32 or wider.
"""

from __future__ import annotations

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from ..host import HostLengths
from ..op import op
from .ragged import in_row, to_flat, to_rectangle
from .widen import wide


@op
def attention(
    q: Float[Tensor, "tokens heads head_dim"],
    k: Float[Tensor, "tokens kv_heads head_dim"],
    v: Float[Tensor, "tokens kv_heads v_dim"],
    query_start: Int[Tensor, " ends"],
    *,
    max_query: int,
    uniform: bool,
    scale: float,
) -> Float[Tensor, "tokens heads v_dim"]:
    """Each token sees itself and the earlier tokens of its row in this batch; padding tokens get zeros."""
    q3, k3, v3 = (to_rectangle(x, query_start, max_query, uniform) for x in (q, k, v))
    at = torch.arange(max_query, device=q.device)
    visible = in_row(query_start, max_query)[:, None, :] & (at <= at[:, None])
    return to_flat(_attend(q3, k3, v3, visible, scale), query_start, q.shape[0], uniform)


@op
def write_pages(
    k_pages: Float[Tensor, "pages page_size kv_heads head_dim"],
    v_pages: Float[Tensor, "pages page_size kv_heads v_dim"],
    k: Float[Tensor, "tokens kv_heads head_dim"],
    v: Float[Tensor, "tokens kv_heads v_dim"],
    slots: Int[Tensor, " tokens"],
) -> tuple[Float[Tensor, "pages page_size kv_heads head_dim"], Float[Tensor, "pages page_size kv_heads v_dim"]]:
    """Store each token's key and value at its slot (page * page_size + offset), in place.

    The pages are the caller's own: slots are past every held length, so no older state can see the write.
    """
    for pages, new in ((k_pages, k), (v_pages, v)):
        # A view or an error: on a copy the write would be lost.
        pages.view(-1, *pages.shape[2:]).index_copy_(0, slots, new.to(pages.dtype))
    return k_pages, v_pages


@op
def paged_attention(
    q: Float[Tensor, "tokens heads head_dim"],
    k_pages: Float[Tensor, "pages page_size kv_heads head_dim"],
    v_pages: Float[Tensor, "pages page_size kv_heads v_dim"],
    page_table: Int[Tensor, "rows max_pages"],
    lengths: Int[Tensor, " rows"],
    query_start: Int[Tensor, " ends"],
    host: HostLengths,
    *,
    max_query: int,
    uniform: bool,
    scale: float,
) -> Float[Tensor, "tokens heads v_dim"]:
    """Attention of each row's newest tokens over all its `lengths` tokens, which already lie in its pages.

    `lengths` counts the new tokens. Slots at or past a row's length may hold anything, NaN included. Padding tokens
    get zeros. The reference gathers every page of every row.
    """
    q3 = to_rectangle(q, query_start, max_query, uniform)
    at = torch.arange(page_table.shape[1] * k_pages.shape[1], device=q.device)
    held = (at < lengths[:, None])[..., None, None]
    k3, v3 = (torch.where(held, pages[page_table].flatten(1, 2), 0).to(q.dtype) for pages in (k_pages, v_pages))
    first = lengths - query_start.diff()
    query_at = first[:, None] + torch.arange(max_query, device=q.device)
    visible = held[:, None, :, 0, 0] & (at <= query_at[..., None])
    return to_flat(_attend(q3, k3, v3, visible, scale), query_start, q.shape[0], uniform)


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    """q [rows queries heads dim], k and v [rows keys kv_heads dim], visible [rows queries keys]."""
    grouped = rearrange(
        q, "rows queries (kv_heads shared) dim -> rows queries kv_heads shared dim", kv_heads=k.shape[2]
    )
    scores = torch.einsum("rqgsd,rkgd->rgsqk", wide(grouped), wide(k)) * scale
    scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
    # A query with nothing to see belongs to no row; its weights are zeros, not NaN.
    weights = torch.where(visible[:, None, None], scores.softmax(-1), 0).to(q.dtype)
    y = torch.einsum("rgsqk,rkgd->rqgsd", wide(weights), wide(v)).to(q.dtype)
    return rearrange(y, "rows queries kv_heads shared dim -> rows queries (kv_heads shared) dim")
