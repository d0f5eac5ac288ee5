"""Multi-head latent attention on Ascend: on a gathered prefix, over the pages themselves, and the writing of latents.

Fused attention has three forms that fit. *Packed* (layout TND): rows behind each other, running sums as lengths, the
rope channels apart for heads of 128 + 64 with values of 128, else beside the others. *Padded* (layout BSND): one line a
row, each row's own lengths, every width up to 512, the values widened with zeros to the keys' width, for the operator
takes no other. *Absorbed*: heads of 512 + 64 read the latents in their pages.

The first two want keys and values of every head, packed row after row: what a row held before is gathered, as many
tokens as the host says, and expanded. That number of tokens is a shape, so a captured program cannot have another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from params import tree
from params.tree import tree_map

from ..errors import LoweringError
from ..host import HostInt, symbolic
from ..layouts import NdPages, NzPages
from ..ops.mla import (
    ANY_WEIGHT,
    LatentPools,
    LatentQueries,
    Latents,
    expanded,
    latent_norm_rope_write,
    mla_prefix_attention,
    write_latents,
)
from ..rows import Rows
from ..target import ASCEND
from ..weights import plain
from .attention import (
    BOTTOM_RIGHT,
    MOST_PACKED,
    OPERATOR,
    UNMASKED,
    cached,
    page_table,
    shared_mask,
    shared_pages,
    too_many,
    unknown_lengths,
    wrong_packing,
)
from .features import atb, npu
from .host_checks.attention import LATENT_DIM, ROPE_DIM, SHARING, page_sizes
from .host_checks.check import ASCEND_910
from .kernel import FLOATS, HALVES, above, empty, fused, machine, wrong_dtype
from .rotary import side_by_side, turned_pairs

UPDATE = "npu_attention_update"
RING = "atb.npu_ring_mla"
BY_HEAD = "npu_transpose_batchmatmul"
SCATTER = "npu_scatter_pa_kv_cache"

APART = (128, 64, 128)
"""Widths of plain channels, rope channels and values whose rope layout TND takes apart."""
MOST_ABSORBED = 16
"""Tokens a row of the absorbed form."""
ACROSS_HEADS = 65535
"""Channels of all heads together that a product by head takes where heads lie behind tokens."""
RING_SIDE = 512
"""Side of the ring's mask."""

FEW = 8
"""Queries a row up to which reading latents as they lie beats expanding every head of the prefix."""


@mla_prefix_attention.order_by(ASCEND)
def _by_shape(q, new, pages, up, rows, *, scale, v_dim):
    """Absorbed for decode and verify; for prefill, one call for one row, and two calls with a merge from two rows on.

    Milliseconds of a layer, measured elsewhere on an A3 with two such calls and a merge against such a call a row; what
    is here has not been measured (bfloat16, 128 + 64 channels, values of 128, latents of 512, pages of 128):

        rows     new tokens    prefix    heads    two passes and a merge    a call a row
        1        100           768       4        0.513                     0.395
        2        100           768       4        0.520                     0.629
        8        100           768       4        0.524                     1.862
        32       100           768       4        0.619                     6.677
        128      100           768       4        2.434                     26.031
        1        1024          8192      4        0.542                     0.457
        4        1024          8192      4        1.715                     1.645
        8        1024          8192      4        3.306                     3.374
    """
    if rows.count == 1:
        expanded = ("concat_fia", "two_fia_merge")
        why = "one row needs no merge: one call over its prefix and new tokens"
    else:
        expanded = ("two_fia_merge", "concat_fia")
        why = "from two rows on, two calls and a merge take less than a call a row"
    if rows.max_query > FEW:
        return (*expanded, "torch_two_pass", "torch_absorbed"), why
    few = f"rows of up to {FEW} new tokens read latents as they lie where npu_fia_absorbed takes them; else {why}"
    return ("npu_fia_absorbed_by_head", "npu_fia_absorbed", *expanded, "torch_absorbed", "torch_two_pass"), few


@dataclass(frozen=True)
class _Lines:
    """Tokens packed row after row: how many each row has, on the host, and where each starts, on the device."""

    counts: Sequence[int]
    starts: Tensor

    @property
    def rows(self) -> Rows:
        return Rows(self.starts, max_query=max(self.counts), uniform=len(set(self.counts)) == 1)

    def rectangle(self, x: Tensor, width: int) -> Tensor:
        """[tokens heads dim] as [rows longest heads width], zeros behind each row and each head."""
        return self.rows.rectangle(torch.nn.functional.pad(x, (0, width - x.shape[-1]))).contiguous()

    def flat(self, x: Tensor) -> Tensor:
        """[rows longest ...] as [tokens ...]."""
        return self.rows.flat(x, sum(self.counts))


@dataclass(frozen=True)
class _Split:
    """A call's tokens by row: the new ones of its batch, and what rows with new tokens held before."""

    new: _Lines
    past: _Lines

    @classmethod
    def of(cls, rows: Any) -> _Split:
        """A row without new tokens has no past here: nobody looks at it."""
        before = torch.where(rows.new > 0, rows.past, 0)
        starts = torch.nn.functional.pad(before.cumsum(0), (1, 0))
        new, held = _known(rows.host.query), _known(rows.host.length)
        past = [length - count if count else 0 for count, length in zip(new, held, strict=True)]
        return cls(_Lines(new, rows.query_start), _Lines(past, starts))

    @property
    def tokens(self) -> int:
        """New tokens without padding."""
        return sum(self.new.counts)

    @property
    def nothing_before(self) -> Tensor:
        """[tokens], true for a new token whose row held nothing before."""
        return self.past.starts.diff()[self.new.rows.of_tokens(self.tokens)] == 0


def _known(lengths: Sequence[HostInt]) -> list[int]:
    """Lengths that are no symbols: the kernels that want them are refused otherwise."""
    return [int(length) for length in lengths]


def _slots(lines: _Lines, table: Tensor, page_size: int) -> Tensor:
    """The slot of each of the first tokens of every row, as many as `lines` says."""
    total = sum(lines.counts)
    row = torch.repeat_interleave(lines.starts.diff(), output_size=total)
    at = torch.arange(total, device=row.device) - lines.starts[row]
    return table[row, at // page_size].long() * page_size + at % page_size


@dataclass(frozen=True)
class _Keys:
    """Keys of all heads [keys heads dim], their rope channels [keys rope_dim], which heads share, and values."""

    plain: Tensor
    rope: Tensor | None
    values: Tensor

    @classmethod
    def of(cls, latents: Latents, up: Any, like: Tensor, v_dim: int) -> _Keys:
        """In the dtype, and for the heads, of the queries `like`."""
        keys, values = expanded(latents.latent, up, like.shape[1], v_dim, like.dtype)
        return cls(keys, None if latents.rope is None else latents.rope.to(like.dtype), values)

    @property
    def rope_heads(self) -> Tensor | None:
        """The rope channels, once a head."""
        return None if self.rope is None else self.rope[:, None].expand(-1, self.plain.shape[1], -1)

    def __getitem__(self, keys: slice) -> _Keys:
        return _Keys(self.plain[keys], None if self.rope is None else self.rope[keys], self.values[keys])


def _gathered(pages: LatentPools, slots: Tensor) -> Latents:
    return Latents(pages.latent.read(slots), None if pages.rope is None else pages.rope.read(slots))


def _cut(pair: Any, tokens: slice) -> Any:
    """Queries, or latents, of these tokens."""
    return tree_map(lambda x: x[tokens], pair)


def _beside(nope: Tensor, rope: Tensor | None) -> Tensor:
    return nope.contiguous() if rope is None else torch.cat((nope, rope), -1)


def _attended(
    q: LatentQueries, keys: _Keys, new: _Lines, held: _Lines, scale: float, *, causal: bool, lse: bool
) -> tuple[Tensor, Tensor]:
    """Attention of packed queries over packed keys of the same rows: [tokens heads width], and lse [tokens heads].

    `causal` stands the last query of a row on its last key. Of the width, values take the first v_dim channels. A row
    without keys leaves anything, lse included.
    """
    if _is_packed(q, keys.values.shape[-1]):
        return _packed(q, keys, new, held, scale, causal=causal, lse=lse)
    return _padded(q, keys, new, held, scale, causal=causal, lse=lse)


def _widths(q: LatentQueries) -> tuple[int, int]:
    return q.nope.shape[2], 0 if q.rope is None else q.rope.shape[2]


def _is_packed(q: LatentQueries, v_dim: int) -> bool:
    """Whether layout TND takes the call: it copies less, and computes nothing behind a row's end."""
    return wrong_packing(q.nope, sum(_widths(q)), v_dim) is None


def _is_apart(q: LatentQueries, v_dim: int) -> bool:
    return (*_widths(q), v_dim) == APART


def _packed(
    q: LatentQueries, keys: _Keys, new: _Lines, held: _Lines, scale: float, *, causal: bool, lse: bool
) -> tuple[Tensor, Tensor]:
    """Layout TND. `causal` rows have as many keys as queries or more, which their mode wants."""
    pairs = [(queries, found) for queries, found in zip(new.counts, held.counts, strict=True) if queries]
    rows: dict[str, Any] = {
        "actual_seq_qlen": list(accumulate(queries for queries, _ in pairs)),
        "actual_seq_kvlen": list(accumulate(found for _, found in pairs)),
        "sparse_mode": BOTTOM_RIGHT if causal else UNMASKED,
    }
    if causal:
        rows["atten_mask"] = shared_mask(q.device)
    key_rope = keys.rope_heads
    if q.rope is not None and key_rope is not None and _is_apart(q, keys.values.shape[-1]):
        # Queries come with their rope apart, so that this spares a copy of them.
        query, key = q.nope.contiguous(), keys.plain.contiguous()
        rows |= {"query_rope": q.rope.contiguous(), "key_rope": key_rope.contiguous()}
    else:
        query, key = _beside(q.nope, q.rope), _beside(keys.plain, key_rope)
    out, found = _fused(query, key, keys.values.contiguous(), scale, "TND", lse, **rows)
    return out, found[..., 0] if lse else found


def _padded(
    q: LatentQueries, keys: _Keys, new: _Lines, held: _Lines, scale: float, *, causal: bool, lse: bool
) -> tuple[Tensor, Tensor]:
    """Layout BSND. Channels of zeros add nothing to a score; those of values come out as zeros."""
    query, key = _beside(q.nope, q.rope), _beside(keys.plain, keys.rope_heads)
    width = _padded_width(query.shape[-1], keys.values.shape[-1])
    line = new.rectangle(query, width)
    rows: dict[str, Any] = {"actual_seq_kvlen": list(held.counts), "sparse_mode": UNMASKED}
    if line.shape[1] > 1:
        rows["actual_seq_qlen"] = list(new.counts)
    if line.shape[1] > 1 and causal:
        rows |= {"sparse_mode": BOTTOM_RIGHT, "atten_mask": shared_mask(line.device)}
    key, values = (held.rectangle(x, width) for x in (key, keys.values))
    out, found = _fused(line, key, values, scale, "BSND", lse, **rows)
    return new.flat(out), new.flat(found[..., 0].mT) if lse else found


def _padded_width(key_dim: int, v_dim: int) -> int:
    return -(-max(key_dim, v_dim) // 16) * 16


def _fused(q: Tensor, k: Tensor, v: Tensor, scale: float, layout: str, lse: bool, **rows: Any) -> tuple[Tensor, Tensor]:
    return npu.npu_fused_infer_attention_score_v2(
        q,
        k,
        v,
        num_query_heads=q.shape[-2],
        num_key_value_heads=k.shape[-2],
        softmax_scale=scale,
        input_layout=layout,
        return_softmax_lse=lse,
        **rows,
    )


def _with_padding(out: Tensor, tokens: int, like: Tensor, v_dim: int) -> Tensor:
    """The values of the first tokens, and zeros for those behind them."""
    out = out[..., :v_dim].to(like.dtype)
    return torch.nn.functional.pad(out, (0, 0, 0, 0, 0, like.shape[0] - tokens))


def _refuse_gathered(q, new, pages, up, rows, *, scale, v_dim):
    heads, width = q.nope.shape[1], _padded_width(sum(_widths(q)), v_dim)
    wrong = _wrong_host(rows) or _wrong_dtypes(q, new)
    if wrong or _is_packed(q, v_dim):
        most = above(2**20, tokens=q.nope.shape[0]) or above(MOST_PACKED, rows=rows.count)
        return wrong or above(256, heads=heads) or most
    if heads * width >= 65535:
        return f"takes heads * head_dim below 65535; this call has {heads * width}"
    return above(512, **{"channels a head": width}) or above(256, heads=heads)


def _wrong_dtypes(q: LatentQueries, new: Latents) -> str | None:
    return wrong_dtype(HALVES, q_nope=q.nope, q_rope=q.rope, latent=new.latent, rope=new.rope)


def _wrong_host(rows: Rows) -> str | None:
    unknown = unknown_lengths(rows)
    if unknown is None and rows.host is not None and symbolic(rows.host.length):
        return "gathers as many tokens as rows hold, and a captured program cannot change the number"
    return unknown


@fused(mla_prefix_attention, "two_fia_merge", OPERATOR, UPDATE, refuse=_refuse_gathered, **ANY_WEIGHT)
def _two_passes(q, new, pages, up, rows, *, scale, v_dim):
    """New tokens over themselves, then over what their rows held before, and the merge of both in float32."""
    split, like = _Split.of(rows), q.nope
    live = split.tokens
    if not live:
        return like.new_zeros(*like.shape[:2], v_dim)
    q, new = (_cut(pair, slice(live)) for pair in (q, new))
    keys = _Keys.of(new, up, like, v_dim)
    among = _attended(q, keys, split.new, split.new, scale, causal=True, lse=True)
    if not sum(split.past.counts):
        return _with_padding(among[0], live, like, v_dim)
    slots = _slots(split.past, rows.page_table, pages.latent.page_size)
    keys = _Keys.of(_gathered(pages, slots), up, like, v_dim)
    behind = _attended(q, keys, split.new, split.past, scale, causal=False, lse=True)
    return _with_padding(_merged(among, _without_empty(behind, split)), live, like, v_dim)


def _without_empty(part: tuple[Tensor, Tensor], split: _Split) -> tuple[Tensor, Tensor]:
    """Nothing, with no weight, for tokens of rows that held nothing: the operator leaves an lse of inf there."""
    empty_row = split.nothing_before[:, None]
    return torch.where(empty_row[..., None], 0, part[0]), torch.where(empty_row, -torch.inf, part[1])


def _merged(*parts: tuple[Tensor, Tensor]) -> Tensor:
    """Of every token and head, the parts' outputs weighted by their lse."""
    outs, lses = ([part[index] for part in parts] for index in (0, 1))
    flat = [out.float().flatten(0, 1).contiguous() for out in outs]
    whole, _ = npu.npu_attention_update([lse.flatten().contiguous() for lse in lses], flat, 0)
    return whole.unflatten(0, outs[0].shape[:2])


@fused(mla_prefix_attention, "concat_fia", OPERATOR, refuse=_refuse_gathered, **ANY_WEIGHT)
def _row_by_row(q, new, pages, up, rows, *, scale, v_dim):
    """One call a row, over all that it holds, new tokens included."""
    counts = _known(rows.host.query)
    held = [length if count else 0 for count, length in zip(counts, _known(rows.host.length), strict=True)]
    live = sum(counts)
    if not live:
        return q.nope.new_zeros(*q.nope.shape[:2], v_dim)
    ends = torch.where(rows.new > 0, rows.lengths, 0).cumsum(0)
    slots = _slots(_Lines(held, torch.nn.functional.pad(ends, (1, 0))), rows.page_table, pages.latent.page_size)
    keys = _Keys.of(_gathered(pages, slots), up, q.nope, v_dim)
    outs, token, key = [], 0, 0
    for count, length in ((count, length) for count, length in zip(counts, held, strict=True) if count):
        own = _cut(q, slice(token, token + count))
        line, held_line = (_Lines([many], rows.query_start[:2]) for many in (count, length))
        outs.append(_attended(own, keys[key : key + length], line, held_line, scale, causal=True, lse=False)[0])
        token, key = token + count, key + length
    return _with_padding(torch.cat(outs), live, q.nope, v_dim)


def _refuse_ring(q, new, pages, up, rows, *, scale, v_dim):
    if not _is_apart(q, v_dim):
        nope, rope = _widths(q)
        return f"takes 128 + 64 channels and values of 128; this call has {nope} + {rope} and {v_dim}"
    return _wrong_host(rows) or _wrong_dtypes(q, new)


@fused(mla_prefix_attention, "atb_ring_mla", RING, refuse=_refuse_ring, **ANY_WEIGHT)
def _ring(q, new, pages, up, rows, *, scale, v_dim):
    """Two rings of the ATB library: new tokens over themselves, then over what rows held before, merged inside.

    A ring takes no row without queries, and none with fewer keys than queries unless it has no key. So a row that held
    less than it gets is several rows to the second ring: pieces of its queries, each over all that it held.
    """
    split, like = _Split.of(rows), q.nope
    live = split.tokens
    if not live:
        return like.new_zeros(*like.shape[:2], v_dim)
    q, new = (_cut(pair, slice(live)) for pair in (q, new))
    q = q.nope.contiguous(), q.rope.contiguous()
    counts = [count for count in split.new.counts if count]
    keys = _Keys.of(new, up, like, v_dim)
    among = _ringed(q, keys, (counts, counts), scale, mask_type="mask_type_triu", calc_type="calc_type_first_ring")
    if not sum(split.past.counts):
        return _with_padding(among[0], live, like, v_dim)
    pieces = _pieces(split.new.counts, split.past.counts)
    of = torch.tensor([row for row, _, _ in pieces], device="cpu").to(like.device)
    ends = split.past.starts.diff()[of].cumsum(0)
    lines = _Lines([held for _, _, held in pieces], torch.nn.functional.pad(ends, (1, 0)))
    slots = _slots(lines, rows.page_table[of], pages.latent.page_size)
    keys = _Keys.of(_gathered(pages, slots), up, like, v_dim)
    lists = [count for _, count, _ in pieces], lines.counts
    earlier = {"pre_out": among[0], "prev_lse": among[1], "calc_type": "calc_type_default"}
    out, _ = _ringed(q, keys, lists, scale, mask_type="no_mask", **earlier)
    # What a ring leaves of rows without keys is not documented.
    out = torch.where(split.nothing_before[:, None, None], among[0], out)
    return _with_padding(out, live, like, v_dim)


def _pieces(new: Sequence[int], past: Sequence[int]) -> list[tuple[int, int, int]]:
    """(row, queries, keys) in order, no piece with more queries than keys unless it has none."""
    found = []
    for row, (count, held) in enumerate(zip(new, past, strict=True)):
        most = held or count
        found += [(row, min(most, count - start), held) for start in range(0, count, most or 1)]
    return found


def _ringed(
    q: tuple[Tensor, Tensor], keys: _Keys, lists: tuple[Sequence[int], Sequence[int]], scale: float, **ring: Any
) -> tuple[Tensor, Tensor]:
    """Attention [tokens heads v_dim] and lse, heads first [heads tokens]. The operator reads lengths on the host."""
    tensors = (keys.plain, keys.rope_heads, keys.values)
    mask = torch.ones(RING_SIDE, RING_SIDE, dtype=q[0].dtype, device=q[0].device).triu(1)
    lengths = torch.tensor([list(counts) for counts in lists], dtype=torch.int32, device="cpu")
    heads = q[0].shape[1]
    return atb.npu_ring_mla(
        *q, *(x.contiguous() for x in tensors if x is not None), mask, lengths, heads, heads, qk_scale=scale,
        kernel_type="kernel_type_high_precision", input_layout="type_bsnd", **ring,
    )  # fmt: skip


def _refuse_absorbed(q, new, pages, up, rows, *, scale, v_dim):
    wrong = unknown_lengths(rows) or shared_pages(rows)
    if wrong:
        return wrong
    if not rows.max_query:
        return "takes no empty tensor; no row has a new token"
    widths = (pages.latent.width, 0 if pages.rope is None else pages.rope.width)
    if pages.rope is None or widths != (LATENT_DIM, ROPE_DIM):
        return f"takes latents of {LATENT_DIM} and rope keys of {ROPE_DIM}; this call has {widths[0]} and {widths[1]}"
    pools = {"latent_pages": pages.latent.values, "rope_pages": pages.rope.values}
    wrong = above(SHARING[-1], heads=q.nope.shape[1]) or above(MOST_ABSORBED, **{"tokens a row": rows.max_query})
    return wrong or wrong_dtype(HALVES, q_nope=q.nope, q_rope=q.rope, **pools) or _wrong_latent_pages(pages)


def _wrong_latent_pages(pages: LatentPools) -> str | None:
    tiled, size = isinstance(pages.latent, NzPages), pages.latent.page_size
    if isinstance(pages.rope, NzPages) != tiled:
        return "takes latents and rope keys in one layout"
    sizes = page_sizes(machine(pages.latent.values), "BSND", LATENT_DIM, 1, rope=True)
    if size not in sizes:
        return f"takes pages of {sizes[0]} to {sizes[-1]} tokens in steps of {sizes.step}; found {size}"
    elements = pages.latent.values.numel()
    if elements >= 2**31:
        return f"takes pools of fewer than 2**31 elements; this one has {elements}: make fewer pages"
    return None


@fused(mla_prefix_attention, "npu_fia_absorbed", OPERATOR, refuse=_refuse_absorbed, **ANY_WEIGHT)
def _absorbed(q, new, pages, up, rows, *, scale, v_dim):
    """All heads over the latents in their pages: `up` moved over to the queries, and to what comes out."""
    keys, values = _moved_over(q, up, v_dim)
    moved = torch.einsum("thn,hnl->thl", q.nope, keys)
    out = _over_latents(moved, q.rope, pages, rows, scale, "BSND")
    out = rows.flat(out, q.nope.shape[0])[:, : q.nope.shape[1]]
    return torch.einsum("thl,hvl->thv", out, values)


def _refuse_by_head(q, new, pages, up, rows, *, scale, v_dim):
    heads, width = q.nope.shape[1:]
    odd = next((channels for channels in (width, v_dim) if channels % 16), None)
    if odd is not None:
        return f"takes channels in multiples of 16; this call has {odd} a head"
    wrong = _refuse_absorbed(q, new, pages, up, rows, scale=scale, v_dim=v_dim)
    return wrong or above(ACROSS_HEADS, **{"channels of all heads": heads * width})


@fused(mla_prefix_attention, "npu_fia_absorbed_by_head", OPERATOR, BY_HEAD, refuse=_refuse_by_head, **ANY_WEIGHT)
def _absorbed_by_head(q, new, pages, up, rows, *, scale, v_dim):
    """As `npu_fia_absorbed`, each product one operator that reads and writes tokens and heads in the order they have.

    Attention leaves heads before rows, as the second product reads them. That one runs over the padding behind a row's
    end too, which nobody reads.
    """
    keys, values = _moved_over(q, up, v_dim)
    moved = _by_head(q.nope, keys, TOKENS_FIRST)
    out = _over_latents(moved, q.rope, pages, rows, scale, "BSND_NBSD")[: q.nope.shape[1]]
    attended = _by_head(out.flatten(1, 2), values.mT, HEADS_FIRST)
    return rows.flat(attended.unflatten(0, out.shape[1:3]), q.nope.shape[0])


HEADS_FIRST, TOKENS_FIRST = [0, 1, 2], [1, 0, 2]


def _by_head(x: Tensor, weight: Tensor, order: list[int]) -> Tensor:
    """Tokens of each head times the head's weight [heads inner outputs], as [tokens heads outputs]."""
    return npu.npu_transpose_batchmatmul(x, weight, perm_x1=order, perm_x2=HEADS_FIRST, perm_y=TOKENS_FIRST)


def _moved_over(q: LatentQueries, up: Any, v_dim: int) -> tuple[Tensor, Tensor]:
    """`up` by head: what makes keys [heads nope_dim latent], and values [heads v_dim latent]."""
    by_head = plain(up).to(q.nope.dtype).unflatten(0, (q.nope.shape[1], -1))
    return by_head[:, :-v_dim], by_head[:, -v_dim:]


def _over_latents(moved: Tensor, rope: Tensor, pages: Any, rows: Any, scale: float, layout: str) -> Tensor:
    """Sums of latents [rows longest heads latent], or heads first in layout BSND_NBSD; heads filled up to a count."""
    heads = moved.shape[1]
    more = next(count for count in SHARING if count >= heads) - heads
    both = (torch.nn.functional.pad(x, (0, 0, 0, more)) if more else x for x in (moved, rope))
    query, query_rope = (rows.rectangle(x).contiguous() for x in both)
    key, key_rope = (_shared(pool) for pool in (pages.latent, pages.rope))
    lists: dict[str, Any] = {"actual_seq_kvlen": list(rows.host.length), "sparse_mode": UNMASKED}
    if rows.max_query > 1:
        mask = shared_mask(query.device)
        lists |= {"actual_seq_qlen": list(rows.host.query), "sparse_mode": BOTTOM_RIGHT, "atten_mask": mask}
    out, _ = npu.npu_fused_infer_attention_score_v2(
        query, key, key, query_rope=query_rope, key_rope=key_rope, num_query_heads=query.shape[2],
        num_key_value_heads=1, softmax_scale=scale, input_layout=layout, block_table=page_table(rows),
        block_size=pages.latent.page_size, **lists,
    )  # fmt: skip
    return out


def _shared(pages: NdPages | NzPages) -> Tensor:
    """Pages as the operator names their axes: blocks and tokens, or blocks, the one head, tiles and tokens."""
    return pages.values[:, None] if isinstance(pages, NzPages) else pages.values


def _refuse_write(pages, new, slots) -> str | None:
    return _wrong_caches(pages, slots) or empty(latent=new.latent)


def _wrong_caches(pages: LatentPools, slots: Tensor) -> str | None:
    if pages.rope is None:
        return "writes two caches at once; this call has latents alone"
    tiled = isinstance(pages.latent, NzPages)
    if isinstance(pages.rope, NzPages) != tiled:
        return "takes latents and rope keys in one layout"
    # Tiles are 32 bytes: ours have sixteen channels, whatever the dtype.
    latent, rope = pages.latent.values, pages.rope.values
    wrong = wrong_dtype(HALVES if tiled else cached(latent), latent_pages=latent, rope_pages=rope)
    return wrong or too_many(slots, latent.shape[0], pages.latent.page_size)


@fused(write_latents, SCATTER, SCATTER, refuse=_refuse_write)
def _write(pages, new, slots):
    """Latents as keys of one head, rope keys as its values."""
    both = ((x.to(pages.latent.dtype).contiguous()[:, None]) for x in (new.latent, new.rope))
    tiled = isinstance(pages.latent, NzPages)
    caches = (pool.values if tiled else pool.values[:, :, None] for pool in (pages.latent, pages.rope))
    _need_whole(pages)
    npu.npu_scatter_pa_kv_cache(*both, *caches, slots.contiguous(), cache_mode="PA_NZ" if tiled else "Norm")
    return pages


def _need_whole(pages: LatentPools) -> None:
    if not all(pool.is_contiguous() for pool in tree.leaves(pages)):
        raise LoweringError("the pages must be contiguous: a write to a copy of them would be lost")


def _refuse_norm_rope(pages, kv, weight, cos, sin, slots, *, eps) -> str | None:
    if pages.rope is None or cos is None:
        return "turns a rope key and writes it; this call has none to turn"
    widths = (weight.shape[0], kv.shape[1] - weight.shape[0])
    if widths != (LATENT_DIM, ROPE_DIM):
        return f"takes latents of {LATENT_DIM} and rope keys of {ROPE_DIM}; this call has {widths[0]} and {widths[1]}"
    if 2 * cos.shape[1] != ROPE_DIM:
        return f"turns whole rope keys of {ROPE_DIM} channels; this call turns {2 * cos.shape[1]}"
    pools = {"latent_pages": pages.latent.values, "rope_pages": pages.rope.values}
    wrong = wrong_dtype(HALVES, kv=kv, weight=weight, **pools) or _wrong_caches(pages, slots) or empty(kv=kv)
    size = pages.latent.page_size
    if wrong is None and size % 16 and machine(kv).name in ASCEND_910:
        return f"takes pages in multiples of 16 tokens; found {size}"
    return wrong


FUSED_WRITE = "npu_kv_rmsnorm_rope_cache_v2"


@fused(latent_norm_rope_write, FUSED_WRITE, FUSED_WRITE, refuse=_refuse_norm_rope)
def _norm_rope(pages, kv, weight, cos, sin, slots, *, eps):
    _need_whole(pages)
    angles = (side_by_side(table, kv.dtype)[:, None, None] for table in (cos, sin))
    tiled = isinstance(pages.latent, NzPages)
    # The caches' public shape is that of plain pages, also where the bytes are tiled; the rope's comes first.
    caches = (pool.values.view(-1, pool.page_size, 1, pool.width) for pool in (pages.rope, pages.latent))
    rope, latent = npu.npu_kv_rmsnorm_rope_cache_v2(
        kv[:, None, None].contiguous(),
        weight.contiguous(),
        *angles,
        slots.long().contiguous(),
        *caches,
        epsilon=eps,
        cache_mode="PA_NZ" if tiled else "PA_BNSD",
        is_output_kv=True,
    )
    return pages, Latents(latent[:, 0, 0], rope[:, 0, 0])


def _refuse_composed(pages, kv, weight, cos, sin, slots, *, eps) -> str | None:
    return wrong_dtype(FLOATS, kv=kv, weight=weight) or empty(kv=kv) or _wrong_caches(pages, slots)


@fused(
    latent_norm_rope_write,
    "npu_rms_norm_rope_scatter",
    "npu_rms_norm",
    "npu_rotary_mul",
    SCATTER,
    refuse=_refuse_composed,
)
def _norm_rope_scatter(pages, kv, weight, cos, sin, slots, *, eps):
    latent, rope = kv.split((weight.shape[0], kv.shape[1] - weight.shape[0]), -1)
    latent = npu.npu_rms_norm(latent.contiguous(), weight.contiguous(), epsilon=eps)[0]
    if cos is not None:
        rope = turned_pairs(rope[:, None], cos, sin)[:, 0]
    new = Latents(latent, rope)
    return _write(pages, new, slots), new
