"""The block draft that comes with the bundled model: it changes no token, and its guesses hold as often as they did."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import pytest
import torch

import funcmodels as fm
import lowering
from tests import held_out


@pytest.fixture(scope="module")
def loaded() -> tuple[fm.Model, Any, list[list[int]]]:
    model, params = fm.load("bundled", dtype=torch.float32)
    assert model.tokenizer is not None
    return model, params, held_out.prompts(model.tokenizer, 6, 30, 60, seed=4)


@pytest.mark.plain
def test_greedy_text_is_that_without_a_draft(loaded: tuple[fm.Model, Any, list[list[int]]]) -> None:
    """And more tokens come of a round than one: a draft fed wrongly would still leave the text as it is."""
    model, params, prompts = loaded
    plain = fm.generate(model, params, prompts, 24, eos=())
    drafted = fm.generate(model, params, prompts, 24, eos=(), draft="dspark")
    same = sum(one.tokens == other.tokens for one, other in zip(plain, drafted, strict=True))
    assert same >= len(prompts) - 1, "one text may part at a near tie"
    rounds = sum(result.rounds for result in drafted)
    taken = [sum(place) / rounds for place in zip(*(result.accepted for result in drafted), strict=True)]
    assert len(taken) == 7 and all(first >= second for first, second in pairwise(taken))
    assert 1 + sum(taken) > 1.5


def begun(model: fm.Model, params: Any, draft: Any, prompts: list[list[int]]) -> Any:
    """Both states and the carry of rows whose prompts are in; the likeliest token follows each."""
    state = model.init_state(len(prompts), 128, page_size=32)
    batch = fm.Batch.from_lists(prompts, state)
    drafted = draft.init_state(state)
    out, state = model.forward(params, state, batch, outputs=draft.outputs)
    first = out.logits[batch.query_start[1:].long() - 1].argmax(-1)
    return state, *draft.extend(params, drafted, out, batch, fm.next_tokens(batch, first))


FEWEST = {"mtp": (3.0, 1.2), "dspark": (0.4, 0.4)}
"""Of four drafts those that a greedy row takes a round, and a row that draws: likeliest drafts it takes far less of."""


@torch.no_grad()
@pytest.mark.plain
@pytest.mark.parametrize("kind", FEWEST)
def test_captured_drafts_are_taken_as_often_as_plain_ones(
    kind: str, loaded: tuple[fm.Model, Any, list[list[int]]]
) -> None:
    """Half of the rows greedy. Tokens stay right with plans that are frozen or fed wrongly: acceptance does not."""
    model, params, prompts = loaded
    draft: Any = fm.draft(model, kind, torch.float32)
    both, rounds, plainly = draft.joined(params), 10, cast(Any, fm.Round(model, draft).run)
    propose, extend = (lowering.jit(call, ("state",), backend="fx") for call in (draft.propose, draft.extend))
    sampling = fm.RowSampling.of([fm.Sampling(0.9 * (row % 2), seed=row) for row in range(6)])
    rest, most, noise = (sampling, torch.arange(6)), torch.full((6,), 5), fm.CoupledNoise(sampling, torch.arange(6))
    (state, drafted, carry), right = (begun(model, params, draft, prompts) for _ in range(2))
    taken = torch.zeros(6)
    for number in range(rounds):
        proposal, drafted = propose(both, drafted, carry, 4, noise)
        window = proposal.batch(state)
        out, pending = model.forward(params, state, window, outputs=draft.outputs, keep_steps=True)
        verdict = fm.verify(out, proposal, *rest)
        state = fm.commit(pending, verdict.accepted)
        drafted, carry = extend(both, drafted, out, window, verdict.tokens, carry)
        plain, *right = plainly(params, *right, *rest, most, steps=4)
        assert torch.equal(verdict.accepted, plain.accepted), f"round {number}"
        taken += verdict.accepted - 1
    assert propose.captures == 1
    greedy, warm = FEWEST[kind]
    assert taken[::2].mean() > greedy * rounds and taken[1::2].mean() > warm * rounds
