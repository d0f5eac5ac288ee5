"""The law of drafted tokens is plain sampling's, whatever is drafted; wrong rules fail the same statistic."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import funcmodels as fm
from tests.drafts.rounds import Asked, Rows
from tests.oracle import mtp
from tests.oracle.qwen3_5 import KINDS, tokens
from tests.sampling.test_sampling import chi_square, expected_law

VOCAB, ROWS, ROOT = 7, 20_000, 2
PLAIN = fm.Sampling(1.0)
FILTERED = fm.Sampling(1.1, top_k=6, top_p=0.95, min_p=0.03, seed=11)
DRAFTS = {
    "likeliest": lambda table: table.argmax(-1),
    "second": lambda table: table.topk(2).values[:, 1:].eq(table).int().argmax(-1),
    "unlikeliest": lambda table: table.argmin(-1),
}

Rule = Callable[[Tensor, Tensor, fm.Sampling, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Logits [rows width vocab], drafts, settings, requests, places: the tokens drawn, and how many of them count."""


def bigrams(seed: int = 0) -> Tensor:
    """Logits of the next token after each token: the toy model."""
    return torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) * 1.5


def ours(logits: Tensor, drafts: Tensor, given: fm.Sampling, requests: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """`fm.verify`, on an output made of these logits."""
    rows, width, vocab = logits.shape
    out = fm.Output(logits.reshape(-1, vocab), torch.zeros(rows * width, 1), {})
    verdict = fm.verify(out, fm.Proposal(torch.full((rows,), ROOT), drafts, start), given, requests)
    return verdict.tokens, verdict.accepted


def stream(
    rule: Rule, given: Any, table: Tensor, draft: Callable[[Tensor], Tensor], count: int = 3, rows: int = ROWS
) -> Tensor:
    """The first `count` tokens after the root of each of many rows, in rounds of three drafts: [rows count]."""
    likely, requests = draft(table), torch.arange(rows)
    found = torch.full((rows, count + 4), -1)
    held, root = torch.zeros(rows, dtype=torch.int64), torch.full((rows,), ROOT)
    while int(held.min()) < count:
        window = [root]
        for _ in range(3):
            window.append(likely[window[-1]])
        drawn, accepted = rule(table[torch.stack(window, 1)], torch.stack(window[1:], 1), given, requests, 9 + held)
        places = torch.arange(4)
        live = (places < accepted[:, None]) & (held < count)[:, None]
        at = torch.where(live, held[:, None] + places, count + 3)
        found = found.scatter(1, at, drawn)
        newest = drawn.gather(1, accepted[:, None] - 1)[:, 0]
        root, held = torch.where(held < count, newest, root), held + live.sum(1)
    return found[:, :count]


def likelihoods(seen: Tensor, table: Tensor, given: fm.Sampling) -> dict[str, float]:
    """Chance of a deviation as large, of the first token, of the first two, and of the second and third."""
    law = torch.from_numpy(np.stack([expected_law(row, given) for row in table.numpy()]))
    first, pair = law[ROOT], law[ROOT][:, None] * law
    later = (first @ law)[:, None] * law
    counts = {"first": (seen[:, 0], first), "two": (seen[:, 0] * VOCAB + seen[:, 1], pair.flatten())}
    counts["later two"] = (seen[:, 1] * VOCAB + seen[:, 2], later.flatten())
    return {
        name: chi_square(*merged(torch.bincount(cells, minlength=len(right)), right * ROWS))
        for name, (cells, right) in counts.items()
    }


def merged(observed: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """Cells of less than 8 expected are one, so that the statistic has its law; impossible ones stay by themselves."""
    assert not observed[expected == 0].any(), "a token came that the filters forbid"
    rare = (expected > 0) & (expected < 8)
    both = [torch.cat((x[~rare], x[rare].sum()[None])) for x in (observed, expected)]
    return both[0], both[1]


@pytest.mark.parametrize(
    ("given", "draft"),
    [(PLAIN, "likeliest"), (FILTERED, "likeliest"), (FILTERED, "second"), (FILTERED, "unlikeliest")],
)
def test_drafted_tokens_have_the_law_of_plain_sampling(given: fm.Sampling, draft: str) -> None:
    table = bigrams()
    assert min(likelihoods(stream(ours, given, table, DRAFTS[draft]), table, given).values()) > 1e-3


@pytest.mark.sweep
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("seed", range(20))
def test_more_laws(seed: int, draft: str) -> None:
    settings = random.Random(seed)
    table = bigrams(seed)
    given = fm.Sampling(
        settings.uniform(0.5, 2), settings.randint(3, VOCAB), settings.uniform(0.7, 1), settings.uniform(0, 0.1), seed
    )
    assert min(likelihoods(stream(ours, given, table, DRAFTS[draft]), table, given).values()) > 1e-4


def top_two(
    logits: Tensor, drafts: Tensor, given: fm.Sampling, requests: Tensor, start: Tensor
) -> tuple[Tensor, Tensor]:
    """Wrong: a draft counts if it is one of the two likeliest."""
    drawn, _ = two_draws(logits, given, requests, start)
    fits = (logits[:, :-1].topk(2).indices == drafts[..., None]).any(-1)
    drawn[:, :-1] = torch.where(fits, drafts, drawn[:, :-1])
    return drawn, 1 + fits.int().cumprod(1).sum(1)


def redrawn(
    logits: Tensor, drafts: Tensor, given: fm.Sampling, requests: Tensor, start: Tensor
) -> tuple[Tensor, Tensor]:
    """Wrong: a coin of the draft's probability accepts it, and a rejected one is drawn again from the whole law."""
    drawn, coins = two_draws(logits, given, requests, start)
    fits = coins[:, :-1] == drafts
    drawn[:, :-1] = torch.where(fits, drafts, drawn[:, :-1])
    return drawn, 1 + fits.int().cumprod(1).sum(1)


def one_noise(
    logits: Tensor, drafts: Tensor, given: fm.Sampling, requests: Tensor, start: Tensor
) -> tuple[Tensor, Tensor]:
    """Wrong: every place of a window is drawn with the noise of its first one."""
    rows, width, vocab = logits.shape
    each = (requests.repeat_interleave(width), start.repeat_interleave(width))
    drawn = fm.sample(logits.reshape(-1, vocab), given, *each).view(rows, width)
    return drawn, 1 + (drawn[:, :-1] == drafts).int().cumprod(1).sum(1)


def two_draws(logits: Tensor, given: fm.Sampling, requests: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Two independent draws at each place of the windows."""
    rows, width, vocab = logits.shape
    positions = (start[:, None] + 1 + torch.arange(width)).flatten()
    numbers = requests.repeat_interleave(width)
    draws = (fm.sample(logits.reshape(-1, vocab), given, numbers + other, positions) for other in (0, ROWS))
    first, second = (draw.view(rows, width) for draw in draws)
    return first, second


@pytest.mark.parametrize(
    ("rule", "draft", "wrong_in"),
    [
        (top_two, "likeliest", "first"),
        (top_two, "second", "first"),
        (redrawn, "likeliest", "first"),
        (one_noise, "likeliest", "two"),
    ],
)
def test_wrong_rules_fail(rule: Rule, draft: str, wrong_in: str) -> None:
    table = bigrams()
    assert likelihoods(stream(rule, FILTERED, table, DRAFTS[draft]), table, FILTERED)[wrong_in] < 1e-6


def test_how_many_are_accepted_has_its_law() -> None:
    """An argmax draft x is accepted with the probability p(x) that it is drawn, whatever came before it."""
    table, given = bigrams(), FILTERED
    window = [torch.full((ROWS,), ROOT)]
    for _ in range(3):
        window.append(table.argmax(-1)[window[-1]])
    drafts = torch.stack(window[1:], 1)
    start = torch.zeros(ROWS, dtype=torch.int64)
    _, accepted = ours(table[torch.stack(window, 1)], drafts, given, torch.arange(ROWS), start)
    chances, reach = [], 1.0
    for before, token in zip([ROOT, *drafts[0].tolist()], drafts[0].tolist(), strict=False):
        p = expected_law(table[before].numpy(), given)[token]
        chances.append(reach * (1 - p))
        reach *= p
    expected = torch.tensor([*chances, reach], dtype=torch.float64) * ROWS
    assert chi_square(torch.bincount(accepted - 1, minlength=4), expected) > 1e-3


@pytest.mark.parametrize("draft", DRAFTS)
def test_drafted_tokens_are_the_undrafted_ones(draft: str) -> None:
    """For equal logits token by token, under settings that differ by row: noise knows only seed, request and place."""
    random_settings = random.Random(3)
    table = bigrams(1)
    rows = [
        fm.Sampling(
            random_settings.choice((0.0, 0.7, 1.4)), random_settings.choice((0, 1, 4)),
            random_settings.choice((0.6, 1.0)), random_settings.choice((0.0, 0.1)), random_settings.randrange(3),
        )
        for _ in range(2000)
    ]  # fmt: skip
    given = fm.RowSampling.of(rows)
    drafted = stream(ours, given, table, DRAFTS[draft], 5, len(rows))
    token, plain = torch.full((len(rows),), ROOT), []
    for place in range(5):
        token = fm.sample(table[token], given, torch.arange(len(rows)), torch.full((len(rows),), 10 + place))
        plain.append(token)
    assert torch.equal(drafted, torch.stack(plain, 1))


def check_a_models_law(kind: str, count: int) -> None:
    """Many rows of one prompt, drafted by the head, against laws from forwards of every first token."""
    layers = {"num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"]}
    one = mtp.build(kind, mtp.sizes(kind, 2) | {"vocab_size": VOCAB} | layers, 1, 1)
    given = fm.Sampling(1.2, top_k=6, top_p=0.95, min_p=0.03, seed=7)
    (prompt,) = tokens(one, 4)
    rows = Rows(one, [Asked(prompt, request, given) for request in range(count)], max_len=16, page_size=16)
    while min(map(len, rows.tokens)) < len(prompt) + 2:
        rows.round(rows.propose(2))
    seen = torch.tensor([row[len(prompt) : len(prompt) + 2] for row in rows.tokens])
    out, _ = one.model.forward(one.params, None, fm.Batch.from_lists([[*prompt, token] for token in range(VOCAB)]))
    logits = out.logits.view(VOCAB, -1, VOCAB).numpy()
    first = torch.from_numpy(expected_law(logits[0, -2], given))
    both = first[:, None] * torch.from_numpy(np.stack([expected_law(row, given) for row in logits[:, -1]]))
    assert (both > 0.01).sum() > VOCAB, "a law of so few pairs tells nothing"
    assert chi_square(*merged(torch.bincount(seen[:, 0], minlength=VOCAB), first * count)) > 1e-3
    cells = torch.bincount(seen[:, 0] * VOCAB + seen[:, 1], minlength=VOCAB**2)
    assert chi_square(*merged(cells, both.flatten() * count)) > 1e-3


def test_a_model_and_its_head_sample_by_the_models_law() -> None:
    check_a_models_law("dense", 1500)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_and_its_head_in_many_rows(kind: str) -> None:
    check_a_models_law(kind, 20_000)


# One batch of many settings


def test_a_greedy_row_does_not_mind_a_sampled_neighbour() -> None:
    """Greedy answers 5 always: it refuses a draft of 0 and accepts one of 5, whatever its neighbour does."""
    logits = torch.tensor([-8.0, -3, -2, -1, 0, 9, 1, 2]).expand(2, 2, -1)
    seen = set()
    for request in range(60):
        for draft, accepted in ((0, 1), (5, 2)):
            for order in ((0.0, 0.7), (7.0, 0.0)):
                settings = fm.RowSampling.of([fm.Sampling(heat) for heat in order])
                proposal = fm.Proposal(torch.tensor([1, 1]), torch.full((2, 1), draft), torch.tensor([3, 4]))
                out = fm.Output(logits.reshape(4, 8), torch.zeros(4, 1), {})
                verdict = fm.verify(out, proposal, settings, torch.tensor([request, request + 1000]))
                greedy = order.index(0.0)
                assert int(verdict.accepted[greedy]) == accepted
                assert verdict.tokens[greedy].tolist() == [5, 5 if accepted == 2 else -1]
                seen.update(verdict.tokens[1 - greedy].tolist())
    assert seen > {-1, 5}, "the neighbour draws other tokens too"


def test_rows_of_a_verdict_follow_their_requests() -> None:
    """Rows in another order give the same tokens in that order, each drawn for its own request and place."""
    generator = torch.Generator().manual_seed(0)
    rows, order = 50, torch.randperm(50, generator=torch.Generator().manual_seed(1))
    logits = torch.randn(rows, 4, VOCAB, generator=generator)
    drafts = torch.randint(0, VOCAB, (rows, 3), generator=generator)
    requests, start = torch.arange(rows) * 3 + 1, torch.arange(rows) % 9
    given = fm.Sampling(1.0, seed=2)
    drawn, accepted = ours(logits, drafts, given, requests, start)
    moved, counts = ours(logits[order], drafts[order], given, requests[order], start[order])
    assert torch.equal(moved, drawn[order]) and torch.equal(counts, accepted[order])
    by_row, _ = ours(logits, drafts, given, torch.arange(rows), start)
    assert not torch.equal(by_row, drawn)
    first = fm.sample(logits[:, 0], given, requests, start + 1)
    assert torch.equal(drawn[:, 0], first)


def test_logits_that_are_no_numbers_end_a_window() -> None:
    logits = torch.zeros(3, 3, VOCAB)
    logits[..., 4] = 9
    logits[1, 1] = torch.nan
    logits[2, 0, 0] = torch.inf
    drafts = torch.tensor([[4, 4], [4, -1], [4, 4]])  # what is no token is not that which could not be drawn
    drawn, accepted = ours(logits, drafts, fm.Sampling(), torch.arange(3), torch.zeros(3, dtype=torch.int64))
    assert accepted.tolist() == [3, 1, 0]
    assert drawn.tolist() == [[4, 4, 4], [4, -1, -1], [-1, -1, -1]]
