"""The device's part of a run: the states of the rows, and a forward over them a round.

With a draft a round is one forward over the windows of the rows whose prompt is in (propose, verify, commit, extend),
after which the next pieces of the other prompts are run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from params.modes import lasting
from params.tree import tree_map

from ..drafts.protocol import Carry, Verdict, begun, checked
from ..output import Output
from ..sampling.penalties import TokenCounts
from ..sampling.settings import Sampling
from ..state.batch import Batch
from ..state.rows import fork, fork_into, release, select
from ..state.state import State
from .prefixes import Beginning
from .programs import Keys, Programs
from .scheduler import Change, Continuation, Copy, Offer, Turn


def settled(state: State, lengths: Sequence[int]) -> State:
    """The state when the host has learned its lengths, by reading what was accepted."""
    return replace(state, ledger=state.ledger.at(lengths))


def _in_place(old: State, new: State) -> State:
    """`new`, made from `old`, in the tensors of `old`, which nobody uses any more: graphs of a device write there."""
    return replace(tree_map(lambda x, y: x if x is y else x.copy_(y), old, new), ledger=new.ledger)


@dataclass
class Runner:
    """Rounds without a draft: prompts in pieces and newest tokens share one forward.

    `states` are that of the model and, where there is a draft, its own; `settings` are what rows may come to have.
    """

    programs: Programs
    params: Any
    states: list[State]
    settings: Sequence[Sampling]
    keys: Keys = field(init=False)
    counts: TokenCounts | None = field(default=None, init=False)  # where any row asks for penalties
    held: dict[Beginning, list[State]] = field(default_factory=dict, init=False)

    @lasting
    @torch.no_grad()
    def change(self, change: Change) -> None:
        """Let rows change hands."""
        if change.ended:
            self._go_on([release(state, change.ended) for state in self.states])
        if len(change.kept) < self.states[0].rows:
            self._keep(change.kept)
        for copy in change.copies:
            self._copy(copy)
        if change.table is not None:
            self.keys = Keys.of(change.table, self.settings, self.states[0].lengths.device)
            self._recount(change.table)

    @lasting
    @torch.no_grad()
    def run(self, turns: Sequence[Turn]) -> list[Offer]:
        """The new tokens of each row, none while its prompt is not in. Reads the device once."""
        batch = self._batch(turns, steady=all(turn.decoding or not turn.tokens for turn in turns))
        drawn, _, new = self.programs.step(self.params, self.states[0], batch, self.keys, self.counts)
        offers = self._drawn(turns, drawn, new)
        self._count([offer.tokens for offer in offers])
        return offers

    def _batch(self, turns: Sequence[Turn], steady: bool = False) -> Batch:
        """What rows run next. In a `steady` round, of newest tokens alone, every row runs one."""
        # So all such are one program. What rows of nobody run does not count (`Keys.live`).
        batch = Batch.from_lists([turn.tokens or [0] * steady for turn in turns], self.states[0])
        ragged = self.programs.captured and not steady  # to be padded to a bucket, however small
        return batch.pad(batch.tokens.shape[0], batch.max_query) if ragged else batch

    def _drawn(self, turns: Sequence[Turn], drawn: Tensor, new: State) -> list[Offer]:
        """What rows get of a step: a token each where the prompt is in."""
        self._settle([new], [len(turn.tokens) for turn in turns])
        ready = [len(turn.tokens) > len(turn.following) for turn in turns]
        tokens = drawn.tolist() if any(ready) else [0] * len(turns)
        each = zip(turns, tokens, ready, strict=True)
        return [Offer([token], turn.decoding) if one else Offer() for turn, token, one in each]

    def _settle(self, new: Sequence[State], counts: Sequence[int]) -> None:
        """Go on with `new` states, in which rows hold `counts` more tokens than in those before."""
        lengths = [length + count for length, count in zip(self.states[0].ledger.lengths, counts, strict=True)]
        self.states[: len(new)] = [settled(state, lengths) for state in new]

    def _recount(self, table: Sequence[Continuation]) -> None:
        """Count the tokens of the rows from their start, if any of them asks for penalties."""
        asked = any(row.live and row.request.sampling.penalised for row in table)
        prompts = [row.request.prompt for row in table]
        self.counts = TokenCounts.of(prompts, self.states[0].vocab, self.keys.numbers.device) if asked else None
        self._count([row.tokens for row in table])

    def _count(self, new: Sequence[Sequence[int]]) -> None:
        """Count each row's new tokens."""
        if self.counts is not None:
            most = max(len(row) for row in new)
            filled = torch.tensor([[*row, *[-1] * (most - len(row))] for row in new], dtype=torch.int64, device="cpu")
            self.counts = self.counts.add(filled.to(self.counts.output.device))

    def _go_on(self, states: list[State]) -> None:
        """Go on with states whose rows have changed hands."""
        if self.programs.captured:
            states = [_in_place(*pair) for pair in zip(self.states, states, strict=True)]
        self.states = states

    def _keep(self, rows: Sequence[int]) -> None:
        """Keep only `rows`."""
        self.states = [select(state, rows) for state in self.states]

    def _copy(self, copy: Copy) -> None:
        """Let rows begin from copies of another, or of what is held of it, which goes when nobody else will."""
        source, row = (self.held[copy.beginning], 0) if copy.source is None else (self.states, copy.source)
        if copy.takers:
            pairs = zip(self.states, source, strict=True)
            self._go_on([fork_into(state, copy.takers, given, row) for state, given in pairs])
        if copy.source is not None and copy.more:
            self.held[copy.beginning] = [fork(state, [row]) for state in self.states]
        if copy.source is None and not copy.more:
            for state in self.held.pop(copy.beginning):
                release(state)


@dataclass
class DraftRunner(Runner):
    """Rounds with a draft: windows of drafts after each row's newest token, apart from prompts."""

    carry: Carry | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        assert self.programs.draft is not None
        self.draft = self.programs.draft
        self.both = self.draft.joined(self.params)
        self.states.append(begun(self.draft, self.states[0]))

    @lasting
    @torch.no_grad()
    def run(self, turns: Sequence[Turn]) -> list[Offer]:
        """The new tokens of each row, none while its prompt is not in. Reads the device once a forward."""
        keys, steps, offers = self.keys, self.programs.steps, [Offer()] * len(turns)
        if any(turn.decoding for turn in turns):
            # Of rows whose prompt is not in, and of nobody's, no token of the window counts.
            most = torch.tensor([turn.decoding * (steps + 1) for turn in turns], device="cpu").to(keys.numbers.device)
            given = (keys.sampling, keys.numbers, most, self.counts)
            verdict, *new, self.carry = self.programs.round(self.both, *self.states, self.carry, *given, steps=steps)
            offers = self._emitted(turns, verdict, new)
        # A window without a choice says nothing of its root: drafts that are no numbers may reach what is before them.
        # So the newest token of its row is run again, without drafts behind it.
        turns = [Turn() if offer.tokens else turn for turn, offer in zip(turns, offers, strict=True)]
        if any(turn.tokens for turn in turns):
            batch = self._batch(turns)
            drawn, out, state = self.programs.step(self.params, self.states[0], batch, keys, self.counts)
            first = self._drawn(turns, drawn, state)
            self._extend(out, batch, turns, first)
            pairs = zip(offers, first, strict=True)
            offers = [Offer(new.tokens or old.tokens, old.rounds + new.rounds, old.drafts) for old, new in pairs]
        self._count([offer.tokens for offer in offers])
        return offers

    def _emitted(self, turns: Sequence[Turn], verdict: Verdict, new: Sequence[State]) -> list[Offer]:
        """What rows get of a window: the root's token, and one after each draft that was taken."""
        read = torch.cat((verdict.tokens, verdict.accepted[:, None]), 1).tolist()
        emitted = [row[: row[-1]] for row in read]
        self._settle(new, [len(tokens) for tokens in emitted])
        return [Offer(one, turn.decoding, max(len(one) - 1, 0)) for turn, one in zip(turns, emitted, strict=True)]

    def _extend(self, out: Output, batch: Batch, turns: Sequence[Turn], offers: Sequence[Offer]) -> None:
        """Let the draft take in what a step has run, and the token after each place."""
        following: list[int] = []
        for turn, offer in zip(turns, offers, strict=True):
            # A row without a choice has ended; what its draft takes in is of no meaning, and has to be a token.
            following += [*turn.following, *(max(token, 0) for token in offer.tokens)]
        if self.carry is None:
            rows = batch.rows
            self.carry = Carry(batch.tokens.new_zeros(rows), out.hidden.new_zeros(rows, out.hidden.shape[1]))
        tokens = torch.tensor(following, dtype=torch.int64, device="cpu").to(batch.tokens.device)
        found = self.programs.extend(self.both, self.states[1], out, batch, tokens, self.carry)
        drafted, self.carry = checked(self.draft, "extend", found, State, Carry)
        self.states[1] = settled(drafted, self.states[0].ledger.lengths)

    def _keep(self, rows: Sequence[int]) -> None:
        """Keep only `rows`."""
        super()._keep(rows)
        if self.carry is not None:
            self.carry = self.carry.select(torch.tensor(rows, device="cpu").to(self.carry.token.device))
