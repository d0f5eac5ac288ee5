"""Drafts that are drawn: the law is plain sampling's for any law of the draft, and only if that law is the one told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

import funcmodels as fm
from funcmodels.drafts import protocol as speculative
from funcmodels.sampling import draws as sampling
from lowering import ops
from lowering.ops.sampling import exponentials, first_of
from tests.drafts.test_law import merged
from tests.drafts.toy import (
    ROOT,
    ROWS,
    START,
    STEPS,
    VOCAB,
    Propose,
    Toy,
    counts_of,
    drawn,
    first_round,
    likeliest,
    stream,
    table,
    verdict_on,
)
from tests.oracle import mtp
from tests.oracle.qwen3_5 import tokens
from tests.oracle.states import advance
from tests.sampling.test_sampling import chi_square, expected_law

FILTERED = fm.Sampling(1.1, top_k=6, top_p=0.95, min_p=0.03, seed=11)
PENALISED = replace(
    FILTERED, seed=12, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.6, logit_bias=((1, 1.0),)
)


def one_hot() -> Tensor:
    return torch.full((VOCAB, VOCAB), -torch.inf).scatter(1, (torch.arange(VOCAB)[:, None] + 3) % VOCAB, 0.0)


def with_zeros() -> Tensor:
    """The draft cannot give what the model likes best."""
    return table(1).scatter(1, table(0).argmax(1, keepdim=True), -torch.inf)


DRAFTS: dict[str, Callable[[], Tensor]] = {
    "far": lambda: table(3, 3.0), "near": lambda: table(0) + table(4, 0.3), "equal": lambda: table(0),
    "one token": one_hot, "with zeros": with_zeros, "flat": lambda: torch.zeros(VOCAB, VOCAB),
}  # fmt: skip


def likelihoods(toy: Toy, seen: Tensor) -> list[float]:
    """Chance of a deviation as large: of the first token, of the first two together, of the first three."""
    code, found = torch.zeros(len(seen), dtype=torch.int64), []
    for place in range(seen.shape[1]):
        code = code * VOCAB + seen[:, place]
        right = toy.chain(place + 1) * len(seen)
        found.append(chi_square(*merged(torch.bincount(code, minlength=len(right)), right)))
    return found


@pytest.mark.parametrize("given", [fm.Sampling(1.0), FILTERED, PENALISED], ids=["plain", "filtered", "penalised"])
@pytest.mark.parametrize("draft", DRAFTS)
def test_tokens_have_the_law_of_plain_sampling(draft: str, given: fm.Sampling) -> None:
    toy = Toy(table(0), DRAFTS[draft](), given, prompt=(1, 4))
    assert min(likelihoods(toy, stream(toy))) > 1e-3


def test_argmax_drafts_have_it_with_penalties() -> None:
    toy = Toy(table(0), table(3), PENALISED, prompt=(1, 4))
    assert min(likelihoods(toy, stream(toy, likeliest))) > 1e-3


@pytest.mark.parametrize("propose", [drawn, likeliest])
def test_penalties_that_forget_what_came_fail(propose: Propose) -> None:
    toy = Toy(table(0), table(0), PENALISED, prompt=(1, 4))
    assert chi_square_of_all(toy, stream(toy, propose, relaxed=True)) < 1e-6


def chi_square_of_all(toy: Toy, seen: Tensor) -> float:
    """The chance of the likeliest deviation, 0 where a token came that cannot."""
    try:
        return min(likelihoods(toy, seen))
    except AssertionError:
        return 0.0


@pytest.mark.parametrize("given", [fm.Sampling(1.0), FILTERED], ids=["plain", "filtered"])
@pytest.mark.parametrize("draft", DRAFTS)
def test_a_draft_is_accepted_as_often_as_the_laws_overlap(draft: str, given: fm.Sampling) -> None:
    toy = Toy(table(0), DRAFTS[draft](), given)
    _, verdict = first_round(toy)
    overlap = float(np.minimum(toy.law(), toy.draft_law()).sum())
    accepted = float((verdict.accepted > 1).sum())
    spread = (ROWS * overlap * (1 - overlap)) ** 0.5
    assert abs(accepted - ROWS * overlap) <= 4 * spread + 1e-6 * ROWS
    if draft == "equal":
        assert (verdict.accepted == STEPS + 1).all()
    argmax = float(toy.law()[toy.draft[ROOT].argmax()])
    _, compared = first_round(toy, likeliest)
    assert abs(float((compared.accepted > 1).sum()) - ROWS * argmax) <= 4 * (ROWS * argmax * (1 - argmax)) ** 0.5


# What must not be


def unfiltered(toy: Toy, rows: fm.RowSampling, *places: Tensor) -> fm.Proposal:
    """Wrong: the law told is that before temperature and filters."""
    proposal = drawn(toy, rows, *places)
    window = torch.cat((proposal.root[:, None], proposal.tokens[:, :-1]), 1)
    return replace(proposal, logits=toy.draft[window])


def cooler(toy: Toy, rows: fm.RowSampling, *places: Tensor) -> fm.Proposal:
    """Wrong: the law told has another temperature."""
    proposal = drawn(toy, rows, *places)
    assert proposal.logits is not None
    return replace(proposal, logits=proposal.logits * 1.5)


def undrawn(toy: Toy, rows: fm.RowSampling, *places: Tensor) -> fm.Proposal:
    """Wrong: argmax drafts, told to be drawn."""
    return replace(likeliest(toy, rows, *places), logits=unfiltered(toy, rows, *places).logits)


@pytest.mark.parametrize("propose", [unfiltered, cooler, undrawn])
def test_a_law_that_the_drafts_were_not_drawn_from_fails(propose: Propose) -> None:
    toy = Toy(table(0), table(4), FILTERED)
    assert chi_square_of_all(toy, stream(toy, propose)) < 1e-6
    assert chi_square_of_all(toy, stream(toy)) > 1e-3


def whole_law(p: Tensor, q: Tensor, keys: Tensor, numbers: None) -> Tensor:
    return first_of(p.log(), p > 0, keys)


def coins_of_the_draft(seeds: Tensor, requests: Tensor, positions: Tensor) -> Tensor:
    """Coins from the numbers that the drafts were drawn with."""
    keys = sampling.keys_of(seeds[:, None], requests[:, None], positions, sampling.DRAFT)
    return -torch.expm1(-VOCAB * exponentials(keys[..., None], torch.arange(VOCAB)).amin(-1))


def zeros(seeds: Tensor, requests: Tensor, positions: Tensor) -> Tensor:
    return torch.zeros(positions.shape)


MUTANTS = {
    "a rejected draft is drawn again from the whole law": (speculative, "_from_the_rest", whole_law),
    "drafts and draws share their noise": (sampling, "DRAFT", None),
    "drafts and coins share their noise": (speculative, "coins", coins_of_the_draft),
    "coins that always accept": (speculative, "coins", zeros),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_wrong_rejection_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTANTS[name])
    toy = Toy(table(0), table(4), FILTERED)
    assert chi_square_of_all(toy, stream(toy)) < 1e-6


# The edges


def test_a_residual_of_nothing_falls_back_to_the_law() -> None:
    p = torch.tensor([[0.5, 0.2, 0.3, 0.0]]).expand(ROWS, -1)
    index = torch.arange(ROWS)
    keys = sampling.keys_of(index * 0, index, index * 0)
    for q in (p, p * (1 + 1e-7), torch.full_like(p, torch.nan)):
        seen = torch.bincount(speculative._from_the_rest(p, q, keys), minlength=4)
        assert chi_square(seen, torch.tensor([0.5, 0.2, 0.3, 0.0]) * ROWS) > 1e-3
    rest = speculative._from_the_rest(p, torch.tensor([[0.6, 0.1, 0.0, 0.3]]).expand(ROWS, -1), keys)
    assert chi_square(torch.bincount(rest, minlength=4), torch.tensor([0.0, 0.25, 0.75, 0.0]) * ROWS) > 1e-3


@pytest.mark.parametrize("bits", [-1, 2**63 - 1])
def test_coins_are_below_one(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    index = torch.arange(1000)
    coins = sampling.coins(index % 7, index, index[:, None] + torch.arange(40))
    assert 0 <= coins.min() < 1e-3 and 0.999 < coins.max() < 1
    assert chi_square(torch.bincount((coins * 16).long().flatten(), minlength=16), torch.full((16,), 2500.0)) > 1e-3
    monkeypatch.setattr(sampling, "mix", lambda a, b: torch.full(torch.broadcast_shapes(a.shape, b.shape), bits))
    largest = sampling.coins(index[:1], index[:1], index[:1, None])
    assert 0 <= largest < 1


def test_the_streams_of_noise_are_apart() -> None:
    index = torch.arange(ROWS)
    keys = [sampling.keys_of(index * 0, index, index * 0, stream) for stream in (None, sampling.DRAFT)]
    streams = [exponentials(each, torch.ones(())) for each in keys]
    streams.append(-torch.log1p(-sampling.coins(index * 0, index, index[:, None] * 0)[:, 0]))
    cells = [(-torch.expm1(-x.double()) * 8).long() for x in streams]
    for one, two in ((0, 1), (0, 2), (1, 2)):
        pairs = torch.bincount(cells[one] * 8 + cells[two], minlength=64)
        assert chi_square(pairs, torch.full((64,), ROWS / 64)) > 1e-3


@pytest.mark.parametrize("draft", ["drawn", "likeliest told to be drawn", "likeliest"])
def test_three_tokens_whose_laws_are_known(draft: str) -> None:
    """p = .6 .3 .1 and q = .5 .4 .1: told that an argmax draft was drawn, token 0 comes every time."""
    p, q = torch.tensor([0.6, 0.3, 0.1]).log(), torch.tensor([0.5, 0.4, 0.1]).log()
    index = torch.arange(ROWS)
    rows = fm.RowSampling.of([fm.Sampling(1.0)] * ROWS)
    token, law = fm.DraftNoise(rows, index).draw(q.expand(ROWS, -1), index * 0 + 1)
    assert law is not None
    if draft != "drawn":
        token = index * 0
    told = None if draft == "likeliest" else law[:, None]
    out = fm.Output(p.expand(2 * ROWS, -1), torch.zeros(2 * ROWS, 1), {})
    verdict = fm.verify(out, fm.Proposal(index * 0, token[:, None], index * 0, told), rows)
    seen = torch.bincount(verdict.tokens[:, 0], minlength=3)
    if draft == "likeliest told to be drawn":
        assert seen.tolist() == [ROWS, 0, 0]
        return
    assert chi_square(seen, torch.tensor([0.6, 0.3, 0.1]) * ROWS) > 1e-3


@pytest.mark.parametrize("order", [(0.0, 0.7), (7.0, 0.0)])
@pytest.mark.parametrize(("draft", "accepted"), [(0, 1), (5, 2)])
def test_a_greedy_row_does_not_mind_a_sampled_neighbour(order: tuple[float, float], draft: int, accepted: int) -> None:
    """It answers 5 always: whatever the draft's law, and with the sampled row's law for a neighbour."""
    logits = torch.tensor([-8.0, -3, -2, -1, 0, 9, 1, 2]).expand(2, 2, -1)
    given, greedy = fm.RowSampling.of([fm.Sampling(heat) for heat in order]), order.index(0.0)
    certain = torch.full((2, 1, 8), -torch.inf).index_fill(2, torch.tensor(draft), 0.0)
    seen = set()
    for request in range(60):
        for law in (certain, torch.zeros(2, 1, 8)):
            proposal = fm.Proposal(torch.tensor([1, 1]), torch.full((2, 1), draft), torch.tensor([3, 4]), law)
            out = fm.Output(logits.reshape(4, 8), torch.zeros(4, 1), {})
            verdict = fm.verify(out, proposal, given, torch.tensor([request, request + 1000]))
            assert int(verdict.accepted[greedy]) == accepted
            assert verdict.tokens[greedy].tolist() == [5, 5 if accepted == 2 else -1]
            seen.update(verdict.tokens[1 - greedy].tolist())
    assert max(order) < 1 or seen > {-1, 5}, "a hot neighbour draws other tokens too"


def test_greedy_rows_draft_and_answer_as_argmax_does() -> None:
    toy = Toy(table(0), table(0) + table(4, 0.5), fm.Sampling())
    rows, requests = fm.RowSampling.of([toy.given, fm.Sampling(1.0)] * 50), torch.arange(100)
    root, start = torch.arange(100) // 2 % VOCAB, torch.full((100,), START)
    proposal, compared = (propose(toy, rows, requests, root, start) for propose in (drawn, likeliest))
    assert torch.equal(proposal.tokens[::2], compared.tokens[::2])
    counts = counts_of(toy, 100)
    one, two = (verdict_on(toy, each, rows, requests, counts) for each in (proposal, compared))
    assert torch.equal(one.tokens[::2], two.tokens[::2]) and torch.equal(one.accepted[::2], two.accepted[::2])
    assert len(one.accepted[::2].unique()) == STEPS + 1


def test_logits_that_are_no_numbers_end_a_window() -> None:
    logits = torch.zeros(4, 3, VOCAB)
    logits[1, 1], logits[2, 0, 0], logits[3, 2] = torch.nan, torch.inf, -torch.inf
    for given in (fm.Sampling(1.0), fm.Sampling()):
        drafts = torch.full((4, 2), 4 if given.temperature else 0)
        laws = torch.full((4, 2, VOCAB), -torch.inf).scatter(2, drafts[..., None], 0.0)
        wide = torch.where(torch.arange(VOCAB) == drafts[0, 0], logits + 40, logits)
        out = fm.Output(wide.flatten(0, 1), torch.zeros(12, 1), {})
        none = torch.zeros(4, dtype=torch.int64)
        verdict = fm.verify(out, fm.Proposal(none, drafts, none, laws), given)
        assert verdict.accepted.tolist() == [3, 1, 0, 2]
        draft = int(drafts[0, 0])
        assert verdict.tokens.tolist() == [[draft] * 3, [draft, -1, -1], [-1, -1, -1], [draft, draft, -1]]


def test_a_draft_whose_law_is_no_number_is_refused_and_harms_nothing() -> None:
    toy = Toy(table(0), torch.full((VOCAB, VOCAB), torch.nan), fm.Sampling(1.0))
    proposal, verdict = first_round(toy)
    assert (proposal.tokens >= 0).all() and (verdict.accepted == 1).all()
    assert chi_square(torch.bincount(verdict.tokens[:, 0], minlength=VOCAB), torch.from_numpy(toy.law()) * ROWS) > 1e-3


def test_rows_follow_their_requests() -> None:
    """Rows in another order give the same tokens in that order."""
    toy, order = Toy(table(0), table(4), FILTERED), torch.randperm(200)
    rows, requests = fm.RowSampling.of([toy.given] * 200), torch.arange(200)
    root, start = torch.arange(200) % VOCAB, torch.arange(200) % 13

    def verdict(at: Tensor) -> fm.Verdict:
        proposal = drawn(toy, rows, requests[at], root[at], start[at])
        return verdict_on(toy, proposal, rows, requests[at], counts_of(toy, 200))

    whole, moved = verdict(requests), verdict(order)
    assert torch.equal(moved.tokens, whole.tokens[order]) and torch.equal(moved.accepted, whole.accepted[order])


# The head


def test_the_heads_drafts_are_drawn_from_its_own_law_and_verified_by_it() -> None:
    """Many rows of one prompt, one round: drafts, and tokens that follow accepted ones, have their laws."""
    layers = {"num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"]}
    one = mtp.build("dense", mtp.sizes("dense", 2) | {"vocab_size": VOCAB} | layers, 1, 1)
    given, rows = fm.Sampling(1.2, top_k=6, top_p=0.95, min_p=0.03, seed=7), 2000
    (prompt,) = tokens(one, 4)
    head, root = fm.draft(one.model, "mtp"), 3
    state = one.model.init_state(rows, 16, page_size=16)
    dstate = head.init_state(state)
    out, state = advance(one, state, [prompt] * rows)
    batch = fm.Batch.from_lists([prompt] * rows)
    following = fm.next_tokens(batch, torch.full((rows,), root))
    dstate, carry = head.extend(one.params, dstate, out, batch, following)
    noise = fm.DraftNoise(fm.RowSampling.of([given] * rows), torch.arange(rows))
    proposal, _ = head.propose(one.params, dstate, carry, 2, noise)
    assert proposal.logits is not None
    likely, _ = head.propose(one.params, dstate, carry, 1)
    assert likely.logits is None
    logits = ops.linear(*head.head.read(one.config, one.params, carry.hidden))
    right = expected_law(logits[0].detach().numpy(), given)
    np.testing.assert_allclose(proposal.logits[0, 0].softmax(-1).detach().numpy(), right, atol=1e-5)
    assert int(likely.tokens[0, 0]) == right.argmax()
    seen = torch.bincount(proposal.tokens[:, 0], minlength=VOCAB)
    assert chi_square(*merged(seen, torch.from_numpy(right) * rows)) > 1e-3
    out, _ = one.model.forward(one.params, state, proposal.batch(state), keep_steps=True)
    verdict = fm.verify(out, proposal, given)
    after = [[*prompt, root]] + [[*prompt, root, token] for token in range(VOCAB)]
    laws = [
        torch.from_numpy(expected_law(one.model.forward(one.params, None, fm.Batch.from_lists([ids]))[0].logits[-1]
                                      .detach().numpy(), given))
        for ids in after
    ]  # fmt: skip
    first = torch.bincount(verdict.tokens[:, 0], minlength=VOCAB)
    assert chi_square(*merged(first, laws[0] * rows)) > 1e-3
    pairs, expected = [], []
    for token in range(VOCAB):
        follow = verdict.tokens[(verdict.tokens[:, 0] == token) & (verdict.accepted > 1), 1]
        pairs.append(torch.bincount(follow, minlength=VOCAB))
        expected.append(laws[1 + token] * len(follow))
    assert sum(int(x.sum()) for x in pairs) > 300
    assert chi_square(*merged(torch.cat(pairs), torch.cat(expected))) > 1e-3
