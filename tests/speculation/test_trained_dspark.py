"""The block draft that comes with the bundled model: it changes no token, and its guesses hold as often as they did."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

import funcmodels as fm
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


@pytest.mark.plain
def test_drawn_drafts_of_sampled_rows_hold_too(loaded: tuple[fm.Model, Any, list[list[int]]]) -> None:
    """Rounds by hand, half of the rows greedy: each kind takes drafts."""
    model, params, prompts = loaded
    draft: Any = fm.draft(model, "dspark", torch.float32)
    state = model.init_state(6, 128, page_size=32)
    batch = fm.Batch.from_lists(prompts, state)
    with torch.no_grad():
        drafted = draft.init_state(state)
        out, state = model.forward(params, state, batch, outputs=draft.outputs)
        first = out.logits[batch.query_start[1:].long() - 1].argmax(-1)
        drafted, carry = draft.extend(params, drafted, out, batch, fm.next_tokens(batch, first))
        sampling = fm.RowSampling.of([fm.Sampling(0.8 * (row % 2), seed=row) for row in range(6)])
        most, taken = torch.full((6,), 5), torch.zeros(6)
        for _ in range(8):
            verdict, state, drafted, carry = fm.Round(model, draft).run(
                params, state, drafted, carry, sampling, torch.arange(6), most, steps=4, drawn=True
            )
            taken += verdict.accepted - 1
    assert taken[::2].sum() > 0 and taken[1::2].sum() > 0
