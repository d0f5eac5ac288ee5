"""A speculative round of captured calls equals one of plain calls, to the last bit, draft state and carry included."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import funcmodels as fm
import lowering
from lowering.jit.buckets import Buckets
from params import tree
from params.tree import tree_map
from tests.lowering.jit.twins import BUCKETS, plain_kernels
from tests.oracle.mtp import MtpPair, small

ROWS, STEPS = 3, 3


class Side:
    """One run: its states, and the five functions of a round, captured or not."""

    def __init__(self, one: MtpPair, captured: bool) -> None:
        self.one, self.captured = one, captured
        self.head = fm.draft(one.model, "mtp")
        self.state = one.model.init_state(ROWS, 60, page_size=4, pages=50)
        self.dstate = self.head.init_state(self.state)
        self.carry: fm.Carry | None = None
        self.forward, self.commit, self.propose, self.extend = (
            self.jit(f, "state") for f in (one.model.forward, fm.commit, self.head.propose, self.head.extend)
        )
        self.verify = self.jit(fm.verify)

    def jit(self, function: Any, *donate: str) -> Any:
        return lowering.jit(function, donate, BUCKETS, backend="fx") if self.captured else function

    def padded(self, batch: fm.Batch) -> tuple[fm.Batch, int]:
        """The batch as a captured call runs it, for the plain side."""
        fitted = batch if self.captured else Buckets.of(BUCKETS).fit(batch)
        return fitted, fitted.tokens.shape[0] - batch.tokens.shape[0]

    def prompts(self, lists: list[list[int]], last: list[int]) -> None:
        batch = fm.Batch.from_lists(lists, self.state)
        following = fm.next_tokens(batch, torch.tensor(last))
        fitted, extra = self.padded(batch)
        following = torch.cat((following, following.new_full((extra,), -1)))
        with plain_kernels(fitted):
            out, self.state = self.forward(self.one.params, self.state, fitted)
            self.dstate, self.carry = self.extend(self.one.params, self.dstate, out, fitted, following, self.carry)

    def round(self, sampling: fm.RowSampling, most: list[int]) -> tuple[fm.Proposal, fm.Verdict]:
        assert self.carry is not None
        params = self.one.params
        with lowering.use(paged_attention="torch", experts="torch"):
            proposal, self.dstate = self.propose(params, self.dstate, self.carry, STEPS)
            window = proposal.batch(self.state)
            out, pending = self.forward(params, self.state, window, keep_steps=True)
            verdict = self.verify(out, proposal, sampling)
            accepted = torch.minimum(verdict.accepted, torch.tensor(most))
            kept = torch.where(torch.arange(STEPS + 1) < accepted[:, None], verdict.tokens, -1)
            self.state = self.commit(pending, accepted)
            self.dstate, self.carry = self.extend(params, self.dstate, out, window, kept, self.carry)
        return proposal, verdict


@torch.no_grad()
@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.filterwarnings("ignore::lowering.RecaptureWarning")
def test_captured_rounds_equal_plain_ones(kind: str, temperature: float) -> None:
    one, draw = small(kind), random.Random(f"{kind} {temperature}")
    sides = [Side(one, captured) for captured in (True, False)]
    vocab = one.config.vocab_size

    def prompts(*counts: int) -> None:
        lists = [[draw.randrange(vocab) for _ in range(count)] for count in counts]
        last = [draw.randrange(vocab) for _ in counts]
        for side in sides:
            side.prompts(lists, last)

    prompts(5, 2, 0)
    kept = []
    for number in range(6):
        if number == 2:
            prompts(0, 0, 3)
        # A row that takes none is one that has finished, or not begun.
        most = [draw.randint(0, STEPS + 1), STEPS + 1, (STEPS + 1) * (number >= 2)]
        sampling = fm.RowSampling.of([fm.Sampling(temperature, seed=row) for row in range(ROWS)])
        found = [side.round(sampling, most) for side in sides]
        assert same(*found), f"round {number}"
        kept.append((found[0], tree_map(torch.clone, found[0])))
        for of in (
            lambda side: side.carry,
            lambda side: side.state.ledger.lengths,
            lambda side: side.dstate.ledger.lengths,
        ):
            assert same(*map(of, sides)), f"round {number}"
        for row in range(ROWS):
            for of in (lambda side: side.state, lambda side: side.dstate):
                assert same(*(fm.logical(of(side), row) for side in sides)), f"round {number}, row {row}"
    assert all(same(*pair) for pair in kept)  # what earlier rounds handed out
    counts = {name: getattr(sides[0], name).captures for name in ("forward", "extend", "propose", "verify", "commit")}
    assert counts == {"forward": 3, "extend": 3, "propose": 1, "verify": 1, "commit": 1}


def same(one: Any, two: Any) -> bool:
    """Equal trees, to the last bit."""
    first, second = tree.leaves(one), tree.leaves(two)
    pairs = zip(first, second, strict=True)
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in pairs)
