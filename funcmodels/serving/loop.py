"""The loop below `generate`: a state of few rows, each given to the next request when it is done.

A round is one forward over the rows in use. With a draft it is one over the windows of the rows whose prompt is in
(propose, verify, commit, extend), after one over the next piece of the prompts that are not. What prompts have in
common is run by one of them, and the others begin from copies of its row.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from params.modes import lasting
from params.tree import num_bytes

from ..drafts.protocol import Carry, Draft, checked
from ..model import Model
from ..output import Output
from ..sampling.penalties import TokenCounts
from ..state.batch import Batch
from ..state.rows import fork, fork_into, release, select
from ..state.state import State
from .prefixes import pages_held, plan
from .programs import Keys, Programs, in_place, power_of_two, settled
from .requests import Event, Request, Row

NOBODY = Row(0, Request((0,), 1), fed=1, reason="length")
"""Stands where a row belongs to no request."""

Offers = list[list[int]]
"""New tokens of each row; -1 in the place of one ends a row that has no choice."""


@dataclass(frozen=True)
class Setup:
    """How requests are run: by which functions, rows at a time, pages, tokens of a prompt a round, and what drafts."""

    programs: Programs
    rows: int
    page_size: int
    chunk: int
    draft: Draft | None
    draft_steps: int
    recurrent_dtype: torch.dtype | None


class Serving(Iterator[Event]):
    """The events of requests as they are run: a round whenever those of the last one are taken.

    `state_bytes` is the memory of the rows, made once with room for the longest request.
    """

    @lasting
    def __init__(self, model: Model, params: Any, requests: Sequence[Row], setup: Setup) -> None:
        run = _begun(model, params, requests, setup) if requests else None
        self.state_bytes = 0 if run is None else sum(num_bytes(state) for state in run.states)
        self._events: Iterator[Event] = iter(()) if run is None else run.events()

    @lasting
    def __next__(self) -> Event:
        return next(self._events)


def _begun(model: Model, params: Any, requests: Sequence[Row], setup: Setup) -> Plain:
    """The loop over an empty state with room for the longest request."""
    weight, page = params.embed.weight, setup.page_size
    past_end = 0 if setup.draft is None else setup.draft_steps  # a row's last window may reach this far past its end
    longest = max(len(row.request.prompt) + row.request.max_new_tokens for row in requests) + past_end
    rows, width, copies = min(setup.rows, len(requests)), -(-longest // page), _share(requests, page)
    if setup.programs.captured:
        # Few sizes for all calls: each other one is captured anew.
        rows, width, copies = min(setup.rows, power_of_two(rows)), _rounded(width), copies and _rounded(copies)
    state = model.init_state(
        rows, width * page, weight.dtype, setup.recurrent_dtype, weight.device, page_size=page,
        pages=rows * width + copies if copies else None,
    )  # fmt: skip
    if setup.draft is None:
        return Plain(params, requests, setup, [state])
    drafted = setup.draft.init_state(state)
    if not isinstance(drafted, State) or drafted.rows != rows:
        found = f"a state of {drafted.rows} rows" if isinstance(drafted, State) else type(drafted).__name__
        raise TypeError(f"draft: {type(setup.draft).__name__}.init_state gave {found}, expected a State of {rows} rows")
    return Drafted(params, requests, setup, [state, drafted])


def _share(requests: Sequence[Row], page_size: int) -> int:
    """Tell each request which of its first tokens another runs; the most pages held for requests still to come."""
    shares = plan([row.request.prompt for row in requests], page_size)
    for row, share in zip(requests, shares, strict=True):
        row.source, row.start, row.holds = share.source, share.start, share.holds
    return pages_held(shares, page_size)


def _rounded(count: int) -> int:
    """The power of two, or one and a half of one, that holds `count`."""
    power = power_of_two(count)
    return power * 3 // 4 if count <= power * 3 // 4 else power


@dataclass
class Plain:
    """Rounds without a draft: prompts in pieces and newest tokens share one forward.

    `states` are that of the model and, where there is a draft, its own. Captured, a loop keeps all its rows to its end;
    else it lets go of those that no request takes.
    """

    params: Any
    requests: Sequence[Row]
    setup: Setup
    states: list[State]
    table: list[Row] = field(init=False)
    """Who has which row of the states."""
    counts: TokenCounts | None = field(default=None, init=False)
    """Of the rows' tokens, where any row asks for penalties."""

    def __post_init__(self) -> None:
        self.programs = self.setup.programs
        draft = self.setup.draft
        self.both = self.params if draft is None else draft.joined(self.params)
        self.waiting = deque(self.requests)
        self.table = [self._next() for _ in range(self.states[0].rows)]
        self.takers = Counter((row.source, row.start) for row in self.requests)
        self.held: dict[tuple[int | None, int], list[State]] = {}
        self.settings = list(dict.fromkeys(replace(row.request.sampling, seed=0) for row in self.requests))

    def _next(self) -> Row:
        return self.waiting.popleft() if self.waiting else NOBODY

    def events(self) -> Iterator[Event]:
        """Run rounds until all requests are done."""
        device = self.states[0].lengths.device
        while self.table:
            live = [row for row in self.table if row.live]
            keys = Keys.of(self.table, self.settings, device)
            self._recount()
            while all(row.live for row in live):
                offers = self.round(keys)
                self._hand_on()
                yield from (row.take(offer) for row, offer in zip(self.table, offers, strict=True) if offer)
            self._refill()

    @torch.no_grad()
    def round(self, keys: Keys) -> Offers:
        """The new tokens of each row, none while its prompt is not in. Reads the device once."""
        decoding = [row.live and row.through for row in self.table]
        inputs = [self._input(row) for row in self.table]
        steady = decoding == [row.live for row in self.table]
        if steady:
            # Every row runs a token, so that all such steps are one program; nobody's do not count (`Keys.live`).
            inputs = [new or [0] for new in inputs]
        offers = self._step(inputs, keys, steady)[-1]
        self._count(offers)
        return offers

    def _input(self, row: Row) -> Sequence[int]:
        """What a row runs next: its newest token, or a piece of its prompt."""
        if row.live and row.through:
            row.count_round()
            return row.tokens[-1:]
        return row.feed(self.setup.chunk)

    def _step(self, inputs: Sequence[Sequence[int]], keys: Keys, steady: bool) -> tuple[Batch, Output, Offers]:
        """Run `inputs`, and draw a token for each row that has some and whose prompt is in."""
        state = self.states[0]
        batch = Batch.from_lists(inputs, state)
        if self.programs.captured and not steady:
            batch = batch.pad(batch.tokens.shape[0], batch.max_query)  # ragged: padded to a bucket, however small
        drawn, out, new = self.programs.step(self.params, state, batch, keys, self.counts)
        pairs = list(zip(self.table, inputs, strict=True))
        self._settle([new], [len(more) if row.live else 0 for row, more in pairs])
        ready = [row.live and row.through and len(more) > 0 for row, more in pairs]
        tokens = drawn.tolist() if any(ready) else [0] * len(ready)
        return batch, out, [[token] if wanted else [] for token, wanted in zip(tokens, ready, strict=True)]

    def _settle(self, new: Sequence[State], counts: Sequence[int]) -> None:
        """Go on with `new` states, in which rows hold `counts` more tokens than in those before."""
        lengths = [length + count for length, count in zip(self.states[0].ledger.lengths, counts, strict=True)]
        self.states[: len(new)] = [settled(state, lengths) for state in new]

    def _recount(self) -> None:
        """Count the tokens of the rows from their start, if any of them asks for penalties."""
        self.counts = None
        if any(row.live and row.request.sampling.penalised for row in self.table):
            state = self.states[0]
            self.counts = TokenCounts.of([row.request.prompt for row in self.table], state.vocab, state.lengths.device)
            self._count([row.tokens for row in self.table])

    def _count(self, new: Sequence[Sequence[int]]) -> None:
        """Count each row's new tokens."""
        if self.counts is not None:
            most = max(len(row) for row in new)
            filled = torch.tensor([[*row, *[-1] * (most - len(row))] for row in new], dtype=torch.int64, device="cpu")
            self.counts = self.counts.add(filled.to(self.counts.output.device))

    @torch.no_grad()
    def _hand_on(self) -> None:
        """Copy rows that are where others begin, to those that wait for it and to a row held for those to come."""
        for place, row in enumerate(self.table):
            key = (row.number, row.fed)
            if row.live and row.fed in row.holds:
                self._copy(key, self.states, place)
                if self.takers[key]:
                    self.held[key] = [fork(state, [place]) for state in self.states]

    def _copy(self, key: tuple[int | None, int], source: list[State], row: int) -> None:
        """Let all rows begin that wait for what `row` of `source` holds; it is let go of if nobody else will."""
        takers = [place for place, row in enumerate(self.table) if row.waits and (row.source, row.start) == key]
        if takers:
            pairs = zip(self.states, source, strict=True)
            self._go_on([fork_into(state, takers, given, row) for state, given in pairs])
        for place in takers:
            self.table[place].fed = self.table[place].start
        self.takers[key] -= len(takers)
        if key in self.held and not self.takers[key]:
            for state in self.held.pop(key):
                release(state)

    @torch.no_grad()
    def _refill(self) -> None:
        """Rows that are done emptied and given to requests that wait; with none waiting, nobody's, or let go of."""
        done = [place for place, row in enumerate(self.table) if not row.live and row is not NOBODY]
        if not self.waiting and not any(row.live for row in self.table):
            for state in self.states:
                release(state)
            self.table = []
            return
        self._go_on([release(state, done) for state in self.states])
        for place in done:
            self.table[place] = self._next()
        if not self.programs.captured and NOBODY in self.table:
            self._keep([place for place, row in enumerate(self.table) if row is not NOBODY])
        for key, states in list(self.held.items()):
            self._copy(key, states, 0)

    def _go_on(self, states: list[State]) -> None:
        """Go on with states whose rows have changed hands."""
        if self.programs.captured:
            states = [in_place(*pair) for pair in zip(self.states, states, strict=True)]
        self.states = states

    def _keep(self, rows: Sequence[int]) -> None:
        """Keep only `rows`."""
        self.states = [select(state, rows) for state in self.states]
        self.table = [self.table[row] for row in rows]


@dataclass
class Drafted(Plain):
    """Rounds with a draft: windows of drafts after each row's newest token, apart from prompts."""

    carry: Carry | None = field(default=None, init=False)

    @torch.no_grad()
    def round(self, keys: Keys) -> Offers:
        """The new tokens of each row, none while its prompt is not in. Reads the device once a forward."""
        decoding = [row.live and row.through for row in self.table]
        offers: Offers = self._speculate(decoding, keys) if any(decoding) else [[] for _ in decoding]
        # A window without a choice says nothing of its root: drafts that are no numbers may reach what is before them.
        alone = [one and not offer for one, offer in zip(decoding, offers, strict=True)]
        inputs = [
            self._alone(row) if one else row.feed(self.setup.chunk) for row, one in zip(self.table, alone, strict=True)
        ]
        if any(inputs):
            first = self._prefill(inputs, keys)
            offers = [new or old for new, old in zip(first, offers, strict=True)]
        self._count(offers)
        return offers

    def _prefill(self, inputs: Sequence[Sequence[int]], keys: Keys) -> Offers:
        """Run the next piece of each prompt that is not in, or a newest token, while the other rows idle."""
        batch, out, offers = self._step(inputs, keys, steady=False)
        following: list[int] = []
        for row, new, offer in zip(self.table, inputs, offers, strict=True):
            start = row.fed - len(new) + 1
            # A row without a choice has ended; what its draft takes in is of no meaning, and has to be a token.
            following += [*row.request.prompt[start : start + len(new)], *(max(x, 0) for x in offer)] if new else []
        if self.carry is None:
            rows = batch.rows
            self.carry = Carry(batch.tokens.new_zeros(rows), out.hidden.new_zeros(rows, out.hidden.shape[1]))
        tokens = torch.tensor(following, dtype=torch.int64, device="cpu").to(batch.tokens.device)
        assert self.programs.extend is not None and self.setup.draft is not None
        found = self.programs.extend(self.both, self.states[1], out, batch, tokens, self.carry)
        drafted, self.carry = checked(self.setup.draft, "extend", found, State, Carry)
        self.states[1] = settled(drafted, self.states[0].ledger.lengths)
        return offers

    def _speculate(self, decoding: Sequence[bool], keys: Keys) -> Offers:
        """A window in every row: of rows whose prompt is not in, and of nobody's, nothing counts."""
        assert self.programs.round is not None
        steps = self.setup.draft_steps
        most = torch.tensor([(steps + 1) * one for one in decoding], device="cpu").to(keys.numbers.device)
        given = (keys.sampling, keys.numbers, most, self.counts)
        verdict, *new, self.carry = self.programs.round(self.both, *self.states, self.carry, *given, steps=steps)
        read = torch.cat((verdict.tokens, verdict.accepted[:, None]), 1).tolist()
        offers = [row[: row[-1]] for row in read]
        self._settle(new, [len(offer) for offer in offers])
        for row, one, offer in zip(self.table, decoding, offers, strict=True):
            if one:
                row.count_round([place + 1 < len(offer) for place in range(steps)])
        return offers

    def _alone(self, row: Row) -> Sequence[int]:
        """The newest token of a row, to be run without drafts behind it."""
        row.count_round([False] * self.setup.draft_steps)
        return row.tokens[-1:]

    def _keep(self, rows: Sequence[int]) -> None:
        """Keep only `rows`."""
        super()._keep(rows)
        if self.carry is not None:
            self.carry = self.carry.select(torch.tensor(rows, device="cpu").to(self.carry.token.device))
