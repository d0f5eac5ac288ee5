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
from ..ops.mla import ANY_WEIGHT, LatentPools, mla_prefix_attention
from ..ops.widen import wide, wide_dtype
from ..rows import Rows
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
def _order(q, new, pages, up, rows, *, scale, v_dim) -> tuple[tuple[str, ...], str]:
    """Absorbed for few queries a row, else a row at a time; those of fixed shapes where no length may be read.

    Source: float32 on one core of an AMD EPYC, widths of V2-Lite, milliseconds absorbed / a row at a time, for new
    tokens on cached ones: 16 on 768, 4 heads 2.1 / 9.5; 64 on 768 6.5 / 11.4; 100 on 768 10.2 / 13.3, 16 heads 43 / 58;
    128 on 768 13.0 / 13.9; 160 on 768 17.2 / 15.8; 200 on 2048 46 / 42; 100 on none 2.6 / 1.8. Two passes took 1.2 to
    2.5 times as long as a row at a time. `tests/bench/bench_mla.py` measures them again.
    """
    if rows.max_query <= ABSORBED_UP_TO:
        why = f"at up to {ABSORBED_UP_TO} queries a row, to read latents as they lie takes less than to expand them"
        return ("torch_absorbed_rows", "torch_absorbed", "torch_concat", "torch_two_pass"), why
    why = f"at more than {ABSORBED_UP_TO} queries a row, to expand takes less, and one row at a time has no merge"
    return ("torch_concat", "torch_two_pass", "torch_absorbed_rows", "torch_absorbed"), why


@mla_prefix_attention.order_by(("cuda",))
def _order_of_fixed_shapes(q, new, pages, up, rows, *, scale, v_dim) -> tuple[tuple[str, ...], str]:
    """Absorbed for decode and verify; for prefill two passes, which hold scores block by block. Not measured."""
    if rows.max_query <= FEW:
        return ("torch_absorbed", "torch_two_pass"), f"rows of up to {FEW} new tokens read latents as they lie"
    return ("torch_two_pass", "torch_absorbed"), f"for more than {FEW} new tokens a row, scores are held block by block"


def _refuse_rows(q, new, pages, up, rows, *, scale, v_dim) -> str | None:
    return rows.inexact


@mla_prefix_attention.kernel(
    "torch_absorbed_rows", targets=("cpu",), refuse=_refuse_rows, host_reads=True, **ANY_WEIGHT
)
def _absorbed_rows(q, new, pages, up, rows, *, scale, v_dim):
    k_up, v_up = _of_heads(up, q.nope, v_dim)
    moved, turned = _over_to_queries(q.nope, k_up) * scale, None if q.rope is None else wide(q.rope) * scale
    parts = []
    for row, at, queries in _busy(rows.host):
        c, shared = _held(row, rows.host, pages, moved.dtype)
        scores = moved[at : at + queries].flatten(0, 1) @ c.T
        if turned is not None:
            scores.addmm_(turned[at : at + queries].flatten(0, 1), shared.T)
        if queries > 1:
            scores = scores.unflatten(0, (queries, -1))
            scores[..., -queries:] += _later(queries, scores)[:, None]
        parts.append((scores.softmax(-1).reshape(-1, c.shape[0]) @ c).unflatten(0, (queries, -1)))
    return _end_to_end([_back_from_latents(torch.cat(parts), v_up)] if parts else [], q.nope, v_dim)


@mla_prefix_attention.kernel("torch_concat", targets=("cpu",), refuse=_refuse_rows, host_reads=True, **ANY_WEIGHT)
def _concat(q, new, pages, up, rows, *, scale, v_dim):
    dtype, heads = wide_dtype(q.nope), q.nope.shape[1]
    weight = plain(up).to(dtype)
    plain_part = (q.nope.to(dtype) * scale).transpose(0, 1)
    turned = None if q.rope is None else (q.rope.to(dtype) * scale).transpose(0, 1)
    parts = []
    for row, at, queries in _busy(rows.host):
        c, shared = _held(row, rows.host, pages, dtype)
        k, v = (weight @ c.T).unflatten(0, (heads, -1)).split((plain_part.shape[2], v_dim), 1)
        for start in range(at, at + queries, BLOCK):
            end = min(start + BLOCK, at + queries)
            seen = c.shape[0] - (at + queries - end)
            scores = torch.bmm(plain_part[:, start:end], k[..., :seen])
            if turned is not None:
                scores += turned[:, start:end] @ shared[:seen].T
            scores[..., seen - (end - start) :] += _later(end - start, scores)
            parts.append(torch.bmm(scores.softmax(-1), v[..., :seen].mT).transpose(0, 1))
    return _end_to_end(parts, q.nope, v_dim)


@mla_prefix_attention.kernel("torch_absorbed", targets=EVERY, **ANY_WEIGHT)
def _absorbed(q, new, pages, up, rows, *, scale, v_dim):
    k_up, v_up = _of_heads(up, q.nope, v_dim)
    table = _filled(rows, pages.latent)
    at = torch.arange(table.shape[1] * pages.latent.page_size, device=q.device)
    held = at < rows.lengths[:, None]
    c = _gathered(pages.latent, table, held, k_up.dtype)
    scores = rows.rectangle(_over_to_queries(q.nope, k_up)).flatten(1, 2) @ c.mT
    if q.rope is not None and pages.rope is not None:
        turned = rows.rectangle(wide(q.rope)).flatten(1, 2)
        scores = scores + turned @ _gathered(pages.rope, table, held, k_up.dtype).mT
    visible = held[:, None] & (at <= rows.places[..., None]) & rows.inside[..., None]
    weights, total, _ = _weighed((scores * scale).unflatten(1, (rows.max_query, -1)), visible[:, :, None])
    y = (weights / _nonzero(total)).flatten(1, 2) @ c
    y = rows.flat(y.unflatten(1, (rows.max_query, -1)), q.nope.shape[0])
    return _back_from_latents(y, v_up).to(q.nope.dtype)


@mla_prefix_attention.kernel("torch_two_pass", targets=EVERY, **ANY_WEIGHT)
def _two_pass(q, new, pages, up, rows, *, scale, v_dim):
    dtype, heads, most = wide_dtype(q.nope), q.nope.shape[1], rows.max_query

    def rectangle(x: Tensor) -> Tensor:
        return rows.rectangle(x.to(dtype))

    plain_part = rectangle(q.nope).transpose(1, 2) * scale
    turned = None if q.rope is None else rectangle(q.rope).transpose(1, 2) * scale
    table = _filled(rows, pages.latent)
    at = torch.arange(table.shape[1] * pages.latent.page_size, device=q.device)
    before = at < rows.past[:, None]
    at = torch.arange(most, device=q.device)
    causal = rows.inside[:, None] & (at <= at[:, None])
    shared = None if pages.rope is None else _gathered(pages.rope, table, before, dtype)
    old = _Keys.of(_gathered(pages.latent, table, before, dtype), shared, up, heads, v_dim)
    among = _Keys.of(rectangle(new.latent), None if new.rope is None else rectangle(new.rope), up, heads, v_dim)
    each = max(1, MOST_SCORES // (len(before) * heads * (before.shape[1] + most)))
    parts = []
    for block in (slice(start, start + each) for start in range(0, most, each)):
        queries = plain_part[:, :, block], None if turned is None else turned[:, :, block]
        both = old.attended(*queries, before[:, None, None]), among.attended(*queries, causal[:, None, block])
        parts.append(_merged(*both))
    return rows.flat(torch.cat(parts, 2).transpose(1, 2).to(q.nope.dtype), q.nope.shape[0])


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


def _held(row: int, host: HostLengths, pages: LatentPools, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A row's latents and rope keys [length width]; the former twice without a rope."""
    pools = (pages.latent, pages.latent if pages.rope is None else pages.rope)
    latents, shared = (x.held(host.pages[row], host.length[row]).to(dtype) for x in pools)
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


def _filled(rows: Rows, pages: Pages) -> Tensor:
    """The page table's columns that hold all tokens: as many as are filled, all of them while tracing."""
    _, table = rows.paged
    if tracing() or rows.host is None:
        return table
    return table[:, : max(1, -(-max(rows.host.length, default=1) // pages.page_size))]


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
        """Keys of latents and rope keys [rows keys width]."""
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
