"""Filters of a law over tokens, and the draw from what they leave."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..host import tracing
from ..op import op
from .widen import wide


@op
def keep_top(
    logits: Float[Tensor, "rows vocab"],
    k: Int[Tensor, " rows"] | None,
    p: Float[Tensor, " rows"] | None,
    *,
    largest_k: int,
    p_alone: bool,
) -> Bool[Tensor, "rows vocab"]:
    """The tokens that top-k, then top-p leave of each row.

    Top-k keeps a token if fewer than k are larger; k = 0 keeps all, as does `k=None`. Top-p works on what top-k left
    and keeps a token if the larger ones have less than the share p of that mass; p = 1 keeps all, as does `p=None`.
    Equal tokens stay or go together, so ties at a threshold are all kept, and the largest always stays.
    `largest_k` is at least any k, and `p_alone` tells whether some row with p < 1 has k = 0: hints for kernels.
    """
    ordered = wide(logits).sort(-1, descending=True).values
    least = torch.full_like(ordered[:, :1], -torch.inf)
    if k is not None:
        kth = ordered.gather(-1, k.long().clamp(1, logits.shape[1])[:, None] - 1)
        least = torch.where(k[:, None] > 0, kth, least)
    if p is not None:
        weights = (torch.where(ordered >= least, ordered, -torch.inf) - ordered[:, :1]).exp()
        stays = sum_of_larger(weights) < torch.where(p < 1, p * weights.sum(-1), torch.inf)[:, None]
        least = torch.maximum(least, torch.where(stays, ordered, torch.inf).amin(-1, keepdim=True))
    return wide(logits) >= least


def sum_of_larger(weights: Float[Tensor, "rows choices"]) -> Float[Tensor, "rows choices"]:
    """Of numbers in falling order, the sum of those larger than each; equal ones share one sum."""
    before = F.pad(weights.cumsum(-1), (1, 0))[:, :-1]
    begins = F.pad(weights[:, 1:] < weights[:, :-1], (1, 0))
    places = torch.arange(weights.shape[1], device=weights.device)
    return before.gather(-1, torch.where(begins, places, 0).cummax(-1).values)


@op
def draw(
    logits: Float[Tensor, "rows vocab"],
    keys: Int[Tensor, " rows"],
    temperature: Float[Tensor, " rows"],
    k: Int[Tensor, " rows"] | None,
    p: Float[Tensor, " rows"] | None,
    min_p: Float[Tensor, " rows"] | None,
    *,
    largest_k: int,
    p_alone: bool,
) -> Int[Tensor, " rows"]:
    """A token of each row: temperature (positive), `keep_top`, min-p, then a draw from what they leave.

    min-p keeps a token with at least min_p times the probability of the largest. The draw is an exponential race:
    token v arrives at `exponentials(key, v)` over its weight, so it is first by its share of the weight; what it gives
    depends on the row alone. A row that is left no token, as one whose largest logit is no finite number, gives -1.
    """
    scaled = scaled_down(logits, temperature)
    keep = keep_top.body(scaled, k, p, largest_k=largest_k, p_alone=p_alone)
    return first_of(scaled, keep if min_p is None else keep & (scaled >= min_p.log()[:, None]), keys)


def scaled_down(
    logits: Float[Tensor, "rows vocab"], temperature: Float[Tensor, " rows"]
) -> Float[Tensor, "rows vocab"]:
    """Logits below the largest, over temperature: at most 0, so that no temperature overflows."""
    return (wide(logits) - wide(logits.amax(-1, keepdim=True))) / temperature[:, None]


def first_of(
    scaled: Float[Tensor, "rows vocab"], keep: Bool[Tensor, "rows vocab"], keys: Int[Tensor, " rows"]
) -> Int[Tensor, " rows"]:
    """The winner of the race of all tokens in `keep`, by logits of at most 0, the largest of which is 0; -1 of none."""
    numbers = exponentials(keys[:, None], torch.arange(scaled.shape[1], device=scaled.device))
    return winner(torch.where(keep, numbers / scaled.exp(), torch.inf))


def winner(arrivals: Float[Tensor, "rows choices"]) -> Int[Tensor, " rows"]:
    """The place of each row's first arrival; -1 where none arrives, or a NaN is among them."""
    first = arrivals.argmin(-1)
    return torch.where(arrivals.gather(-1, first[:, None])[:, 0].isfinite(), first, -1)


def mix(first: Tensor, second: Tensor) -> Tensor:
    """A 64-bit hash of two integers: the finaliser of the SplitMix64 generator."""
    x = first.long() * -7046029254386353131 + second.long() * -4417276706812531889 + 1
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def exponentials(keys: Tensor, tokens: Tensor) -> Tensor:
    """Independent standard exponential numbers, one for each pair of key and token; positive and finite."""
    # Fused by Inductor 2.13 on a CPU, lanes past the end of a row of tokens won races: there the hash stays apart.
    if tracing() and keys.device.type == "cpu":
        return _apart(keys, tokens)
    return _exponentials(keys, tokens)


def _exponentials(keys: Tensor, tokens: Tensor) -> Tensor:
    bits = mix(keys, tokens)
    # 40 bits, half a step in: never 0, and fine steps near 0, where races are won. The largest would round to 1.
    uniform = ((((bits >> 24) & 0xFF_FFFF_FFFF).float() + 0.5) * 2**-40).clamp(max=1 - 2**-24)
    return -torch.log1p(-uniform)


_apart = torch.library.custom_op(
    "funcmodels::exponentials", _exponentials, mutates_args=(), schema="(Tensor keys, Tensor tokens) -> Tensor"
)


@_apart.register_fake
def _shape_of_exponentials(keys: Tensor, tokens: Tensor) -> Tensor:
    return torch.empty(torch.broadcast_shapes(keys.shape, tokens.shape), device=keys.device)
