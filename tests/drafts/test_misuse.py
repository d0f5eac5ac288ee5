"""Drafts used wrongly: every misuse raises before any work, and says what was given, what was expected, what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import funcmodels as fm
import params
from funcmodels.drafts.protocol import kept_tokens
from tests.drafts.rounds import GREEDY
from tests.oracle import kimi_linear, mtp
from tests.oracle.mtp import MtpPair
from tests.oracle.states import advance, refuses


@dataclass
class Case:
    """Two rows of 3 and 2 tokens, with room for 20, a proposal of three drafts for each, and its verdict."""

    one: MtpPair
    head: Any
    state: fm.State
    dstate: fm.State
    carry: fm.Carry
    prompt: fm.Output
    proposal: fm.Proposal
    window: fm.Batch
    out: fm.Output
    verdict: fm.Verdict

    def extend(self, dstate: fm.State, out: fm.Output, following: Tensor, carry: fm.Carry | None) -> Any:
        return self.head.extend(self.one.params, dstate, out, self.window, following, carry)

    def propose(self, dstate: fm.State, carry: fm.Carry, steps: int = 3) -> Any:
        return self.head.propose(self.one.params, dstate, carry, steps)

    def verify(self, out: fm.Output, settings: Any = GREEDY, requests: Tensor | None = None) -> Any:
        return fm.verify(out, self.proposal, settings, requests)


@pytest.fixture
def case() -> Case:
    one = mtp.small("dense")
    head = fm.draft(one.model, "mtp")
    empty = one.model.init_state(2, 20, page_size=4, pages=16, checked=True)
    batch = fm.Batch.from_lists([[1, 2, 3], [4, 5]])
    prompt, state = one.model.forward(one.params, empty, batch)
    following = fm.next_tokens(batch, torch.tensor([6, 7]))
    dstate, carry = head.extend(one.params, head.init_state(empty), prompt, batch, following)
    proposal, dstate = head.propose(one.params, dstate, carry)
    window = proposal.batch(state)
    out, _ = one.model.forward(one.params, state, window, keep_steps=True)
    verdict = fm.verify(out, proposal)
    return Case(one, head, state, dstate, carry, prompt, proposal, window, out, verdict)


MISUSES: dict[str, tuple[Callable[[Case], Any], type[Exception], str]] = {
    "logits of the last tokens only": (
        lambda c: c.verify(params.put(c.out, "logits", c.out.logits[:2])), ValueError,
        "verify: 2 rows of logits for 2 windows of 4 tokens; run forward(params, state, proposal.batch(state), "
        "keep_steps=True) with logits of all tokens",
    ),
    "no logits": (
        lambda c: c.verify(params.put(c.out, "logits", c.out.logits[:0])), ValueError,
        "verify: 0 rows of logits for 2 windows of 4 tokens",
    ),
    "the output of another forward": (
        lambda c: c.verify(c.prompt), ValueError, "verify: 5 rows of logits for 2 windows of 4 tokens",
    ),
    "settings of other rows": (
        lambda c: c.verify(c.out, fm.RowSampling.of([fm.Sampling(1.0)] * 3)), ValueError,
        "verify: 2 windows, settings of 3 rows and 2 requests; give one of each a window",
    ),
    "requests of other rows": (
        lambda c: c.verify(c.out, fm.Sampling(1.0), torch.arange(1)), ValueError,
        "verify: 2 windows, settings of 2 rows and 1 requests",
    ),
    "too few next tokens": (
        lambda c: c.extend(c.dstate, c.out, c.verdict.tokens[:, :3], c.carry), ValueError,
        "extend: 6 next tokens for 8 tokens; give one for each",
    ),
    "next tokens of accepted places alone": (
        lambda c: c.extend(c.dstate, c.out, torch.tensor([1, 2]), c.carry), ValueError,
        "extend: 2 next tokens for 8 tokens",
    ),
    "an output that the batch did not make": (
        lambda c: c.extend(c.dstate, c.prompt, c.verdict.tokens, c.carry), ValueError,
        "extend: the output is of 5 tokens, the batch has 8; give the batch that the model's forward made this output",
    ),
    "extending a state of other rows": (
        lambda c: c.extend(fm.select(c.dstate, [0]), c.out, c.verdict.tokens, None), fm.StateError,
        "the batch has 2 rows, the state has 1",
    ),
    "extending with a carry of other rows": (
        lambda c: c.extend(c.dstate, c.out, c.verdict.tokens, c.carry.select(torch.tensor([1]))), fm.StateError,
        "the carry has 1 rows, the state has 2; select the same rows of both",
    ),
    "extending the model's own state": (
        lambda c: c.extend(c.state, c.out, c.verdict.tokens, c.carry), fm.StateError,
        "the state has entries for 2 layers, the parameters have 1; make the state with the init_state",
    ),
    "proposing from a state of other rows": (
        lambda c: c.propose(fm.select(c.dstate, [1, 0, -1]), c.carry), fm.StateError,
        "the carry has 2 rows, the state has 3; select the same rows of both",
    ),
    "proposing one token from a state of other rows": (
        lambda c: c.propose(fm.select(c.dstate, [1]), c.carry, 1), fm.StateError, "the carry has 2 rows",
    ),
    "proposing nothing": (
        lambda c: c.propose(c.dstate, c.carry, 0), ValueError, "propose: steps must be at least 1, found 0",
    ),
    "proposing past the end of a row": (
        lambda c: c.propose(c.dstate, c.carry, 19), ValueError,
        "row 0: 18 new tokens do not fit: it holds 3, and max_len is 20",
    ),
    "a window past the end of a row": (
        lambda c: c.propose(c.dstate, c.carry, 18)[0].batch(c.state), ValueError,
        "row 0: 19 new tokens do not fit: it holds 3, and max_len is 20",
    ),
    "a window of more than a model keeps": (
        lambda c: advance(c.one, c.state, [[1] * 17, []], keep_steps=True), ValueError, "at most 16 can be kept",
    ),
    "a window for other rows": (
        lambda c: c.proposal.batch(fm.select(c.state, [0])), fm.StateError, "the batch has 2 rows, the state has 1",
    ),
    "a draft of a state that holds tokens": (
        lambda c: c.head.init_state(c.state), fm.StateError,
        "the state already holds tokens ([3, 2]) that the draft has not seen; make the draft's state from the empty",
    ),
    "parameters without a head": (
        lambda c: c.head.forward(params.put(c.one.params, "mtp", None), None, c.window, c.out.hidden), ValueError,
        "these parameters have no mtp head; load a checkpoint whose config has one",
    ),
    "a draft of another kind": (
        lambda c: fm.draft(c.one.model, "ngram"), ValueError, "draft: 'ngram' is not a known draft; give 'mtp'",
    ),
    "a model without a head": (
        lambda c: fm.draft(fm.build({**c.one.model.config_json, "mtp_num_hidden_layers": 0}), "mtp"), ValueError,
        "draft: this model has no mtp head",
    ),
    "a model of a family without heads": (
        lambda c: fm.draft(fm.build({**kimi_linear.sizes("grouped", 0), "model_type": "kimi_linear"}), "mtp"),
        ValueError,
        "draft: models of type 'kimi_linear' have no mtp head; give the directory of a block draft, or 'none'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISUSES)
def test_misuses_are_refused_and_harm_nothing(case: Case, name: str) -> None:
    act, error, message = MISUSES[name]
    held = [(state, row, fm.logical(state, row)) for state in (case.state, case.dstate) for row in range(2)]
    with refuses(error, message):
        act(case)
    assert all(params.equal(fm.logical(state, row), then) for state, row, then in held)


@pytest.mark.parametrize("steps", [1, 3])
def test_a_state_that_ended_proposes_nothing(case: Case, steps: int) -> None:
    pending = case.head.forward(case.one.params, case.dstate, case.window, case.out.hidden, keep_steps=True)[1]
    with pytest.raises(fm.StateError, match=re.escape("this state is pending after keep_steps=True")):
        case.propose(pending, case.carry, steps)
    fm.release(case.dstate)
    with pytest.raises(fm.StateError, match="this state was released"):
        case.propose(case.dstate, case.carry, steps)


def test_a_pool_without_pages_for_a_proposal_stays_as_it_was(case: Case) -> None:
    """The window would begin a page in both rows, and one page is free."""
    one, head = case.one, case.head
    empty = one.model.init_state(2, 12, page_size=4, pages=3)
    batch = fm.Batch.from_lists([[1, 2, 3], [4, 5, 6]])
    out, _ = one.model.forward(one.params, empty, batch)
    following = fm.next_tokens(batch, torch.tensor([6, 7]))
    dstate, carry = head.extend(one.params, head.init_state(empty), out, batch, following)
    pool, before = dstate.ledger.leases[0].pool, [fm.logical(dstate, row) for row in range(2)]
    with pytest.raises(fm.OutOfPages, match="2 more pages are needed and 1 of 3 are free"):
        case.propose(dstate, carry, 3)
    assert pool.free == 1
    assert all(params.equal(fm.logical(dstate, row), before[row]) for row in range(2))
    assert case.propose(dstate, carry, 2)[0].tokens.shape == (2, 2)


def test_the_first_minus_one_of_a_row_ends_it() -> None:
    """Idle rows, rows of which nothing counts, and what stands in padding are no matter."""
    batch = fm.Batch.from_lists([[1, 2, 3, 4], [], [5, 6], [7, 8, 9]]).pad(11)
    following, kept = kept_tokens(batch, torch.tensor([7, -1, 7, 7, -1, -1, 3, 4, 5, 6, 6]))
    assert kept.tolist() == [1, 0, 0, 3] and int(following.min()) == 0
    uniform = fm.Batch.from_lists([[1, 2, 3], [4, 5, 6]])
    assert kept_tokens(uniform, torch.tensor([[5, 6, -1], [-1, 8, 9]]))[1].tolist() == [2, 0]
