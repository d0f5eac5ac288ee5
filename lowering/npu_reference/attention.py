"""Fused inference attention: grouped-query attention over packed, padded or paged keys and values.

Scores, softmax and the sum over values run in float32 and are rounded once. Lengths are host lists: cumulative for
queries of layout TND and for packed keys, per request everywhere else (layout BSND, paged keys).

Latent attention gives the rotated channels of queries and keys apart, and has two forms: heads of 128 over packed keys,
and heads of 512, which all read the one latent, over pages.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from params.modes import lasting

from .checks import (
    ASCEND_950,
    OperatorError,
    machine,
    need,
    need_contiguous,
    need_default,
    need_dtype,
    need_one_dtype,
    need_rank,
    need_shape,
    need_values,
    shown,
)
from .registration import operator

RANKS = {"TND": 3, "BSND": 4, "BSND_NBSD": 4}
"""Layouts that the reference covers, and the rank of their queries."""

WIDEST = 512
"""Channels of a head at most."""

ROPE_WIDTH = 64
"""Width of the channels that latent attention gives apart."""

LATENT_WIDTH = 512
"""Width of the latent that all heads share; it stands for keys and values."""

LATENT_HEADS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Query heads that the operator takes over a shared latent."""

NZ_TILE = 16
"""Channels of the innermost axis of NZ pages of 16-bit values."""

MASK_SIDE = 2048
"""Side of the one mask that serves all lengths: True strictly above the diagonal."""


@dataclass(frozen=True)
class _Call:
    """What the arguments say is to be computed. `queries` and `held` are the lengths of each request."""

    layout: str
    paged: bool
    heads: int
    kv_heads: int
    queries: tuple[int, ...]
    held: tuple[int, ...]
    block_size: int
    mode: int
    before: int
    after: int
    one_step: bool
    """Whether Q_S is 1, by which the documentation splits its rules."""
    rope: bool
    """Whether the rotated channels are given apart, as latent attention does."""
    latent: bool
    """Whether they are, and all heads read one latent."""
    heads_first: bool
    """Whether heads come before requests in what comes out."""


def _understand(
    query: Tensor, key: Tensor, value: Tensor, query_rope: Tensor | None, key_rope: Tensor | None,
    atten_mask: Tensor | None, actual_seq_qlen: Sequence[int] | None, actual_seq_kvlen: Sequence[int] | None,
    block_table: Tensor | None, num_query_heads: int, num_key_value_heads: int, pre_tokens: int, next_tokens: int,
    input_layout: str, sparse_mode: int, block_size: int, softmax_scale: float, return_softmax_lse: bool, **rest: Any,
) -> _Call:  # fmt: skip
    """Check all that can be checked without the values of tensors."""
    need_default(**{name: given if isinstance(given, Tensor) else given or None for name, given in rest.items()})
    need(input_layout in RANKS, f"input_layout is {input_layout!r}; the reference covers {', '.join(RANKS)}")
    need_dtype((torch.float16, torch.bfloat16), query=query)
    need_one_dtype(query=query, key=key, value=value, query_rope=query_rope, key_rope=key_rope)
    need_dtype((torch.bool, torch.int8, torch.uint8), atten_mask=atten_mask)
    need_contiguous(query=query, key=key, value=value, query_rope=query_rope, key_rope=key_rope, atten_mask=atten_mask)
    need_rank(RANKS[input_layout], RANKS[input_layout], query=query)
    input_layout, _, out_layout = input_layout.partition("_")
    need((query_rope is None) == (key_rope is None), "query_rope and key_rope are given both or neither")
    rope = query_rope is not None
    latent = rope and query.shape[-1] == LATENT_WIDTH
    need(latent or not out_layout, f"the reference covers outputs of layout {out_layout} over a shared latent alone")
    kv_heads = num_key_value_heads or num_query_heads
    _need_heads(query, num_query_heads, kv_heads, latent)
    paged = block_table is not None
    queries = _query_lengths(query, actual_seq_qlen, input_layout)
    held = _held_lengths(key, actual_seq_kvlen, input_layout, len(queries), paged)
    one_step = max(queries, default=0) <= 1 if input_layout == "TND" else query.shape[1] == 1
    call = _Call(
        input_layout, paged, num_query_heads, kv_heads, queries, held, block_size, sparse_mode, pre_tokens, next_tokens,
        one_step, rope, latent, out_layout == "NBSD",
    )  # fmt: skip
    if query_rope is not None and key_rope is not None:
        _need_rope(query, key, query_rope, key_rope, call)
        need(not (latent and return_softmax_lse), "return_softmax_lse is not documented for heads over a shared latent")
    _need_key_shapes(key, value, call)
    _need_widths(query.shape[-1], _width(key, call), _width(value, call), query.dtype, call)
    _need_mode(atten_mask, call)
    if block_table is not None:
        _need_table(block_table, key, call)
    return call


def _need_heads(query: Tensor, heads: int, kv_heads: int, latent: bool) -> None:
    need(0 < heads <= 256, f"num_query_heads is {heads}; expected 1 to 256")
    if latent:
        need(heads in LATENT_HEADS, f"num_query_heads is {heads}; over a shared latent one of {LATENT_HEADS}")
        need(kv_heads == 1, f"num_key_value_heads is {kv_heads}; a shared latent is one head")
    need(
        heads % kv_heads == 0 and (latent or heads // kv_heads <= 64),
        f"num_query_heads is {heads} and num_key_value_heads {kv_heads}; expected a multiple, of at most 64 times",
    )
    need(query.shape[-2] == heads, f"query is {shown(query)}; num_query_heads={heads} must be its last axis but one")


def _need_rope(query: Tensor, key: Tensor, query_rope: Tensor, key_rope: Tensor, call: _Call) -> None:
    """What both forms of latent attention demand, and what each does."""
    need_shape((*query.shape[:-1], ROPE_WIDTH), f"as query, {ROPE_WIDTH} wide", query_rope=query_rope)
    need(key.numel() > 0, f"key is {shown(key)}; with query_rope the operator takes no empty tensor")
    if call.latent:
        return _need_latent(key, key_rope, call)
    width = query.shape[-1]
    need(width == 128, f"query is {shown(query)}; with query_rope heads are 128 or {LATENT_WIDTH} wide")
    need(call.layout == "TND", f"input_layout is {call.layout!r}; heads of 128 with query_rope take TND")
    need(not call.paged, "block_table is given; heads of 128 with query_rope take packed keys only")
    return need_shape((*key.shape[:-1], ROPE_WIDTH), f"as key, {ROPE_WIDTH} wide", key_rope=key_rope)


def _need_latent(key: Tensor, key_rope: Tensor, call: _Call) -> None:
    need(call.paged, f"block_table is missing; heads of {LATENT_WIDTH} are read from pages only")
    need(max(call.queries) <= 16, f"a request has {max(call.queries)} queries; over a shared latent at most 16")
    _need_block_size(call.block_size)
    if key.dim() == 5:
        lead = (key.shape[0], 1)
        tiles = (call.block_size, NZ_TILE)
        need_shape((*lead, LATENT_WIDTH // NZ_TILE, *tiles), "blocks, 1, width / 16, block_size, 16", key=key)
        return need_shape((*lead, ROPE_WIDTH // NZ_TILE, *tiles), "as key in NZ, 64 wide", key_rope=key_rope)
    need_rank(3, 3, key=key)
    return need_shape((*key.shape[:2], ROPE_WIDTH), "as key, 64 wide", key_rope=key_rope)


def _query_lengths(query: Tensor, given: Sequence[int] | None, layout: str) -> tuple[int, ...]:
    if layout == "BSND":
        rows, steps = query.shape[:2]
        # With one step the list is documented to have no effect.
        return _per_request("actual_seq_qlen", None if steps == 1 else given, rows, steps)
    if given is None:
        raise OperatorError("actual_seq_qlen is missing; layout TND needs it, cumulative, one entry a request")
    need(query.shape[0] <= 1 << 20, f"query has {query.shape[0]} tokens; layout TND takes up to {1 << 20}")
    return _cumulative("actual_seq_qlen", given, query.shape[0])


def _held_lengths(key: Tensor, given: Sequence[int] | None, layout: str, rows: int, paged: bool) -> tuple[int, ...]:
    if layout == "BSND" and not paged:
        return _per_request("actual_seq_kvlen", given, rows, key.shape[1])
    if given is None:
        where = "with a block_table" if paged else "in layout TND"
        raise OperatorError(f"actual_seq_kvlen is missing; it is mandatory {where}")
    need(layout == "BSND" or len(given) == rows, f"actual_seq_kvlen has {len(given)} entries for {rows} requests")
    if paged:
        return _per_request("actual_seq_kvlen", given, rows, None)
    return _cumulative("actual_seq_kvlen", given, key.shape[0])


def _cumulative(name: str, given: Sequence[int], tokens: int) -> tuple[int, ...]:
    """Lengths of a list of running sums, which starts at the first request's length."""
    lengths = tuple(after - before for before, after in pairwise((0, *given)))
    need(0 < len(given) <= 4096, f"{name} has {len(given)} entries; expected 1 to 4096")
    need(
        min(lengths) >= 0 and given[-1] == tokens,
        f"{name} is {list(given)}; in layout TND it is cumulative (never falling, no leading zero) "
        f"and ends at the number of tokens, {tokens}",
    )
    return lengths


def _per_request(name: str, given: Sequence[int] | None, rows: int, longest: int | None) -> tuple[int, ...]:
    """One length a request: that of a list with one entry for all, else the first entries."""
    if given is None:
        return (longest or 0,) * rows
    need(len(given) == 1 or len(given) >= rows, f"{name} has {len(given)} entries; expected 1, or {rows} or more")
    lengths = tuple(given) * rows if len(given) == 1 else tuple(given[:rows])
    need(
        min(lengths, default=0) >= 0 and (longest is None or max(lengths, default=0) <= longest),
        f"{name} is {list(given)}; here it holds the length of each request, 0 to {longest or 'any'}",
    )
    return lengths


def _need_key_shapes(key: Tensor, value: Tensor, call: _Call) -> None:
    if call.latent:
        _need_countable(key)
        return need_shape(key.shape, "as key", value=value)
    if call.paged:
        size = call.block_size
        _need_block_size(size)
        need_rank(3, 3, key=key)
        need_shape((key.shape[0], size, key.shape[2]), "blocks, block_size, heads * width", key=key)
        need(key.shape[2] <= 65535, f"key is {shown(key)}; its last axis, heads * width, takes up to 65535")
        need(key.shape[2] % call.kv_heads == 0, f"key is {shown(key)}, whose last axis is not {call.kv_heads} heads")
        _need_countable(key)
        return need_shape(key.shape, "as key", value=value)
    need_rank(RANKS[call.layout], RANKS[call.layout], key=key, value=value)
    need(
        key.shape[-2] == call.kv_heads, f"key is {shown(key)}; expected {call.kv_heads} heads on its last axis but one"
    )
    need(call.layout == "BSND" or key.numel() > 0, f"key is {shown(key)}; layout TND takes no empty tensor")
    if call.layout == "BSND":
        need(key.shape[0] == len(call.queries), f"key is {shown(key)}; expected {len(call.queries)} requests")
        return need_shape(key.shape, "as key", value=value)
    return need_shape(key.shape[:2], "tokens, heads, as key", value=value[..., 0])


def _need_block_size(size: int) -> None:
    """What some CANN takes for some call; which does is the host code's to say."""
    need(size in range(16, 1025, 16), f"block_size is {size}; expected a multiple of 16, at most 1024")


def _need_countable(key: Tensor) -> None:
    need(key.numel() < 1 << 31, f"key has {key.numel()} elements; the operator counts them in int32")


def _width(x: Tensor, call: _Call) -> int:
    """Width of one head of keys or values."""
    if call.latent:
        return LATENT_WIDTH
    return x.shape[-1] // call.kv_heads if call.paged else x.shape[-1]


def _need_widths(width: int, of_keys: int, of_values: int, dtype: torch.dtype, call: _Call) -> None:
    need(width == of_keys, f"heads of query are {width} wide and those of key {of_keys}; expected equal widths")
    need(width <= WIDEST, f"heads are {width} wide; expected at most {WIDEST}")
    if call.latent:
        return
    if call.layout == "TND":
        recent = machine().has_cann("9.0.0")
        need(recent or dtype == torch.bfloat16, f"query is {dtype}; layout TND takes torch.bfloat16 before CANN 9.0.0")
        need(width % 16 == 0, f"heads are {width} wide; expected a multiple of 16")
        both = (of_keys, of_values)
        need(
            of_keys == of_values or both == (192, 128),
            f"heads are {of_keys} wide, values {of_values}; layout TND takes one width, or 192 and 128",
        )
    elif not call.one_step:
        need(width % 16 == 0, f"heads are {width} wide; with more than one step a multiple of 16 is needed")
        flat = call.heads * width
        need(flat < 65535, f"num_query_heads * width is {flat}; layout BSND needs less than 65535")


def _need_mode(mask: Tensor | None, call: _Call) -> None:
    given = f"sparse_mode is {call.mode} with{'out' if mask is None else ''} atten_mask"
    if call.latent:
        wanted = 0 if call.one_step else 3
        allowed = (call.mode, mask is None) == (wanted, call.one_step)
        need(allowed, f"{given}; over a shared latent 0 without for one query, and 3 with for up to 16")
    elif call.layout == "BSND" and call.one_step:
        need(call.mode == 0, f"{given}; the reference covers 0 for a query of one step")
        return _need_own_mask(mask, call)
    allowed = (call.mode, mask is None) in ((0, True), (3, False), (4, False))
    need(allowed, f"{given}; the reference covers 0 without, and 3 and 4 with the shared mask")
    if mask is None:
        return
    need(
        mask.dim() in (2, 3, 4) and tuple(mask.shape) == (1,) * (mask.dim() - 2) + (MASK_SIDE, MASK_SIDE),
        f"atten_mask is {shown(mask)}; modes 3 and 4 take one for all lengths, [{MASK_SIDE}, {MASK_SIDE}] "
        "with up to two leading axes of size 1",
    )
    if call.layout == "TND" and not call.latent:
        _need_tnd_lengths(call)


def _need_own_mask(mask: Tensor | None, call: _Call) -> None:
    """A mask of the call's own, for one query a request: over all slots of its pages, or all its keys."""
    if mask is not None:
        size = call.block_size if call.paged else 1
        keys = math.ceil(max(call.held) / size) * size
        need(
            mask.dim() == 4 and mask.shape[:3] == (len(call.queries), 1, 1) and mask.shape[3] >= keys,
            f"atten_mask is {shown(mask)}; for one query it is [requests, 1, 1, keys] of {len(call.queries)} requests "
            f"with at least {keys} keys",
        )


def _bands_one_query() -> bool:
    """Whether engines rely on a band for one query there (vllm-ascend attention/attention_v1.py)."""
    target = machine()
    return target.name != ASCEND_950 and target.has_cann("9.0.0")


def _need_tnd_lengths(call: _Call) -> None:
    reach = max(call.held, default=0) - 1
    need(
        call.mode != 4 or not call.one_step or call.before >= reach or _bands_one_query(),
        f"pre_tokens is {call.before} and one query of a request sees {reach} keys before its own; pre_tokens is "
        "documented to have no effect on requests of one query",
    )
    for queries, held in zip(call.queries, call.held, strict=True):
        need(
            call.mode == 4 or queries <= held,
            f"a request has {queries} queries and {held} keys; in layout TND sparse_mode 3 needs no more queries than "
            "keys (sparse_mode=4 with next_tokens=0 masks the same and does not)",
        )
        need(
            call.mode == 3 or (call.before >= -queries and call.after >= -held and call.before + call.after >= 0),
            f"pre_tokens is {call.before} and next_tokens {call.after}; with {queries} queries and {held} keys "
            "sparse_mode 4 needs pre_tokens >= -queries, next_tokens >= -keys and a sum of at least 0",
        )


def _need_table(block_table: Tensor, key: Tensor, call: _Call) -> None:
    blocks = [math.ceil(held / call.block_size) for held in call.held]
    most = max(blocks, default=0)
    need_dtype((torch.int32,), block_table=block_table)
    need_rank(2, 2, block_table=block_table)
    need_contiguous(block_table=block_table)
    need(
        block_table.shape[0] == len(blocks) and block_table.shape[1] >= most,
        f"block_table is {shown(block_table)}; expected {len(blocks)} lines of at least {most} blocks",
    )
    need(
        key.shape[0] >= sum(blocks),
        f"key has {key.shape[0]} blocks and the requests hold {sum(blocks)}, shared ones counted each time; the "
        "operator wants no fewer blocks than that",
    )


def _fia_like(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
    call = _understand(query, key, value, **arguments)
    by_head = query.shape[:2] if call.layout == "TND" else (query.shape[0], call.heads, query.shape[1])
    lse = (*by_head, 1) if arguments["return_softmax_lse"] else (0,)
    lead = [query.shape[axis] for axis in (2, 0, 1)] if call.heads_first else query.shape[:-1]
    return query.new_empty((*lead, _width(value, call))), query.new_empty(lse, dtype=torch.float32)


@operator("npu_fused_infer_attention_score_v2", shapes=_fia_like)
def npu_fused_infer_attention_score_v2(
    query: Tensor, key: Tensor, value: Tensor, **arguments: Any
) -> tuple[Tensor, Tensor]:
    """(attention, log of the softmax's denominator: natural, float32).

    Query head h reads key head h // (heads / kv_heads). NaN stands where the device leaves a value undefined: cells
    past a request's queries, queries that see no key, and requests without keys (whose lse is inf).
    """
    call = _understand(query, key, value, **arguments)
    mask, table = arguments["atten_mask"], arguments["block_table"]
    query_rope, key_rope = arguments["query_rope"], arguments["key_rope"]
    if key.dim() == 5:
        key, value, key_rope = (_plain(x) for x in (key, value, key_rope))
    if table is not None:
        need_values(0, key.shape[0] - 1, "ids of blocks, in unused entries too", block_table=table)
    if mask is not None and call.mode != 0:
        alike = torch.equal(mask.reshape(MASK_SIDE, MASK_SIDE).bool(), _shared_mask())
        need(alike, "atten_mask must be True strictly above the diagonal and False elsewhere: True masks out")
    rows = range(len(call.queries))
    tokens = [_rows(query, call.layout, call.queries, row) for row in rows]
    keys, values = ([_held(x, table, call, row) for row in rows] for x in (key, value))
    if call.rope:
        tokens = _beside(tokens, [_rows(query_rope, call.layout, call.queries, row) for row in rows])
        keys = _beside(keys, [_held(key_rope, table, call, row) for row in rows])
    seen = [_seen(call, mask, row) for row in rows]
    scale = arguments["softmax_scale"]
    results = [_attend(*each, call, scale) for each in zip(tokens, keys, values, seen, strict=True)]
    out, lse = _joined(results, query.shape[1], call)
    if key.numel() == 0:
        out.zero_()  # Documented for keys that are empty altogether.
    out = out.permute(2, 0, 1, 3).contiguous() if call.heads_first else out
    return out.to(query.dtype), lse if arguments["return_softmax_lse"] else lse.new_empty(0)


@functools.cache
@lasting
def _shared_mask() -> Tensor:
    return torch.ones(MASK_SIDE, MASK_SIDE, dtype=torch.bool).triu(1)


def _beside(plain: list[Tensor], turned: list[Tensor]) -> list[Tensor]:
    """Heads with their rotated channels behind the others: a product of such heads is the sum of both products."""
    return [torch.cat(pair, -1) for pair in zip(plain, turned, strict=True)]


def _plain(x: Tensor) -> Tensor:
    """Pages [blocks 1 tiles block_size 16] as [blocks block_size tiles * 16]: channel c lies in tile c // 16."""
    return x.squeeze(1).transpose(1, 2).flatten(2)


def _rows(x: Tensor, layout: str, lengths: Sequence[int], row: int) -> Tensor:
    """The tokens of one request, [length heads width]."""
    if layout == "BSND":
        return x[row, : lengths[row]]
    start = sum(lengths[:row])
    return x[start : start + lengths[row]]


def _held(x: Tensor, table: Tensor | None, call: _Call, row: int) -> Tensor:
    """The keys or values of one request, [length kv_heads width]."""
    length = call.held[row]
    if table is None:
        return _rows(x, call.layout, call.held, row)
    blocks = x[table[row, : math.ceil(length / call.block_size)].long()]
    return blocks.unflatten(-1, (call.kv_heads, -1)).flatten(0, 1)[:length]


def _seen(call: _Call, mask: Tensor | None, row: int) -> Tensor:
    """[queries keys]: which keys each query of a request sees. The last query stands on the last key."""
    queries, held = call.queries[row], call.held[row]
    i = torch.arange(queries)[:, None] + held - queries
    j = torch.arange(held)
    if call.mode == 0:
        return torch.ones(queries, held, dtype=torch.bool) if mask is None else ~mask[row, 0, :, :held].bool()
    return j <= i if call.mode == 3 else (j >= i - call.before) & (j <= i + call.after)


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, call: _Call, scale: float) -> tuple[Tensor, Tensor]:
    """Outputs [queries heads width] and lse [queries heads] of one request."""
    shared = call.heads // call.kv_heads
    k, v = (x.float().repeat_interleave(shared, 1) for x in (k, v))
    scores = (torch.einsum("qhd,khd->hqk", q.float(), k) * scale).masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(-1)
    out = torch.einsum("hqk,khd->qhd", (scores - lse[..., None]).exp(), v)
    blind = ~seen.any(-1)
    out = out.masked_fill(blind[:, None, None], torch.nan)
    return out, lse.T.masked_fill(blind[:, None], torch.nan if len(k) else torch.inf)


def _joined(results: list[tuple[Tensor, Tensor]], steps: int, call: _Call) -> tuple[Tensor, Tensor]:
    """Outputs and lse of all requests; in layout BSND with NaN behind the queries of each."""
    outs, lses = zip(*results, strict=True)
    if call.layout == "TND":
        return torch.cat(outs), torch.cat(lses)[..., None]
    out, lse = (torch.stack([_padded(x, steps) for x in each]) for each in (outs, lses))
    return out, lse.transpose(1, 2)[..., None].contiguous()


def _padded(x: Tensor, steps: int) -> Tensor:
    return torch.cat((x, x.new_full((steps - len(x), *x.shape[1:]), torch.nan)))
