"""Attention through npu_fused_infer_attention_score_v2, over pages and without, and the writing of pages.

The operator reads lengths as host lists, whose units differ by layout: with layout TND query lengths are cumulative,
with BSND they are each row's own; lengths over pages are each row's own in both. Masked modes want one triangle of a
fixed size, True where a key must not be seen, and line queries up with the end of the keys. `softmax_scale` is passed
always: the operator's default is 1.

A window is a band of that triangle. For one query a row the operator is documented to ignore bands, and engines rely on
one in layout TND where CANN's newer kernel (FAI) takes it; elsewhere such rows get the pages of the window alone and a
mask of their own over them. The block of a draft needs no mask, or a band to both sides.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from params.modes import lasting

from ..errors import LoweringError
from ..host import tracing
from ..ops.attention import attention, block_attention, paged_attention, window_pages, write_pages
from ..rows import Rows
from .features import npu
from .host_checks.attention import page_sizes
from .host_checks.check import ASCEND_910, ASCEND_950
from .kernel import FLOATS, HALVES, above, empty, fused, machine, wrong_dtype

OPERATOR = "npu_fused_infer_attention_score_v2"
MASK_SIDE = 2048
"""Side of the triangle that modes 2 to 4 want, whatever the lengths."""
UNMASKED = 0
BOTTOM_RIGHT = 3
"""The mode in which the last query sees the last key."""
BAND = 4
"""The mode that is also told how far a query sees."""
FAR = 2**31 - 1
PACKED_BEFORE_9 = ((64, 64), (128, 128), (192, 128))
"""Widths of keys and values in layout TND before CANN 9.0.0; layout BSND takes every multiple of 16 up to 512."""
MOST_PACKED = 4095
"""Rows of layout TND: its lists take 4096 entries, and padding may be one."""

_masks: dict[torch.device, Tensor] = {}


@lasting
def shared_mask(device: torch.device) -> Tensor:
    """The triangle that modes 2 to 4 want: True strictly above the diagonal."""
    if device in _masks and not tracing():
        return _masks[device]
    later = torch.ones(MASK_SIDE, MASK_SIDE, dtype=torch.bool, device=device).triu(1)
    if not tracing():
        _masks[device] = later
    return later


def wrong_heads(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Limits of the operator on heads; the head axis is the last but one, in pages too."""
    heads, kv_heads, head_dim, v_dim = q.shape[1], k.shape[-2], q.shape[2], v.shape[-1]
    if v_dim != head_dim:
        return f"takes keys and values of one size; this call has {head_dim} and {v_dim}"
    if heads % kv_heads or heads > 64 * kv_heads:
        return f"takes query heads in multiples of kv_heads, up to 64 times; this call has {heads} and {kv_heads}"
    if head_dim % 16:
        return f"takes a head_dim in multiples of 16; this call has {head_dim}"
    if heads * head_dim >= 65535:
        return f"takes heads * head_dim below 65535; this call has {heads * head_dim}"
    return above(512, head_dim=head_dim) or above(256, heads=heads)


def _binds(window: int | None, rows: Rows, page_size: int) -> bool:
    """Whether a row may hold more keys than its newest query sees."""
    return window is not None and window < rows.paged[1].shape[1] * page_size


def _wrong_pages(q: Tensor, k_pages: Tensor, v_pages: Tensor, longest: int, layout: str) -> str | None:
    """`longest` is the most queries of a row."""
    page_size, sizes = k_pages.shape[1], page_sizes(machine(q), layout, q.shape[2], longest)
    if page_size not in sizes:
        return f"takes pages of {sizes[0]} to {sizes[-1]} tokens in steps of {sizes.step}; found {page_size}"
    if k_pages.numel() >= 2**31:
        return f"takes pools of fewer than 2**31 elements; this one has {k_pages.numel()}: make fewer pages"
    return wrong_dtype(HALVES, q=q, k_pages=k_pages, v_pages=v_pages)


def _refuse_paged(q, k_pages, v_pages, rows, *, scale, window=None):
    wrong = _wrong_rows(rows) or wrong_heads(q, k_pages, v_pages)
    return wrong or _wrong_pages(q, k_pages, v_pages, rows.max_query, "BSND")


def unknown_lengths(rows: Rows) -> str | None:
    """A sentence about rows whose lengths the host does not know exactly."""
    return rows.inexact and f"{rows.inexact}: read the accepted counts first"


def _wrong_rows(rows: Rows) -> str | None:
    return unknown_lengths(rows) or shared_pages(rows)


def shared_pages(rows: Rows) -> str | None:
    """A sentence about a pool with fewer pages than its rows hold, those they share counted for each."""
    if rows.host is not None and not rows.host.fits:
        return "counts pages that rows share once a row, and the pool has fewer: give init_state more pages"
    return None


def wrong_packing(q: Tensor, head_dim: int, v_dim: int) -> str | None:
    """Why layout TND does not take heads of these widths, with queries of q's dtype; None when it does."""
    target, found = machine(q), f"this call has {head_dim} and {v_dim}"
    if target.has_cann("9.0.0"):
        most = 512 if target.name in ASCEND_950 else 256
        fits = (head_dim == v_dim <= most and head_dim % 16 == 0) or (head_dim, v_dim) == (192, 128)
        return None if fits else f"layout TND takes keys and values of one width up to {most}, in 16s; {found}"
    if q.dtype != torch.bfloat16:
        return f"layout TND takes bfloat16 before CANN 9.0.0; q is {str(q.dtype).removeprefix('torch.')}"
    fits = (head_dim, v_dim) in PACKED_BEFORE_9
    return None if fits else f"layout TND takes keys and values of 64 or 128 before CANN 9.0.0; {found}"


def _bands_one_query(q: Tensor) -> bool:
    """Whether layout TND holds one query a row to a window, as vllm-ascend relies on (attention/attention_v1.py)."""
    target = machine(q)
    return target.name in ASCEND_910 and target.has_cann("9.0.0")


def _refuse_packed(q, k_pages, v_pages, rows, *, scale, window=None):
    if rows.max_query == 1 and _binds(window, rows, k_pages.shape[1]) and not _bands_one_query(q):
        return "for one query a row the operator is documented to ignore a window, and layout TND takes no other mask"
    # Padding is a row too, and may be longer than the others.
    longest = rows.max_query if rows.uniform else max(rows.max_query, 2)
    wrong = _wrong_rows(rows) or wrong_heads(q, k_pages, v_pages) or wrong_packing(q, q.shape[2], v_pages.shape[3])
    wrong = wrong or _wrong_pages(q, k_pages, v_pages, longest, "TND")
    return wrong or above(2**20, tokens=q.shape[0]) or above(MOST_PACKED, rows=rows.count)


@fused(paged_attention, "npu_fia_tnd", OPERATOR, refuse=_refuse_packed)
def _packed(q, k_pages, v_pages, rows, *, scale, window=None):
    page_size, padding = k_pages.shape[1], 0
    queries, keys, table = list(rows.host.query), list(rows.host.length), page_table(rows)
    if not rows.uniform:
        # The last entry must be the number of tokens, so padding is one more row, over the scratch page alone: what it
        # gets is dropped.
        padding = q.shape[0] - sum(queries)
        queries, keys = [*queries, padding], [*keys, torch.sym_min(padding, page_size)]
        table = torch.nn.functional.pad(table, (0, 0, 0, 1))
    mode, band = _packed_mode(window, rows, page_size, padding if isinstance(padding, int) else q.shape[0])
    y = _attended(
        q.contiguous(),
        k_pages,
        v_pages,
        scale,
        "TND",
        mode,
        actual_seq_qlen=list(accumulate(queries)),
        actual_seq_kvlen=keys,
        block_table=table,
        **band,
    )
    if rows.uniform:
        return y
    live = rows.of_tokens(q.shape[0]) < rows.count
    return torch.where(live[:, None, None], y, 0)


def _packed_mode(window: int | None, rows: Rows, page_size: int, padding: int) -> tuple[int, dict[str, int]]:
    """The mode, with its bounds, for packed rows and up to so many tokens of padding behind them."""
    binds = _binds(window, rows, page_size)
    if rows.uniform and rows.max_query == 1 and not binds:
        # One query sees every key: there is no mask to make or to read.
        return UNMASKED, {}
    # Mode 3 is for rows with as many keys as queries or more, which more padding than the scratch page holds is not; a
    # band that ends at the query masks the same.
    return (BOTTOM_RIGHT, {}) if padding <= page_size and not binds else (BAND, _band(window))


def page_table(rows: Rows) -> Tensor:
    """The page table as the operator takes it."""
    return rows.paged[1].int().contiguous()


def _band(window: int | None) -> dict[str, int]:
    """How far a query sees: the operator counts the tokens before and after its own."""
    return {"pre_tokens": FAR if window is None else window - 1, "next_tokens": 0}


@fused(paged_attention, "npu_fia_bsnd", OPERATOR, refuse=_refuse_paged)
def _padded(q, k_pages, v_pages, rows, *, scale, window=None):
    rectangle = rows.rectangle(q).contiguous()
    if rows.max_query == 1:
        held = _one_query(rows, k_pages.shape[1], window)
        return rows.flat(_attended(rectangle, k_pages, v_pages, scale, "BSND", UNMASKED, **held), q.shape[0])
    held: dict[str, Any] = {"actual_seq_qlen": list(rows.host.query), "actual_seq_kvlen": list(rows.host.length)}
    held["block_table"] = page_table(rows)
    mode, band = (BAND, _band(window)) if _binds(window, rows, k_pages.shape[1]) else (BOTTOM_RIGHT, {})
    return rows.flat(_attended(rectangle, k_pages, v_pages, scale, "BSND", mode, **band, **held), q.shape[0])


def _one_query(rows: Any, page_size: int, window: int | None) -> dict[str, Any]:
    """What rows of one query see: all they hold, or the pages of a window with a mask over what lies before it."""
    if window is None or not _binds(window, rows, page_size):
        return {"actual_seq_kvlen": list(rows.host.length), "block_table": page_table(rows)}
    table, places = window_pages(rows, page_size, window)
    held: list[Any] = []
    for query, length in zip(rows.host.query, rows.host.length, strict=True):
        before: Any = torch.sym_max(length - query - window + 1, 0)
        held.append(length - before // page_size * page_size)
    return {
        "actual_seq_kvlen": held,
        "block_table": table.int().contiguous(),
        "atten_mask": (places < rows.lengths[:, None] - window)[:, None, None],
    }


def _refuse_block(q, k_pages, v_pages, rows, *, scale, window=None) -> str | None:
    if rows.max_query == 1 and _binds(window, rows, k_pages.shape[1]):
        return "for one query a row the operator is documented to ignore a window"
    return _refuse_paged(q, k_pages, v_pages, rows, scale=scale, window=window)


@fused(block_attention, "npu_fia_block", OPERATOR, refuse=_refuse_block)
def _block(q, k_pages, v_pages, rows, *, scale, window=None):
    block, held = rows.max_query, {"actual_seq_kvlen": list(rows.host.length), "block_table": page_table(rows)}
    if block > 1:
        held["actual_seq_qlen"] = list(rows.host.query)
    mode = UNMASKED
    if window is not None and block > 1:
        mode, held = BAND, held | {"pre_tokens": window - 1, "next_tokens": window - 1}
    rectangle = q.unflatten(0, (-1, block)).contiguous()
    return _attended(rectangle, k_pages, v_pages, scale, "BSND", mode, **held).flatten(0, 1)


def _attended(q: Tensor, k: Tensor, v: Tensor, scale: float, layout: str, mode: int, **rows: Any) -> Tensor:
    """The operator's output; k and v are pages when `rows` has a `block_table`, else laid out as q."""
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if "block_table" in rows:
        rows["block_size"] = k.shape[1]
        k, v = k.flatten(2), v.flatten(2)
    if mode != UNMASKED:
        rows["atten_mask"] = shared_mask(q.device)
    return npu.npu_fused_infer_attention_score_v2(
        q,
        k,
        v,
        num_query_heads=heads,
        num_key_value_heads=kv_heads,
        softmax_scale=scale,
        input_layout=layout,
        sparse_mode=mode,
        **rows,
    )[0]


def _refuse_dense(q, k, v, rows, *, scale, window=None) -> str | None:
    if not rows.uniform:
        return "needs each row's length on the host, and without a state only a uniform batch tells it"
    return wrong_dtype(HALVES, q=q, k=k, v=v) or wrong_heads(q, k, v)


@fused(attention, "npu_fia_dense", OPERATOR, refuse=_refuse_dense)
def _dense(q, k, v, rows, *, scale, window=None):
    q4, k4, v4 = (rows.rectangle(x).contiguous() for x in (q, k, v))
    mode = BOTTOM_RIGHT if rows.max_query > 1 else UNMASKED
    band: dict[str, int] = {}
    if window is not None and window < rows.max_query:
        mode, band = BAND, _band(window)
    return _attended(q4, k4, v4, scale, "BSND", mode, **band).flatten(0, 1)


def cached(x: Tensor) -> tuple[torch.dtype, ...]:
    """The dtypes of caches that the operator writes: on Ascend 910 its host code takes no float32."""
    return FLOATS if machine(x).name in ASCEND_950 else HALVES


def too_many(slots: Tensor, pages: int, page_size: int) -> str | None:
    """A sentence about more tokens than the pool has slots: padding, all for the scratch page, may come to that."""
    return above(pages * page_size, tokens=slots.shape[0])


def _refuse_write(k_pages, v_pages, k, v, slots) -> str | None:
    wrong = wrong_dtype(cached(k_pages), k_pages=k_pages, v_pages=v_pages) or empty(k=k, v=v)
    return wrong or too_many(slots, *k_pages.shape[:2])


@fused(write_pages, "npu_scatter_pa_kv_cache", "npu_scatter_pa_kv_cache", refuse=_refuse_write)
def _write(k_pages, v_pages, k, v, slots):
    if not (k_pages.is_contiguous() and v_pages.is_contiguous()):
        raise LoweringError("write_pages: the pages must be contiguous: a write to a copy of them would be lost")
    new = (x.to(pages.dtype).contiguous() for x, pages in ((k, k_pages), (v, v_pages)))
    # The operator's default layout is NZ; our pages are plain.
    npu.npu_scatter_pa_kv_cache(*new, k_pages, v_pages, slots, cache_mode="Norm")
    return k_pages, v_pages
