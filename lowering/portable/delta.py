"""The gated delta rule in chunks, for prompts and windows to verify, with one decay a head; for decoding as one update.

The chunked form solves, per chunk of tokens, for what each token writes, and carries the state from chunk to chunk:
with c the running sum of log decays, L_ij = exp(c_i - c_j), the decay from j <= i on, and A = strict lower triangle of
beta k k^T L,
    D = (I + A)^-1 beta (v - exp(c) k S^T),
    o = exp(c) q S^T + (q k^T L) D,   S <- exp(c_last) S + D^T (exp(c_last - c) k)
Where steps are kept, D is what the tokens wrote, and no new state is made.
Source: the chunkwise algorithm of Gated Delta Networks (arXiv 2412.06464), section 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.delta import DeltaTrail, gated_delta_rule, of_channels
from ..ops.widen import wide_dtype
from ..rows import Rows
from ..target import EVERY

CHUNK = 32
"""Tokens a chunk: the whole of one chunk's work fits in cache."""
SMALLEST = 1e-30
"""Decays and state entries below this are taken as zero. Left alone, an entry that is never written again decays to a
denormal number and, rounding to nearest, stays there for good; some machines take tenfold time over those."""
FEWEST = 2
"""Tokens a row from which chunks pay."""


class Chunk(NamedTuple):
    """Outputs [heads tokens v_dim], what each token wrote [heads tokens v_dim], and what makes the state after.

    The state is [heads v_dim k_dim], and not wanted where steps are kept.
    """

    out: Tensor
    writes: Tensor
    after: Callable[[], Tensor]


OfChunk = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Chunk]
"""From a chunk's q, k [heads tokens k_dim], v [heads tokens v_dim], log decays [heads tokens ...], write strengths
[heads tokens] and the state before it [heads v_dim k_dim]."""


def exp(x: Tensor) -> Tensor:
    """The exponential, and 0 where it is below `SMALLEST`."""
    return F.threshold(x, math.log(SMALLEST), -torch.inf).exp()


def _refuse_step(q, k, v, decay, beta, state, rows, *, keep_steps) -> str | None:
    if state is None:
        return "continues a state; this call has none"
    if keep_steps:
        return "keeps no steps"
    one = rows.max_query == 1 and rows.uniform
    return None if one else f"takes one token in every row; this call has up to {rows.max_query}"


@gated_delta_rule.kernel("torch_step", targets=("cpu",), refuse=_refuse_step, eager=True)
def _step(q, k, v, decay, beta, state, rows, *, keep_steps):
    shared = v.shape[1] // k.shape[1]
    dtype = wide_dtype(q, k, v, decay, beta, state)
    q, k = (_shared(x.to(dtype), shared) for x in (q, k))
    keys_queries, overlap = torch.stack((k, q), 2), (k * q).sum(-1, keepdim=True)
    decay, beta, values = exp(of_channels(decay, k).to(dtype))[:, :, None], beta.to(dtype)[..., None], v.to(dtype)
    after, out = torch.empty_like(state), torch.empty_like(values)
    in_place = state.dtype == dtype
    # Row by row, so that a row's matrices stay in cache from their decay to their update.
    for row in range(v.shape[0]):
        now = F.hardshrink(state[row], SMALLEST)
        now = torch.mul(now, decay[row], out=after[row] if in_place else None)
        read, queried = torch.bmm(keys_queries[row], now.mT).unbind(1)
        update = beta[row] * (values[row] - read)
        torch.addcmul(queried, update, overlap[row], out=out[row])
        now.addcmul_(update[..., None], k[row, :, None])
        if not in_place:
            after[row] = now
    after[v.shape[0] :] = state[v.shape[0] :]  # the scratch slot
    return out.to(v.dtype), after, None


def _shared(x: Tensor, heads: int) -> Tensor:
    """Each key head once for every value head that it serves: [tokens k_heads k_dim] to [tokens v_heads k_dim]."""
    return x if heads == 1 else x.repeat_interleave(heads, 1)


def too_short(max_query: int, keep_steps: bool) -> str | None:
    """Why chunks do not take a call, if they do not."""
    if keep_steps and max_query > CHUNK:
        return f"keeps the steps of at most {CHUNK} tokens a row; this call has {max_query}"
    return None if max_query >= FEWEST else f"pays from {FEWEST} tokens a row on; this call has at most {max_query}"


def _refuse_chunked(q, k, v, decay, beta, state, rows, *, keep_steps) -> str | None:
    if decay.ndim == k.ndim:
        return "takes one decay a head; this call has one a channel"
    return too_short(rows.max_query, keep_steps)


@gated_delta_rule.kernel("torch_chunked", targets=EVERY, refuse=_refuse_chunked)
def _chunked(q, k, v, decay, beta, state, rows, *, keep_steps):
    return in_chunks(_chunk, (q, k, v, decay, beta), state, rows, keep_steps)


def in_chunks(
    chunk: OfChunk, inputs: tuple[Tensor, ...], state: Tensor | None, rows: Rows, keep_steps: bool
) -> tuple[Tensor, Tensor | None, DeltaTrail | None]:
    """What `gated_delta_rule` returns, by `chunk` over some tokens of every row at a time."""
    q, k, v, decay, beta = inputs
    rectangles = [rows.rectangle(x) for x in inputs]
    count, _, v_heads, v_dim = rectangles[2].shape
    shared, k_dim = v_heads // k.shape[1], k.shape[2]
    dtype = wide_dtype(q, k, v, decay, beta, state)
    now = v.new_zeros(count * v_heads, v_dim, k_dim, dtype=dtype)
    if state is not None:
        now = state[:count].to(dtype).flatten(0, 1)
    outputs, trail = [], None
    for pieces in zip(*(x.split(CHUNK, 1) for x in rectangles), strict=True):
        qs, ks = (_heads_first(x, dtype, shared) for x in pieces[:2])
        vs, gs, bs = (_heads_first(x, dtype) for x in pieces[2:])
        made = chunk(qs, ks, vs, gs, bs, now)
        outputs.append(_tokens_first(made.out, count).to(v.dtype))
        if not keep_steps:
            now = made.after()
        elif state is not None:
            keys, writes = (_tokens_first(x, count) for x in (ks, made.writes))
            trail = DeltaTrail(state, keys, writes, rectangles[3].to(dtype))
    # Compiled, one tensor put together would keep its strides, which are not those that it has here.
    out = torch.cat(outputs, 1) if len(outputs) > 1 else outputs[0]
    out = rows.flat(out, v.shape[0])
    if state is None or keep_steps:
        return out, state, trail
    now = F.hardshrink(now, SMALLEST)
    return out, torch.cat((now.view(count, *state.shape[1:]).to(state.dtype), state[count:])), None


def _tokens_first(x: Tensor, rows: int) -> Tensor:
    """[rows * heads tokens ...] to [rows tokens heads ...]."""
    return x.unflatten(0, (rows, -1)).transpose(1, 2)


def _heads_first(x: Tensor, dtype: torch.dtype, shared: int = 1) -> Tensor:
    """[rows tokens heads ...] to `dtype` [rows * heads * shared tokens ...], in one copy."""
    x = x.transpose(1, 2)[:, :, None]
    x = x.expand(-1, -1, shared, *x.shape[3:])
    return x.to(dtype, memory_format=torch.contiguous_format).flatten(0, 2)


def _chunk(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, state: Tensor) -> Chunk:
    """An `OfChunk` with log decays [heads tokens]."""
    tokens = k.shape[1]
    earlier = torch.ones(tokens, tokens, dtype=torch.bool, device=k.device).tril(-1)
    one = torch.eye(tokens, dtype=k.dtype, device=k.device)
    # Summed from each token on: a difference of sums from the start would be lost in rounding after a strong decay.
    # The diagonal is a constant 0: its gradient would cancel, but only after swamping gradients of strong decays.
    spread = exp(torch.where(earlier, torch.where(earlier, g[:, :, None], 0).cumsum(1), one.log()))
    keys_queries = torch.cat((k, q), 1)
    chained, near = ((keys_queries @ k.mT).unflatten(1, (2, -1)) * spread[:, None]).unbind(1)
    read, far = (keys_queries @ state.mT).split(tokens, 1)
    grown = exp(g.cumsum(1))[..., None]
    solved = torch.linalg.solve_triangular(b[..., None] * chained, one.expand_as(near), upper=False, unitriangular=True)
    writes = (solved * b[:, None]) @ torch.addcmul(v, grown, read, value=-1)
    out = torch.baddbmm(grown * far, near, writes)

    def after() -> Tensor:
        return torch.addcmul(writes.mT @ (k * spread[:, -1, :, None]), grown[:, -1:], state)

    return Chunk(out, writes, after)
