"""Checked states: a log of which token, after which prefix, wrote each slot of the pool.

Two continuations of one state write the same slots; the one that wrote first is then stale. The log keeps a hash of the
token and of the prefix ending with it a slot, and the hash of its newest prefix a row, so that `stale_rows` can tell. A
prefix hash is the sum of its tokens' hashes, in wrapping int64.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from params.tree import tree


@tree
class TokenLog:
    """Token and prefix hash of each slot, and each row's prefix hash; `steps` are those after its pending tokens."""

    token: Int[Tensor, "pages page_size"]
    prefix: Int[Tensor, "pages page_size"]
    tip: Int[Tensor, " rows"]
    steps: Int[Tensor, "rows kept"] | None = None

    def after(self, accepted: Int[Tensor, " rows"]) -> TokenLog:
        """The log when the first `accepted` of each row's pending tokens count. Reads no slots: others may own them."""
        assert self.steps is not None
        return TokenLog(self.token, self.prefix, self.steps.gather(1, accepted.long()[:, None])[:, 0])


def written(
    log: TokenLog, hashes: Tensor, slots: Tensor, row: Tensor, query_start: Tensor, kept: int | None
) -> TokenLog:
    """The log with new tokens' hashes stored at their slots (in place, as the pages are) and the rows' new tips.

    `kept` is the most tokens of any row when the state becomes pending, else None.
    """
    rows = log.tip.shape[0]
    hashes = torch.where(row < rows, hashes, 0)
    total = F.pad(hashes.cumsum(0), (1, 0))
    start, end = total[query_start[:-1].long()], total[query_start[1:].long()]
    base = F.pad(log.tip - start, (0, 1))
    log.token.view(-1).index_copy_(0, slots, hashes)
    log.prefix.view(-1).index_copy_(0, slots, base[row] + total[1:])
    steps = None
    if kept is not None:
        at = query_start[:-1, None] + torch.arange(kept + 1, device=row.device)
        steps = base[:-1, None] + total[torch.minimum(at, query_start[1:, None])]
    return TokenLog(log.token, log.prefix, log.tip + end - start, steps)


def stale_rows(log: TokenLog, page_table: Tensor, lengths: Tensor) -> Bool[Tensor, " rows"]:
    """True for each row whose slots no longer hold the tokens, each after the prefix, that the row was built from."""
    token, prefix = (x[page_table.long()].flatten(1) for x in (log.token, log.prefix))
    held = torch.arange(token.shape[1], device=token.device) < lengths[:, None]
    chained = prefix == F.pad(prefix, (1, 0))[:, :-1] + token
    tip = prefix.gather(1, (lengths.long() - 1).clamp(min=0)[:, None])[:, 0]
    return (held & ~chained).any(1) | ((lengths > 0) & (tip != log.tip))
