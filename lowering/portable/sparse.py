"""Selecting blocks and attending to them a block of queries at a time, so that memory does not grow with the prompt."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from ..host import symbolic
from ..ops.sparse import expand_blocks, index_scores_topk, members, selected_slots, sparse_attention, visible_tokens
from ..ops.widen import wide
from ..rows import Rows
from ..target import EVERY

FEW = 8
"""Tokens of a row up to which each gathers its own keys, however few it could choose from."""
SCORED = 64
"""Queries whose blocks are scored at a time."""
EXPANDED = 256
"""Queries whose blocks are expanded to tokens at a time."""
GATHERED = 16
"""Queries whose selected keys and values are gathered at a time."""
CACHED = 1
"""The same, for each thread, where they are gathered into one buffer again and again, to stay in its cache."""
SHARED = 32
"""Queries of a row that stand together and share products with all the keys that any of them selects, or may see."""
FEWER = 0.7
"""Which part of the keys they may see these are at most, to be copied for the product."""
WORTH = (3.0, 3.5)
"""How many times as many keys as one query selects such a product may take, to beat gathering them query by query: keys
of 16 bits, which take half the time to gather, and of 32."""


_SYMBOL = "goes over tokens block by block, and their number is a symbol here"


def _refuse_wide(q, index_pages, rows, *, ratio, top_k) -> str | None:
    if torch.float64 in (q.dtype, index_pages.dtype):
        return "orders float32 scores by their bits; this call has float64"
    return None


def _best(scores: Tensor, seen: Tensor, top_k: int, *, ordered: bool = True) -> Tensor:
    """[... top_k] numbers of the largest scores, which are float32 and not negative, and of equal ones the lowest.

    Numbers that are not `seen` come last, as -1; with `ordered` false there may be none.
    """
    blocks = scores.shape[-1]
    # The bits of such floats order as they do; below them stands the number, so that no two entries are equal.
    backward = torch.arange(blocks - 1, -1, -1, device=scores.device)
    entry = torch.where(seen, (scores + 0.0).view(torch.int32).long() << 32 | backward, -1)
    kept = entry.topk(min(top_k, blocks), sorted=ordered).values
    return torch.where(kept < 0, -1, blocks - 1 - (kept & 0xFFFFFFFF)).int()


@index_scores_topk.kernel("torch_rows", targets=("cpu",), refuse=_refuse_wide, host_reads=True, eager=True)
def _select_rows(q, index_pages, rows, *, ratio, top_k):
    found = torch.full((q.shape[0], top_k), -1, dtype=torch.int32, device=q.device)
    heads = wide(q)
    for start, end, length, table in _busy(rows):
        keys = wide(_held(index_pages, table, length // ratio)).T
        for at in range(start, end, SCORED):
            some = heads[at : min(at + SCORED, end)]
            last = length - (end - at - some.shape[0])
            visible = torch.arange(last - some.shape[0] + 1, last + 1, device=q.device)[:, None] // ratio
            found[at : at + some.shape[0]] = _some(some, keys[:, : last // ratio], visible, top_k)
    return found


def _some(q: Tensor, keys: Tensor, visible: Tensor, top_k: int) -> Tensor:
    """The blocks of a few queries of one row, q [queries heads dim], keys [dim blocks], visible [queries 1]."""
    blocks = torch.arange(keys.shape[1], device=keys.device)
    if keys.shape[1] <= top_k:
        # All are kept, whatever their scores.
        return F.pad(torch.where(blocks < visible, blocks, -1), (0, top_k - keys.shape[1]), value=-1).int()
    scores = (q.flatten(0, 1) @ keys).relu_().unflatten(0, q.shape[:2]).sum(1) / q.shape[2] ** 0.5
    return _best(scores, blocks < visible, top_k)


def _busy(rows: Rows) -> list[tuple[int, int, int, list[int]]]:
    """First token, end, length and pages of each row that has new tokens."""
    starts, (lengths, table) = rows.query_start.tolist(), rows.paged
    found = zip(starts[:-1], starts[1:], lengths.tolist(), table.tolist(), strict=True)
    return [row for row in found if row[1] > row[0]]


def _held(pool: Tensor, table: list[int], count: int) -> Tensor:
    """The first `count` entries of a row's pages, in order: a view where the pages follow each other, else a copy."""
    used = -(-count // pool.shape[1])
    first = table[0]
    if table[:used] == list(range(first, first + used)):
        return pool[first : first + used].flatten(0, 1)[:count]
    return pool[table[:used]].flatten(0, 1)[:count]


def _refuse_blocks(q, index_pages, rows, *, ratio, top_k) -> str | None:
    return _SYMBOL if symbolic((rows.max_query,)) else _refuse_wide(q, index_pages, rows, ratio=ratio, top_k=top_k)


@index_scores_topk.kernel("torch_blocked", targets=EVERY, refuse=_refuse_blocks, batches=False)
def _select_blocked(q, index_pages, rows, *, ratio, top_k):
    q4 = wide(rows.rectangle(q))
    keys = wide(index_pages[rows.page_table].flatten(1, 2)).transpose(1, 2)
    visible = (rows.places + 1)[..., None] // ratio
    blocks = torch.arange(keys.shape[2], device=q.device)
    found = []
    for at in range(0, rows.max_query, SCORED):
        some = q4[:, at : at + SCORED]
        scores = torch.bmm(some.flatten(1, 2), keys).relu().unflatten(1, some.shape[1:3]).sum(2) / q.shape[2] ** 0.5
        found.append(_best(scores, blocks < visible[:, at : at + SCORED], top_k))
    best = F.pad(torch.cat(found, 1), (0, top_k - found[0].shape[2]), value=-1)
    # Padding gets zeros from the rectangle; it selects nothing.
    _, seen = visible_tokens(rows, q.shape[0])
    return torch.where(seen[:, None] > 0, rows.flat(best, q.shape[0]), -1)


def _refuse_expanded(blocks, rows, *, ratio) -> str | None:
    return _SYMBOL if symbolic(blocks.shape[:1]) else None


@expand_blocks.kernel("torch_blocked", targets=EVERY, refuse=_refuse_expanded)
def _expand_blocked(blocks, rows, *, ratio):
    _, visible = visible_tokens(rows, blocks.shape[0])
    parts = zip(blocks.split(EXPANDED), visible.split(EXPANDED), strict=True)
    return torch.cat([members(some, seen, ratio) for some, seen in parts])


def _refuse_rows(q, k_pages, v_pages, selected, rows, *, scale) -> str | None:
    if k_pages.dtype != v_pages.dtype:
        return f"takes keys and values of one dtype; found {k_pages.dtype} and {v_pages.dtype}"
    return None


@sparse_attention.kernel("torch_rows", targets=("cpu",), refuse=_refuse_rows, host_reads=True, eager=True)
def _attend_rows(q, k_pages, v_pages, selected, rows, *, scale):
    out = q.new_zeros(q.shape[0], q.shape[1], v_pages.shape[3])
    for start, end, length, table in _busy(rows):
        most = int(WORTH[k_pages.dtype.itemsize > 2] * selected.shape[1])
        all_of = _seeing_few(end - start, length, selected.shape[1], most)
        k, v = (_held(pool, table, length - (end - start) + all_of).to(q.dtype) for pool in (k_pages, v_pages))
        # A weight of zero hides a number, but neither NaN nor infinity: those may only be read where selected.
        if all_of and bool(v.isfinite().all()):
            middle = start + all_of
            out[start:middle] = _masked(q[start:middle], k, v, selected[start:middle], scale)
            start = middle
        row = _Row(k_pages, v_pages, torch.tensor(table, device="cpu"), length, most)
        for at in range(start, end, SHARED):
            part = slice(at, min(at + SHARED, end))
            out[part] = row.attend(q[part], selected[part], scale)
    return out


def _seeing_few(queries: int, length: int, selected: int, most: int) -> int:
    """How many of a row's newest tokens, from the first on, see few enough keys to take all of them, masked."""
    if queries <= FEW:
        return queries if length <= selected else 0
    return min(max(most - (length - queries), 0), queries)


def _masked(q: Tensor, k: Tensor, v: Tensor, selected: Tensor, scale: float) -> Tensor:
    """Attention of a row's tokens, q [queries heads dim], over the keys up to the last, k and v [keys kv_heads dim]."""
    outputs, before = [], k.shape[0] - q.shape[0]
    k, v = wide(k), wide(v)
    for part, some in zip(q.split(SHARED), selected.split(SHARED), strict=True):
        before += part.shape[0]
        unselected = _unselected(some, before)
        keys, values, union = k[:before], v[:before], _union(unselected)
        if union.numel() < FEWER * before:
            keys, values, unselected = keys[union], values[union], unselected[:, union]
        outputs.append(_product(part, keys, values, unselected, scale))
    return torch.cat(outputs)


def _product(q: Tensor, k: Tensor, v: Tensor, unselected: Tensor, scale: float) -> Tensor:
    """Attention of tokens, q [queries heads dim], over keys [keys kv_heads dim] not `unselected` [queries keys]."""
    heads = (wide(_grouped(q, k.shape[1])) * scale).permute(1, 2, 0, 3)
    scores = torch.bmm(heads.flatten(1, 2), k.permute(1, 2, 0)).unflatten(1, heads.shape[1:3])
    weights = scores.masked_fill_(unselected, -torch.inf).softmax(-1)
    y = torch.bmm(weights.flatten(1, 2), v.transpose(0, 1)).unflatten(1, heads.shape[1:3])
    # Where nothing is selected there are no weights.
    y = y.masked_fill_(unselected.all(-1)[:, None], 0)
    return rearrange(y, "kv_heads shared queries dim -> queries (kv_heads shared) dim").to(q.dtype)


def _unselected(selected: Tensor, keys: int) -> Tensor:
    """[queries keys], true where a query has not selected the key."""
    without = torch.ones(selected.shape[0], keys + 1, dtype=torch.bool, device=selected.device)
    # Entries of -1 fall on a column of their own.
    return without.scatter_(1, torch.where(selected < 0, keys, selected).long(), False)[:, :keys]


def _union(unselected: Tensor) -> Tensor:
    """The keys that any query selects, in order."""
    return (~unselected.all(0)).nonzero()[:, 0]


@dataclass(frozen=True)
class _Row:
    """Pages of one row, of `length` tokens; queries that stand together may share up to `most` keys."""

    k_pages: Tensor
    v_pages: Tensor
    table: Tensor
    length: int
    most: int

    def attend(self, q: Tensor, selected: Tensor, scale: float) -> Tensor:
        """Attention of tokens that stand together, over copies of what any of them selects, or each over its own."""
        y = self._shared(q, selected, scale) if q.shape[0] > 1 else None
        if y is None and q.shape[0] > FEW:
            parts = zip(q.split(FEW), selected.split(FEW), strict=True)
            return torch.cat([self.attend(part, some, scale) for part, some in parts])
        return _gathered(q, self.k_pages, self.v_pages, selected, self.table, scale) if y is None else y

    def _shared(self, q: Tensor, selected: Tensor, scale: float) -> Tensor | None:
        """None where too many keys are selected between them, or a value among those is not finite."""
        unselected = _unselected(selected, self.length)
        union = _union(unselected)
        # The fewer share a copy, the more of it falls to each.
        if union.numel() > self.most * q.shape[0] / (q.shape[0] + 2):
            return None
        slots = _slots(union, self.table, self.k_pages.shape[1])
        k, v = (wide(pages.flatten(0, 1).index_select(0, slots).to(q.dtype)) for pages in (self.k_pages, self.v_pages))
        if not bool(v.isfinite().all()):
            return None
        return _product(q, k, v, unselected[:, union], scale)


def _slots(places: Tensor, table: Tensor, page_size: int) -> Tensor:
    """Where the tokens at `places` of a row lie among all slots."""
    return table[places // page_size] * page_size + places % page_size


def _gathered(q: Tensor, k_pages: Tensor, v_pages: Tensor, selected: Tensor, table: Tensor, scale: float) -> Tensor:
    """Attention of one row's tokens, q [queries heads dim], each over its own copy of the keys it selects."""
    page_size, kv_heads = k_pages.shape[1:3]
    pools = [pages.flatten(0, 1).flatten(1) for pages in (k_pages, v_pages)]
    each = min(CACHED * torch.get_num_threads(), q.shape[0])
    # One piece of memory, kept to the end: the system hands out fresh memory page by page, at more than the copy costs.
    sizes = [each * selected.shape[1] * pool.shape[1] for pool in pools]
    buffers = k_pages.new_empty(sum(sizes)).split(sizes)
    outputs = []
    for part, some in zip(_grouped(q, kv_heads).split(each), selected.split(each), strict=True):
        # What is not selected reads the first that is, so that its weight of zero meets a value that counts anyway.
        place = torch.where(some < 0, some[:, :1].clamp(min=0), some)
        slots = _slots(place, table, page_size)
        taken = (_taken(pool, slots, buffer) for pool, buffer in zip(pools, buffers, strict=True))
        k, v = (x.unflatten(2, (kv_heads, -1)).transpose(1, 2).to(q.dtype) for x in taken)
        y = F.scaled_dot_product_attention(part, k, v, attn_mask=(some >= 0)[:, None, None], scale=scale)
        outputs.append(y.masked_fill_(some[:, :1, None, None] < 0, 0))
    return torch.cat(outputs).flatten(1, 2)


def _taken(pool: Tensor, slots: Tensor, buffer: Tensor) -> Tensor:
    """[queries keys width]: the lines of a pool at `slots` [queries keys], written into a buffer."""
    lines = buffer.view(-1, pool.shape[1])[: slots.numel()]
    return torch.index_select(pool, 0, slots.flatten(), out=lines).unflatten(0, slots.shape)


def _grouped(q: Tensor, kv_heads: int) -> Tensor:
    """[queries kv_heads shared dim]: heads that share a key/value head are further queries of it."""
    return q.unflatten(1, (kv_heads, q.shape[1] // kv_heads))


def _refuse_attended(q, k_pages, v_pages, selected, rows, *, scale) -> str | None:
    return _SYMBOL if symbolic(q.shape[:1]) else None


@sparse_attention.kernel("torch_blocked", targets=EVERY, refuse=_refuse_attended, batches=False, backward_once=True)
def _attend_blocked(q, k_pages, v_pages, selected, rows, *, scale):
    row, visible = visible_tokens(rows, q.shape[0])
    chosen = torch.where(visible[:, None] > 0, selected, -1)
    outputs = []
    for part, some, of in zip(q.split(GATHERED), chosen.split(GATHERED), row.split(GATHERED), strict=True):
        valid, slots = selected_slots(some, rows.page_table[of], k_pages.shape[1])
        k, v = (
            torch.where(valid[..., None, None], pages.flatten(0, 1)[slots], 0).to(q.dtype).transpose(1, 2)
            for pages in (k_pages, v_pages)
        )
        # Where nothing is selected all is zero, and so is its mean: no row of the softmax is left without keys.
        mask, some_q = valid | ~valid[:, :1], torch.where(valid[:, :1, None], part, 0)
        y = F.scaled_dot_product_attention(
            _grouped(some_q, k.shape[1]), k, v, attn_mask=mask[:, None, None], scale=scale
        )
        outputs.append(y.flatten(1, 2))
    return torch.cat(outputs)
