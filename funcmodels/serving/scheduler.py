"""Which request has which row, and what each row runs next: the host's part of a run, without a tensor."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..checkpoint.text import TextStream
from .prefixes import Beginning, Share
from .requests import Event, FinishReason, Request, Result


@dataclass(frozen=True)
class Turn:
    """What a row runs next: a piece of its prompt, or, `decoding`, its newest token; nothing while it idles.

    `following` are the prompt's tokens after each. Where none follows the last, a token is drawn.
    """

    tokens: Sequence[int] = ()
    following: Sequence[int] = ()
    decoding: bool = False


@dataclass(frozen=True)
class Offer:
    """What a row gets of a round: new tokens, -1 in the place of one that ends a row without a choice.

    `rounds` counts the forwards after prefill that it took part in, `drafts` those of its window that were taken.
    """

    tokens: Sequence[int] = ()
    rounds: int = 0
    drafts: int = 0


@dataclass(frozen=True)
class Copy:
    """Rows `takers` begin from what row `source` holds, or is held of it (None): it is while `more` are to come."""

    beginning: Beginning
    source: int | None
    takers: Sequence[int]
    more: bool


@dataclass(frozen=True)
class Change:
    """Rows `ended` are emptied, all but `kept` let go of, some copied. `table`: who has them then, if that is new."""

    table: Sequence[Continuation] | None
    ended: Sequence[int]
    kept: Sequence[int]
    copies: Sequence[Copy]


@dataclass(eq=False)
class Continuation:
    """A request under way, or waiting, at place `number` of all: how much of its prompt is in, and what came out."""

    number: int
    request: Request
    share: Share
    text: TextStream | None = None
    accepted: list[int] = field(default_factory=list)
    fed: int = 0
    tokens: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    rounds: int = 0
    reason: FinishReason | None = None

    @property
    def noise(self) -> int:
        """What its noise is keyed by beside the seed."""
        return self.number if self.request.number is None else int(self.request.number)

    @property
    def live(self) -> bool:
        """Whether it has not ended."""
        return self.reason is None

    @property
    def waits(self) -> bool:
        """Whether the tokens that it begins from are not in yet."""
        return self.fed < self.share.start

    def turn(self, chunk: int) -> Turn:
        """What it runs next; of its prompt at most `chunk` tokens, from now on counted as in."""
        prompt, start = self.request.prompt, self.fed
        if self.waits or not self.live:
            return Turn()
        if start == len(prompt):
            return Turn(self.tokens[-1:], decoding=True)
        stop = next((at for at in self.share.holds if at > start), len(prompt))
        self.fed = min(start + chunk, stop)
        return Turn(prompt[start : self.fed], prompt[start + 1 : self.fed + 1])

    def take(self, offer: Offer) -> Event:
        """Take new tokens, up to the one that ends it, or to a -1 in the place of one."""
        self.rounds += offer.rounds
        self.accepted = [count + (place < offer.drafts) for place, count in enumerate(self.accepted)]
        known, told = len(self.tokens), len(self.pieces)
        for token in offer.tokens:
            if self.live:
                self.pieces.append(self._read(token))
        return Event(self.number, tuple(self.tokens[known:]), "".join(self.pieces[told:]), self._result())

    def _read(self, token: int) -> str:
        """The text that is certain with `token`, all of it at the end; notes the reason to end, if there is one."""
        if token < 0:
            self.reason = "no_choice"
        else:
            self.tokens.append(token)
            full = len(self.tokens) == self.request.max_new_tokens
            self.reason = "eos" if token in self.request.eos else "length" if full else None
        return "" if self.text is None else self._shown(self.text, token)

    def _shown(self, text: TextStream, token: int) -> str:
        """The piece of `text` that comes with `token`. A stop string goes before every other reason to end."""
        piece = "" if token < 0 else text.leave_out(token) if self.reason == "eos" else text.push(token)
        if not self.live:
            piece += text.finish()
        if text.stopped:
            self.reason = "stop"
        return piece

    def _result(self) -> Result | None:
        if self.reason is None:
            return None
        text = None if self.text is None else "".join(self.pieces)
        counts = self.rounds, len(self.request.prompt), tuple(self.accepted), self.share.start
        return Result(self.tokens, text, self.reason, *counts, self.noise)


NOBODY = Continuation(0, Request((0,), 1), Share(None, 0, ()), fed=1, reason="length")
"""Stands where a row belongs to no request."""


class Scheduler:
    """Who has which of `rows` rows. Prompts run in pieces of `chunk` tokens; `keeps` says if rows of nobody stay."""

    def __init__(self, requests: Sequence[Continuation], rows: int, chunk: int, keeps: bool) -> None:
        self.waiting = deque(requests)
        self.table = [NOBODY] * rows
        self.chunk, self.keeps = chunk, keeps
        self.takers = Counter(row.share.beginning for row in requests)
        self.held: list[Beginning] = []

    @property
    def unfinished(self) -> bool:
        """Whether any request has not ended."""
        return bool(self.waiting) or any(row.live for row in self.table)

    def refill(self) -> Change:
        """Give rows to requests that wait; with none waiting, they are nobody's, or let go of."""
        free = [place for place, row in enumerate(self.table) if not row.live]
        ended = [place for place in free if self.table[place] is not NOBODY]
        renewed = bool(ended or (free and self.waiting))
        for place in free:
            self.table[place] = self.waiting.popleft() if self.waiting else NOBODY
        kept = [place for place, row in enumerate(self.table) if self.keeps or row is not NOBODY]
        self.table = [self.table[place] for place in kept]
        return Change(self.table if renewed else None, ended, kept, self._copies(renewed))

    def turns(self) -> list[Turn]:
        """What each row runs next."""
        return [row.turn(self.chunk) for row in self.table]

    def take(self, offers: Sequence[Offer]) -> Iterator[Event]:
        """Hand each row's new tokens to its request."""
        return (row.take(offer) for row, offer in zip(self.table, offers, strict=True) if offer.tokens)

    def _copies(self, renewed: bool) -> list[Copy]:
        """What is to be copied: rows that stand where others begin and, for who has just got a row, what is held."""
        here: dict[Beginning, int | None] = {beginning: None for beginning in self.held if renewed}
        here |= {(row.number, row.fed): place for place, row in enumerate(self.table) if row.fed in row.share.holds}
        copies = [self._copy(beginning, row) for beginning, row in here.items()]
        self.held = [beginning for beginning in dict.fromkeys([*self.held, *here]) if self.takers[beginning]]
        return copies

    def _copy(self, beginning: Beginning, source: int | None) -> Copy:
        """Let those go on who wait for this beginning."""
        takers = [place for place, row in enumerate(self.table) if row.waits and row.share.beginning == beginning]
        for place in takers:
            self.table[place].fed = self.table[place].share.start
        self.takers[beginning] -= len(takers)
        return Copy(beginning, source, takers, self.takers[beginning] > 0)
