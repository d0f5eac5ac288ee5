"""A stateful function of one's own is captured as it stands, and its host's part with it: it equals the plain call."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import funcmodels as fm
import lowering
from lowering.jit.buckets import Buckets
from tests.lowering.jit.test_round import same
from tests.lowering.jit.twins import BUCKETS
from tests.oracle.mtp import MtpPair, small

ROWS, MAX_LEN = 2, 40
Held = list[tuple[fm.State, fm.State]]
"""Versions of a state: captured, and plain."""


class Own:
    """Two forwards and a commit in one function: new tokens, and a window after them of which a part counts."""

    def __init__(self, one: MtpPair, **kwargs: Any) -> None:
        self.one, self.vocab = one, one.config.vocab_size
        self.step = lowering.jit(self.run, buckets=BUCKETS, backend="fx", **kwargs)

    def run(self, params: Any, state: fm.State, batch: fm.Batch, most: Tensor) -> tuple[fm.Output, Tensor, fm.State]:
        out, state = self.one.model.forward(params, state, batch)
        ends = (batch.query_start[1:] - 1).clamp(min=0).long()
        token = out.logits[ends].argmax(-1)
        tokens = torch.stack((token, (token + 1) % self.vocab, (token + 3) % self.vocab), 1)
        window = fm.Batch.from_tokens(tokens.flatten(), [3] * ROWS, state)
        after, pending = self.one.model.forward(params, state, window, keep_steps=True)
        accepted = torch.minimum(most, 1 + after.logits.argmax(-1).view(ROWS, 3)[:, 0] % 3)
        return out, accepted, fm.commit(pending, accepted)

    def both(
        self, held: tuple[fm.State, fm.State], counts: list[int], draw: random.Random
    ) -> tuple[fm.State, fm.State]:
        """The function captured, and called on the padded batch with the kernels that tracing allows."""
        lists = [[draw.randrange(self.vocab) for _ in range(count)] for count in counts]
        most = torch.tensor([draw.randint(0, 3) for _ in range(ROWS)])
        batch = fm.Batch.from_lists(lists, held[0])
        out, accepted, state = self.step(self.one.params, held[0], batch, most)
        with lowering.use(paged_attention="torch", experts="torch"):
            right, counted, plain = self.run(self.one.params, held[1], Buckets.of(BUCKETS).fit(batch), most)
        assert same(accepted, counted) and same(out.hidden, right.hidden[: sum(counts)])
        assert same(out.logits, right.logits[: sum(counts)])
        return state, plain

    def refused(self, kind: type[Exception], state: fm.State, batch: fm.Batch) -> str:
        """What the captured function says, which leaves the state and its pages."""
        pool, most = state.ledger.leases[0].pool, torch.tensor([1] * ROWS)
        free = pool.free
        with pytest.raises(kind) as found:
            self.step(self.one.params, state, batch, most)
        assert pool.free == free
        return str(found.value)


def agree(held: Held) -> None:
    """The host knows the same of all versions, which hold the same where nothing has been overwritten."""
    for one, other in held:
        mine, right = one.ledger, other.ledger
        assert (mine.lengths, mine.least, mine.overwritten) == (right.lengths, right.least, right.overwritten)
        assert [len(lease.pages) for lease in mine.leases] == [len(lease.pages) for lease in right.leases]
        if not mine.overwritten:
            assert all(same(fm.logical(one, row), fm.logical(other, row)) for row in range(ROWS))


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::lowering.RecaptureWarning")
def test_it_equals_the_plain_call_on_every_branch() -> None:
    own, draw = Own(small("dense")), random.Random(5)
    first = [own.one.model.init_state(ROWS, MAX_LEN, page_size=4, pages=30) for _ in range(2)]
    held: Held = [(first[0], first[1])]
    refused = 0
    for at, counts in (
        (0, [5, 2]), (1, [1, 0]), (2, [4, 3]), (1, [0, 3]), (3, [2, 1]), (4, [1, 2]), (2, [0, 1]), (5, [3, 2]),
    ):  # fmt: skip
        if held[at][0].ledger.overwritten:
            refused += 1
            batch = fm.Batch.from_lists([[1] * count for count in counts], held[at][0])
            said = own.refused(fm.StaleStateError, held[at][0], batch)
            with pytest.raises(fm.StaleStateError) as plainly:
                own.run(own.one.params, held[at][1], batch, torch.ones(ROWS, dtype=torch.int64))
            assert said == str(plainly.value)
            continue
        held.append(own.both(held[at], counts, draw))
        agree(held)
    assert refused == 2 and own.step.captures == len(own.step._graphs)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::lowering.RecaptureWarning")
def test_it_refuses_what_the_plain_call_refuses() -> None:
    own = Own(small("dense"), donate=("state",))
    state = own.one.model.init_state(ROWS, MAX_LEN, page_size=4, pages=5)
    assert own.one.config.vocab_size < 9999
    batch = fm.Batch.from_lists([[1, 2, 3, 4, 5], [6]], state)
    *_, after = own.step(own.one.params, state, batch, torch.tensor([1, 0]))
    assert "donated to a captured call" in own.refused(fm.StateError, state, batch)
    assert "3 more pages are needed and 2 of 5 are free" in own.refused(fm.OutOfPages, after, batch)
    wide = own.one.model.init_state(ROWS, MAX_LEN, page_size=4)
    _, full = own.one.model.forward(own.one.params, wide, fm.Batch.from_lists([[1] * 34, [1]], wide))
    said = own.refused(ValueError, full, batch)
    assert "row 0: 3 new tokens do not fit: it holds 39, and max_len is 40" in said
    with pytest.raises(ValueError, match="token 5 of the batch: id 10005 is out of range"):
        own.step(own.one.params, wide, fm.Batch(batch.tokens + 9999, batch.query_start, max_query=5), batch.tokens[:2])
    *_, last = own.step(own.one.params, after, fm.Batch.from_lists([[], [6]], after), torch.tensor([0, 0]))
    assert last.ledger.lengths == tuple(last.lengths.tolist())


@torch.no_grad()
def test_counts_that_are_given_are_checked_before_it_runs() -> None:
    one = small("dense")

    def verified(params: Any, state: fm.State, window: fm.Batch, accepted: Tensor) -> fm.State:
        return fm.commit(one.model.forward(params, state, window, keep_steps=True)[1], accepted)

    step = lowering.jit(verified, donate=("state",), backend="fx")
    state = one.model.init_state(ROWS, MAX_LEN, page_size=4)
    window = fm.Batch.from_lists([[1, 2], [3, 4]], state)
    for _ in range(2):
        with pytest.raises(ValueError, match="commit: row 1 was offered 2 tokens, 3 were accepted"):
            step(one.params, state, window, torch.tensor([1, 3]))
    assert step(one.params, state, window, torch.tensor([1, 2])).ledger.lengths == (1, 2)


@torch.no_grad()
def test_a_branch_that_it_has_overwritten_itself_is_stale() -> None:
    one = small("dense")

    def branching(params: Any, state: fm.State, batch: fm.Batch) -> fm.State:
        _, left = one.model.forward(params, state, batch)
        one.model.forward(params, state, batch)
        return one.model.forward(params, left, batch)[1]

    state = one.model.init_state(ROWS, MAX_LEN, page_size=4)
    batch = fm.Batch.from_lists([[1], [2]], state)
    for function in (branching, lowering.jit(branching, backend="fx")):
        with pytest.raises(fm.StaleStateError, match="row 0 of this state is stale"):
            function(one.params, state, batch)
