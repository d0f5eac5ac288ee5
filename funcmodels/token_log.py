"""Checked states: a log of which token, after which prefix, wrote each slot of the pool.

Two continuations of one state write the same slots; the one that wrote first is then stale. The log keeps the token
and the hash of the prefix ending with it a slot, and the hash of its newest prefix a row, so that `stale_rows` can
tell. A prefix hash is a sum over positions of mix(token, position), in wrapping int64.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from params.tree import tree
from torch import Tensor


@tree
class TokenLog:
    """The token and prefix hash at each slot, and the hash of each row's newest token."""

    tokens: Int[Tensor, "pages page_size"]
    prefix: Int[Tensor, "pages page_size"]
    tip: Int[Tensor, " rows"]


def mix(tokens: Tensor, positions: Tensor) -> Tensor:
    """A 64-bit hash of (token, position): the finaliser of the SplitMix64 generator."""
    x = tokens.long() * -7046029254386353131 + positions.long() * -4417276706812531889 + 1
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def written(
    log: TokenLog, tokens: Tensor, positions: Tensor, slots: Tensor, row: Tensor, query_start: Tensor
) -> TokenLog:
    """The log with new tokens stored at their slots (in place, as the pages are) and the rows' new tips."""
    rows = log.tip.shape[0]
    running = torch.where(row < rows, mix(tokens, positions), 0).cumsum(0)
    before = torch.nn.functional.pad(running, (1, 0))[query_start.long()]
    prefix = torch.nn.functional.pad(log.tip, (0, 1))[row] + running - before[row.clamp(max=rows - 1)]
    log.tokens.view(-1).index_copy_(0, slots, tokens.to(log.tokens.dtype))
    log.prefix.view(-1).index_copy_(0, slots, prefix)
    return TokenLog(log.tokens, log.prefix, log.tip + before[1:] - before[:-1])


def tip_at(log: TokenLog, page_table: Tensor, lengths: Tensor, page_size: int) -> Int[Tensor, " rows"]:
    """The prefix hash at each row's newest token; 0 for an empty row."""
    last = (lengths.long() - 1).clamp(min=0)
    page = page_table.long().gather(1, (last // page_size)[:, None])[:, 0]
    return torch.where(lengths > 0, log.prefix[page, last % page_size], 0)


def stale_rows(log: TokenLog, page_table: Tensor, lengths: Tensor) -> Bool[Tensor, " rows"]:
    """True for each row whose slots no longer hold the tokens, each after the prefix, that the row was built from."""
    tokens, prefix = (x[page_table.long()].flatten(1) for x in (log.tokens, log.prefix))
    at = torch.arange(tokens.shape[1], device=tokens.device)
    held = at < lengths[:, None]
    before = torch.nn.functional.pad(prefix, (1, 0))[:, :-1]
    chained = prefix == before + mix(tokens, at)
    tip = prefix.gather(1, (lengths.long() - 1).clamp(min=0)[:, None])[:, 0]
    return (held & ~chained).any(1) | ((lengths > 0) & (tip != log.tip))
