"""A whole speculative round captured as one function equals its parts run plainly, to the last bit."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import funcmodels as fm
import lowering
from funcmodels.drafts.round import Round
from params.tree import tree_map
from tests.lowering.jit.test_round import same
from tests.oracle.mtp import MtpPair, small
from tests.oracle.states import advance

ROWS, STEPS = 3, 3


def begun(one: MtpPair, prompts: list[list[int]], **kwargs: Any) -> tuple[fm.State, fm.State, fm.Carry]:
    """Both states and the carry of rows whose prompts are in; token 1 follows each."""
    head = fm.draft(one.model, "mtp")
    state = one.model.init_state(len(prompts), 60, page_size=4, **kwargs)
    out, after = advance(one, state, prompts)
    batch = fm.Batch.from_lists(prompts)
    following = fm.next_tokens(batch, torch.ones(len(prompts), dtype=torch.int64))
    return after, *head.extend(one.params, head.init_state(state), out, batch, following)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize(("temperature", "drawn"), [(0.0, False), (0.8, False), (0.8, True)])
def test_a_captured_round_equals_its_parts(kind: str, temperature: float, drawn: bool) -> None:
    one, draw = small(kind), random.Random(f"{kind} {temperature} {drawn}")
    plainly: Any = Round(one.model, fm.draft(one.model, "mtp")).run
    step = lowering.jit(plainly, donate=("state", "drafted"), backend="fx")
    sampling = fm.RowSampling.of([fm.Sampling(temperature, top_k=9, seed=row) for row in range(ROWS)])
    requests = torch.tensor([4, 7, 2])
    mine: Any = begun(one, [[5, 6, 7], [8], [9, 4]], pages=40)
    right: Any = begun(one, [[5, 6, 7], [8], [9, 4]])
    kept = []
    for number in range(8):
        most = torch.tensor([draw.randint(0, STEPS + 1), STEPS + 1, (STEPS + 1) * (number > 1)])
        found, *mine = step(one.params, *mine, sampling, requests, most, steps=STEPS, drawn=drawn)
        with lowering.use(paged_attention="torch", experts="torch"):
            expected, *right = plainly(one.params, *right, sampling, requests, most, steps=STEPS, drawn=drawn)
        assert same(found, expected) and same(mine[2], right[2]), f"round {number}"
        kept.append((found, tree_map(torch.clone, found)))
        for actual, plain in zip(mine[:2], right[:2], strict=True):
            assert actual.ledger.lengths == plain.ledger.lengths == tuple(plain.lengths.tolist())
            for row in range(ROWS):
                assert same(fm.logical(actual, row), fm.logical(plain, row)), f"round {number}, row {row}"
    assert all(same(*pair) for pair in kept)
    assert step.captures == 1


@torch.no_grad()
def test_a_round_refuses_what_its_parts_refuse() -> None:
    one = small("dense")
    step = lowering.jit(Round(one.model, fm.draft(one.model, "mtp")).run, donate=("state", "drafted"), backend="fx")
    state, drafted, carry = begun(one, [[5] * 55, [6]], pages=40)
    rest = (fm.RowSampling.of([fm.Sampling()] * 2), torch.arange(2), torch.tensor([4, 4]))
    _, after, _, again = step(one.params, state, drafted, carry, *rest)
    with pytest.raises(fm.StateError, match="donated"):
        step(one.params, after, drafted, carry, *rest)
    state, drafted, carry = begun(one, [[5] * 57, [6]], pages=40)
    with pytest.raises(ValueError, match="row 0: 4 new tokens do not fit: it holds 57"):
        step(one.params, state, drafted, carry, *rest)
    state, drafted, carry = begun(one, [[5] * 9, [6] * 8], pages=5)
    with pytest.raises(fm.OutOfPages, match="2 more pages are needed and 0 of 5 are free"):
        step(one.params, state, drafted, carry, *rest)
    assert step.captures == 1 and fm.logical(state, 0)["layers.1.k"].shape[0] == 9
    assert again.token.shape == (2,)
