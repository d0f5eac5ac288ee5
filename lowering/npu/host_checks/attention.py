"""Fused inference attention, in the layouts that our kernels call, TND and BSND.

One operator is several kernels, each with checks of its own. On Ascend 910 the host code routes a call by layout and
widths: to FAI or V3, before CANN 9.0.0 also to the older ones of prompts (PFA) and of single queries (IFA). On Ascend
950 all calls go to V5. Lists may hold symbols while a program is traced: then only their lengths are looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from ...target import Target
from .check import ASCEND_910, ASCEND_950, OT, HostCheck, enter

FOLDER = "attention/fused_infer_attention_score/op_host"
TILING = f"{FOLDER}/fused_infer_attention_score_tiling.cpp"
FEATURES = f"{FOLDER}/arch22/fused_infer_attention_score_tiling_check_feature.cpp"
CHECKERS = f"{FOLDER}/arch35 checkers"
PROMPT = "attention/prompt_flash_attention/op_host/prompt_flash_attention_tiling.cpp"
HALVES = (torch.float16, torch.bfloat16)

LATENT_DIM, ROPE_DIM = 512, 64
SHARING = (1, 2, 4, 8, 16, 32, 64, 128)
"""Query heads that may share a latent."""
OLD_V3 = ((128, 0, 128), (64, 0, 64), (128, 64, 128), (192, 0, 128), (LATENT_DIM, ROPE_DIM, LATENT_DIM))
"""Widths of queries, rope and values that CANN 8.5.0 sends to V3."""
MASK_SIDE = 2048


def page_sizes(target: Target, layout: str, width: int, longest: int, *, rope: bool = False) -> range:
    """The page sizes that a call takes, by its layout, the width of its heads and its longest row's queries."""
    recent, is_950 = target.has_cann("9.0.0"), target.name in ASCEND_950
    if rope or (recent and width in (64, 128)):
        return range(16, 1025, 16)
    if recent and not is_950 and layout == "TND":
        return range(16, 513, 16)
    if target.has_cann("9.1.0-beta.1") and not is_950:
        return range(16, 1025, 16)
    return range(16, 513, 16) if longest == 1 else range(128, 1025 if recent else 513, 128)


def packed(c: Any) -> bool:
    """Whether rows lie behind each other."""
    return c.input_layout == "TND"


def has_rope(c: Any) -> bool:
    """Whether the rotated channels come apart."""
    return c.query_rope is not None


def latent(c: Any) -> bool:
    """Whether all heads read one latent."""
    return has_rope(c) and c.query.shape[-1] == LATENT_DIM


def paged(c: Any) -> bool:
    """Whether keys and values lie in pages."""
    return c.block_table is not None


def kv_heads(c: Any) -> int:
    """Heads of keys and values."""
    return c.num_key_value_heads or c.num_query_heads


def grouped(c: Any) -> bool:
    """Whether several query heads read one key head."""
    return kv_heads(c) != c.num_query_heads


def widths(c: Any) -> tuple[int, int, int]:
    """Of queries, of their rope channels, and of values."""
    tiles = c.value.shape[2] * c.value.shape[4] if c.value.ndim == 5 else c.value.shape[-1]
    v_dim = tiles // kv_heads(c) if paged(c) and c.value.ndim == 3 else tiles
    return c.query.shape[-1], c.query_rope.shape[-1] if has_rope(c) else 0, v_dim


def own(lengths: Sequence[int] | None, sums: bool) -> list[int] | None:
    """Each row's own length, of running sums or not; None where one is a symbol, or nothing is said."""
    if lengths is None or not all(isinstance(length, int) for length in lengths):
        return None
    return [after - before for before, after in pairwise((0, *lengths))] if sums else list(lengths)


def queries(c: Any) -> list[int] | None:
    """Each row's queries, where they are known."""
    return own(c.actual_seq_qlen, sums=packed(c))


def pairs(c: Any) -> list[tuple[int, int]]:
    """Each row's queries and keys, where both are known."""
    held = own(c.actual_seq_kvlen, sums=packed(c) and not paged(c))
    return list(zip(queries(c) or (), held or (), strict=False))


def longest(c: Any) -> int | None:
    """Queries of the longest row, padding of the rectangle included; None where symbols hide it."""
    return max(queries(c) or (0,)) or None if packed(c) else c.query.shape[1]


def route(c: Any) -> str:
    """The kernel that the host code sends a call to."""
    if c.target.name in ASCEND_950:
        return "V5"
    width, rope, v_dim = widths(c)
    plain = packed(c) and not rope and width == v_dim
    if c.target.has_cann("9.0.0"):
        fits = plain and width <= 256 and c.sparse_mode in (0, 3, 4) and not c.inner_precise
        return "FAI" if fits else "V3"
    if (width, rope, v_dim) in OLD_V3:
        return "V3"
    if plain and grouped(c) and c.sparse_mode in (0, 3) and c.block_size == 128:
        return "FAI"
    return "PFA" if packed(c) or c.query.shape[1] > 1 else "IFA"


def on(kernel: str, holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """A condition of the calls that go to this kernel."""
    return lambda c: route(c) != kernel or holds(c)


def _takes_page(c: Any) -> bool:
    if not paged(c):
        return True
    known = longest(c)
    width, rope, _ = widths(c)
    layout = "TND" if packed(c) else c.input_layout
    return any(
        c.block_size in page_sizes(c.target, layout, width, most, rope=rope > 0)
        for most in ((1, 2) if known is None else (known,))
    )


def _ends_at_tokens(c: Any) -> bool:
    rows = queries(c) if packed(c) else None
    return rows is None or (min(rows) >= 0 and sum(rows) == c.query.shape[0])


def _takes_mask(c: Any) -> bool:
    if c.sparse_mode == 0:
        return c.atten_mask is None
    return c.atten_mask is None or c.atten_mask.shape[-2:] == (MASK_SIDE, MASK_SIDE)


def _as_many_lists(c: Any) -> bool:
    given = c.actual_seq_qlen
    if packed(c):
        return given is not None and len(c.actual_seq_kvlen or ()) == len(given)
    return given is None or len(given) == 1 or len(given) >= c.query.shape[0]


enter(
    "npu_fused_infer_attention_score_v2",
    HostCheck(
        "int32 block tables, and lengths of the keys with them",
        lambda c: not paged(c) or (c.block_table.dtype == torch.int32 and c.actual_seq_kvlen is not None),
        f"{OT} v9.0.0 {FEATURES}",
    ),
    HostCheck(
        "running sums of queries that never fall and end at the number of tokens, in layout TND",
        _ends_at_tokens,
        f"{OT} v9.0.0 {FEATURES}",
    ),
    HostCheck(
        "query lengths of 0 up to the rectangle's side, in layout BSND",
        lambda c: packed(c) or all(0 <= count <= c.query.shape[1] for count in queries(c) or ()),
        f"{OT} v9.0.0 {FEATURES}",
    ),
    HostCheck(
        "a mask with every sparse_mode but 0",
        lambda c: c.sparse_mode == 0 or c.atten_mask is not None,
        f"{OT} v9.0.0 {FEATURES}",
    ),
    HostCheck(
        "page sizes by CANN, layout, width and queries a row (multiples of 16 up to 512 or 1024, or of 128)",
        _takes_page,
        f"{OT} v8.5.0 {PROMPT}, v9.0.0 {FEATURES} and {CHECKERS}",
    ),
    HostCheck(
        "for heads over one latent one key head, 1 to 128 query heads, a power of two, in modes 0, 3, 4 and 9",
        lambda c: (
            not latent(c) or (kv_heads(c) == 1 and c.num_query_heads in SHARING and c.sparse_mode in (0, 3, 4, 9))
        ),
        f"{OT} v9.0.0 {FEATURES} and {CHECKERS}",
    ),
    HostCheck(
        "one dtype, float16 or bfloat16, in FAI",
        on("FAI", lambda c: c.query.dtype in HALVES and {c.key.dtype, c.value.dtype} == {c.query.dtype}),
        f"{OT} v9.0.0 {TILING} CheckFAI",
        targets=ASCEND_910,
    ),
    HostCheck(
        "no mask in mode 0, and one of [2048, 2048] in modes 3 and 4, in FAI",
        on("FAI", _takes_mask),
        f"{OT} v9.0.0 {TILING} CheckFAI",
        targets=ASCEND_910,
    ),
    HostCheck(
        "a band whose bounds are not both negative and leave a key between them, in FAI",
        on(
            "FAI",
            lambda c: c.sparse_mode != 4 or (max(c.pre_tokens, c.next_tokens) >= 0 and -c.next_tokens <= c.pre_tokens),
        ),
        f"{OT} v9.0.0 {TILING} CheckFAI",
        targets=ASCEND_910,
    ),
    HostCheck(
        "heads of 64, 128 or 192 in layout TND, in V3",
        on("V3", lambda c: not packed(c) or has_rope(c) or widths(c)[0] in (64, 128, 192)),
        f"{OT} v9.0.0 {FEATURES}",
        targets=ASCEND_910,
    ),
    HostCheck(
        "keys as wide as values, or 192 beside 128",
        lambda c: widths(c)[0] == widths(c)[2] or (widths(c)[0], widths(c)[2]) == (192, 128),
        f"{OT} v8.5.0 {PROMPT}, v9.0.0 {FEATURES}",
        targets=ASCEND_910,
    ),
    HostCheck(
        "rope channels of 64 beside values of 128 or 512",
        lambda c: not has_rope(c) or (widths(c)[1] == ROPE_DIM and widths(c)[2] in (128, LATENT_DIM)),
        f"{OT} v9.0.0 {FEATURES}",
        targets=ASCEND_910,
    ),
    HostCheck(
        "widths in multiples of 16 where a row has several queries, and values of up to 512",
        lambda c: widths(c)[2] <= 512 and (widths(c)[0] % 16 == 0 or longest(c) in (1, None)),
        f"{OT} v9.0.0 {FEATURES}",
        targets=ASCEND_910,
    ),
    HostCheck(
        "no more queries than keys in mode 9, but for rows without keys",
        lambda c: c.sparse_mode != 9 or all(count <= held or held == 0 for count, held in pairs(c)),
        f"{OT} v9.0.0 {FEATURES}",
        targets=ASCEND_910,
        since="9.0.0",
    ),
    HostCheck(
        "in modes 0 and 1 masks of two axes in layout BSND alone and without rope, in V3",
        on(
            "V3",
            lambda c: (
                c.sparse_mode > 1 or c.atten_mask is None or c.atten_mask.ndim != 2 or not (packed(c) or has_rope(c))
            ),
        ),
        f"{OT} v9.0.0 {FEATURES}",
        targets=ASCEND_910,
    ),
    HostCheck(
        "heads of 64, 128 or 192, or keys of 192 beside values of 128, in layout TND, in PFA",
        on("PFA", lambda c: not packed(c) or widths(c)[0] in (64, 128, 192)),
        f"{OT} v8.5.0 {PROMPT}",
        targets=ASCEND_910,
        until="9.0.0",
    ),
    HostCheck(
        "as many key heads as query heads where both are 192 wide, in layout TND, in PFA",
        on("PFA", lambda c: not packed(c) or widths(c) != (192, 0, 192) or not grouped(c)),
        f"{OT} v8.5.0 {PROMPT}",
        targets=ASCEND_910,
        until="9.0.0",
    ),
    HostCheck(
        "mode 4 for values of 64 or 128 alone, in layout TND, in PFA",
        on("PFA", lambda c: not packed(c) or c.sparse_mode != 4 or widths(c)[2] in (64, 128)),
        f"{OT} v8.5.0 {PROMPT}",
        targets=ASCEND_910,
        until="9.0.0",
    ),
    HostCheck(
        "no more queries than keys in mode 3, in PFA",
        on("PFA", lambda c: c.sparse_mode != 3 or all(count <= held for count, held in pairs(c))),
        f"{OT} v8.5.0 {PROMPT}",
        targets=ASCEND_910,
        until="9.0.0",
    ),
    HostCheck(
        "bounds of a band that are not negative, in PFA",
        on("PFA", lambda c: c.sparse_mode != 4 or min(c.pre_tokens, c.next_tokens) >= 0),
        f"{OT} v8.5.0 {PROMPT}",
        targets=ASCEND_910,
        until="9.0.0",
    ),
    HostCheck(
        "lists of up to 4096 lengths, in PFA",
        on("PFA", lambda c: max(len(c.actual_seq_qlen or ()), len(c.actual_seq_kvlen or ())) <= 4096),
        f"{OT} v8.5.0 {PROMPT}",
        targets=ASCEND_910,
        until="9.0.0",
    ),
    HostCheck(
        "up to 64 query heads a key head, in PFA",
        on("PFA", lambda c: c.num_query_heads <= 64 * kv_heads(c)),
        f"{OT} v8.5.0 {PROMPT}",
        targets=ASCEND_910,
        until="9.0.0",
    ),
    HostCheck(
        "heads of up to 512 in layout TND",
        lambda c: not packed(c) or has_rope(c) or widths(c)[0] <= 512,
        f"{OT} 3a280bcc {CHECKERS}",
        targets=ASCEND_950,
    ),
    HostCheck(
        "other values than keys up to 128 wide alone, without pages, in modes 0, 2 and 3; or 128 beside 192",
        lambda c: (
            widths(c)[0] == widths(c)[2]
            or (widths(c)[0], widths(c)[2]) == (192, 128)
            or (max(widths(c)) <= 128 and not paged(c) and c.sparse_mode in (0, 2, 3))
        ),
        f"{OT} 3a280bcc {CHECKERS}",
        targets=ASCEND_950,
    ),
    HostCheck(
        "rope channels of 64 beside queries of 128 or 512",
        lambda c: not has_rope(c) or (widths(c)[1] == ROPE_DIM and widths(c)[0] in (128, LATENT_DIM)),
        f"{OT} 3a280bcc {CHECKERS}",
        targets=ASCEND_950,
    ),
    HostCheck(
        "in modes 0 and 1 masks of three or four axes alone",
        lambda c: c.sparse_mode > 1 or c.atten_mask is None or c.atten_mask.ndim in (3, 4),
        f"{OT} 3a280bcc {CHECKERS}",
        targets=ASCEND_950,
    ),
    HostCheck(
        "as many lengths of keys as of queries in layout TND, one or as many as rows in BSND",
        _as_many_lists,
        f"{OT} 3a280bcc {CHECKERS}",
        targets=ASCEND_950,
    ),
    HostCheck(
        "tiled pages of 16 channels a tile, as many tiles as a head has",
        lambda c: c.key.ndim != 5 or (c.key.shape[4] == 16 and c.key.shape[2] * 16 == widths(c)[0]),
        f"{OT} 3a280bcc {CHECKERS}",
        targets=ASCEND_950,
    ),
)
