"""Filters of a law over tokens without a sort of the vocabulary, and draws without noise for all of it.

On a CPU most of a row is never looked at one by one: the largest token of each group of 32 says which groups can hold
any of the top k, or any that min-p keeps; and the nucleus is found by a few sums over the row, each nearer its edge.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ..ops.sampling import draw, exponentials, first_of, keep_top, scaled_down, sum_of_larger, winner
from ..ops.widen import wide
from ..target import EVERY

LONG = 2**13
"""Tokens from which on a row is worth a turn of its own."""

GROUP = 32
"""Tokens of which one look at the largest tells whether any matters."""

Search = Callable[[Tensor, Tensor], Tensor]
"""Takes weights [rows choices] in 0..1 and limits [rows]; the least weight whose larger ones sum to less, [rows]."""


def _refuse(logits, k, p, *, largest_k, p_alone) -> str | None:
    return "searches the bits of float32 numbers; logits are torch.float64" if logits.dtype == torch.float64 else None


def _small(vocab: int) -> str | None:
    return f"takes rows of at least {LONG} tokens; these have {vocab}, and all rows at once are faster"


def _refuse_by_row(logits, k, p, *, largest_k, p_alone) -> str | None:
    if p is None or not p_alone:
        return "searches the whole vocabulary; here the top k decide"
    if logits.shape[1] < LONG:
        return _small(logits.shape[1])
    return _refuse(logits, k, p, largest_k=largest_k, p_alone=p_alone)


def _refuse_draw(logits, keys, temperature, k, p, min_p, *, largest_k, p_alone) -> str | None:
    return _refuse(logits, k, p, largest_k=largest_k, p_alone=p_alone)


def _refuse_draw_by_row(logits, keys, temperature, k, p, min_p, *, largest_k, p_alone) -> str | None:
    if logits.shape[1] < LONG:
        return _small(logits.shape[1])
    return _refuse(logits, k, p, largest_k=largest_k, p_alone=p_alone)


@keep_top.kernel("torch_search_by_row", targets=("cpu",), refuse=_refuse_by_row, host_reads=True)
def _searched_by_row(logits, k, p, *, largest_k, p_alone):
    return _top(logits, k, p, largest_k, p_alone, _smallest_by_row)


@keep_top.kernel("torch_search", targets=EVERY, refuse=_refuse)
def _searched(logits, k, p, *, largest_k, p_alone):
    return _top(logits, k, p, largest_k, p_alone, _smallest)


@draw.kernel("torch_by_row", targets=("cpu",), refuse=_refuse_draw_by_row, host_reads=True)
def _drawn_by_row(logits, keys, temperature, k, p, min_p, *, largest_k, p_alone):
    tokens = torch.full_like(keys, -1, dtype=torch.int64)
    if largest_k and (largest_k + 1) * GROUP < logits.shape[1]:
        tokens = torch.where(k > 0, _of_list(logits, keys, temperature, k, p, min_p, largest_k), tokens)
    elif k is None and p is None and min_p is not None:
        tokens = _of_groups(logits, keys, temperature, min_p)
    for row in (tokens < 0).nonzero()[:, 0].tolist():
        at = slice(row, row + 1)
        cuts = (None if x is None else x[at] for x in (k, p, min_p))
        tokens[at] = _of_row(logits[at], keys[at], temperature[at], *cuts)
    return tokens


@draw.kernel("torch_search", targets=EVERY, refuse=_refuse_draw)
def _drawn_at_once(logits, keys, temperature, k, p, min_p, *, largest_k, p_alone):
    scaled = scaled_down(logits, temperature)
    keep = _top(scaled, k, p, largest_k, p_alone, _smallest)
    return first_of(scaled, keep if min_p is None else keep & (scaled >= min_p.log()[:, None]), keys)


def _of_list(
    logits: Tensor, keys: Tensor, temperature: Tensor, k: Tensor, p: Tensor | None, min_p: Tensor | None, most: int
) -> Tensor:
    """The tokens [rows] of rows with k in 1..`most`; -1 where tokens that are not listed equal the k-th."""
    largest, groups = _groups(logits)
    ids = _members(largest.topk(min(most + 1, groups)).indices, groups, logits.shape[1])
    top = logits.gather(1, ids).topk(most + 1)
    ids, scaled = ids.gather(1, top.indices), scaled_down(top.values, temperature)
    last = k.long().clamp(min=1)[:, None]
    unlisted = scaled.gather(1, last) >= scaled.gather(1, last - 1)
    keep = keep_top.body(scaled[:, :-1], k, p, largest_k=most, p_alone=False)
    token = _first(scaled[:, :-1], keep, min_p, keys, ids[:, :-1])
    return torch.where(unlisted[:, 0], -1, token)


def _of_groups(logits: Tensor, keys: Tensor, temperature: Tensor, min_p: Tensor) -> Tensor:
    """The tokens [rows] that min-p alone leaves to draw from; -1 for all where that is a large part of a row."""
    largest, groups = _groups(logits)
    of_groups = (wide(largest) - wide(largest.amax(-1, keepdim=True))) / temperature[:, None]
    count = int((of_groups >= min_p.log()[:, None]).sum(-1).max())
    if not 0 < count < groups // 4:
        return torch.full_like(keys, -1, dtype=torch.int64)
    ids = _members(largest.topk(count).indices, groups, logits.shape[1])
    scaled = (wide(logits.gather(1, ids)) - wide(largest.amax(-1, keepdim=True))) / temperature[:, None]
    return _first(scaled, scaled > -torch.inf, min_p, keys, ids)


def _groups(logits: Tensor) -> tuple[Tensor, int]:
    """The largest logit of each group [rows groups], and how many groups; group g has tokens g, g + groups, ..."""
    groups = -(-logits.shape[1] // GROUP)
    whole = logits.shape[1] // groups * groups
    largest = logits[:, :whole].unflatten(1, (-1, groups)).amax(1)
    rest = logits[:, whole:]
    if rest.shape[1]:
        largest[:, : rest.shape[1]] = torch.maximum(largest[:, : rest.shape[1]], rest)
    return largest, groups


def _members(groups: Tensor, count: int, vocab: int) -> Tensor:
    """The ids [rows members] of the tokens in `groups` [rows chosen], of `count` groups."""
    ids = groups[:, None] + torch.arange(0, vocab, count, device=groups.device)[:, None]
    # Short groups repeat their first token.
    return torch.where(ids < vocab, ids, groups[:, None]).flatten(1)


def _first(scaled: Tensor, keep: Tensor, min_p: Tensor | None, keys: Tensor, ids: Tensor) -> Tensor:
    """The winner [rows] of the race among those of `ids` [rows choices] that are kept, -1 of none."""
    if min_p is not None:
        keep = keep & (scaled >= min_p.log()[:, None])
    row, at = keep.nonzero().unbind(1)
    numbers = exponentials(keys[row], ids[row, at]) / scaled[row, at].exp()
    at = winner(torch.full_like(scaled, torch.inf).index_put_((row, at), numbers))
    return torch.where(at < 0, at, ids.gather(1, at.clamp(min=0)[:, None])[:, 0])


def _of_row(
    logits: Tensor, key: Tensor, temperature: Tensor, k: Tensor | None, p: Tensor | None, min_p: Tensor | None
) -> Tensor:
    """The token [1] of one row, which stays in cache, with noise for the tokens that are kept alone."""
    scaled = scaled_down(logits, temperature)
    most = 0 if k is None else int(k)
    shared = p is not None and bool(p < 1)
    if not (most or shared) and min_p is None:
        return first_of(scaled, torch.ones_like(scaled, dtype=torch.bool), key)
    keep = _top(scaled, k if most else None, p if shared else None, most, not most, _smallest_by_row)
    if min_p is not None:
        keep &= scaled >= min_p.log()
    kept = torch.from_numpy(np.flatnonzero(keep.numpy()))  # Torch takes several times as long
    if not len(kept):
        return torch.full_like(key, -1)
    at = winner((exponentials(key, kept) / scaled[0, kept].exp())[None])
    return torch.where(at < 0, at, kept[at])


def _top(logits: Tensor, k: Tensor | None, p: Tensor | None, largest_k: int, p_alone: bool, search: Search) -> Tensor:
    logits = wide(logits)
    largest = logits.amax(-1, keepdim=True)
    if k is None and p is not None:
        weights = (logits - largest).exp()
        return weights >= search(weights, torch.where(p < 1, p * weights.sum(-1), torch.inf))[:, None]
    least, top = torch.full_like(largest, -torch.inf), logits[:, :0]
    if k is not None and largest_k:
        top = logits.topk(min(largest_k, logits.shape[1])).values
        kth = top.gather(-1, k.long().clamp(1, top.shape[1])[:, None] - 1)
        least = torch.where(k[:, None] > 0, kth, least)
    keep = logits >= least
    if p is None:
        return keep
    if p_alone:
        weights = torch.where(keep, logits - largest, -torch.inf).exp()
        limit = torch.where(p < 1, p * weights.sum(-1), torch.inf)
        return keep & (weights >= search(weights, limit)[:, None])
    listed = top >= least
    weights = torch.where(listed, top - largest, -torch.inf).exp()
    # Tokens equal to the k-th may be more than the list has; what is larger than some token is all in the list.
    unlisted = (keep.sum(-1, dtype=torch.int32) - listed.sum(-1)) * (least - largest).exp()[:, 0]
    stays = sum_of_larger(weights) < (p * (weights.sum(-1) + unlisted))[:, None]
    lowest = torch.where(stays, top, torch.inf).amin(-1, keepdim=True)
    return logits >= torch.where(p[:, None] < 1, torch.maximum(least, lowest), least)


def _smallest(weights: Tensor, limit: Tensor) -> Tensor:
    """A `Search` of all rows at once.

    Non-negative floats order as their bit patterns do, so 30 halvings of the patterns find the weight without a sort:
    the loop counts the patterns that are too small, from the highest bit down.
    """
    count = torch.zeros_like(limit, dtype=torch.int32)
    for bit in range(29, -1, -1):
        trial = count + (1 << bit)
        larger = torch.where(weights > (trial - 1).view(torch.float32)[:, None], weights, 0).sum(-1)
        count = torch.where(larger < limit, count, trial)
    return count.view(torch.float32)


def _smallest_by_row(weights: Tensor, limit: Tensor) -> Tensor:
    """The same of the same sums, a row at a time, with fewer of them."""
    rows = zip(weights.split(1), limit.tolist(), strict=True)
    found = [_RowSearch(row, most).smallest() for row, most in rows]
    return torch.tensor(found, dtype=torch.float32, device=weights.device)


class _RowSearch:
    """One row of a `Search`. The sum of larger weights is at least the limit at `low`, and below it at `high`."""

    TRIES = 24

    def __init__(self, weights: Tensor, limit: float) -> None:
        self.weights, self.limit = weights, limit
        self.room = torch.empty_like(weights)
        self.whole = self.larger(0.0)
        self.low, self.high, self.at_low, self.at_high = 0.0, 1.0, self.whole, 0.0

    def larger(self, than: float) -> float:
        """The sum of larger weights."""
        torch.ops.aten.threshold.out(self.weights, than, 0, out=self.room)
        return self.room.sum(-1).item()

    def next(self, after: float) -> float:
        """The least weight above `after`."""
        torch.ops.aten.threshold.out(self.weights, after, torch.inf, out=self.room)
        return self.room.amin().item()

    def smallest(self) -> float:
        """Guesses, each from what the sums at both ends say; then halvings of bit patterns, if there are still many."""
        if not self.at_low >= self.limit or math.isinf(self.limit):
            return 0.0
        # Weights below this have less, together, than what the share leaves out.
        self.tried(0.9 * (self.at_low - self.limit) / self.weights.shape[1])
        around = self.guessed()
        self.tried(min(around * 1.1, self.high))
        self.tried(max(around / 1.1, self.low))
        evenly, empty = True, False
        for _ in range(self.TRIES):
            if empty or self.at_low - self.at_high <= 2 * self.high:
                weight = self.next(self.low)
                if self.tried(weight) < self.limit:
                    return weight
            ends, apart = (self.at_low, self.at_high), self.patterns()
            empty = self.tried(self.between() if evenly else self.middle()) in ends
            evenly = not evenly or 2 * self.patterns() < apart
        return self.halved()

    def guessed(self) -> float:
        """About where the limit is: by the largest few weights, or as if the row were as a few thousand of its own."""
        largest, groups = _groups(self.weights)
        first = largest[0].topk(min(64, groups)).values
        sums, share = first.cumsum(0), self.limit
        if sums[-1] < self.limit:
            first = self.weights[0, :: max(1, self.weights.shape[1] // 4096)].sort(descending=True).values
            sums = first.cumsum(0)
            share = sums[-1].item() * (self.limit / self.whole)
        return first[int((sums < share).sum().clamp(max=len(first) - 1))].item()

    def patterns(self) -> int:
        """How many bit patterns the ends are apart."""
        return _bits_of(self.high) - _bits_of(self.low)

    def tried(self, weight: float) -> float:
        """The sum of what is larger than `weight`, which becomes an end."""
        found = self.larger(weight)
        if found >= self.limit:
            self.low, self.at_low = weight, found
        else:
            self.high, self.at_high = weight, found
        return found

    def between(self) -> float:
        """Where the limit would be if the sum fell evenly with the bit pattern."""
        low, high = _bits_of(self.low), _bits_of(self.high)
        share = (self.at_low - self.limit) / (self.at_low - self.at_high)
        return _float_of(min(max(low + int(share * (high - low)), low), high))

    def middle(self) -> float:
        """Halfway between the bit patterns."""
        return _float_of((_bits_of(self.low) + _bits_of(self.high)) // 2)

    def halved(self) -> float:
        """The answer by halvings alone."""
        while self.patterns() > 1:
            self.tried(self.middle())
        return self.high


def _bits_of(number: float) -> int:
    return struct.unpack("i", struct.pack("f", number))[0]


def _float_of(bits: int) -> float:
    return struct.unpack("f", struct.pack("i", bits))[0]
