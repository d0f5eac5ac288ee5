"""Copies of one row put into others: they go on as the row would, and nobody notices them."""

from __future__ import annotations

import pytest
import torch

import funcmodels as fm
from tests.oracle.qwen3_5 import Pair, pair
from tests.oracle.states import advance

PROMPTS = [[1, 2, 3, 4, 5], [6], [7, 8, 9, 10, 11, 12, 13, 14], [15, 16]]


@pytest.fixture
def one() -> Pair:
    return pair("dense", 0)


def begun(one: Pair, pages: int | None = 20, checked: bool = False) -> fm.State:
    """A state of `PROMPTS`."""
    return advance(one, one.model.init_state(4, 20, page_size=4, pages=pages, checked=checked), PROMPTS)[1]


def same(one: fm.State, row: int, other: fm.State, where: int) -> bool:
    pairs = zip(fm.logical(one, row).items(), fm.logical(other, where).items(), strict=True)
    return all(name == again and torch.equal(x, y) for (name, x), (again, y) in pairs)


@pytest.mark.parametrize("source", [0, 1, 2])
@pytest.mark.parametrize("forked", [True, False])
@pytest.mark.parametrize("checked", [True, False])
def test_copies_go_on_as_the_row_itself(source: int, forked: bool, checked: bool, one: Pair) -> None:
    state, right = begun(one, checked=checked), begun(one, pages=None)
    pool = state.ledger.leases[0].pool
    given, row = (fm.fork(state, [source]), 0) if forked else (state, source)
    held = pool.pages - pool.free
    rows = [at for at in (3, 1) if at != source]
    state = fm.fork_into(state, rows, given, row)
    assert state.ledger.lengths == tuple(len(PROMPTS[source if at in rows else at]) for at in range(4))
    for at in range(4):
        assert same(state, at, right, source if at in rows else at), at
    if forked:
        fm.release(given)
    partial = len(PROMPTS[source]) % 4 > 0
    gone = sum(-(-len(PROMPTS[at]) // 4) for at in rows)
    assert pool.pages - pool.free == held - gone + partial * (len(rows) - forked)
    news = [[21], [22, 23], [24, 25, 26, 27], [28]]
    _, state = advance(one, state, news)
    for at in range(4):
        prompt = PROMPTS[source if at in rows else at]
        _, alone = advance(one, one.model.init_state(1, 20, page_size=4), [prompt])
        _, alone = advance(one, alone, [news[at]])
        for (name, x), y in zip(fm.logical(state, at).items(), fm.logical(alone, 0).values(), strict=True):
            torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4, msg=f"row {at}, {name}")
    fm.release(state)
    assert pool.free == pool.pages


def test_what_was_there_is_given_up(one: Pair) -> None:
    state = begun(one)
    now = fm.fork_into(state, [2], state, 0)
    with pytest.raises(fm.StateError, match="row 2 of this state was released"):
        advance(one, state, [[], [], [1], []])
    assert now.ledger.exact


def test_refusals(one: Pair) -> None:
    state, other = begun(one), begun(one)
    with pytest.raises(ValueError, match="one shared pool"):
        fm.fork_into(state, [0], other, 0)
    owned = begun(one, pages=None)
    with pytest.raises(ValueError, match="one shared pool"):
        fm.fork_into(owned, [0], owned, 1)
    with pytest.raises(ValueError, match="row 4 is not in"):
        fm.fork_into(state, [4], state, 0)
    with pytest.raises(ValueError, match="name a row twice"):
        fm.fork_into(state, [1, 1], state, 0)
    full = begun(one, pages=6)
    with pytest.raises(fm.OutOfPages, match="1 more pages are needed and 0 of 6 are free"):
        fm.fork_into(full, [1], full, 0)
    assert same(full, 1, begun(one), 1), "nothing has happened"
