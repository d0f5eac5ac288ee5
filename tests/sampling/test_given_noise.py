"""Noise that the caller brings: draws, drafts and verdicts are functions of it, told by float64 arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import funcmodels as fm
from tests.oracle.states import refuses

ROWS, DRAFTS, VOCAB = 40, 3, 17
SETTINGS = [
    fm.Sampling(1.0), fm.Sampling(0.7, top_k=5), fm.Sampling(1.3, top_p=0.8, min_p=0.02), fm.Sampling(0.0),
    fm.Sampling(1.0, presence_penalty=0.4, logit_bias=((3, 2.0),)),
]  # fmt: skip


def made(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2


def numbers_of(*shape: int, seed: int = 7) -> Tensor:
    return torch.empty(shape).exponential_(generator=torch.Generator().manual_seed(seed))


def settings() -> fm.RowSampling:
    return fm.RowSampling.of([SETTINGS[row % len(SETTINGS)] for row in range(ROWS)])


def counts() -> fm.TokenCounts:
    return fm.TokenCounts.of([[1, 2, 3]] * ROWS, VOCAB).add(torch.full((ROWS, 1), 3))


def winners(law: Tensor, numbers: Tensor) -> list[int]:
    """Of each row the token whose number over its probability is least, in float64."""
    with np.errstate(divide="ignore"):
        return (numbers.double().numpy() / law.double().numpy()).argmin(-1).tolist()


def test_the_numbers_decide() -> None:
    logits, places = made(ROWS, VOCAB, seed=1), torch.arange(ROWS)
    law = fm.law(logits, settings(), counts())
    for seed in range(20):
        numbers = numbers_of(ROWS, VOCAB, seed=seed)
        drawn = fm.sample(logits, settings(), places, places, counts(), numbers=numbers)
        assert drawn.tolist() == winners(law, numbers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_counted_numbers_given_are_the_counted_draw(dtype: torch.dtype) -> None:
    logits = made(ROWS, VOCAB, seed=2).to(dtype)
    requests, places = torch.arange(ROWS) % 3, torch.arange(ROWS)
    rows = settings()
    numbers = fm.noise(rows.seed, requests, places, VOCAB)
    given = fm.sample(logits, rows, requests, places, counts(), numbers=numbers)
    assert torch.equal(given, fm.sample(logits, rows, requests, places, counts()))


def test_a_row_without_a_choice_draws_none() -> None:
    logits = made(2, VOCAB, seed=3)
    logits[0, 4] = torch.nan
    places = torch.arange(2)
    assert fm.sample(logits, fm.Sampling(1.0), places, places, numbers=numbers_of(2, VOCAB))[0] == -1


def proposal_of(rows: fm.RowSampling, numbers: Tensor, kind: type[fm.DraftNoise]) -> fm.Proposal:
    """Drafts of random laws by `numbers`, as a draft makes them: place after place."""
    start = torch.arange(ROWS)
    noise = kind(rows, torch.arange(ROWS), numbers, start + 1)
    found = [noise.draw(made(ROWS, VOCAB, seed=10 + at), start + 1 + at) for at in range(DRAFTS)]
    laws = [law for _, law in found if law is not None]
    tokens = torch.stack([token for token, _ in found], 1)
    return fm.Proposal(torch.zeros(ROWS, dtype=torch.int64), tokens, start, torch.stack(laws, 1) if laws else None)


@pytest.mark.parametrize("kind", [fm.DraftNoise, fm.CoupledNoise])
def test_drafts_are_those_of_the_numbers(kind: type[fm.DraftNoise]) -> None:
    rows, numbers = replace(settings(), penalties=None), numbers_of(ROWS, DRAFTS, VOCAB)
    proposal = proposal_of(settings(), numbers, kind)
    for at in range(DRAFTS):
        assert proposal.tokens[:, at].tolist() == winners(fm.law(made(ROWS, VOCAB, seed=10 + at), rows), numbers[:, at])
    assert (proposal.logits is None) == (kind is fm.CoupledNoise)


def verdict_of(p: np.ndarray, q: np.ndarray, drafts: list[int], numbers: np.ndarray, coins: np.ndarray) -> list[int]:
    """One row's new tokens by rejection sampling (Leviathan et al. 2023), in float64."""
    for at, draft in enumerate(drafts):
        if coins[at] * q[at, draft] < p[at, draft]:
            continue
        rest = np.maximum(p[at] - q[at], 0)
        weights = rest if rest.sum() > 0 else p[at]
        return [*drafts[:at], int((numbers[at] / weights).argmin())]
    return [*drafts, int((numbers[-1] / p[-1]).argmin())]


def test_verdicts_are_those_of_numbers_and_coins() -> None:
    rows = fm.RowSampling.of([SETTINGS[row % 4] for row in range(ROWS)])
    proposal = proposal_of(rows, numbers_of(ROWS, DRAFTS, VOCAB, seed=3), fm.DraftNoise)
    logits = made(ROWS, DRAFTS + 1, VOCAB, seed=20)
    numbers, coins = numbers_of(ROWS, DRAFTS + 1, VOCAB, seed=4), numbers_of(ROWS, DRAFTS, seed=5) % 1
    out = fm.Output(logits.flatten(0, 1), torch.zeros(logits[..., 0].numel(), 1), {})
    verdict = fm.verify(out, proposal, rows, numbers=numbers, coins=coins)
    each = rows.repeated(DRAFTS + 1)
    p = fm.law(out.logits, each).unflatten(0, (ROWS, DRAFTS + 1)).double().numpy()
    assert proposal.logits is not None
    q = proposal.logits.double().softmax(-1).numpy()
    with np.errstate(divide="ignore"):
        for row in range(ROWS):
            own = (x[row].double().numpy() for x in (numbers, coins))
            right = verdict_of(p[row], q[row], proposal.tokens[row].tolist(), *own)
            assert verdict.tokens[row, : len(right)].tolist() == right
            assert int(verdict.accepted[row]) == len(right)
    assert len(set(verdict.accepted.tolist())) > 2


def test_compared_drafts_are_held_against_the_numbers_draws() -> None:
    """With one noise for both, drafts of the model's own law are all accepted."""
    rows = settings()
    rows = replace(rows, penalties=None)
    numbers = numbers_of(ROWS, DRAFTS + 1, VOCAB)
    proposal = proposal_of(rows, numbers[:, :DRAFTS], fm.CoupledNoise)
    logits = torch.stack([made(ROWS, VOCAB, seed=10 + at) for at in range(DRAFTS + 1)], 1)
    out = fm.Output(logits.flatten(0, 1), torch.zeros(ROWS * (DRAFTS + 1), 1), {})
    assert (fm.verify(out, proposal, rows, numbers=numbers).accepted == DRAFTS + 1).all()
    assert (fm.verify(out, proposal, rows, numbers=numbers.flip(1)).accepted < DRAFTS + 1).any()


WRONG_ROWS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "one row": (lambda: drawn_of(made(VOCAB, seed=1)), ValueError, "logits are [17]; give [rows, vocab], logits[None]"),
    "requests": (lambda: drawn_of(requests=torch.zeros(1, dtype=torch.int64)), ValueError,
                 "sample: requests are [1], and logits have 3 rows; give one a row"),
    "positions": (lambda: drawn_of(positions=torch.arange(4)), ValueError, "positions are [4], and logits have 3 rows"),
    "fractions": (lambda: drawn_of(positions=torch.ones(3)), TypeError, "sample: positions must be integers, found"),
    "settings": (lambda: drawn_of(sampling=fm.RowSampling.of([SETTINGS[0]])), ValueError,
                 "settings are of 1 rows, logits of 3; give one Sampling a row"),
    "no settings": (lambda: drawn_of(sampling=0.8), TypeError, "must be a Sampling or a RowSampling, found 0.8"),
    "law": (lambda: fm.law(made(3, VOCAB, seed=1), fm.RowSampling.of([SETTINGS[0]])), ValueError, "settings are of 1"),
    "counts": (lambda: counts().add(torch.ones(1, 2, dtype=torch.int64)), ValueError,
               "counts are of 40 rows, tokens [1, 2]; give [rows, steps]"),
    "prompt": (lambda: fm.TokenCounts.of([[1], [-1]], 9), IndexError, "row 1: token -1 is outside of the vocabulary"),
    "last": (lambda: fm.next_tokens(fm.Batch.from_lists([[1, 2], [3]]), torch.tensor([1])), ValueError,
             "next_tokens: last is torch.int64 [1], the batch has 2 rows"),
}  # fmt: skip


def drawn_of(logits: Tensor | None = None, **given: Any) -> Tensor:
    places = torch.arange(3)
    logits = made(3, VOCAB, seed=1) if logits is None else logits
    return fm.sample(logits, **{"sampling": SETTINGS[0], "requests": places, "positions": places} | given)


@pytest.mark.parametrize("name", WRONG_ROWS)
def test_rows_that_do_not_fit_do_not_broadcast(name: str) -> None:
    call, error, message = WRONG_ROWS[name]
    with refuses(error, message):
        call()


def test_noise_that_does_not_fit() -> None:
    places, logits = torch.arange(2), made(2, VOCAB, seed=1)
    with refuses(ValueError, "sample: numbers of [2, 3] for logits of [2, 17]; give one for each logit"):
        fm.sample(logits, fm.Sampling(1.0), places, places, numbers=numbers_of(2, 3))
    rows = settings()
    with refuses(ValueError, "numbers need the place of each row's first draft; give start=state.lengths + 1"):
        fm.DraftNoise(rows, torch.arange(ROWS), numbers_of(ROWS, 1, VOCAB)).draw(made(ROWS, VOCAB, seed=1), places)
    proposal = proposal_of(rows, numbers_of(ROWS, DRAFTS, VOCAB), fm.CoupledNoise)
    out = fm.Output(made(ROWS * (DRAFTS + 1), VOCAB, seed=2), torch.zeros(ROWS * (DRAFTS + 1), 1), {})
    with refuses(ValueError, "verify: coins are given, and drafts without proposal.logits are compared"):
        fm.verify(out, proposal, rows, None, counts(), coins=numbers_of(ROWS, DRAFTS))
    with refuses(ValueError, f"verify: numbers of [{ROWS}, 3, {VOCAB}], expected [{ROWS}, 4, {VOCAB}]"):
        fm.verify(out, proposal, rows, None, counts(), numbers=numbers_of(ROWS, DRAFTS, VOCAB))
