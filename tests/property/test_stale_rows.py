"""What the host knows of overwritten rows, held against the log of tokens that a checked state keeps, over histories.

Histories are those of states alone: no layer computes, so thousands run in seconds. Every token is written once, which
makes the log exact. Where counts stay on the device the host has bounds: it may miss no stale row, and may not refuse
what the newest state stands on.
"""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from unittest import mock

import pytest
import torch

import funcmodels as fm
from funcmodels.state import state as states
from funcmodels.state.pages import PagePool
from funcmodels.state.rows import fork_into
from funcmodels.state.state import State, rewound
from funcmodels.state.step import begin, finish
from funcmodels.state.token_log import stale_rows

MAX_LEN = 24
MOST_HELD = 6


def empty(rng: random.Random) -> State:
    rows, page_size = rng.randint(1, 3), rng.choice((1, 3, 4))
    each = -(-MAX_LEN // page_size)
    owned = rng.random() < 0.3
    pool = PagePool(rows * each if owned else 8 * rows * each, owned)
    return states.empty(
        (), rows=rows, max_len=MAX_LEN, page_size=page_size, pool=pool, vocab=2**31, device=torch.device("cpu"),
        checked=True,
    )  # fmt: skip


@dataclass
class History:
    """States held at once, and every act that makes another one of them. `exact`: the host knows every count."""

    rng: random.Random
    exact: bool
    held: list[State] = field(default_factory=list)
    tokens: int = 0

    def grown(self, state: State, counts: Sequence[int], keep: bool = False) -> State:
        lists = [list(range(self.tokens + 100 * row, self.tokens + 100 * row + n)) for row, n in enumerate(counts)]
        self.tokens += 1000
        batch = fm.Batch.from_lists(lists, state)
        if not self.exact and self.rng.random() < 0.3:
            batch = fm.Batch(batch.tokens, batch.query_start, max_query=batch.max_query)
        after = finish(begin(state, batch, keep), [])
        assert after is not None
        return after

    def counts(self, state: State, most: int) -> list[int]:
        room = [min(most, MAX_LEN - length) for length in state.ledger.lengths]
        # Beyond the count of one row, bounds count the most of any.
        return [self.rng.randint(0, n) if self.exact else min(room) for n in room]

    def extend(self, state: State) -> State:
        counts = self.counts(state, 5)
        return self.grown(state, counts) if any(counts) else state

    def verify(self, state: State) -> State:
        counts = self.counts(state, 4)
        if not any(counts):
            return state
        pending = self.grown(state, counts, keep=True)
        if self.rng.random() < 0.5:  # a sibling, offered and never taken
            self.keep(self.commit(pending, counts))
        return self.commit(pending, counts)

    def commit(self, pending: State, counts: Sequence[int]) -> State:
        accepted = torch.tensor([self.rng.randint(0, n) for n in counts])
        if self.exact or self.rng.random() < 0.5:
            return fm.commit(pending, accepted)
        with mock.patch.object(states, "known", return_value=None):
            return fm.commit(pending, accepted)

    def propose(self, state: State) -> State:
        """As a draft does: tokens ahead, and back."""
        ahead = state
        for _ in range(self.rng.randint(1, 2)):
            counts = self.counts(ahead, 2)
            ahead = self.grown(ahead, counts) if any(counts) else ahead
        if self.rng.random() < 0.3:
            self.keep(ahead)
        return rewound(ahead, state)

    def read(self, state: State) -> State:
        return fm.read_lengths(state)

    def fork(self, state: State) -> State:
        return fm.fork(state, [self.rng.randrange(state.rows) for _ in range(self.rng.randint(1, 3))])

    def select(self, state: State) -> State:
        rows = self.rng.sample(range(state.rows), self.rng.randint(1, state.rows))
        return fm.select(state, [row if self.rng.random() < 0.8 else -1 for row in rows])

    def fork_row_into(self, state: State) -> State:
        if state.ledger.leases[0].pool.owned or state.rows < 2:
            return state
        source, *rows = self.rng.sample(range(state.rows), 2)
        return fork_into(state, rows, state, source)

    def release(self, state: State) -> State:
        return fm.release(state, [self.rng.randrange(state.rows)])

    def keep(self, state: State) -> None:
        self.held = [one for one in [*self.held, state] if not any(lease.ended for lease in one.ledger.leases)]
        if len(self.held) > MOST_HELD:
            del self.held[self.rng.randrange(MOST_HELD)]

    def act(self) -> None:
        state = self.rng.choice(self.held)
        acts: list[Callable[[State], State]] = [self.extend, self.verify, self.propose, self.fork, self.select]
        acts += [self.extend, self.verify, self.read, self.fork_row_into, self.release]
        if not state.ledger.overwritten:
            self.keep(self.rng.choice(acts)(state))

    def check(self) -> None:
        for state in self.held:
            assert state.log is not None
            changed = stale_rows(state.log, state.page_table, state.lengths).nonzero().flatten().tolist()
            found = state.ledger.overwritten
            assert found == changed if self.exact else set(found) >= set(changed)
            if found:
                with pytest.raises(fm.StaleStateError, match=f"row {found[0]} of this state is stale"):
                    fm.fork(state)


def play(seeds: range, exact: bool) -> None:
    """A history a seed, checked after each act."""
    for seed in seeds:
        history = History(random.Random(seed), exact)
        history.keep(empty(history.rng))
        for _ in range(10):
            if not history.held:
                break
            history.act()
            history.check()


@pytest.mark.plain
@pytest.mark.parametrize("part", range(8))
def test_the_host_knows_every_overwritten_row(part: int) -> None:
    play(range(250 * part, 250 * part + 250), exact=True)


@pytest.mark.plain
def test_bounds_miss_no_overwritten_row() -> None:
    play(range(250), exact=False)


@pytest.mark.plain
def test_counts_on_the_device_refuse_nothing_that_the_newest_state_stands_on() -> None:
    for seed in range(100):
        history = History(random.Random(seed), exact=False)
        state = empty(history.rng)
        line = [state]
        for _ in range(8):
            state = history.rng.choice((history.extend, history.verify, history.propose))(state)
            line.append(state)
            if history.rng.random() < 0.3:
                line[-1] = state = history.read(state)
            assert not any(one.ledger.overwritten for one in line)


@pytest.mark.plain
def test_what_a_lease_remembers_is_bounded_by_its_tokens() -> None:
    """Rounds that accept nothing, for rows that idle in them, add nothing; other branches go when they are left."""
    history = History(random.Random(0), exact=True)
    state = states.empty(
        (), rows=2, max_len=4 * MAX_LEN, page_size=4, pool=PagePool(64, False), vocab=2**31,
        device=torch.device("cpu"), checked=True,
    )  # fmt: skip
    for _ in range(50):
        state = fm.commit(history.grown(state, [4, 4], keep=True), [1, 0])
        history.grown(state, [2, 1])
    moving, idle = (len(lease.overwritings) for lease in state.ledger.leases)
    assert moving <= 51 and idle <= 2


@pytest.mark.plain
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda states: pickle.loads(pickle.dumps(states))])
def test_copies_know_what_was_overwritten(copied: Callable[[list[State]], list[State]]) -> None:
    history = History(random.Random(0), exact=True)
    empty = states.empty(
        (), rows=1, max_len=MAX_LEN, page_size=4, pool=PagePool(32, False), vocab=2**31, device=torch.device("cpu"),
        checked=False,
    )  # fmt: skip
    old = history.grown(empty, [3])
    new = history.grown(empty, [2])
    with mock.patch.object(states, "known", return_value=None):
        bounded = fm.commit(history.grown(new, [4], keep=True), [2])
    history.grown(bounded, [1])
    found = [state.ledger.overwritten for state in copied([empty, old, new, bounded])]
    assert found == [[], [0], [], []]
