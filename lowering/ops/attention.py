"""Grouped-query attention over ragged rows, with and without pages of past keys and values.

Query head h reads key/value head h // (heads / kv_heads). Softmax runs in float32 or wider. Attention is causal: with a
`window` of at least 1 a token sees itself and at most `window` - 1 tokens before it, else all of them. The tokens of a
draft's block see those after them too (`block_attention`).
"""

from __future__ import annotations

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from ..op import op
from ..rows import Rows
from .widen import wide


@op
def attention(
    q: Float[Tensor, "tokens heads head_dim"],
    k: Float[Tensor, "tokens kv_heads head_dim"],
    v: Float[Tensor, "tokens kv_heads v_dim"],
    rows: Rows,
    *,
    scale: float,
    window: int | None = None,
) -> Float[Tensor, "tokens heads v_dim"]:
    """Each token sees itself and the earlier tokens of its row in this batch; padding tokens get zeros."""
    q3, k3, v3 = map(rows.rectangle, (q, k, v))
    at = torch.arange(rows.max_query, device=q.device)
    visible = rows.inside[:, None, :] & seen(at[:, None], at, window)
    return rows.flat(attend(q3, k3, v3, visible, scale), q.shape[0])


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
    rows: Rows,
    *,
    scale: float,
    window: int | None = None,
) -> Float[Tensor, "tokens heads v_dim"]:
    """Attention of each row's newest tokens over all its tokens, which already lie in its pages.

    Slots at or past a row's length may hold anything, NaN included. Padding tokens get zeros. The reference gathers
    every page of every row.
    """
    _, table = rows.paged
    at = torch.arange(table.shape[1] * k_pages.shape[1], device=q.device).expand(rows.count, -1)
    return attend_pages(q, k_pages, v_pages, rows, table, at, scale, window)


@op
def block_attention(
    q: Float[Tensor, "tokens heads head_dim"],
    k_pages: Float[Tensor, "pages page_size kv_heads head_dim"],
    v_pages: Float[Tensor, "pages page_size kv_heads v_dim"],
    rows: Rows,
    *,
    scale: float,
    window: int | None = None,
) -> Float[Tensor, "tokens heads v_dim"]:
    """Attention of each row's block of newest tokens over all its tokens, to both sides (DFlash, DSpark).

    Rows are uniform: a block has `max_query` tokens, which see each other and all before them; with a `window`, those
    at most `window` - 1 places away on either side. Slots at or past a row's length may hold anything, NaN included.
    The reference gathers every page of every row.
    """
    (lengths, table), block = rows.paged, rows.max_query
    at = torch.arange(table.shape[1] * k_pages.shape[1], device=q.device)
    held = at < lengths[:, None]
    k3, v3 = (_gathered(pool, table, held, q.dtype) for pool in (k_pages, v_pages))
    visible = held[:, None].expand(-1, block, -1)
    if window is not None:
        query_at = (lengths - block)[:, None] + torch.arange(block, device=q.device)
        visible = visible & near(query_at[..., None], at, window)
    return attend(q.unflatten(0, (-1, block)), k3, v3, visible, scale).flatten(0, 1)


def near(query_at: Tensor, key_at: Tensor, window: int) -> Tensor:
    """Whether a query at one place of a row sees the key at another, before it or after it."""
    return (key_at - query_at).abs() < window


def _gathered(pool: Tensor, pages: Tensor, held: Tensor, dtype: torch.dtype) -> Tensor:
    """What lies in `pages` [rows pages] of a pool, [rows keys ...], with zeros where the row holds no token."""
    return torch.where(held[..., None, None], pool[pages].flatten(1, 2), 0).to(dtype)


def attend_pages(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, rows: Rows, pages: Tensor, at: Tensor, scale: float, window: int | None
) -> Tensor:
    """`paged_attention` of keys that lie in `pages` [rows pages], at the places `at` [rows keys] of their rows."""
    q3 = rows.rectangle(q)
    held = at < rows.paged[0][:, None]
    k3, v3 = (_gathered(pool, pages, held, q.dtype) for pool in (k_pages, v_pages))
    visible = held[:, None] & seen(rows.places[..., None], at[:, None], window)
    return rows.flat(attend(q3, k3, v3, visible, scale), q.shape[0])


def pages_of_window(window: int, max_query: int, page_size: int) -> int:
    """The most pages that the windows of a row's newest queries can lie in, wherever the first of them begins."""
    return -(-(window + max_query - 2) // page_size) + 1


def window_pages(rows: Rows, page_size: int, window: int) -> tuple[Tensor, Tensor]:
    """The pages that hold what a row's newest queries see [rows pages], and the places of their slots [rows slots].

    Past the end of the table stands its last page, whose slots then have places that no row holds.
    """
    _, table = rows.paged
    first = (rows.past - window + 1).clamp(min=0) // page_size
    count = min(pages_of_window(window, rows.max_query, page_size), table.shape[1])
    page = first[:, None] + torch.arange(count, device=table.device)
    places = (page[..., None] * page_size + torch.arange(page_size, device=table.device)).flatten(1)
    return table.gather(1, page.clamp(max=table.shape[1] - 1).long()), places


def seen(query_at: Tensor, key_at: Tensor, window: int | None) -> Tensor:
    """Whether a query at one place of a row sees the key at another."""
    causal = key_at <= query_at
    return causal if window is None else causal & (key_at > query_at - window)


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
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
