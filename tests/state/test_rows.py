"""Rows and pages: a fork keeps what it shares, whoever else goes on; empty rows find room; asking takes nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import funcmodels as fm
import lowering
from tests.oracle.qwen3_5 import Pair, pair
from tests.oracle.states import advance
from tests.tolerances import assert_close


@pytest.fixture
def one() -> Pair:
    return pair("dense", 0)


def without_counts(state: fm.State, tokens: list[int]) -> fm.Batch:
    """A batch of one row whose count is known to the device alone, as in a captured graph with padding."""
    batch = fm.Batch.from_lists([tokens], state).pad(len(tokens) + 2)
    return replace(batch, counts=(), max_query=len(tokens) + 2)


@pytest.mark.parametrize("pages", [None, 20])
@pytest.mark.parametrize("known", [True, False])
def test_an_ancestor_that_goes_on_leaves_a_fork_alone(one: Pair, pages: int | None, known: bool) -> None:
    start = one.model.init_state(1, 32, page_size=4, pages=pages)
    if known:
        _, short = advance(one, start, [[1, 2, 3, 4, 5]])
    else:
        _, kept = one.model.forward(one.params, start, without_counts(start, [1, 2, 3, 4, 5]))
        assert kept is not None
        assert not kept.ledger.exact
        short = kept
    _, long = advance(one, short, [[6, 7, 8, 9, 10]])
    branch = fm.fork(long)
    before = {name: value.clone() for name, value in fm.logical(branch, 0).items()}
    _, other = advance(one, short, [[11, 12, 13, 14]])  # writes where `long` lies, and the fork shares its pages
    for name, value in fm.logical(branch, 0).items():
        assert torch.equal(value, before[name]), name
    again, _ = advance(one, branch, [[7]])
    whole, _ = one.model.forward(one.params, None, fm.Batch.from_lists([[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 7]]))
    assert_close(again.logits, whole.logits[-1:], length=256)
    assert other.ledger.lengths >= (9,)


def test_a_fork_that_is_gone_is_not_copied_around(one: Pair) -> None:
    state = one.model.init_state(1, 32, page_size=4, pages=20)
    _, short = advance(one, state, [[1, 2, 3, 4, 5]])
    _, long = advance(one, short, [[6, 7, 8, 9, 10]])
    fm.release(fm.fork(long))
    held = short.ledger.leases[0].pages
    _, other = advance(one, short, [[11, 12]])
    assert other.ledger.leases[0].pages == held


def test_empty_rows_of_a_state_whose_rows_own_their_pages(one: Pair) -> None:
    _, state = advance(one, one.model.init_state(1, 8, page_size=4), [[1, 2, 3]])
    wider = fm.select(state, [-1, 0, -1])
    out, wider = advance(one, wider, [[4] * 8, [5], [6] * 8])
    alone, _ = advance(one, state, [[5]])
    assert_close(out.logits[8:9], alone.logits, length=256)
    assert wider.ledger.lengths == (8, 4, 8)


def test_asking_which_kernels_run_takes_no_pages(one: Pair) -> None:
    state = one.model.init_state(2, 32, page_size=4, pages=10)
    lowering.explain(one.model.forward, one.params, state, fm.Batch.from_lists([[1] * 9, [2]], state))
    assert state.ledger.leases[0].pool.free == 10
