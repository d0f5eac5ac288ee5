"""Multi-head latent attention on Ascend: on a gathered prefix, over the pages themselves, and the writing of latents.

Fused attention has three forms that fit. *Packed* (layout TND, bfloat16): rows behind each other, running sums as
lengths, the rope channels apart for heads of 128 + 64 with values of 128, else beside the others. *Padded* (layout
BSND): one line a row, each row's own lengths, every width up to 512, the values widened with zeros to the keys' width,
for the operator takes no other. *Absorbed*: heads of 512 + 64 read the latents in their pages.

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

from ..errors import LoweringError
from ..host import HostInt, HostLengths, symbolic
from ..layouts import NdPages, NzPages, Pages
from ..ops.mla import ANY_WEIGHT, expanded, latent_norm_rope_write, mla_prefix_attention, write_latents
from ..ops.ragged import row_of_token, to_flat, to_rectangle
from ..target import ASCEND
from ..weights import plain
from .attention import BAND, BOTTOM_RIGHT, FAR, MOST_PACKED, OPERATOR, UNMASKED, shared_mask
from .features import atb, npu
from .kernel import FLOATS, HALVES, above, empty, fused, wrong_dtype
from .rotary import side_by_side, turned_pairs

ASCEND_910 = ("ascend910b", "ascend910_93")
"""Targets that the forms of latent attention are documented for."""
UPDATE = "npu_attention_update"
RING = "atb.npu_ring_mla"
SCATTER = "npu_scatter_pa_kv_cache"

APART = (128, 64, 128)
"""Widths of plain channels, rope channels and values whose rope layout TND takes apart."""
PACKED = ((128, 128), (192, 128), (192, 192))
"""Widths of keys and values that layout TND takes otherwise."""
LATENT_DIM, ROPE_DIM = 512, 64
"""Widths of latents and rope keys that heads share in the absorbed form, and that are normed and cached at once."""
SHARING = (1, 2, 4, 8, 16, 32, 64, 128)
"""Numbers of heads that may share a latent; other numbers are filled up to the next with heads that nobody reads."""
MOST_ABSORBED = 16
"""Tokens a row of the absorbed form."""
RING_SIDE = 512
"""Side of the ring's mask."""

mla_prefix_attention.without(
    tuple(target for target in ASCEND if target not in ASCEND_910),
    "the latent forms of fused attention, npu_attention_update and npu_ring_mla are documented for Ascend 910 alone",
)

FEW = 8
"""Queries a row up to which reading latents as they lie beats expanding every head of the prefix."""


@mla_prefix_attention.order_by(ASCEND)
def _by_shape(
    q_nope, q_rope, latent, rope, latent_pages, rope_pages, up, page_table, lengths, query_start, host,
    *, max_query, uniform, scale, v_dim,
):  # fmt: skip
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
    if page_table.shape[0] == 1:
        expanded = ("concat_fia", "two_fia_merge")
        why = "one row needs no merge: one call over its prefix and new tokens"
    else:
        expanded = ("two_fia_merge", "concat_fia")
        why = "from two rows on, two calls and a merge take less than a call a row"
    if max_query > FEW:
        return (*expanded, "torch_two_pass", "torch_absorbed"), why
    few = f"rows of up to {FEW} new tokens read latents as they lie where npu_fia_absorbed takes them; else {why}"
    return ("npu_fia_absorbed", *expanded, "torch_absorbed", "torch_two_pass"), few


@dataclass(frozen=True)
class _Lines:
    """Tokens packed row after row: how many each row has, on the host, and where each starts, on the device."""

    counts: Sequence[int]
    starts: Tensor

    @property
    def uniform(self) -> bool:
        return len(set(self.counts)) == 1

    def rectangle(self, x: Tensor, width: int) -> Tensor:
        """[tokens heads dim] as [rows longest heads width], zeros behind each row and each head."""
        x = torch.nn.functional.pad(x, (0, width - x.shape[-1]))
        return to_rectangle(x, self.starts, max(self.counts), self.uniform).contiguous()

    def flat(self, x: Tensor) -> Tensor:
        """[rows longest ...] as [tokens ...]."""
        return to_flat(x, self.starts, sum(self.counts), self.uniform)


@dataclass(frozen=True)
class _Split:
    """A call's tokens by row: the new ones of its batch, and what rows with new tokens held before."""

    new: _Lines
    past: _Lines

    @classmethod
    def of(cls, host: HostLengths, lengths: Tensor, query_start: Tensor) -> _Split:
        """A row without new tokens has no past here: nobody looks at it."""
        counts = query_start.diff()
        before = torch.where(counts > 0, lengths - counts, 0)
        starts = torch.nn.functional.pad(before.cumsum(0), (1, 0))
        new, held = _known(host.query), _known(host.length)
        past = [length - count if count else 0 for count, length in zip(new, held, strict=True)]
        return cls(_Lines(new, query_start), _Lines(past, starts))

    @property
    def tokens(self) -> int:
        """New tokens without padding."""
        return sum(self.new.counts)


def _known(lengths: Sequence[HostInt]) -> list[int]:
    """Lengths that are no symbols: the kernels that want them are refused otherwise."""
    return [int(length) for length in lengths]


def _slots(lines: _Lines, page_table: Tensor, page_size: int) -> Tensor:
    """The slot of each of the first tokens of every row, as many as `lines` says."""
    total = sum(lines.counts)
    row = torch.repeat_interleave(lines.starts.diff(), output_size=total)
    at = torch.arange(total, device=row.device) - lines.starts[row]
    return page_table[row, at // page_size].long() * page_size + at % page_size


@dataclass(frozen=True)
class _Keys:
    """Keys of all heads [keys heads dim], their rope channels [keys rope_dim], which heads share, and values."""

    plain: Tensor
    rope: Tensor | None
    values: Tensor

    @classmethod
    def of(cls, latent: Tensor, rope: Tensor | None, up: Any, like: Tensor, v_dim: int) -> _Keys:
        """In the dtype, and for the heads, of the queries `like`."""
        keys, values = expanded(latent, up, like.shape[1], v_dim, like.dtype)
        return cls(keys, None if rope is None else rope.to(like.dtype), values)

    @property
    def rope_heads(self) -> Tensor | None:
        """The rope channels, once a head."""
        return None if self.rope is None else self.rope[:, None].expand(-1, self.plain.shape[1], -1)

    def __getitem__(self, keys: slice) -> _Keys:
        return _Keys(self.plain[keys], None if self.rope is None else self.rope[keys], self.values[keys])


def _gathered(pages: Pages, rope_pages: Pages | None, slots: Tensor) -> tuple[Tensor, Tensor | None]:
    return pages.read(slots), None if rope_pages is None else rope_pages.read(slots)


def _beside(nope: Tensor, rope: Tensor | None) -> Tensor:
    return nope.contiguous() if rope is None else torch.cat((nope, rope), -1)


def _attended(
    q: tuple[Tensor, Tensor | None], keys: _Keys, new: _Lines, held: _Lines, scale: float, *, causal: bool, lse: bool
) -> tuple[Tensor, Tensor]:
    """Attention of packed queries over packed keys of the same rows: [tokens heads width], and lse [tokens heads].

    `causal` stands the last query of a row on its last key. Of the width, values take the first v_dim channels. A row
    without keys leaves anything, lse included.
    """
    if _is_packed(q[0], q[1], keys.values.shape[-1]):
        return _packed(q, keys, new, held, scale, causal=causal, lse=lse)
    return _padded(q, keys, new, held, scale, causal=causal, lse=lse)


def _is_packed(q_nope: Tensor, q_rope: Tensor | None, v_dim: int) -> bool:
    """Whether layout TND is documented for the call: it copies less, and computes nothing behind a row's end."""
    width = q_nope.shape[2] + (0 if q_rope is None else q_rope.shape[2])
    return q_nope.dtype == torch.bfloat16 and (_is_apart(q_nope, q_rope, v_dim) or (width, v_dim) in PACKED)


def _is_apart(q_nope: Tensor, q_rope: Tensor | None, v_dim: int) -> bool:
    return q_rope is not None and (q_nope.shape[2], q_rope.shape[2], v_dim) == APART


def _packed(
    q: tuple[Tensor, Tensor | None], keys: _Keys, new: _Lines, held: _Lines, scale: float, *, causal: bool, lse: bool
) -> tuple[Tensor, Tensor]:
    """Layout TND. The mode that ends at the query is documented for rows with more keys than queries; a band is not."""
    pairs = [(queries, found) for queries, found in zip(new.counts, held.counts, strict=True) if queries]
    rows: dict[str, Any] = {
        "actual_seq_qlen": list(accumulate(queries for queries, _ in pairs)),
        "actual_seq_kvlen": list(accumulate(found for _, found in pairs)),
        "sparse_mode": BAND if causal else UNMASKED,
    }
    if causal:
        rows |= {"atten_mask": shared_mask(q[0].device), "pre_tokens": FAR, "next_tokens": 0}
    q_rope, key_rope = q[1], keys.rope_heads
    if q_rope is not None and key_rope is not None and _is_apart(*q, keys.values.shape[-1]):
        # Queries come with their rope apart, so that this spares a copy of them.
        query, key = q[0].contiguous(), keys.plain.contiguous()
        rows |= {"query_rope": q_rope.contiguous(), "key_rope": key_rope.contiguous()}
    else:
        query, key = _beside(*q), _beside(keys.plain, key_rope)
    out, found = _fused(query, key, keys.values.contiguous(), scale, "TND", lse, **rows)
    return out, found[..., 0] if lse else found


def _padded(
    q: tuple[Tensor, Tensor | None], keys: _Keys, new: _Lines, held: _Lines, scale: float, *, causal: bool, lse: bool
) -> tuple[Tensor, Tensor]:
    """Layout BSND. Channels of zeros add nothing to a score; those of values come out as zeros."""
    query, key = _beside(*q), _beside(keys.plain, keys.rope_heads)
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
        q, k, v, num_query_heads=q.shape[-2], num_key_value_heads=k.shape[-2], softmax_scale=scale, input_layout=layout,
        return_softmax_lse=lse, **rows,
    )  # fmt: skip


def _with_padding(out: Tensor, tokens: int, like: Tensor, v_dim: int) -> Tensor:
    """The values of the first tokens, and zeros for those behind them."""
    out = out[..., :v_dim].to(like.dtype)
    return torch.nn.functional.pad(out, (0, 0, 0, 0, 0, like.shape[0] - tokens))


def _refuse_gathered(
    q_nope, q_rope, latent, rope, latent_pages, rope_pages, up, page_table, lengths, query_start, host,
    *, max_query, uniform, scale, v_dim,
):  # fmt: skip
    heads, width = q_nope.shape[1], q_nope.shape[2] + (0 if q_rope is None else q_rope.shape[2])
    wrong = _wrong_host(host) or wrong_dtype(HALVES, q_nope=q_nope, q_rope=q_rope, latent=latent, rope=rope)
    if wrong or _is_packed(q_nope, q_rope, v_dim):
        return wrong or above(256, heads=heads) or above(2**20, tokens=q_nope.shape[0]) or _many_rows(page_table)
    width = _padded_width(width, v_dim)
    if heads * width >= 65535:
        return f"takes heads * head_dim below 65535; this call has {heads * width}"
    return above(512, **{"channels a head": width}) or above(256, heads=heads)


def _many_rows(page_table: Tensor) -> str | None:
    return above(MOST_PACKED, rows=page_table.shape[0])


def _wrong_host(host: HostLengths) -> str | None:
    if not host.exact:
        return "needs exact row lengths on the host, and only an upper bound is known: read the accepted counts first"
    if symbolic(host.length):
        return "gathers as many tokens as rows hold, and a captured program cannot change the number"
    return None


@fused(mla_prefix_attention, "two_fia_merge", OPERATOR, UPDATE, only=ASCEND_910, refuse=_refuse_gathered, **ANY_WEIGHT)
def _two_passes(
    q_nope, q_rope, latent, rope, latent_pages, rope_pages, up, page_table, lengths, query_start, host,
    *, max_query, uniform, scale, v_dim,
):  # fmt: skip
    """New tokens over themselves, then over what their rows held before, and the merge of both in float32."""
    split = _Split.of(host, lengths, query_start)
    live = split.tokens
    if not live:
        return q_nope.new_zeros(*q_nope.shape[:2], v_dim)
    q = q_nope[:live], None if q_rope is None else q_rope[:live]
    keys = _Keys.of(latent[:live], None if rope is None else rope[:live], up, q_nope, v_dim)
    among = _attended(q, keys, split.new, split.new, scale, causal=True, lse=True)
    if not sum(split.past.counts):
        return _with_padding(among[0], live, q_nope, v_dim)
    slots = _slots(split.past, page_table, latent_pages.page_size)
    keys = _Keys.of(*_gathered(latent_pages, rope_pages, slots), up, q_nope, v_dim)
    behind = _attended(q, keys, split.new, split.past, scale, causal=False, lse=True)
    return _with_padding(_merged(among, _without_empty(behind, split)), live, q_nope, v_dim)


def _without_empty(part: tuple[Tensor, Tensor], split: _Split) -> tuple[Tensor, Tensor]:
    """Nothing, with no weight, for tokens of rows that held nothing: the operator leaves an lse of inf there."""
    past = split.past.starts.diff()[row_of_token(split.new.starts, split.tokens)]
    empty_row = (past == 0)[:, None]
    return torch.where(empty_row[..., None], 0, part[0]), torch.where(empty_row, -torch.inf, part[1])


def _merged(*parts: tuple[Tensor, Tensor]) -> Tensor:
    """Of every token and head, the parts' outputs weighted by their lse."""
    outs, lses = ([part[index] for part in parts] for index in (0, 1))
    flat = [out.float().flatten(0, 1).contiguous() for out in outs]
    whole, _ = npu.npu_attention_update([lse.flatten().contiguous() for lse in lses], flat, 0)
    return whole.unflatten(0, outs[0].shape[:2])


@fused(mla_prefix_attention, "concat_fia", OPERATOR, only=ASCEND_910, refuse=_refuse_gathered, **ANY_WEIGHT)
def _row_by_row(
    q_nope, q_rope, latent, rope, latent_pages, rope_pages, up, page_table, lengths, query_start, host,
    *, max_query, uniform, scale, v_dim,
):  # fmt: skip
    """One call a row, over all that it holds, new tokens included."""
    counts = _known(host.query)
    held = [length if new else 0 for new, length in zip(counts, _known(host.length), strict=True)]
    live = sum(counts)
    if not live:
        return q_nope.new_zeros(*q_nope.shape[:2], v_dim)
    ends = torch.where(query_start.diff() > 0, lengths, 0).cumsum(0)
    slots = _slots(_Lines(held, torch.nn.functional.pad(ends, (1, 0))), page_table, latent_pages.page_size)
    keys = _Keys.of(*_gathered(latent_pages, rope_pages, slots), up, q_nope, v_dim)
    outs, token, key = [], 0, 0
    for new, length in ((new, length) for new, length in zip(counts, held, strict=True) if new):
        rows = slice(token, token + new)
        q = q_nope[rows], None if q_rope is None else q_rope[rows]
        line, held_line = (_Lines([count], query_start[:2]) for count in (new, length))
        outs.append(_attended(q, keys[key : key + length], line, held_line, scale, causal=True, lse=False)[0])
        token, key = token + new, key + length
    return _with_padding(torch.cat(outs), live, q_nope, v_dim)


def _refuse_ring(
    q_nope, q_rope, latent, rope, latent_pages, rope_pages, up, page_table, lengths, query_start, host,
    *, max_query, uniform, scale, v_dim,
):  # fmt: skip
    widths = (q_nope.shape[2], 0 if q_rope is None else q_rope.shape[2], v_dim)
    if widths != APART:
        return f"takes 128 + 64 channels and values of 128; this call has {widths[0]} + {widths[1]} and {v_dim}"
    return _wrong_host(host) or wrong_dtype(HALVES, q_nope=q_nope, q_rope=q_rope, latent=latent, rope=rope)


@fused(mla_prefix_attention, "atb_ring_mla", RING, only=ASCEND_910, refuse=_refuse_ring, **ANY_WEIGHT)
def _ring(
    q_nope, q_rope, latent, rope, latent_pages, rope_pages, up, page_table, lengths, query_start, host,
    *, max_query, uniform, scale, v_dim,
):  # fmt: skip
    """Two rings of the ATB library: new tokens over themselves, then over what rows held before, merged inside.

    A ring takes no row without queries, and none with fewer keys than queries unless it has no key. So a row that held
    less than it gets is several rows to the second ring: pieces of its queries, each over all that it held.
    """
    split = _Split.of(host, lengths, query_start)
    live = split.tokens
    if not live:
        return q_nope.new_zeros(*q_nope.shape[:2], v_dim)
    q = q_nope[:live].contiguous(), q_rope[:live].contiguous()
    new = [count for count in split.new.counts if count]
    keys = _Keys.of(latent[:live], rope[:live], up, q_nope, v_dim)
    among = _ringed(q, keys, (new, new), scale, mask_type="mask_type_triu", calc_type="calc_type_first_ring")
    if not sum(split.past.counts):
        return _with_padding(among[0], live, q_nope, v_dim)
    pieces = _pieces(split.new.counts, split.past.counts)
    rows = torch.tensor([row for row, _, _ in pieces], device="cpu").to(q_nope.device)
    ends = split.past.starts.diff()[rows].cumsum(0)
    lines = _Lines([held for _, _, held in pieces], torch.nn.functional.pad(ends, (1, 0)))
    slots = _slots(lines, page_table[rows], latent_pages.page_size)
    keys = _Keys.of(*_gathered(latent_pages, rope_pages, slots), up, q_nope, v_dim)
    lists = [count for _, count, _ in pieces], lines.counts
    earlier = {"pre_out": among[0], "prev_lse": among[1], "calc_type": "calc_type_default"}
    out, _ = _ringed(q, keys, lists, scale, mask_type="no_mask", **earlier)
    # What a ring leaves of rows without keys is not documented.
    past = split.past.starts.diff()[row_of_token(split.new.starts, live)]
    out = torch.where((past == 0)[:, None, None], among[0], out)
    return _with_padding(out, live, q_nope, v_dim)


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


def _refuse_absorbed(
    q_nope, q_rope, latent, rope, latent_pages, rope_pages, up, page_table, lengths, query_start, host,
    *, max_query, uniform, scale, v_dim,
):  # fmt: skip
    if not host.exact:
        return "needs exact row lengths on the host, and only an upper bound is known: read the accepted counts first"
    if not host.fits:
        return "counts pages that rows share once a row, and the pool has fewer: give init_state more pages"
    if not max_query:
        return "takes no empty tensor; no row has a new token"
    widths = (latent_pages.width, 0 if rope_pages is None else rope_pages.width)
    if rope_pages is None or widths != (LATENT_DIM, ROPE_DIM):
        return f"takes latents of {LATENT_DIM} and rope keys of {ROPE_DIM}; this call has {widths[0]} and {widths[1]}"
    dtypes = {"q_nope": q_nope, "q_rope": q_rope, "latent_pages": latent_pages.values, "rope_pages": rope_pages.values}
    wrong = above(SHARING[-1], heads=q_nope.shape[1]) or above(MOST_ABSORBED, **{"tokens a row": max_query})
    return wrong or wrong_dtype(HALVES, **dtypes) or _wrong_latent_pages(latent_pages, rope_pages)


def _wrong_latent_pages(latent_pages: Pages, rope_pages: Pages) -> str | None:
    tiled, size = isinstance(latent_pages, NzPages), latent_pages.page_size
    if isinstance(rope_pages, NzPages) != tiled:
        return "takes latents and rope keys in one layout"
    if size != 128 and (tiled or size != 16):
        return f"takes {'tiled pages of 128' if tiled else 'pages of 16 or 128'} tokens; found {size}"
    if latent_pages.values.numel() >= 2**31:
        return f"takes pools of fewer than 2**31 elements; this one has {latent_pages.values.numel()}: make fewer pages"
    return None


@fused(mla_prefix_attention, "npu_fia_absorbed", OPERATOR, only=ASCEND_910, refuse=_refuse_absorbed, **ANY_WEIGHT)
def _absorbed(
    q_nope, q_rope, latent, rope, latent_pages, rope_pages, up, page_table, lengths, query_start, host,
    *, max_query, uniform, scale, v_dim,
):  # fmt: skip
    """All heads over the latents in their pages: `up` moved over to the queries, and to what comes out."""
    heads = q_nope.shape[1]
    by_head = plain(up).to(q_nope.dtype).unflatten(0, (heads, -1))
    q = torch.einsum("thn,hnl->thl", q_nope, by_head[:, :-v_dim])
    more = next(count for count in SHARING if count >= heads) - heads
    both = (torch.nn.functional.pad(x, (0, 0, 0, more)) if more else x for x in (q, q_rope))
    query, query_rope = (to_rectangle(x, query_start, max_query, uniform).contiguous() for x in both)
    key, key_rope = (_shared(pages) for pages in (latent_pages, rope_pages))
    rows: dict[str, Any] = {"actual_seq_kvlen": list(host.length), "sparse_mode": UNMASKED}
    if max_query > 1:
        mask = shared_mask(query.device)
        rows |= {"actual_seq_qlen": list(host.query), "sparse_mode": BOTTOM_RIGHT, "atten_mask": mask}
    out, _ = npu.npu_fused_infer_attention_score_v2(
        query, key, key, query_rope=query_rope, key_rope=key_rope, num_query_heads=query.shape[2],
        num_key_value_heads=1, softmax_scale=scale, input_layout="BSND", block_table=page_table.int().contiguous(),
        block_size=latent_pages.page_size, **rows,
    )  # fmt: skip
    out = to_flat(out, query_start, q_nope.shape[0], uniform)[:, :heads]
    return torch.einsum("thl,hvl->thv", out, by_head[:, -v_dim:])


def _shared(pages: NdPages | NzPages) -> Tensor:
    """Pages as the operator names their axes: blocks and tokens, or blocks, the one head, tiles and tokens."""
    return pages.values[:, None] if isinstance(pages, NzPages) else pages.values


def _refuse_write(latent_pages, rope_pages, latent, rope, slots) -> str | None:
    if rope_pages is None:
        return "writes two caches at once; this call has latents alone"
    return _wrong_caches(latent_pages, rope_pages) or empty(latent=latent)


def _wrong_caches(latent_pages: Pages, rope_pages: Pages) -> str | None:
    tiled = isinstance(latent_pages, NzPages)
    if isinstance(rope_pages, NzPages) != tiled:
        return "takes latents and rope keys in one layout"
    # Tiles are 32 bytes: ours have sixteen channels, whatever the dtype.
    return wrong_dtype(HALVES if tiled else FLOATS, latent_pages=latent_pages.values, rope_pages=rope_pages.values)


@fused(write_latents, SCATTER, SCATTER, refuse=_refuse_write)
def _write(latent_pages, rope_pages, latent, rope, slots):
    _scatter(latent_pages, rope_pages, latent, rope, slots)
    return latent_pages, rope_pages


def _scatter(latent_pages: Pages, rope_pages: Pages, latent: Tensor, rope: Tensor, slots: Tensor) -> None:
    """Latents as keys of one head, rope keys as its values."""
    new = ((x.to(latent_pages.dtype).contiguous()[:, None]) for x in (latent, rope))
    tiled = isinstance(latent_pages, NzPages)
    caches = (pages.values if tiled else pages.values[:, :, None] for pages in (latent_pages, rope_pages))
    _need_whole(latent_pages, rope_pages)
    npu.npu_scatter_pa_kv_cache(*new, *caches, slots.contiguous(), cache_mode="PA_NZ" if tiled else "Norm")


def _need_whole(*pages: Pages) -> None:
    if not all(each.values.is_contiguous() for each in pages):
        raise LoweringError("the pages must be contiguous: a write to a copy of them would be lost")


def _refuse_norm_rope(latent_pages, rope_pages, kv, weight, cos, sin, slots, *, eps) -> str | None:
    if rope_pages is None or cos is None:
        return "turns a rope key and writes it; this call has none to turn"
    widths = (weight.shape[0], kv.shape[1] - weight.shape[0])
    if widths != (LATENT_DIM, ROPE_DIM):
        return f"takes latents of {LATENT_DIM} and rope keys of {ROPE_DIM}; this call has {widths[0]} and {widths[1]}"
    if 2 * cos.shape[1] != ROPE_DIM:
        return f"turns whole rope keys of {ROPE_DIM} channels; this call turns {2 * cos.shape[1]}"
    dtypes = {"latent_pages": latent_pages.values, "rope_pages": rope_pages.values}
    return (
        wrong_dtype(HALVES, kv=kv, weight=weight, **dtypes) or _wrong_caches(latent_pages, rope_pages) or empty(kv=kv)
    )


FUSED_WRITE = "npu_kv_rmsnorm_rope_cache_v2"


@fused(latent_norm_rope_write, FUSED_WRITE, FUSED_WRITE, refuse=_refuse_norm_rope)
def _norm_rope(latent_pages, rope_pages, kv, weight, cos, sin, slots, *, eps):
    _need_whole(latent_pages, rope_pages)
    angles = (side_by_side(table, kv.dtype)[:, None, None] for table in (cos, sin))
    tiled = isinstance(latent_pages, NzPages)
    # The caches' public shape is that of plain pages, also where the bytes are tiled; the rope's comes first.
    caches = (pages.values.view(-1, pages.page_size, 1, pages.width) for pages in (rope_pages, latent_pages))
    rope, latent = npu.npu_kv_rmsnorm_rope_cache_v2(
        kv[:, None, None].contiguous(), weight.contiguous(), *angles, slots.long().contiguous(), *caches, epsilon=eps,
        cache_mode="PA_NZ" if tiled else "PA_BNSD", is_output_kv=True,
    )  # fmt: skip
    return latent_pages, rope_pages, latent[:, 0, 0], rope[:, 0, 0]


def _refuse_composed(latent_pages, rope_pages, kv, weight, cos, sin, slots, *, eps) -> str | None:
    return (
        wrong_dtype(FLOATS, kv=kv, weight=weight)
        or empty(kv=kv)
        or _refuse_write(latent_pages, rope_pages, kv, kv, slots)
    )


@fused(
    latent_norm_rope_write, "npu_rms_norm_rope_scatter", "npu_rms_norm", "npu_rotary_mul", SCATTER,
    refuse=_refuse_composed,
)  # fmt: skip
def _norm_rope_scatter(latent_pages, rope_pages, kv, weight, cos, sin, slots, *, eps):
    latent, rope = kv.split((weight.shape[0], kv.shape[1] - weight.shape[0]), -1)
    latent = npu.npu_rms_norm(latent.contiguous(), weight.contiguous(), epsilon=eps)[0]
    if cos is not None:
        rope = turned_pairs(rope[:, None], cos, sin)[:, 0]
    _scatter(latent_pages, rope_pages, latent, rope, slots)
    return latent_pages, rope_pages, latent, rope
