"""Sampling: from logits to tokens, as one pure function of logits, settings and counters.

The noise of a draw is a hash of (seed, request, position, token) and of nothing else, so a token does not depend on
which rows share a batch, in which order, how a batch is padded, or whether a draft proposed it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from params.tree import static, tree

from .token_log import mix


@dataclass(frozen=True)
class Sampling:
    """How to pick tokens. `temperature` 0 is greedy: the largest logit, the lowest id among equals.

    Filters work on the law after temperature, in this order, each on what the one before left, renormalised:
    `top_k` keeps a token if fewer than k are larger (0: off); `top_p` keeps it if the mass of larger ones is below
    top_p (1: off), so the largest always stays; `min_p` keeps it if its probability is at least min_p times the
    largest (0: off). Equal tokens stay or go together: ties at a threshold are all kept.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        def number(name: str) -> bool:
            return isinstance(getattr(self, name), Real)

        wrong = [
            f"{name} must be {wanted}, found {getattr(self, name)!r}"
            for name, wanted, fits in (
                (
                    "temperature",
                    "0 (greedy) or a positive number",
                    number("temperature") and 0 <= self.temperature < math.inf,
                ),
                ("top_k", "0 (off) or a positive integer", isinstance(self.top_k, int) and 0 <= self.top_k < 2**31),
                ("top_p", "above 0 and at most 1 (off)", number("top_p") and 0 < self.top_p <= 1),
                ("min_p", "in 0 (off)..1", number("min_p") and 0 <= self.min_p <= 1),
                ("seed", "an integer of 64 bits", isinstance(self.seed, int) and -(2**63) <= self.seed < 2**63),
            )
            if not fits
        ]
        if wrong:
            raise ValueError("Sampling: " + "; ".join(wrong))


@tree
class RowSampling:
    """Settings of each row of a batch. `largest_k` and the flags are what the host knows of all rows together."""

    temperature: Float[Tensor, " rows"]
    top_k: Int[Tensor, " rows"]
    top_p: Float[Tensor, " rows"]
    min_p: Float[Tensor, " rows"]
    seed: Int[Tensor, " rows"]
    greedy: bool = static()
    largest_k: int = static()
    top_p_on: bool = static()
    top_p_alone: bool = static()

    @staticmethod
    def of(rows: Sequence[Sampling], device: torch.device | str = "cpu") -> RowSampling:
        """One `Sampling` a row."""
        settings = [[row.temperature, row.top_p, row.min_p] for row in rows]
        numbers = torch.tensor(settings, dtype=torch.float32).reshape(-1, 3).to(device)
        whole = torch.tensor([[row.top_k, row.seed] for row in rows], dtype=torch.int64).reshape(-1, 2).to(device)
        nucleus = [row for row in rows if row.temperature > 0 and row.top_p < 1]
        return RowSampling(
            temperature=numbers[:, 0], top_k=whole[:, 0], top_p=numbers[:, 1], min_p=numbers[:, 2], seed=whole[:, 1],
            greedy=all(row.temperature == 0 for row in rows),
            largest_k=max((row.top_k for row in rows if row.temperature > 0), default=0),
            top_p_on=bool(nucleus),
            top_p_alone=any(row.top_k == 0 for row in nucleus),
        )  # fmt: skip


def sample(
    logits: Float[Tensor, "rows vocab"],
    sampling: Sampling | RowSampling,
    requests: Int[Tensor, " rows"],
    positions: Int[Tensor, " rows"],
) -> Int[Tensor, " rows"]:
    """A token for each row of logits, by the row's settings; float32 inside, nothing is read on the host.

    `positions` are the places in their sequences that the tokens will take; `requests` tell sequences with one seed
    apart. A logit of -inf forbids its token. A row whose largest logit is NaN or infinite gives -1.
    """
    if isinstance(sampling, Sampling):
        sampling = RowSampling.of([sampling] * logits.shape[0], logits.device)
    tokens = logits.argmax(-1)
    largest = logits.gather(-1, tokens[:, None]).float()
    if not sampling.greedy:
        scaled = _scaled(logits, largest, sampling)
        drawn = _draw(scaled, kept(scaled, sampling), sampling.seed, requests, positions)
        tokens = torch.where(sampling.temperature > 0, drawn, tokens)
    return torch.where(largest[:, 0].isfinite(), tokens, -1)


def law(logits: Float[Tensor, "rows vocab"], sampling: RowSampling) -> Float[Tensor, "rows vocab"]:
    """The probabilities that `sample` draws from. A greedy row has all its mass on one token."""
    greedy = logits.argmax(-1)
    scaled = _scaled(logits, logits.gather(-1, greedy[:, None]).float(), sampling)
    drawn = torch.where(kept(scaled, sampling), scaled, -torch.inf).softmax(-1)
    certain = torch.zeros_like(drawn).scatter(-1, greedy[:, None], 1)
    return torch.where(sampling.temperature[:, None] > 0, drawn, certain)


def _scaled(logits: Tensor, largest: Tensor, sampling: RowSampling) -> Float[Tensor, "rows vocab"]:
    """Logits below the largest, over temperature: at most 0, so that no temperature overflows."""
    temperature = torch.where(sampling.temperature > 0, sampling.temperature, 1)
    return (logits.float() - largest) / temperature[:, None]


def kept(scaled: Float[Tensor, "rows vocab"], sampling: RowSampling) -> Bool[Tensor, "rows vocab"]:
    """The tokens that the filters leave, from logits divided by temperature with the largest at 0."""
    keep = scaled >= sampling.min_p.log()[:, None]
    top = scaled[:, :0]
    if sampling.largest_k:
        top = scaled.topk(min(sampling.largest_k, scaled.shape[1])).values
        at = sampling.top_k.clamp(1, top.shape[1])[:, None] - 1
        least = torch.where(sampling.top_k[:, None] > 0, top.gather(-1, at), -torch.inf)
        keep, scaled, top = keep & (scaled >= least), *(x.masked_fill(x < least, -torch.inf) for x in (scaled, top))
    if sampling.top_p_on:
        weights = scaled.exp()
        limit = torch.where(sampling.top_p < 1, sampling.top_p * weights.sum(-1), torch.inf)
        # With top-k in every row, what decides is among the top: tokens below it have no mass.
        keep = keep & (weights >= _smallest_kept(weights if sampling.top_p_alone else top.exp(), limit)[:, None])
    return keep


def _smallest_kept(weights: Float[Tensor, "rows choices"], limit: Float[Tensor, " rows"]) -> Float[Tensor, " rows"]:
    """The least value, in 0..1, whose larger weights sum to less than `limit`.

    Non-negative floats order as their bit patterns do, so 30 halvings of the patterns find it without a sort: the
    loop counts the patterns that are too small, from the highest bit down.
    """
    count = torch.zeros_like(limit, dtype=torch.int32)
    for bit in range(29, -1, -1):
        trial = count + (1 << bit)
        larger = torch.where(weights > (trial - 1).view(torch.float32)[:, None], weights, 0).sum(-1)
        count = torch.where(larger < limit, count, trial)
    return count.view(torch.float32)


def _draw(
    scaled: Float[Tensor, "rows vocab"],
    keep: Bool[Tensor, "rows vocab"],
    seeds: Int[Tensor, " rows"],
    requests: Int[Tensor, " rows"],
    positions: Int[Tensor, " rows"],
) -> Int[Tensor, " rows"]:
    """The winner of an exponential race: token v arrives at noise / weight, so it is first by its share of weight."""
    arrival = noise(seeds, requests, positions, scaled.shape[1]) / scaled.exp()
    return torch.where(keep, arrival, torch.inf).argmin(-1)


def noise(
    seeds: Int[Tensor, " rows"], requests: Int[Tensor, " rows"], positions: Int[Tensor, " rows"], vocab: int
) -> Float[Tensor, "rows vocab"]:
    """Independent standard exponential numbers, one for each (seed, request, position, token); positive and finite."""
    keys = mix(mix(seeds, requests), positions)
    bits = mix(keys[:, None], torch.arange(vocab, device=keys.device))
    # 40 bits, half a step in: never 0, and fine steps near 0, where races are won. The largest would round to 1.
    uniform = ((((bits >> 24) & 0xFF_FFFF_FFFF).float() + 0.5) * 2**-40).clamp(max=1 - 2**-24)
    return -torch.log1p(-uniform)
