"""Any order of prefill, chunks, drafts, commits, forks, selects and releases: every held state stays what it was.

The machine keeps several states at once, with the tokens of each row. It also keeps its own record of which write each
slot of each pool holds, so it knows which held states another continuation has made stale: these must raise, and all
others must equal a computation from scratch, in logits and in every logical entry.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

import funcmodels as fm
from funcmodels.state.pages import Lease, PagePool
from tests.oracle.qwen3_5 import Pair, build, sizes
from tests.oracle.states import ROUNDING, advance, per_row
from tests.tolerances import assert_close

MOST_HELD = 7
MAX_LEN = 14


@functools.cache
def small(kind: str) -> Pair:
    """Two layers, one of each kind."""
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    return build(kind, sizes(kind, 4) | layers)


@functools.cache
def from_scratch(kind: str, tokens: tuple[int, ...]) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits without a state, and the entries of a fresh one, for one row."""
    one = small(kind)
    fresh = one.model.init_state(1, MAX_LEN)
    if not tokens:
        return torch.zeros(0), fm.logical(fresh, 0)
    plain, _ = one.model.forward(one.params, None, fm.Batch.from_lists([tokens]))
    _, after = advance(one, fresh, [tokens])
    return plain.logits, fm.logical(after, 0)


@dataclass(eq=False)
class Held:
    """A state, the tokens of its rows (pending ones last), which write each is of, and its entries when it was made."""

    state: fm.State
    tokens: list[tuple[int, ...]]
    writes: list[tuple[int, ...]]
    offered: tuple[int, ...] | None = None
    whole_released: bool = False
    entries: list[dict[str, Tensor]] | None = field(default=None, repr=False)

    @property
    def leases(self) -> tuple[Lease, ...]:
        return self.state.ledger.leases


class Slots:
    """Which write each slot of each pool holds: a record of our own, in plain Python."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.pools: list[PagePool] = []
        self._content: dict[tuple[int, int, int], int] = {}
        self._number = 0

    def _at(self, lease: Lease, position: int) -> tuple[int, int, int]:
        if not any(pool is lease.pool for pool in self.pools):
            self.pools.append(lease.pool)  # kept, so that its id stays its own
        return id(lease.pool), lease.pages[position // self.page_size], position % self.page_size

    def write(self, lease: Lease, writes: tuple[int, ...], count: int) -> tuple[int, ...]:
        """`count` more tokens behind those of the lease's row; which write each of all is of."""
        self._number += 1
        writes += (self._number,) * count
        for position in range(len(writes) - count, len(writes)):
            self._content[self._at(lease, position)] = self._number
        return writes

    def copy(self, old: Lease, new: Lease, length: int) -> None:
        content = [self._content[self._at(old, position)] for position in range(length)]
        for position, prefix in enumerate(content):
            self._content[self._at(new, position)] = prefix

    def intact(self, lease: Lease, writes: tuple[int, ...]) -> bool:
        return all(self._content[self._at(lease, at)] == write for at, write in enumerate(writes))


class StateMachine(RuleBasedStateMachine):
    """The rules. `kind`, `owned` and `checked` are set by subclasses."""

    kind = "dense"
    owned = False
    checked = True

    @initialize(rows=st.integers(1, 3), page_size=st.sampled_from((1, 3, 4, 16)), spare=st.integers(0, 6))
    def start(self, rows: int, page_size: int, spare: int) -> None:
        self.one = small(self.kind)
        self.slots = Slots(page_size)
        self.ended: list[Lease] = []
        pages = None if self.owned else math.ceil(MAX_LEN / page_size) * rows // 2 + 1 + spare
        state = self.one.model.init_state(rows, MAX_LEN, page_size=page_size, pages=pages, checked=self.checked)
        self.held: list[Held] = []
        self.keep(Held(state, [()] * rows, [()] * rows))

    # What the machine knows

    def keep(self, new: Held) -> None:
        """Hold a state, with a snapshot of its entries if they can be read and are right."""
        if new.offered is None and self.usable(new) and not self.stale(new):
            new.entries = [fm.logical(new.state, row) for row in range(new.state.rows)]
            for entries, tokens in zip(new.entries, new.tokens, strict=True):
                assert_close(entries, from_scratch(self.kind, tokens)[1], looser=5, reason=ROUNDING)
        dead = [held for held in self.held if not self.usable(held)]
        for held in dead[1:]:  # one is enough to see that it stays refused
            self.held.remove(held)
        self.held.append(new)
        if len(self.held) > MOST_HELD:
            del self.held[0]

    def usable(self, held: Held) -> bool:
        return not held.whole_released and not any(lease is ended for lease in held.leases for ended in self.ended)

    def stale(self, held: Held) -> list[int]:
        rows = enumerate(zip(held.leases, held.writes, strict=True))
        return [row for row, (lease, writes) in rows if not self.slots.intact(lease, writes)]

    def pick(self, data: st.DataObject, *, pending: bool | None = None) -> Held:
        among = [held for held in self.held if pending is None or (held.offered is not None) == pending]
        # By place: strategies are cached, and a cached state would hold its pages.
        return among[data.draw(st.integers(0, len(among) - 1), label="held")]

    def refused(self, held: Held, act: Any, rows: Sequence[int] = ()) -> bool:
        """Whether the call must raise because of what the state is; if so, it did. `rows` are those that it goes on."""
        stale = [row for row in self.stale(held) if row in rows]
        if not self.usable(held):
            with pytest.raises(fm.StateError, match="was released"):
                act()
        elif held.offered is not None:
            with pytest.raises(fm.StateError, match="pending"):
                act()
        elif stale:
            with pytest.raises(fm.StaleStateError, match=f"row {stale[0]} of this state is stale"):
                act()
        else:
            return False
        return True

    def fits(self, held: Held, pages: int, act: Any) -> bool:
        """Whether the pool has `pages` more; if not, the call raises, takes none, and leaves the state as it was."""
        pool = held.leases[0].pool
        free = pool.free
        if pages <= free:
            return True
        with pytest.raises(fm.OutOfPages, match=f"{pages} more pages are needed and {free} of {pool.pages} are free"):
            act()
        assert pool.free == free
        return False

    # Rules

    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        self.forward(data, keep_steps=False)

    @rule(data=st.data())
    def draft(self, data: st.DataObject) -> None:
        self.forward(data, keep_steps=True)

    def forward(self, data: st.DataObject, keep_steps: bool) -> None:
        held = self.pick(data)
        most = [min(MAX_LEN - len(tokens), 8 if keep_steps else MAX_LEN) for tokens in held.tokens]
        counts = data.draw(st.tuples(*(st.integers(0, count) for count in most)), label="counts")
        if not any(counts):
            return
        token = st.integers(0, self.one.config.vocab_size - 1)
        new = [data.draw(st.lists(token, min_size=n, max_size=n), label="new") for n in counts]

        def act() -> tuple[Any, fm.State]:
            return advance(self.one, held.state, new, keep_steps=keep_steps)

        if self.refused(held, act, range(held.state.rows)) or not self.fits(held, self.pages_for(held, counts), act):
            return
        out, after = act()
        tokens = [old + tuple(more) for old, more in zip(held.tokens, new, strict=True)]
        rows = zip(after.ledger.leases, held.writes, counts, strict=True)
        writes = [self.slots.write(lease, old, count) for lease, old, count in rows]
        for row, part in zip(tokens, per_row(out.logits, new), strict=True):
            right = from_scratch(self.kind, row)[0][len(row) - len(part) :]
            if len(part):
                assert_close(part, right, looser=5, reason=ROUNDING)
        self.keep(Held(after, tokens, writes, counts if keep_steps else None))

    def pages_for(self, held: Held, counts: Sequence[int]) -> int:
        size = self.slots.page_size
        need = [math.ceil((len(tokens) + n) / size) for tokens, n in zip(held.tokens, counts, strict=True)]
        return sum(max(0, pages - len(lease.pages)) for pages, lease in zip(need, held.leases, strict=True))

    @precondition(lambda self: any(held.offered is not None for held in self.held))
    @rule(data=st.data(), as_tensor=st.sampled_from((None, torch.int32, torch.int64)))
    def commit(self, data: st.DataObject, as_tensor: torch.dtype | None) -> None:
        held = self.pick(data, pending=True)
        assert held.offered is not None
        accepted = data.draw(st.tuples(*(st.integers(0, n) for n in held.offered)), label="accepted")
        after = fm.commit(held.state, list(accepted) if as_tensor is None else torch.tensor(accepted, dtype=as_tensor))
        dropped = [offered - kept for offered, kept in zip(held.offered, accepted, strict=True)]
        tokens, writes = (
            [row[: len(row) - count] for row, count in zip(rows, dropped, strict=True)]
            for rows in (held.tokens, held.writes)
        )
        self.keep(Held(after, tokens, writes))

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        held = self.pick(data)
        rows = data.draw(st.lists(st.integers(0, held.state.rows - 1), min_size=1, max_size=3), label="rows")

        def act() -> fm.State:
            return fm.fork(held.state, rows)

        if self.refused(held, act, rows):
            return
        partial = sum(len(held.tokens[row]) % self.slots.page_size > 0 for row in rows)
        if not self.owned and not self.fits(held, partial, act):
            return
        after = act()
        for row, lease in zip(rows, after.ledger.leases, strict=True):
            self.slots.copy(held.leases[row], lease, len(held.tokens[row]))
        self.keep(Held(after, [held.tokens[row] for row in rows], [held.writes[row] for row in rows]))

    @rule(data=st.data())
    def select(self, data: st.DataObject) -> None:
        held = self.pick(data)
        order = data.draw(st.permutations(range(held.state.rows)), label="order")
        rows = [-1 if data.draw(st.booleans(), label="empty") else row for row in order]
        rows = rows[: data.draw(st.integers(1, len(rows)), label="rows")]

        def act() -> fm.State:
            return fm.select(held.state, rows)

        if not self.refused(held, act, rows):
            tokens, writes = ([each[row] if row >= 0 else () for row in rows] for each in (held.tokens, held.writes))
            after = act()
            for row, lease in zip(rows, after.ledger.leases, strict=True):
                if row >= 0 and lease.pool is not held.leases[row].pool:  # owned rows are copied to a pool of their own
                    self.slots.copy(held.leases[row], lease, len(held.tokens[row]))
            self.keep(Held(after, tokens, writes))

    @rule(data=st.data())
    def release_rows(self, data: st.DataObject) -> None:
        held = self.pick(data)
        rows = data.draw(st.sets(st.integers(0, held.state.rows - 1), min_size=1), label="rows")

        def act() -> fm.State:
            return fm.release(held.state, sorted(rows))

        if self.refused(held, act):
            return
        after = act()
        self.ended += [held.leases[row] for row in rows]
        tokens, writes = (
            [() if row in rows else part for row, part in enumerate(each)] for each in (held.tokens, held.writes)
        )
        self.keep(Held(after, tokens, writes))

    @precondition(lambda self: sum(self.usable(held) for held in self.held) > 3)
    @rule(data=st.data())
    def release_whole(self, data: st.DataObject) -> None:
        held = self.pick(data)
        if self.refused(held, lambda: fm.release(held.state)):
            return
        fm.release(held.state)
        held.whole_released = True
        self.ended += held.leases

    @precondition(lambda self: len(self.held) > 1)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(self.held) - 1), label="place")
        del self.held[place]

    # What holds at any time

    @invariant()
    def held_states_are_what_they_were(self) -> None:
        for held in self.held:
            self.check_reading(held)

    def check_reading(self, held: Held) -> None:
        def act() -> list[dict[str, Tensor]]:
            return [fm.logical(held.state, row) for row in range(held.state.rows)]

        if self.refused(held, act, range(held.state.rows)):
            return
        then = held.entries or [from_scratch(self.kind, tokens)[1] for tokens in held.tokens]
        assert_close(act(), then, looser=5, reason=ROUNDING)

    @invariant()
    def pages_are_held_by_those_who_use_them(self) -> None:
        for pool in self.slots.pools:
            leases = {id(lease): lease for held in self.held for lease in held.leases if lease.pool is pool}
            held_pages = [page for lease in leases.values() if not lease.ended for page in lease.pages]
            assert pool.free == pool.pages - len(set(held_pages))
            assert 0 not in held_pages
            for lease in leases.values():
                assert len(set(lease.pages)) == len(lease.pages)

    def teardown(self) -> None:
        held = getattr(self, "held", [])
        pools = [lease.pool for one in held for lease in one.leases]
        held.clear()
        self.ended = []
        failed = sys.exc_info()[1] is not None  # its traceback still holds states
        assert failed or all(pool.free == pool.pages for pool in pools)


class OwnedPages(StateMachine):
    owned = True


class Unchecked(StateMachine):
    checked = False


class MixtureOfExperts(StateMachine):
    kind = "moe"


def steps(machine: type[StateMachine], count: int) -> Any:
    case = machine.TestCase
    case.settings = settings(stateful_step_count=count)
    return case


TestSharedPool = steps(StateMachine, 25)
TestOwnedPages = steps(OwnedPages, 25)
TestUnchecked = steps(Unchecked, 25)
TestLongRuns = pytest.mark.sweep(steps(MixtureOfExperts, 80))
