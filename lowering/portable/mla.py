"""Multi-head latent attention in Torch: absorbed for few queries a row, expanded for many, at once or in two passes.

Products run in float32 or wider, whatever the pages hold. The two kernels that go row by row read row lengths on the
host and look at the pages that a row fills; the two others are programs of fixed shapes, to be captured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from params.quant.values import QuantizedWeight

from ..host import HostLengths, tracing
from ..layouts import Pages
from ..ops.mla import ANY_WEIGHT, mla_prefix_attention
from ..ops.ragged import in_row, to_flat, to_rectangle
from ..ops.widen import wide, wide_dtype
from ..target import EVERY
from ..weights import PreparedWeight, plain

ABSORBED_UP_TO = 100
"""Queries a row up to which the absorbed form is faster on a CPU, where as many tokens or more are cached."""
BLOCK = 128
"""Queries of a row that are worked on at a time: no block looks at keys past its last query."""
FEW = 8
"""Queries a row up to which a device reads latents as they lie."""
MOST_SCORES = 2**24
"""Scores that the two passes hold at a time."""


@mla_prefix_attention.order_by(("cpu",))
def _order(
    q_nope, q_rope, latent, rope, latent_pages, rope_pages, up, page_table, lengths, query_start, host, *,
    max_query, uniform, scale, v_dim,
) -> tuple[tuple[str, ...], str]:  # fmt: skip
    """Absorbed for few queries a row, else a row at a time; those of fixed shapes where no length may be read.

    Source: float32 on one core of an AMD EPYC, widths of V2-Lite, milliseconds absorbed / a row at a time, for new
    tokens on cached ones: 16 on 768, 4 heads 2.1 / 9.5; 64 on 768 6.5 / 11.4; 100 on 768 10.2 / 13.3, 16 heads 43 / 58;
    128 on 768 13.0 / 13.9; 160 on 768 17.2 / 15.8; 200 on 2048 46 / 42; 100 on none 2.6 / 1.8. Two passes took 1.2 to
    2.5 times as long as a row at a time. `tests/bench/bench_mla.py` measures them again.
    """
    if max_query <= ABSORBED_UP_TO:
        why = f"at up to {ABSORBED_UP_TO} queries a row, to read latents as they lie takes less than to expand them"
        return ("torch_absorbed_rows", "torch_absorbed", "torch_concat", "torch_two_pass"), why
    why = f"at more than {ABSORBED_UP_TO} queries a row, to expand takes less, and one row at a time has no merge"
    return ("torch_concat", "torch_two_pass", "torch_absorbed_rows", "torch_absorbed"), why


@mla_prefix_attention.order_by(("cuda",))
def _order_of_fixed_shapes(
    q_nope, q_rope, latent, rope, latent_pages, rope_pages, up, page_table, lengths, query_start, host, *,
    max_query, uniform, scale, v_dim,
) -> tuple[tuple[str, ...], str]:  # fmt: skip
    """Absorbed for decode and verify; for prefill two passes, which hold scores block by block. Not measured."""
    if max_query <= FEW:
        return ("torch_absorbed", "torch_two_pass"), f"rows of up to {FEW} new tokens read latents as they lie"
    return ("torch_two_pass", "torch_absorbed"), f"for more than {FEW} new tokens a row, scores are held block by block"


def _refuse_rows(
    q_nope, q_rope, latent, rope, latent_pages, rope_pages, up, page_table, lengths, query_start, host, *,
    max_query, uniform, scale, v_dim,
) -> str | None:  # fmt: skip
    return None if host.exact else "needs exact row lengths on the host, and only an upper bound is known"


@mla_prefix_attention.kernel(
    "torch_absorbed_rows", targets=("cpu",), refuse=_refuse_rows, host_reads=True, **ANY_WEIGHT
)
def _absorbed_rows(
    q_nope, q_rope, latent, rope, latent_pages, rope_pages, up, page_table, lengths, query_start, host, *,
    max_query, uniform, scale, v_dim,
):  # fmt: skip
    k_up, v_up = _of_heads(up, q_nope, v_dim)
    moved, turned = _over_to_queries(q_nope, k_up) * scale, None if q_rope is None else wide(q_rope) * scale
    parts = []
    for row, at, queries in _busy(host):
        c, shared = _held(row, host, latent_pages, rope_pages, moved.dtype)
        scores = moved[at : at + queries].flatten(0, 1) @ c.T
        if turned is not None:
            scores.addmm_(turned[at : at + queries].flatten(0, 1), shared.T)
        if queries > 1:
            scores = scores.unflatten(0, (queries, -1))
            scores[..., -queries:] += _later(queries, scores)[:, None]
        parts.append((scores.softmax(-1).reshape(-1, c.shape[0]) @ c).unflatten(0, (queries, -1)))
    return _end_to_end([_back_from_latents(torch.cat(parts), v_up)] if parts else [], q_nope, v_dim)


@mla_prefix_attention.kernel("torch_concat", targets=("cpu",), refuse=_refuse_rows, host_reads=True, **ANY_WEIGHT)
def _concat(
    q_nope, q_rope, latent, rope, latent_pages, rope_pages, up, page_table, lengths, query_start, host, *,
    max_query, uniform, scale, v_dim,
):  # fmt: skip
    dtype, heads = wide_dtype(q_nope), q_nope.shape[1]
    weight = plain(up).to(dtype)
    q = (q_nope.to(dtype) * scale).transpose(0, 1)
    turned = None if q_rope is None else (q_rope.to(dtype) * scale).transpose(0, 1)
    parts = []
    for row, at, queries in _busy(host):
        c, shared = _held(row, host, latent_pages, rope_pages, dtype)
        k, v = (weight @ c.T).unflatten(0, (heads, -1)).split((q.shape[2], v_dim), 1)
        for start in range(at, at + queries, BLOCK):
            end = min(start + BLOCK, at + queries)
            seen = c.shape[0] - (at + queries - end)
            scores = torch.bmm(q[:, start:end], k[..., :seen])
            if turned is not None:
                scores += turned[:, start:end] @ shared[:seen].T
            scores[..., seen - (end - start) :] += _later(end - start, scores)
            parts.append(torch.bmm(scores.softmax(-1), v[..., :seen].mT).transpose(0, 1))
    return _end_to_end(parts, q_nope, v_dim)


@mla_prefix_attention.kernel("torch_absorbed", targets=EVERY, **ANY_WEIGHT)
def _absorbed(
    q_nope, q_rope, latent, rope, latent_pages, rope_pages, up, page_table, lengths, query_start, host, *,
    max_query, uniform, scale, v_dim,
):  # fmt: skip
    k_up, v_up = _of_heads(up, q_nope, v_dim)
    table = page_table[:, : _pages_read(host, page_table, latent_pages)]
    at = torch.arange(table.shape[1] * latent_pages.page_size, device=q_nope.device)
    held = at < lengths[:, None]
    c = _gathered(latent_pages, table, held, k_up.dtype)
    moved = to_rectangle(_over_to_queries(q_nope, k_up), query_start, max_query, uniform).flatten(1, 2)
    scores = moved @ c.mT
    if q_rope is not None and rope_pages is not None:
        turned = to_rectangle(wide(q_rope), query_start, max_query, uniform).flatten(1, 2)
        scores = scores + turned @ _gathered(rope_pages, table, held, k_up.dtype).mT
    first = lengths - query_start.diff()
    query_at = first[:, None] + torch.arange(max_query, device=q_nope.device)
    visible = held[:, None] & (at <= query_at[..., None]) & in_row(query_start, max_query)[..., None]
    weights, total, _ = _weighed((scores * scale).unflatten(1, (max_query, -1)), visible[:, :, None])
    y = (weights / _nonzero(total)).flatten(1, 2) @ c
    y = to_flat(y.unflatten(1, (max_query, -1)), query_start, q_nope.shape[0], uniform)
    return _back_from_latents(y, v_up).to(q_nope.dtype)


@mla_prefix_attention.kernel("torch_two_pass", targets=EVERY, **ANY_WEIGHT)
def _two_pass(
    q_nope, q_rope, latent, rope, latent_pages, rope_pages, up, page_table, lengths, query_start, host, *,
    max_query, uniform, scale, v_dim,
):  # fmt: skip
    dtype, heads = wide_dtype(q_nope), q_nope.shape[1]

    def rectangle(x: Tensor) -> Tensor:
        return to_rectangle(x.to(dtype), query_start, max_query, uniform)

    q = rectangle(q_nope).transpose(1, 2) * scale
    turned = None if q_rope is None else rectangle(q_rope).transpose(1, 2) * scale
    table = page_table[:, : _pages_read(host, page_table, latent_pages)]
    at = torch.arange(table.shape[1] * latent_pages.page_size, device=q_nope.device)
    before = at < (lengths - query_start.diff())[:, None]
    at = torch.arange(max_query, device=q_nope.device)
    causal = in_row(query_start, max_query)[:, None] & (at <= at[:, None])
    shared = None if rope_pages is None else _gathered(rope_pages, table, before, dtype)
    old = _Keys.of(_gathered(latent_pages, table, before, dtype), shared, up, heads, v_dim)
    new = _Keys.of(rectangle(latent), None if rope is None else rectangle(rope), up, heads, v_dim)
    each = max(1, MOST_SCORES // (len(before) * heads * (before.shape[1] + max_query)))
    parts = []
    for block in (slice(start, start + each) for start in range(0, max_query, each)):
        queries = q[:, :, block], None if turned is None else turned[:, :, block]
        both = old.attended(*queries, before[:, None, None]), new.attended(*queries, causal[:, None, block])
        parts.append(_merged(*both))
    y = torch.cat(parts, 2).transpose(1, 2).to(q_nope.dtype)
    return to_flat(y, query_start, q_nope.shape[0], uniform)


# What the absorbed kernels share


def _of_heads(up: Tensor | QuantizedWeight | PreparedWeight, q_nope: Tensor, v_dim: int) -> tuple[Tensor, Tensor]:
    """The parts of `up` that make keys [heads nope_dim latent_dim] and values [heads v_dim latent_dim]."""
    both = plain(up).to(wide_dtype(q_nope)).unflatten(0, (q_nope.shape[1], -1))
    return both[:, :-v_dim], both[:, -v_dim:]


def _over_to_queries(q_nope: Tensor, k_up: Tensor) -> Tensor:
    """Queries [tokens heads latent_dim] that meet latents where `q_nope` meets the keys made of them."""
    return (q_nope.to(k_up.dtype).transpose(0, 1) @ k_up).transpose(0, 1)


def _back_from_latents(y: Tensor, v_up: Tensor) -> Tensor:
    """Values [tokens heads v_dim] of weighted latents [tokens heads latent_dim]."""
    return (y.transpose(0, 1) @ v_up.mT).transpose(0, 1)


# What the kernels share that go row by row


def _busy(host: HostLengths) -> list[tuple[int, int, int]]:
    """Row, first token and number of tokens of each row that has any."""
    found, at = [], 0
    for row, queries in enumerate(host.query):
        if queries:
            found.append((row, at, queries))
        at += queries
    return found


def _held(
    row: int, host: HostLengths, latent_pages: Pages, rope_pages: Pages | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """A row's latents and rope keys [length width]; the former twice without a rope."""
    pages = (latent_pages, latent_pages if rope_pages is None else rope_pages)
    latents, shared = (x.held(host.pages[row], host.length[row]).to(dtype) for x in pages)
    return latents, shared


def _later(queries: int, like: Tensor) -> Tensor:
    """[queries queries], -inf above the diagonal."""
    return like.new_full((queries, queries), -torch.inf).triu(1)


def _end_to_end(parts: list[Tensor], q_nope: Tensor, v_dim: int) -> Tensor:
    """The parts one after another in q_nope's dtype, zeros for the padding behind them."""
    padding = q_nope.shape[0] - sum(part.shape[0] for part in parts)
    zeros = [q_nope.new_zeros(padding, q_nope.shape[1], v_dim)] if padding else []
    return torch.cat([*(part.to(q_nope.dtype) for part in parts), *zeros])


# What the kernels share that have fixed shapes


def _pages_read(host: HostLengths, page_table: Tensor, pages: Pages) -> int:
    """Columns of the page table that hold all tokens: as many as are filled, all of them while tracing."""
    if tracing():
        return page_table.shape[1]
    return max(1, -(-max(host.length, default=1) // pages.page_size))


def _gathered(pages: Pages, table: Tensor, held: Tensor, dtype: torch.dtype) -> Tensor:
    """[rows keys width], zeros where a slot is not held."""
    return torch.where(held[..., None], pages.gather(table), 0).to(dtype)


def _weighed(scores: Tensor, visible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """e^(score - most) of visible keys, the sum of these, and `most`: zeros and a finite number where none is visible.

    Whatever is subtracted cancels in the end, so no derivative goes through it.
    """
    scores = scores.masked_fill(~visible, -torch.inf)
    most = scores.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
    weights = torch.exp(scores - most)
    return weights, weights.sum(-1, keepdim=True), most


def _nonzero(total: Tensor) -> Tensor:
    """A divisor: the sum of weights, or one where there are none."""
    return torch.where(total == 0, 1, total)


@dataclass(frozen=True)
class _Keys:
    """Keys [rows heads nope_dim keys], rope keys [rows rope_dim keys] that heads share, and values like keys."""

    k: Tensor
    shared: Tensor | None
    v: Tensor

    @classmethod
    def of(cls, latents: Tensor, shared: Tensor | None, up: Any, heads: int, v_dim: int) -> _Keys:
        """Those of latents and rope keys [rows keys width]."""
        both = (plain(up).to(latents.dtype) @ latents.mT).unflatten(1, (heads, -1))
        return cls(both[:, :, :-v_dim], None if shared is None else shared.mT, both[:, :, -v_dim:])

    def attended(self, q: Tensor, turned: Tensor | None, visible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of queries [rows heads queries dim] the values summed by `_weighed`, the sum of the weights, and `most`."""
        scores = q @ self.k
        if turned is not None and self.shared is not None:
            scores = scores + (turned.flatten(1, 2) @ self.shared).unflatten(1, q.shape[1:3])
        weights, total, most = _weighed(scores, visible)
        return weights @ self.v.mT, total, most


def _merged(one: tuple[Tensor, Tensor, Tensor], two: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Attention over two sets of keys from that over each: zeros where neither has a visible one."""
    most = torch.maximum(one[2], two[2])
    (y1, sum1), (y2, sum2) = ((y * (share := torch.exp(own - most)), total * share) for y, total, own in (one, two))
    return (y1 + y2) / _nonzero(sum1 + sum2)
