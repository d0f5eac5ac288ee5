"""The gated delta rule with a decay a channel, in chunks, for prompts (Kimi delta attention).

Of two tokens j < i of a chunk the products k_i . k_j and q_i . k_j are wanted with every channel decayed from j to i.
That decay is a factor of i times one of j, but measured from the chunk's start one of them overflows. So blocks of
tokens are put together two by two: between an earlier and a later block it is the decay from j to the end of its block,
times that from the start of i's block to i. Their logs are sums of log decays, never positive, and never subtracted
from each other: nothing overflows and nothing cancels, forward or backward, at any gate. A chunk of 32 tokens takes
five such steps, each an exponential a token and channel and a product of matrices. The rest is as in `delta`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.delta import gated_delta_rule
from ..target import EVERY
from .delta import Chunk, exp, in_chunks, too_short


def _refuse(q, k, v, decay, beta, state, rows, *, keep_steps) -> str | None:
    if decay.ndim < k.ndim:
        return "takes a decay a channel; this call has one a head"
    return too_short(rows.max_query, keep_steps)


@gated_delta_rule.kernel("torch_chunked_channels", targets=EVERY, refuse=_refuse)
def _chunked(q, k, v, decay, beta, state, rows, *, keep_steps):
    return in_chunks(_chunk, (q, k, v, decay, beta), state, rows, keep_steps)


def _chunk(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, state: Tensor) -> Chunk:
    """A `delta.OfChunk` with log decays [heads tokens k_dim]."""
    tokens = k.shape[1]
    filled = 1
    while filled < tokens:  # where their number is a symbol, this holds for a range of it
        filled *= 2
    if filled > tokens:
        # Tokens of zeros write nothing and forget nothing.
        q, k, v, g = (F.pad(x, (0, 0, 0, filled - tokens)) for x in (q, k, v, g))
        b = F.pad(b, (0, filled - tokens))
    (chained, near), since, left = _pairs(q, k, g)
    grown = exp(since)
    read, far = (torch.cat((k * grown, q * grown), 1) @ state.mT).split(filled, 1)
    one = torch.eye(filled, dtype=k.dtype, device=k.device).expand_as(near)
    solved = torch.linalg.solve_triangular(b[..., None] * chained, one, upper=False, unitriangular=True)
    writes = (solved * b[:, None]) @ (v - read)
    out = torch.baddbmm(far, near, writes)

    def after() -> Tensor:
        return torch.addcmul(writes.mT @ (k * exp(left)), grown[:, -1:], state)

    return Chunk(out[:, :tokens], writes[:, :tokens], after)


def _pairs(q: Tensor, k: Tensor, g: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
    """Products of keys, then of queries, with the keys before them (queries also with their own), decayed in between.

    Each [heads tokens tokens]; then the log decays [heads tokens k_dim] from the chunk's start to each token, its own
    included, and from behind each token to the chunk's end.
    """
    own = torch.stack((torch.zeros_like(q[..., 0]), (q * k).sum(-1)), 1)
    found, since, left = own[..., None, None], g, torch.zeros_like(g)
    for size in (1 << step for step in range((k.shape[1] - 1).bit_length())):
        (early_k, late_k), (_, late_q), (early, late), (early_left, late_left) = (
            x.unflatten(1, (-1, 2, size)).unbind(2) for x in (k, q, since, left)
        )
        reached = exp(late)
        later = torch.cat((late_k * reached, late_q * reached), 2)
        crossed = (later @ (early_k * exp(early_left)).mT).unflatten(2, (2, size)).transpose(1, 2)
        found = _beneath(found, crossed)
        since = torch.stack((early, late + early[:, :, -1:]), 2).flatten(1, 3)
        left = torch.stack((early_left + late[:, :, -1:], late_left), 2).flatten(1, 3)
    chained, near = found[:, :, 0].unbind(1)
    return (chained, near), since, left


def _beneath(blocks: Tensor, crossed: Tensor) -> Tensor:
    """Blocks [heads 2 blocks size size] joined two by two along the diagonal, `crossed` below them, zeros above."""
    early, late = blocks.unflatten(2, (-1, 2)).unbind(3)
    return torch.cat((torch.cat((early, torch.zeros_like(crossed)), -1), torch.cat((crossed, late), -1)), -2)
