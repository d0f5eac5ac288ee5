"""Drafted decoding with its record: rows under way, the undrafted run to compare with, and drafts made to measure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import funcmodels as fm
from funcmodels.sampling.draws import noise
from tests.oracle.states import ROUNDING, advance
from tests.tolerances import assert_close, bound

GREEDY = fm.Sampling()
NEAR = 2 * 5 * bound(torch.float32)
"""Logits of two runs agree within 5 bounds (see `states.ROUNDING`), so a lead of less than twice that may be lost."""


@dataclass
class Asked:
    """What one row is about: its prompt, and the counters and settings of its draws."""

    prompt: list[int]
    request: int = 0
    sampling: fm.Sampling = GREEDY


@dataclass
class Truth:
    """A row decoded without drafts: its new tokens, and how many of them came before the first near-tie."""

    tokens: list[int]
    sure: int


class Rows:
    """Rows of one drafted run: the states, and every token of each row, of which the newest is not yet run."""

    def __init__(self, one: Any, asked: Sequence[Asked | None], draft: Any = None, **kwargs: Any) -> None:
        self.one, self.head = one, fm.draft(one.model, "mtp") if draft is None else draft
        self.state = one.model.init_state(len(asked), **kwargs)
        self.dstate = self.head.init_state(self.state)
        self.asked: list[Asked | None] = [None] * len(asked)
        self.tokens: list[list[int]] = [[] for _ in asked]
        self.carry: fm.Carry | None = None
        self.join({row: new for row, new in enumerate(asked) if new is not None})

    def join(self, new: dict[int, Asked], chunk: int = 1000) -> None:
        """Run the prompts of empty rows, `chunk` tokens a forward, while the others idle; draw their first token."""
        for row, asked in new.items():
            self.asked[row], self.tokens[row] = asked, []
        longest = max((len(asked.prompt) for asked in new.values()), default=0)
        for lower in range(0, longest, chunk):
            fed = [new[row].prompt[lower : lower + chunk] if row in new else [] for row in range(len(self.tokens))]
            out, self.state = advance(self.one, self.state, fed, outputs=self.head.outputs)
            batch = fm.Batch.from_lists(fed)
            drawn = self.draw(out.logits[(batch.query_start[1:] - 1).clamp(min=0).long()])
            following = list(drawn)
            for row, asked in new.items():
                end = lower + chunk
                if end < len(asked.prompt):
                    following[row] = asked.prompt[end]
                elif lower < len(asked.prompt):
                    self.tokens[row] = [*asked.prompt, drawn[row]]
            self.extend(out, batch, fm.next_tokens(batch, torch.tensor(following)))

    def draw(self, logits: Tensor) -> list[int]:
        """The token after each prompt, as any undrafted run would draw it."""
        positions = torch.tensor([len(asked.prompt) if asked else 0 for asked in self.asked])
        return fm.sample(logits, self.sampling, self.requests, positions).tolist()

    def extend(self, out: fm.Output, batch: fm.Batch, following: Tensor) -> None:
        self.dstate, self.carry = self.head.extend(self.one.params, self.dstate, out, batch, following, self.carry)

    @property
    def sampling(self) -> fm.RowSampling:
        return fm.RowSampling.of([asked.sampling if asked else GREEDY for asked in self.asked])

    @property
    def requests(self) -> Tensor:
        return torch.tensor([asked.request if asked else 0 for asked in self.asked])

    def propose(self, steps: int = 3) -> Tensor:
        """The head's own drafts."""
        return self.proposal(steps).tokens

    def proposal(self, steps: int = 3, drawn: bool = False) -> fm.Proposal:
        """The draft's own proposal, of its likeliest tokens or of drawn ones."""
        assert self.carry is not None
        noise = fm.DraftNoise(self.sampling, self.requests) if drawn else None
        found, self.dstate = self.head.propose(self.one.params, self.dstate, self.carry, steps, noise)
        return found

    def round(self, drafts: Tensor | fm.Proposal, most: Sequence[int] | None = None) -> list[int]:
        """Verify `drafts`; of each row's window at most `most` count. How many did, in each row."""
        assert self.carry is not None
        proposal = drafts
        if isinstance(proposal, Tensor):
            proposal = fm.Proposal(self.carry.token, proposal, self.state.lengths)
        drafts, window = proposal.tokens, proposal.batch(self.state)
        options: dict[str, Any] = {"keep_steps": True, "outputs": self.head.outputs}
        out, pending = self.one.model.forward(self.one.params, self.state, window, **options)
        verdict = fm.verify(out, proposal, self.sampling, self.requests)
        limit = torch.tensor([drafts.shape[1] + 1 if asked else 0 for asked in self.asked])
        if most is not None:
            limit = torch.minimum(limit, torch.tensor(most))
        accepted = torch.minimum(verdict.accepted, limit)
        kept = torch.where(torch.arange(drafts.shape[1] + 1) < accepted[:, None], verdict.tokens, -1)
        self.state = fm.commit(pending, accepted)
        self.extend(out, window, kept)
        for row, new in zip(self.tokens, kept.tolist(), strict=True):
            row += [token for token in new if token >= 0]
        return accepted.tolist()

    def new_tokens(self, row: int) -> list[int]:
        asked = self.asked[row]
        assert asked is not None
        return self.tokens[row][len(asked.prompt) :]

    def check(self) -> None:
        """Every logical entry of both states, lengths and carry are those of the rows run from scratch."""
        live = [row for row, asked in enumerate(self.asked) if asked]
        lengths = [max(len(row) - 1, 0) for row in self.tokens]
        assert self.state.lengths.tolist() == self.dstate.lengths.tolist() == lengths
        assert self.state.ledger.lengths == self.dstate.ledger.lengths == tuple(lengths)
        state, dstate, carry = from_scratch(self.one, [self.tokens[row] for row in live], self.head)
        assert self.carry is not None
        for at, row in enumerate(live):
            assert int(self.carry.token[row]) == self.tokens[row][-1]
            mine = (fm.logical(self.state, row), fm.logical(self.dstate, row), self.carry.hidden[row])
            right = (fm.logical(state, at), fm.logical(dstate, at), carry.hidden[at])
            assert_close(mine, right, looser=5, reason=ROUNDING)


def from_scratch(one: Any, tokens: list[list[int]], head: Any) -> tuple[fm.State, fm.State, fm.Carry]:
    """Both states and the carry of rows that hold these tokens, the newest of each not yet run."""
    state = one.model.init_state(len(tokens), max(map(len, tokens)), page_size=64)
    ids = [row[:-1] for row in tokens]
    out, after = advance(one, state, ids, outputs=head.outputs)
    batch = fm.Batch.from_lists(ids)
    last = torch.tensor([row[-1] for row in tokens])
    dstate, carry = head.extend(one.params, head.init_state(state), out, batch, fm.next_tokens(batch, last))
    return after, dstate, carry


def undrafted(one: Any, asked: Sequence[Asked], count: int) -> list[Truth]:
    """`count` tokens of each row, one forward a token."""
    requests = torch.tensor([each.request for each in asked])
    sampling = fm.RowSampling.of([each.sampling for each in asked])
    state = one.model.init_state(len(asked), max(len(each.prompt) for each in asked) + count, page_size=32)
    fed, drawn, leads = [each.prompt for each in asked], [], []
    for _ in range(count):
        out, state = advance(one, state, fed, logits="last")
        tokens = fm.sample(out.logits, sampling, requests, state.lengths)
        leads.append(clear(out.logits, sampling, requests, state.lengths))
        drawn.append(tokens)
        fed = tokens[:, None].tolist()
    sure = torch.stack(leads, 1).cumprod(1).sum(1).tolist()
    return [Truth(row, n) for row, n in zip(torch.stack(drawn, 1).tolist(), sure, strict=True)]


def clear(logits: Tensor, sampling: fm.RowSampling, requests: Tensor, positions: Tensor) -> Tensor:
    """1 where the winner leads by more than rounding may move it, 0 at a near-tie. For settings without filters.

    A token of logit l and noise e arrives at e / exp(l / temperature); a greedy row has no noise.
    """
    heat = sampling.temperature[:, None]
    scores = logits - heat * noise(sampling.seed, requests, positions, logits.shape[1]).log()
    best = scores.topk(2).values
    size = logits.abs().amax(1) + logits.square().mean(1).sqrt()
    return (best[:, 0] - best[:, 1] > NEAR * size).int()


def agreement(rows: Rows, truths: Sequence[Truth | None]) -> tuple[int, int]:
    """Each row's tokens are those of its undrafted run, up to a near-tie. Tokens compared, and tokens left out."""
    compared = left_out = 0
    for row, truth in enumerate(truths):
        if truth is not None:
            new = rows.new_tokens(row)
            sure = min(truth.sure, len(new), len(truth.tokens))
            assert new[:sure] == truth.tokens[:sure], f"row {row} left its undrafted run"
            compared, left_out = compared + sure, left_out + min(len(new), len(truth.tokens)) - sure
    return compared, left_out


def measured(rows: Rows, truths: Sequence[Truth | None], right: Sequence[int], steps: int = 3) -> Tensor:
    """Drafts of which the first `right[row]` are those of the undrafted run and the next one is not."""
    vocab = rows.one.config.vocab_size
    drafts = []
    for row, (truth, count) in enumerate(zip(truths, right, strict=True)):
        ahead = [] if truth is None else truth.tokens[len(rows.new_tokens(row)) :][:steps]
        ahead += [0] * (steps - len(ahead))
        drafts.append([(token + (at >= count)) % vocab for at, token in enumerate(ahead)])
    return torch.tensor(drafts)
