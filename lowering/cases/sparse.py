"""Cases of sparse attention and its index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .case import DECODE_4K, LONG, ROWS, VERIFY, Arguments, Case, Draw, RowCounts, pool, scattered


def index_rows(
    rows: RowCounts, index_heads: int, index_dim: int, ratio: int, page_size: int, top_k: int
) -> Callable[[Draw], Arguments]:
    """Arguments of `index_scores_topk`. Whole numbers, so that scores are exact in any dtype, and often equal."""

    def make(draw: Draw) -> Arguments:
        lengths = rows.lengths
        q = (draw.ids(5, rows.tokens, index_heads, index_dim) - 2).to(draw.dtype)
        blocks = [length // ratio for length in lengths]
        _, table = scattered(lengths, page_size)
        keys = torch.full((int(table.max()) + 2, page_size // ratio, index_dim), torch.nan, dtype=draw.dtype)
        for row, count in enumerate(blocks):
            at, each = torch.arange(count), page_size // ratio
            values = draw.ids(5, count, index_dim) - 2
            keys[table[row, at // each].long(), at % each] = values.to(draw.dtype)
        return (q, keys, rows.made(table)), {"ratio": ratio, "top_k": top_k}

    return make


def selected_rows(
    rows: RowCounts, heads: int, kv_heads: int, head_dim: int, v_dim: int, page_size: int, selected: int
) -> Callable[[Draw], Arguments]:
    """Arguments of `sparse_attention`: places that a token may see, from none to as many as fit, in any order."""

    def make(draw: Draw) -> Arguments:
        lengths = rows.lengths
        places = torch.full((rows.tokens, selected), -1, dtype=torch.int32)
        seen = (past + at + 1 for past, count in zip(rows.past, rows.counts, strict=True) for at in range(count))
        for token, visible in enumerate(seen):
            count = min(visible, selected) - token % 3 * (visible // 2)
            places[token, : max(count, 0)] = draw.distinct(visible, 1, max(count, 0))[0].int()
        q = draw.normal(rows.tokens, heads, head_dim)
        pools = (pool(draw, lengths, page_size, kv_heads, dim) for dim in (head_dim, v_dim))
        return (q, *pools, places, rows.made(scattered(lengths, page_size)[1])), {"scale": head_dim**-0.5}

    return make


def pooled_rows(
    rows: RowCounts, index_dim: int, rotary_dim: int, ratio: int, page_size: int
) -> Callable[[Draw], Arguments]:
    """Arguments of `index_keys`: raw keys of the past in the pages, those of the new tokens beside them."""

    def make(draw: Draw) -> Arguments:
        lengths = rows.lengths
        # Results are compared, pages and all, so nothing is NaN here.
        raw_pages = pool(draw, lengths, page_size, index_dim).nan_to_num(7.0)
        _, table = scattered(lengths, page_size)
        index_pages = draw.normal(raw_pages.shape[0], page_size // ratio, index_dim)
        spans = zip(rows.past, rows.counts, strict=True)
        at = [(row, past + new) for row, (past, count) in enumerate(spans) for new in range(count)]
        slots = [int(table[row, place // page_size]) * page_size + place % page_size for row, place in at]
        slots = torch.tensor([*slots, *range(rows.padding)])
        args = (raw_pages, index_pages, draw.normal(rows.tokens, index_dim), draw.normal(index_dim), slots)
        return (*args, rows.made(table)), {"eps": 1e-6, "rotary_dim": rotary_dim, "theta": 1e4}

    return make


def cases() -> list[Case]:
    """Every case of this file."""
    made = []
    for rows in (*ROWS, VERIFY, LONG):
        made.append(Case("index_keys", f"{rows.name}_12_of_4", pooled_rows(rows, 12, 6, 4, 8), 12))
        made.append(Case("index_keys", f"{rows.name}_16_of_2", pooled_rows(rows, 16, 16, 2, 4), 16))
        made.append(Case("index_scores_topk", f"{rows.name}_3x8", index_rows(rows, 3, 8, 4, 8, 2), 8))
        made.append(Case("index_scores_topk", f"{rows.name}_4x128", index_rows(rows, 4, 128, 4, 128, 3), 128))
        made.append(Case("sparse_attention", f"{rows.name}_6_2_16", selected_rows(rows, 6, 2, 16, 16, 8, 11), 16))
        made.append(Case("sparse_attention", f"{rows.name}_4_1_8_12", selected_rows(rows, 4, 1, 8, 12, 4, 7), 12))
        made.append(Case("sparse_attention", f"{rows.name}_8_2_256", selected_rows(rows, 8, 2, 256, 256, 128, 35), 256))

        def expand(draw: Draw, rows: RowCounts = rows) -> Arguments:
            (_, _, held), _ = index_rows(rows, 1, 8, 4, 8, 3)(draw)
            seen = [past + at + 1 for past, count in zip(rows.past, rows.counts, strict=True) for at in range(count)]
            blocks = torch.full((rows.tokens, 3), -1, dtype=torch.int32)
            for token, visible in enumerate(seen):
                blocks[token, : min(3, visible // 4)] = draw.distinct(visible // 4, 1, 3)[0].int()
            return (blocks, held), {"ratio": 4}

        made.append(Case("expand_blocks", rows.name, expand))
    many = selected_rows(LONG, 6, 2, 16, 16, 8, 150)
    made.append(Case("sparse_attention", f"{LONG.name}_6_2_16_of_150", many, 150))
    for shape, rotary_dim in (((3, 5, 4, 12), 6), ((7, 2, 16), 16), ((0, 4, 8), 4)):
        kwargs = {"eps": 1e-6, "rotary_dim": rotary_dim, "theta": 1e4}

        def pool(draw: Draw, shape: tuple[int, ...] = shape, kwargs: dict[str, Any] = kwargs) -> Arguments:
            return (draw.normal(*shape), draw.ids(3000, *shape[:-2]), draw.normal(shape[-1])), kwargs

        made.append(Case("pool_keys", "empty" if 0 in shape else f"of_{shape[-2]}", pool, shape[-1]))
    for rows in (DECODE_4K, RowCounts("prompt_4k", (128,), (3968,))):
        scores, attention = index_rows(rows, 4, 128, 4, 128, 512), selected_rows(rows, 24, 2, 256, 256, 128, 2051)
        made.append(Case("index_scores_topk", rows.name, scores, 128, bench=True))
        made.append(Case("sparse_attention", rows.name, attention, 2051, bench=True))
    return made
