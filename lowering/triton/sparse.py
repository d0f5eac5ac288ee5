"""Launches of sparse attention and of the tokens that it selects."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import LoweringError
from ..rows import Rows
from ..target import Target
from .launch import Launch
from .tiles import Footprint, planned

KEYS = Footprint(copies=1.0, copies_950=0.75, streams=0)
"""Cells of a key and its value. The compiler makes room for more by sharing places, down to the least."""
LEAST, MOST = 32, 64
"""Keys a turn: Ascend 950's compiler ends on a product over 16, and past 64 no more of the work overlaps."""
CELLS = 8192
"""Cells of the padded heads that share a key/value head: twice as many leave the 910 no room for keys."""
MEMBERS, LINE = Footprint(copies=7.0, copies_950=1.0, streams=0), 8
"""Cells of selected tokens; those of a block take a burst of 32 bytes at least."""
PADDED = 16
"""Heads are filled up to this or the next power of two: the least that a product takes everywhere."""


def sparse_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, selected: Tensor, rows: Rows, *, scale: float, target: Target
) -> tuple[Launch, Tensor]:
    """The op of this name, and the result that the launch fills; nothing is copied beside it."""
    (tokens, heads, head_dim), (_, page_size, kv_heads, v_dim) = q.shape, v_pages.shape
    (lengths, table), shared = rows.paged, heads // kv_heads
    tile, padded = _tiles(q.element_size(), shared, head_dim, v_dim, target)
    out = q.new_zeros(tokens, heads, v_dim)
    pages = {"k_pages": k_pages, "v_pages": v_pages}
    where = {"selected": selected, "query_start": rows.query_start, "lengths": lengths, "page_table": table}
    sizes = {"rows": rows.count, "steps": rows.max_query, "kv_heads": kv_heads, "max_pages": table.shape[1]}
    arguments = {"q": q, "out": out, "scale": scale} | pages | sizes | {name: _narrow(x) for name, x in where.items()}
    dims = {"SHARED": shared, "HEADS": padded, "HEAD_DIM": head_dim, "V_DIM": v_dim, "PAGE_SIZE": page_size}
    listed = {"SELECTED": selected.shape[1], "TABLE": 1 << max(table.shape[1] - 1, 7).bit_length()}
    constants = dims | listed | {"TILE": tile}
    pools, flops = ("q", *pages, "selected", "out"), 2 * tokens * heads * selected.shape[1] * (head_dim + v_dim)
    jobs = rows.count * rows.max_query * kv_heads
    return Launch("sparse", "sparse_attention", arguments, constants, jobs, pools, ("out",), flops), out


def _tiles(size: int, shared: int, head_dim: int, v_dim: int, target: Target) -> tuple[int, int]:
    """Keys a turn, and heads that share them, filled up."""
    width, most = head_dim + v_dim, CELLS // max(head_dim, v_dim)
    tile = planned(target, KEYS, size=size, most=MOST, width=width)
    padded = 1 << max(shared - 1, PADDED - 1).bit_length()
    if padded > most:
        raise LoweringError(f"takes up to {most} heads a key/value head at this dim; this call has {shared}")
    if tile < LEAST:
        raise LoweringError(f"{LEAST} keys and values of {width} cells do not fit the unified buffer of {target.name}")
    return tile, padded


def expand_blocks(blocks: Tensor, rows: Rows, *, ratio: int, target: Target) -> tuple[Launch, Tensor]:
    """The op of this name, and the result that the launch fills."""
    tokens, top_k = blocks.shape
    tile = 1 << (top_k - 1).bit_length()
    planned(target, MEMBERS, size=4, most=1, width=tile * max(ratio, LINE))
    out = blocks.new_full((tokens, top_k * ratio + ratio - 1), -1, dtype=torch.int32)
    where = {"blocks": blocks, "query_start": rows.query_start, "lengths": rows.paged[0]}
    arguments = {name: _narrow(x) for name, x in where.items()}
    arguments |= {"out": out, "rows": rows.count, "steps": rows.max_query}
    constants = {"TOP_K": top_k, "RATIO": ratio, "TILE": tile}
    jobs = rows.count * rows.max_query
    return Launch("sparse", "expand_blocks", arguments, constants, jobs, ("blocks", "out"), ("out",)), out


def _narrow(x: Tensor) -> Tensor:
    return x.to(torch.int32).contiguous()
