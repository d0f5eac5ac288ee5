"""The loop below `generate`: a state of few rows, each given to the next request when it is done.

A round is one forward over the rows in use. With a draft it is one over the windows of the rows whose prompt is in
(propose, verify, commit, extend), after one over the next piece of the prompts that are not.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from .batch import Batch
from .model import Model, at_least_one
from .output import Output
from .penalties import TokenCounts
from .rows import release, select
from .sampling import RowSampling, Sampling, sample
from .speculative import Carry, Draft, verify
from .state import State, commit
from .text import TextStream

FinishReason = Literal["length", "eos", "stop"]


@dataclass(frozen=True)
class Request:
    """A prompt and when to stop: after `max_new_tokens`, at a token of `eos`, or where the text has a `stop` string.

    Raises `TypeError` for a field of another type, `ValueError` for `max_new_tokens` below 1.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = Sampling()
    eos: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        at_least_one("max_new_tokens", self.max_new_tokens)
        token_ids("prompt", self.prompt)
        token_ids("eos", self.eos)
        if not isinstance(self.sampling, Sampling):
            raise TypeError(f"sampling must be a Sampling, found {self.sampling!r}")
        if isinstance(self.stop, str) or strings(self.stop) is None:
            raise TypeError(f"stop must be a tuple of strings, found {self.stop!r}")


@dataclass(frozen=True)
class Result:
    """What became of one prompt.

    `tokens` are all new tokens, those of the end included. `text` is theirs up to the end-of-text token or the stop
    string, both left out, and None without a tokenizer. `rounds` counts the forwards of the model after prefill.
    `accepted[i]` of them took the draft of place i (0 is the first); without a draft it is empty.
    """

    tokens: list[int]
    text: str | None
    finish_reason: FinishReason
    rounds: int
    prompt_tokens: int
    accepted: tuple[int, ...] = ()


@dataclass(frozen=True)
class Event:
    """News of request number `request`: tokens, the text that is certain by now, and at the end its result."""

    request: int
    tokens: tuple[int, ...]
    text: str
    result: Result | None = None


def token_ids(name: str, given: Any) -> tuple[int, ...]:
    """Token ids as integers. `TypeError` for anything that would have to be rounded or read as text."""
    try:
        return tuple(map(operator.index, given))
    except TypeError:
        raise TypeError(f"{name} must be a list of integer token ids, found {given!r:.100}") from None


def strings(given: Any) -> tuple[str, ...] | None:
    """What is given as a tuple, None if it is no collection of strings."""
    if not isinstance(given, Iterable):
        return None
    found = tuple(given)
    return found if all(isinstance(one, str) for one in found) else None


@dataclass
class Row:
    """A request that has a row of the state: how much of its prompt is in, and what came out so far."""

    number: int
    request: Request
    text: TextStream | None
    fed: int = 0
    tokens: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    rounds: int = 0
    accepted: list[int] = field(default_factory=list)
    reason: FinishReason | None = None

    @property
    def through(self) -> bool:
        """Whether the whole prompt is in."""
        return self.fed == len(self.request.prompt)

    def feed(self, chunk: int) -> tuple[int, ...]:
        """The next `chunk` tokens of the prompt, from now on counted as in."""
        piece = self.request.prompt[self.fed : self.fed + chunk]
        self.fed += len(piece)
        return piece

    def take(self, offered: Sequence[int]) -> Event:
        """Take new tokens, up to the one that ends the row."""
        known = len(self.tokens)
        piece = ""
        for token in offered:
            self.tokens.append(token)
            piece += self._read(token)
            if self.reason is not None:
                piece += self.text.finish() if self.text is not None else ""
                break
        self.pieces.append(piece)
        return Event(self.number, tuple(self.tokens[known:]), piece, self._result())

    def count_round(self, accepted: Sequence[bool] = ()) -> None:
        """Count a forward after prefill, and which of its drafts the row took."""
        self.rounds += 1
        before = self.accepted or [0] * len(accepted)
        self.accepted = [count + new for count, new in zip(before, accepted, strict=True)]

    def _read(self, token: int) -> str:
        """The text that is certain with `token`, and the reason to end if there is one."""
        if token in self.request.eos:
            self.reason = "eos"
            return ""
        piece = self.text.push(token) if self.text is not None else ""
        if self.text is not None and self.text.stopped:
            self.reason = "stop"
        elif len(self.tokens) == self.request.max_new_tokens:
            self.reason = "length"
        return piece

    def _result(self) -> Result | None:
        if self.reason is None:
            return None
        text = None if self.text is None else "".join(self.pieces)
        prompt = len(self.request.prompt)
        return Result(self.tokens, text, self.reason, self.rounds, prompt, tuple(self.accepted))


@dataclass(frozen=True)
class Setup:
    """How requests are run: rows at a time, pages, tokens of a prompt a round, and what drafts."""

    rows: int
    page_size: int
    chunk: int
    draft: Draft | None
    draft_steps: int
    recurrent_dtype: torch.dtype | None


def rounds(model: Model, params: Any, requests: Sequence[Row], setup: Setup) -> Iterator[Event]:
    """Run rounds until all requests are done; a row that is done goes to the next request, or is given up."""
    waiting = deque(requests)
    table = [waiting.popleft() for _ in range(min(setup.rows, len(waiting)))]
    if not table:
        return
    device = params.embed.weight.device
    run = _begun(model, params, len(table), requests, setup)
    while table:
        keys = Keys.of(table, device)
        run.recount(table)
        while not any(row.reason is not None for row in table):
            offers = run.round(table, keys)
            yield from (row.take(offer) for row, offer in zip(table, offers, strict=True) if offer)
        table = _refilled(run, table, waiting)


def _begun(model: Model, params: Any, rows: int, requests: Sequence[Row], setup: Setup) -> Plain:
    """The loop over an empty state with room for the longest request."""
    weight, page = params.embed.weight, setup.page_size
    past_end = 0 if setup.draft is None else setup.draft_steps  # a row's last window may reach this far past its end
    longest = max(len(row.request.prompt) + row.request.max_new_tokens for row in requests) + past_end
    state = model.init_state(
        rows, -(-longest // page) * page, weight.dtype, setup.recurrent_dtype, weight.device, page_size=page
    )
    if setup.draft is None:
        return Plain(model, params, state, setup.chunk)
    return Drafted(model, params, state, setup.chunk, setup.draft, setup.draft_steps)


@torch.no_grad()
def _refilled(run: Plain, table: list[Row], waiting: deque[Row]) -> list[Row]:
    """Rows that are done emptied and given to requests that wait; with none waiting, the state loses these rows."""
    done = [place for place, row in enumerate(table) if row.reason is not None]
    if len(done) == len(table) and not waiting:
        run.release(None)
        return []
    run.release(done)
    for place in done:
        if waiting:
            table[place] = waiting.popleft()
    left = [place for place, row in enumerate(table) if row.reason is None]
    if len(left) < len(table):
        run.select(left)
    return [table[place] for place in left]


@dataclass(frozen=True)
class Keys:
    """What the draws of each row depend on beside logits and position: its request's number and settings."""

    numbers: Int[Tensor, " rows"]
    sampling: RowSampling

    @staticmethod
    def of(table: Sequence[Row], device: torch.device) -> Keys:
        """Those of the rows in `table`."""
        numbers = torch.tensor([row.number for row in table], dtype=torch.int64).to(device)
        return Keys(numbers, RowSampling.of([row.request.sampling for row in table], device))


@dataclass
class Plain:
    """Rounds without a draft: prompts in pieces and newest tokens share one forward."""

    model: Model
    params: Any
    state: State
    chunk: int
    counts: TokenCounts | None = field(default=None, init=False)
    """Of the rows' tokens, where any row asks for penalties."""

    @torch.no_grad()
    def round(self, table: Sequence[Row], keys: Keys) -> list[list[int]]:
        """The new tokens of each row, none while its prompt is not in. Reads the device once."""
        for row in table:
            if row.through:
                row.count_round()
        inputs = [row.tokens[-1:] if row.through else row.feed(self.chunk) for row in table]
        offers = self._forward(inputs, table, keys)[-1]
        self.count(offers)
        return offers

    def recount(self, table: Sequence[Row]) -> None:
        """Count the tokens of the rows in `table` from their start, if any of them asks for penalties."""
        self.counts = None
        if any(row.request.sampling.penalised for row in table):
            vocab, device = self.model.config.vocab_size, self.state.lengths.device
            self.counts = TokenCounts.of([row.request.prompt for row in table], vocab, device)
            self.count([row.tokens for row in table])

    def count(self, new: Sequence[Sequence[int]]) -> None:
        """Count each row's new tokens."""
        if self.counts is not None:
            most = max(map(len, new))
            filled = torch.tensor([[*row, *[-1] * (most - len(row))] for row in new], dtype=torch.int64)
            self.counts = self.counts.add(filled.to(self.counts.output.device))

    def _forward(
        self, inputs: Sequence[Sequence[int]], table: Sequence[Row], keys: Keys
    ) -> tuple[Batch, Output, list[list[int]]]:
        """Run `inputs`, and draw a token for each row that has some and whose prompt is in."""
        batch = Batch.from_lists(inputs, self.state)
        out, self.state = self.model.forward(self.params, self.state, batch, logits="last")
        ready = [row.through and len(new) > 0 for row, new in zip(table, inputs, strict=True)]
        if not any(ready):
            return batch, out, [[] for _ in table]
        drawn = sample(out.logits, keys.sampling, keys.numbers, self.state.lengths, self.counts).tolist()
        offers = [[token] if wanted else [] for token, wanted in zip(drawn, ready, strict=True)]
        _check_finite(table, offers)
        return batch, out, offers

    def release(self, rows: Sequence[int] | None) -> None:
        """Empty `rows`; None ends the whole state."""
        self.state = release(self.state, rows)

    def select(self, rows: Sequence[int]) -> None:
        """Keep only `rows`."""
        self.state = select(self.state, rows)


@dataclass
class Drafted(Plain):
    """Rounds with a draft: windows of `steps` drafts after each row's newest token, apart from prompts."""

    draft: Draft
    steps: int
    drafted: State = field(init=False)
    carry: Carry | None = None

    def __post_init__(self) -> None:
        self.drafted = self.draft.init_state(self.state)

    @torch.no_grad()
    def round(self, table: Sequence[Row], keys: Keys) -> list[list[int]]:
        """The new tokens of each row, none while its prompt is not in. Reads the device once a forward."""
        through = [row.through for row in table]
        offers: list[list[int]] = [[] for _ in table]
        if any(through):
            offers = self._verified(table, keys, through)
        if not all(through):
            first = self._prefilled(table, keys)
            offers = [new or old for new, old in zip(first, offers, strict=True)]
        self.count(offers)
        return offers

    def _prefilled(self, table: Sequence[Row], keys: Keys) -> list[list[int]]:
        """Run the next piece of each prompt that is not in, while the other rows idle."""
        inputs = [() if row.through else row.feed(self.chunk) for row in table]
        batch, out, offers = self._forward(inputs, table, keys)
        following: list[int] = []
        for row, new, offer in zip(table, inputs, offers, strict=True):
            start = row.fed - len(new) + 1
            following += [*row.request.prompt[start : start + len(new)], *offer] if new else []
        self._extend(out, batch, following)
        return offers

    def _verified(self, table: Sequence[Row], keys: Keys, through: Sequence[bool]) -> list[list[int]]:
        """Propose, verify and commit a window in every row: of the rows whose prompt is not in, nothing counts."""
        assert self.carry is not None
        proposal, self.drafted = self.draft.propose(self.params, self.drafted, self.carry, self.steps)
        window = proposal.batch(self.state)
        out, pending = self.model.forward(self.params, self.state, window, keep_steps=True)
        verdict = verify(out, proposal, keys.sampling, keys.numbers, self.counts)
        read = torch.cat((verdict.tokens, verdict.accepted[:, None]), 1).tolist()
        offers = [row[: row[-1]] if live else [] for row, live in zip(read, through, strict=True)]
        _check_finite(table, offers)
        self.state = commit(pending, [len(offer) for offer in offers])
        self._extend(out, window, [token for offer in offers for token in self._filled(offer)])
        for row, offer in zip(table, offers, strict=True):
            if offer:
                row.count_round([place + 1 < len(offer) for place in range(self.steps)])
        return offers

    def _filled(self, offer: list[int]) -> list[int]:
        return offer + [-1] * (self.steps + 1 - len(offer))

    def _extend(self, out: Output, batch: Batch, following: list[int]) -> None:
        # Given on the host, the tokens leave the draft's lengths known there.
        tokens = torch.tensor(following, dtype=torch.int64)
        self.drafted, self.carry = self.draft.extend(self.params, self.drafted, out, batch, tokens, self.carry)

    def release(self, rows: Sequence[int] | None) -> None:
        """Empty `rows`; None ends both states."""
        super().release(rows)
        self.drafted = release(self.drafted, rows)

    def select(self, rows: Sequence[int]) -> None:
        """Keep only `rows`."""
        super().select(rows)
        self.drafted = select(self.drafted, rows)
        if self.carry is not None:
            self.carry = self.carry.select(torch.tensor(rows).to(self.carry.token.device))


def _check_finite(table: Sequence[Row], offers: Sequence[Sequence[int]]) -> None:
    """`FloatingPointError` for a row whose draw found no largest logit, -1 among its tokens."""
    for row, offer in zip(table, offers, strict=True):
        if -1 in offer:
            raise FloatingPointError(
                f"prompt {row.number}: the largest logit after {len(row.tokens) + offer.index(-1)} new tokens is NaN "
                "or infinite; check the parameters and their dtype"
            )
