"""Cases of attention over pages, over a batch alone, and of a block."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .case import (
    BLOCK,
    BLOCK_512,
    DECODE_1,
    DECODE_4K,
    DECODE_8,
    LONG,
    PROMPT,
    ROWS,
    VERIFY,
    Arguments,
    Case,
    Draw,
    RowCounts,
)


def without_keys(make: Callable[[Draw], Arguments]) -> Callable[[Draw], Arguments]:
    """The arguments without the second."""

    def fewer(draw: Draw) -> Arguments:
        args, kwargs = make(draw)
        return (args[0], *args[2:]), kwargs

    return fewer


def _attention(
    rows: RowCounts, heads: int, kv_heads: int, head_dim: int, v_dim: int, **window: int
) -> Callable[[Draw], Arguments]:
    def make(draw: Draw) -> Arguments:
        q, k, v = (
            draw.normal(rows.tokens, number, dim)
            for number, dim in ((heads, head_dim), (kv_heads, head_dim), (kv_heads, v_dim))
        )
        return (q, k, v, rows.made()), {"scale": head_dim**-0.5, **window}

    return make


def paged(
    rows: RowCounts,
    heads: int,
    kv_heads: int,
    head_dim: int,
    v_dim: int,
    page_size: int,
    *,
    shuffled: bool,
    **window: int,
) -> Callable[[Draw], Arguments]:
    """Arguments of `paged_attention` with NaN in every page and slot that no row holds; `window` is passed on."""

    def make(draw: Draw) -> Arguments:
        lengths = rows.lengths
        used = [-(-length // page_size) for length in lengths]
        total = sum(used) + 3
        order = draw.distinct(total - 1, 1, total - 1)[0].tolist() if shuffled else list(range(total - 1))
        ids = iter(page + 1 for page in order)
        pages = [tuple(next(ids) for _ in range(count)) for count in used]
        table = torch.zeros(len(used), max(used) + 1, dtype=torch.int32)
        pools = []
        for dim in (head_dim, v_dim):
            pool = torch.full((total, page_size, kv_heads, dim), torch.nan, dtype=draw.dtype)
            for row, (held, length) in enumerate(zip(pages, lengths, strict=True)):
                table[row, : len(held)] = torch.tensor(held, dtype=torch.int32)
                for at in range(length):
                    pool[held[at // page_size], at % page_size] = draw.normal(kv_heads, dim)
            pools.append(pool)
        q = draw.normal(rows.tokens, heads, head_dim)
        return (q, *pools, rows.made(table, pages)), {"scale": head_dim**-0.5, **window}

    return make


def cases() -> list[Case]:
    """Every case of this file."""
    made = []
    for rows in (*ROWS, VERIFY):
        made.append(Case("attention", f"{rows.name}_8_2_256", _attention(rows, 8, 2, 256, 256), 256))
        made.append(Case("attention", f"{rows.name}_3_1_24_16", _attention(rows, 3, 1, 24, 16), 130))
        made.append(Case("paged_attention", f"{rows.name}_4_2_16", paged(rows, 4, 2, 16, 16, 4, shuffled=False), 130))
        made.append(Case("paged_attention", f"{rows.name}_scattered", paged(rows, 4, 4, 8, 12, 5, shuffled=True), 130))
        for dim in (128, 256):
            whole = paged(rows, 4, 2, dim, dim, 128, shuffled=True)
            made.append(Case("paged_attention", f"{rows.name}_pages_of_128_{dim}", whole, 256))
    made += _windows()
    made.append(Case("attention", "prompt_512", _attention(PROMPT, 8, 2, 256, 256), 512, bench=True))
    for rows in (PROMPT, DECODE_1, DECODE_8):
        made.append(
            Case("paged_attention", rows.name, paged(rows, 8, 2, 256, 256, 128, shuffled=False), 512, bench=True)
        )

    made += _blocks()

    def write(draw: Draw) -> Arguments:
        pools = (draw.normal(4, 3, 2, 8), draw.normal(4, 3, 2, 5))
        return (*pools, draw.normal(6, 2, 8), draw.normal(6, 2, 5), draw.distinct(12, 1, 6)[0]), {}

    made.append(Case("write_pages", "scattered", write))
    return made


def _blocks() -> list[Case]:
    """Blocks of a draft: of one token and of several, behind nothing, less than a page and more."""
    made = []
    for rows in (ROWS[1], VERIFY, BLOCK):
        made.append(Case("block_attention", f"{rows.name}_4_2_16", paged(rows, 4, 2, 16, 12, 5, shuffled=True), 130))
        made.append(
            Case("block_attention", f"{rows.name}_window_3", paged(rows, 3, 1, 8, 8, 4, shuffled=True, window=3), 130)
        )
        for dim in (128, 256):
            made.append(
                Case("block_attention", f"{rows.name}_{dim}", paged(rows, 4, 2, dim, dim, 128, shuffled=True), 256)
            )
            bound = paged(rows, 4, 1, dim, dim, 128, shuffled=True, window=4)
            made.append(Case("block_attention", f"{rows.name}_window_4_{dim}", bound, 256))
    return [
        *made,
        Case("block_attention", BLOCK_512.name, paged(BLOCK_512, 8, 2, 128, 128, 128, shuffled=True), 512, bench=True),
    ]


def _windows() -> list[Case]:
    """Attention over the last tokens of rows: fewer than a row has, of one page and of several."""
    made = []
    for rows in (*ROWS, VERIFY):
        made.append(Case("attention", f"{rows.name}_window_4", _attention(rows, 4, 1, 128, 128, window=4), 128))
        small = paged(rows, 4, 2, 16, 16, 4, shuffled=True, window=5)
        made.append(Case("paged_attention", f"{rows.name}_window_5", small, 130))
        for dim in (128, 256):
            whole = paged(rows, 4, 1, dim, dim, 128, shuffled=True, window=3)
            made.append(Case("paged_attention", f"{rows.name}_window_3_{dim}", whole, 256))
    for page_size in (16, 128):
        name = f"long_decode_window_20_pages_of_{page_size}"
        made.append(
            Case("paged_attention", name, paged(LONG, 4, 2, 256, 256, page_size, shuffled=True, window=20), 256)
        )
    long_row = paged(DECODE_4K, 4, 1, 256, 256, 128, shuffled=False, window=512)
    return [*made, Case("paged_attention", "decode_4k_window_512", long_row, 512, bench=True)]
