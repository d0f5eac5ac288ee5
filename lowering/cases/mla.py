"""Cases of latent attention."""

from __future__ import annotations

from collections.abc import Callable

import torch

from params.tree import leaves

from ..layouts import LAYOUTS
from ..ops.mla import LatentPools, LatentQueries, Latents
from .case import DECODE_1, DECODE_8, PROMPT, ROWS, VERIFY, Arguments, Case, Draw, RowCounts, scattered
from .weights import with_quantized


def latent_rows(
    rows: RowCounts, heads: int, nope_dim: int, rope_dim: int, v_dim: int, latent_dim: int, page_size: int, *,
    layout: str = "nd", padding: float = 0.0,
) -> Callable[[Draw], Arguments]:  # fmt: skip
    """Arguments of `mla_prefix_attention`: pages in no order, NaN in every slot that no row holds.

    A `rope_dim` of 0 is attention without rope. `padding` is what padding tokens hold.
    """

    def make(draw: Draw) -> Arguments:
        lengths = rows.lengths
        pages, table = scattered(lengths, page_size)
        slots = [torch.tensor(held, dtype=torch.int64).repeat_interleave(page_size) * page_size for held in pages]
        slots = [
            (base + torch.arange(len(base)) % page_size)[:length] for base, length in zip(slots, lengths, strict=True)
        ]
        total, live = max((page for held in pages for page in held), default=0) + 2, sum(rows.counts)
        widths = [latent_dim, *([rope_dim] if rope_dim else [])]
        new, pools = [], []
        for width in widths:
            pool = LAYOUTS[layout].empty(total, page_size, width, draw.dtype, torch.device("cpu"))
            pool.values.fill_(torch.nan)
            held = [draw.normal(length, width) for length in lengths]
            pool.write(torch.cat(held), torch.cat(slots))
            tail = torch.full((rows.padding, width), padding, dtype=draw.dtype)
            new.append(torch.cat([*(x[past:] for x, past in zip(held, rows.past, strict=True)), tail]))
            pools.append(pool)
        q = draw.normal(rows.tokens, heads, nope_dim + rope_dim)
        q[live:] = padding
        up = draw.normal(heads * (nope_dim + v_dim), latent_dim) / latent_dim**0.5
        queries = LatentQueries(q[..., :nope_dim], q[..., nope_dim:] if rope_dim else None)
        latents, pages_of = Latents(*[*new, None][:2]), LatentPools(*[*pools, None][:2])
        kwargs = {"scale": (nope_dim + rope_dim) ** -0.5, "v_dim": v_dim}
        return (queries, latents, pages_of, up, rows.made(table, pages)), kwargs

    return make


def cases() -> list[Case]:
    """Every case of this file."""
    made = []
    for rows in (*ROWS, VERIFY):
        for layout, page_size in (("nd", 1), ("nz", 4)):
            small = latent_rows(rows, 2, 12, 8 if layout == "nd" else 16, 10, 32, page_size, layout=layout, padding=3.0)
            made.append(Case("mla_prefix_attention", f"{rows.name}_small_{layout}_{page_size}", small, 130))
        made.append(Case("mla_prefix_attention", f"{rows.name}_no_rope", latent_rows(rows, 3, 7, 0, 5, 11, 5), 130))
    for layout, page_size, heads in (("nd", 16, 2), ("nd", 128, 16), ("nz", 128, 6)):
        for rows in (ROWS[1], ROWS[3], ROWS[4], VERIFY):
            wide = latent_rows(rows, heads, 128, 64, 128, 512, page_size, layout=layout)
            made.append(Case("mla_prefix_attention", f"{rows.name}_wide_{layout}_{page_size}", wide, 512))
    for rows, scheme in ((ROWS[3], "w8a8_dynamic"), (VERIFY, "w8a8_mxfp8")):
        wide = with_quantized(latent_rows(rows, 2, 128, 64, 128, 512, 128), 3, scheme)
        made.append(Case("mla_prefix_attention", f"{rows.name}_{scheme}", wide, 512))
    for rows in (PROMPT, DECODE_1, DECODE_8):
        wide = latent_rows(rows, 16, 128, 64, 128, 512, 128)
        made.append(Case("mla_prefix_attention", rows.name, wide, 512, bench=True))
    for layout, sizes in (("nd", (12, 5)), ("nz", (32, 16)), ("nd", (512, 64)), ("nz", (512, 64)), ("nd", (9, 0))):
        page_size = 128 if sizes[0] == 512 else 3
        name = f"{sizes[0]}_{sizes[1]}_{layout}_{page_size}"
        made.append(Case("write_latents", name, _written(layout, page_size, *sizes)))
        if sizes[1] % 2 == 0:
            made.append(Case("latent_norm_rope_write", name, _normed(layout, page_size, *sizes), sizes[0]))
    made.append(Case("latent_norm_rope_write", "large_eps", _normed("nd", 128, 512, 64, eps=0.5), 512))
    return made


def _written(layout: str, page_size: int, latent_dim: int, rope_dim: int) -> Callable[[Draw], Arguments]:
    """Arguments of `write_latents`: 6 tokens into 4 pages; no rope where `rope_dim` is 0."""

    def make(draw: Draw) -> Arguments:
        widths = [latent_dim, *([rope_dim] if rope_dim else [])]
        pools = [LAYOUTS[layout].empty(4, page_size, width, draw.dtype, torch.device("cpu")) for width in widths]
        for pool in pools:
            pool.values.copy_(draw.normal(*pool.values.shape))
        new = [draw.normal(6, width) for width in widths]
        both = LatentPools(*[*pools, None][:2]), Latents(*[*new, None][:2])
        return (*both, draw.distinct(4 * page_size, 1, 6)[0]), {}

    return make


def _normed(
    layout: str, page_size: int, latent_dim: int, rope_dim: int, eps: float = 1e-6
) -> Callable[[Draw], Arguments]:
    """Arguments of `latent_norm_rope_write`, from those of `write_latents`."""

    def make(draw: Draw) -> Arguments:
        (pages, new, slots), _ = _written(layout, page_size, latent_dim, rope_dim)(draw)
        angles = draw.uniform(-3.0, 3.0, 6, rope_dim // 2)
        turned = (None, None) if new.rope is None else (angles.cos(), angles.sin())
        return (pages, torch.cat(leaves(new), -1), draw.normal(latent_dim), *turned, slots), {"eps": eps}

    return make
