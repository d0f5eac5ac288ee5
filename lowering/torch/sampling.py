"""Filters of a law over tokens without a sort of the vocabulary, and draws without noise for all of it."""

from __future__ import annotations

import struct
from collections.abc import Callable

import torch
from torch import Tensor

from ..ops.sampling import draw, exponentials, first_of, keep_top, scaled_down, sum_of_larger
from ..ops.widen import wide
from ..target import EVERY

LONG = 2**13
"""Tokens from which on a row is worth a turn of its own."""

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
    ks, ps = (len(keys) * [off] if x is None else x.tolist() for x, off in ((k, 0), (p, 1)))
    tokens = []
    for row, (most, share) in enumerate(zip(ks, ps, strict=True)):
        at = slice(row, row + 1)
        logit, cuts = logits[at], (None if x is None else x[at] for x in (p, min_p))
        tokens.append(_drawn(logit, keys[at], temperature[at], most, share < 1, *cuts))
    return torch.cat(tokens) if tokens else keys.new_zeros(0, dtype=torch.int64)


@draw.kernel("torch_search", targets=EVERY, refuse=_refuse_draw)
def _drawn_at_once(logits, keys, temperature, k, p, min_p, *, largest_k, p_alone):
    scaled = scaled_down(logits, temperature)
    keep = _top(scaled, k, p, largest_k, p_alone, _smallest)
    return first_of(scaled, keep if min_p is None else keep & (scaled >= min_p.log()[:, None]), keys)


def _drawn(
    logits: Tensor, key: Tensor, temperature: Tensor, k: int, shared: bool, p: Tensor | None, min_p: Tensor | None
) -> Tensor:
    """The token [1] of one row, which stays in cache, with noise for the tokens that are kept alone."""
    ids, scaled = _listed(logits, temperature, k) if k else (None, logits)
    if ids is None:
        scaled = scaled_down(logits, temperature)
        if not (k or shared) and min_p is None:
            return first_of(scaled, torch.ones_like(scaled, dtype=torch.bool), key)
        keep = _top(scaled, torch.full_like(key, k) if k else None, p if shared else None, k, not k, _smallest_by_row)
    else:
        keep = keep_top.body(scaled, None, p if shared else None, largest_k=0, p_alone=True)
    if min_p is not None:
        keep &= scaled >= min_p.log()
    at = keep[0].nonzero()[:, 0]
    if not len(at):  # the row holds no number
        return torch.zeros_like(key, dtype=torch.int64)
    kept = at if ids is None else ids[at]
    first = (exponentials(key, kept) / scaled[0, at].exp()).argmin()
    return kept[first][None]


def _listed(logits: Tensor, temperature: Tensor, k: int) -> tuple[Tensor | None, Tensor]:
    """Ids of the k largest, and their scaled logits [1 k]; no ids where tokens beyond them equal the k-th."""
    top = logits.topk(min(k + 1, logits.shape[1]))
    scaled = scaled_down(top.values, temperature)
    if k >= logits.shape[1]:
        return top.indices[0], scaled
    return top.indices[0, :k] if scaled[0, k] < scaled[0, k - 1] else None, scaled[:, :k]


def _top(logits: Tensor, k: Tensor | None, p: Tensor | None, largest_k: int, p_alone: bool, search: Search) -> Tensor:
    logits = wide(logits)
    largest = logits.amax(-1, keepdim=True)
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
    """The same sums in the same order, a row at a time: a row stays in cache through all halvings."""
    found = []
    room = torch.empty_like(weights[:1])
    for row, most in zip(weights.split(1), limit.tolist(), strict=True):
        count = 0
        for bit in range(29, -1, -1):
            trial = count + (1 << bit)
            torch.ops.aten.threshold.out(row, _float_of(trial - 1), 0, out=room)
            if room.sum(-1).item() >= most:
                count = trial
        found.append(_float_of(count))
    return torch.tensor(found, dtype=torch.float32, device=weights.device)


def _float_of(bits: int) -> float:
    return struct.unpack("f", struct.pack("i", bits))[0]
