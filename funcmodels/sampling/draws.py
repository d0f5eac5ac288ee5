"""Sampling: from logits to tokens, as one pure function of logits, settings and counters.

The order is: logit bias, penalties, temperature, top-k, top-p, min-p, draw. The noise of a draw is a hash of (seed,
request, position, token) and of nothing else, so a token does not depend on which rows share a batch, in which order,
how a batch is padded, or whether an argmax draft proposed it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lowering import ops
from lowering.ops.sampling import exponentials, first_of, mix, scaled_down, winner
from lowering.ops.widen import wide
from params.tree import tree

from .penalties import TokenCounts
from .settings import RowSampling, Sampling


def adjusted(
    logits: Float[Tensor, "rows window vocab"],
    sampling: RowSampling,
    counts: TokenCounts | None,
    drafts: Int[Tensor, "rows drafts"],
) -> tuple[Float[Tensor, "rows window vocab"], RowSampling]:
    """Logits with bias and penalties, each place given the drafts before it; and the settings that are left to do.

    The bias comes first, as in vLLM and transformers: what a repetition penalty scales is the logit with its bias.
    `ValueError` for penalties without counts of these rows and this vocabulary.
    """
    if sampling.bias is None and sampling.penalties is None:
        return logits, sampling
    if sampling.bias is not None:
        logits = sampling.bias.added(wide(logits))
    if sampling.penalties is not None:
        rows, _, vocab = logits.shape
        if counts is None or counts.output.shape != (rows, vocab):
            given = "none" if counts is None else f"those of {list(counts.output.shape)}"
            raise ValueError(
                f"sampling asks for penalties, which need counts of [{rows}, {vocab}] tokens, and was given {given}; "
                "make them with TokenCounts.of(prompts, vocab), and add each round's tokens"
            )
        logits = sampling.penalties.applied(wide(logits), counts, drafts)
    return logits, replace(sampling, bias=None, penalties=None)


def sample(
    logits: Float[Tensor, "rows vocab"],
    sampling: Sampling | RowSampling,
    requests: Int[Tensor, " rows"],
    positions: Int[Tensor, " rows"],
    counts: TokenCounts | None = None,
    numbers: Float[Tensor, "rows vocab"] | None = None,
) -> Int[Tensor, " rows"]:
    """A token for each row of logits, by the row's settings; float32 inside or wider, nothing is read from a device.

    `positions` are the places in their sequences that the tokens will take; `requests` tell sequences with one seed
    apart; `counts` are what penalties go by. A logit of -inf forbids its token. A row without a choice gives -1: one
    whose largest logit, after bias and penalties, is NaN or infinite.

    `numbers` are noise of your own: positive ones, which `noise` says the law of, to draw with in place of those that
    it gives for seeds, requests and positions. The token with the least number over its weight wins.

    Raises `ValueError` for settings, counters or numbers of other rows than the logits, which nothing broadcasts to.
    """
    logits, sampling = _adjusted_rows(logits, sampling, counts)
    _check_counters(logits.shape[0], requests=requests, positions=positions)
    if numbers is not None and numbers.shape != logits.shape:
        raise ValueError(
            f"sample: numbers of {list(numbers.shape)} for logits of {list(logits.shape)}; give one for each logit"
        )
    if sampling.greedy:
        tokens = logits.argmax(-1)
    elif numbers is not None:
        tokens = first_by(law_logits(logits, sampling), numbers)
    else:
        keys = keys_of(sampling.seed, requests, positions)
        temperature, k, p, min_p, hints = sampling.filters()
        tokens = ops.draw(logits, keys, temperature, k, p, min_p, **hints)
        if sampling.mixed:
            tokens = torch.where(sampling.temperature == 0, logits.argmax(-1), tokens)
    return torch.where(finite(logits), tokens, -1)


def law(
    logits: Float[Tensor, "rows vocab"], sampling: RowSampling, counts: TokenCounts | None = None
) -> Float[Tensor, "rows vocab"]:
    """The probabilities that `sample` draws from; a greedy row has all its mass on one token. Raises as it does."""
    return law_logits(*_adjusted_rows(logits, sampling, counts)).softmax(-1)


def _adjusted_rows(
    logits: Tensor, sampling: Sampling | RowSampling, counts: TokenCounts | None
) -> tuple[Tensor, RowSampling]:
    if logits.ndim != 2:
        raise ValueError(f"logits are {list(logits.shape)}; give [rows, vocab], logits[None] of a single row")
    if isinstance(sampling, Sampling):
        sampling = RowSampling.of([sampling] * logits.shape[0], logits.device)
    if not isinstance(sampling, RowSampling):
        raise TypeError(f"sampling must be a Sampling or a RowSampling, found {sampling!r:.100}")
    if sampling.seed.shape[0] != logits.shape[0]:
        raise ValueError(
            f"settings are of {sampling.seed.shape[0]} rows, logits of {logits.shape[0]}; give one Sampling a row to "
            "RowSampling.of"
        )
    none = torch.zeros(logits.shape[0], 0, dtype=torch.int64, device=logits.device)
    changed, sampling = adjusted(logits[:, None], sampling, counts, none)
    return changed[:, 0], sampling


def _check_counters(rows: int, **counters: Tensor) -> None:
    """`ValueError` for counters of noise that are not one a row, `TypeError` for what are no integers."""
    for name, given in counters.items():
        if given.is_floating_point() or given.dtype == torch.bool:
            raise TypeError(f"sample: {name} must be integers, found {given.dtype}")
        if given.shape != (rows,):
            raise ValueError(f"sample: {name} are {list(given.shape)}, and logits have {rows} rows; give one a row")


def finite(logits: Float[Tensor, "rows vocab"]) -> Bool[Tensor, " rows"]:
    """Whether a row's largest logit is a finite number."""
    return logits.amax(-1).isfinite()


def law_logits(logits: Float[Tensor, "rows vocab"], sampling: RowSampling) -> Float[Tensor, "rows vocab"]:
    """Logits whose softmax is the law: the largest is 0, filtered tokens have -inf, as have all but one when greedy.

    Bias and penalties must have been applied.
    """
    temperature, k, p, min_p, hints = sampling.filters()
    scaled = scaled_down(logits, temperature)
    keep = scaled >= -torch.inf
    if k is not None or p is not None:
        keep = ops.keep_top(scaled, k, p, **hints)
    if min_p is not None:
        keep = keep & (scaled >= min_p.log()[:, None])
    if sampling.greedy or sampling.mixed:
        is_best = torch.arange(logits.shape[1], device=logits.device) == logits.argmax(-1, keepdim=True)
        keep = torch.where(sampling.temperature[:, None] == 0, is_best, keep)
    return torch.where(keep, scaled, -torch.inf)


def first_by(scaled: Float[Tensor, "rows vocab"], numbers: Float[Tensor, "rows vocab"]) -> Int[Tensor, " rows"]:
    """What `first_of` gives for these numbers; -inf forbids a token."""
    return winner(torch.where(scaled > -torch.inf, numbers / scaled.exp(), torch.inf))


DRAFT, COIN = -1, -2
"""Streams of noise beside that of `sample`. Counters of tokens start at 0, so theirs are never met by a token's."""


def keys_of(seeds: Tensor, requests: Tensor, positions: Tensor, stream: int | None = None) -> Tensor:
    """What the noise of a place is keyed by, in the stream of `sample` or in another; the counters broadcast."""
    keys = mix(mix(seeds, requests), positions)
    return keys if stream is None else mix(keys, torch.full_like(keys, stream))


def noise(
    seeds: Int[Tensor, " rows"], requests: Int[Tensor, " rows"], positions: Int[Tensor, " rows"], vocab: int
) -> Float[Tensor, "rows vocab"]:
    """What `sample` draws with: the standard exponential number of each (seed, request, position, token).

    Independent numbers of that law, such as those of `torch.Tensor.exponential_`, give independent draws in its place.
    """
    keys = keys_of(seeds, requests, positions)
    return exponentials(keys[:, None], torch.arange(vocab, device=keys.device))


def coins(
    seeds: Int[Tensor, " rows"], requests: Int[Tensor, " rows"], positions: Int[Tensor, "rows drafts"]
) -> Float[Tensor, "rows drafts"]:
    """Independent uniform numbers in [0, 1), one for each (seed, request, position)."""
    bits = keys_of(seeds[:, None], requests[:, None], positions, COIN)
    return ((bits >> 40) & 0xFF_FFFF).float() * 2**-24  # 24 bits are exact in float32: none rounds to 1


@tree
class DraftNoise:
    """What sampled drafts are drawn with: settings and request of each row, those that `verify` is given.

    The noise is a hash of (seed, request, position, token) as in `sample`, in a stream of its own. In its place go
    `numbers`, those of `sample`, one for each draft and token; `start` is then the place of each row's first draft
    (`state.lengths + 1`).
    """

    sampling: RowSampling
    requests: Int[Tensor, " rows"]
    numbers: Float[Tensor, "rows drafts vocab"] | None = None
    start: Int[Tensor, " rows"] | None = None

    def given(self, positions: Int[Tensor, " rows"]) -> Float[Tensor, "rows vocab"] | None:
        """The numbers of the drafts at `positions`, None if none were given. `ValueError` where `start` is not."""
        if self.numbers is None:
            return None
        if self.start is None:
            raise ValueError("noise: numbers need the place of each row's first draft; give start=state.lengths + 1")
        at = (positions - self.start).long()[:, None, None]
        return self.numbers.gather(1, at.expand(-1, 1, self.numbers.shape[2]))[:, 0]

    def draw(
        self, logits: Float[Tensor, "rows vocab"], positions: Int[Tensor, " rows"]
    ) -> tuple[Int[Tensor, " rows"], Float[Tensor, "rows vocab"] | None]:
        """A token a row for the places `positions`, and logits whose softmax is the law it was drawn from.

        That law has the row's temperature, filters and bias, not its penalties. A greedy row's is all on one token.
        None in its place says that the token is to be compared with the model's own.
        """
        changed, settings = _adjusted_rows(logits, replace(self.sampling, penalties=None), None)
        kept_logits = law_logits(changed, settings)
        numbers = self.given(positions)
        if numbers is None:
            keys = keys_of(settings.seed, self.requests, positions, DRAFT)
            tokens = first_of(kept_logits, kept_logits > -torch.inf, keys)
        else:
            tokens = first_by(kept_logits, numbers)
        # A row without a choice proposes some token: that it has none is for `verify` to say.
        return tokens.clamp(min=0), kept_logits


@tree
class CoupledNoise(DraftNoise):
    """The noise that `sample` will draw the model's own token of each place with, to guess that token by.

    Where the draft's law is like the model's, one noise picks one token from both. What is proposed is compared and
    never accepted for its law, so the tokens stay those of plain decoding (Daliri et al. 2024, drafter-invariant).
    """

    def draw(
        self, logits: Float[Tensor, "rows vocab"], positions: Int[Tensor, " rows"]
    ) -> tuple[Int[Tensor, " rows"], Float[Tensor, "rows vocab"] | None]:
        """What `sample` gives for these logits, without penalties; the largest of a greedy row."""
        settings, numbers = replace(self.sampling, penalties=None), self.given(positions)
        tokens = sample(logits, settings, self.requests, positions, numbers=numbers)
        return tokens.clamp(min=0), None
