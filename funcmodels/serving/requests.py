"""Requests and what becomes of them: the values that `generate` and `serve` take and give, and a request's progress."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Literal

from ..checkpoint.text import TextStream
from ..model import at_least_one
from ..sampling.settings import Sampling

FinishReason = Literal["length", "eos", "stop", "no_choice"]
"""Why a row ended. "no_choice" says that no token could be chosen: the largest logit, after bias and penalties, is NaN
or infinite, as with broken parameters, or where every token is forbidden. It ends that row alone."""


@dataclass(frozen=True)
class Request:
    """A prompt and when to stop: after `max_new_tokens`, at a token of `eos`, or where the text has a `stop` string.

    A stop string may hold special tokens, as they are written: they count in their places, though texts lack them.

    Its draws are a function of `sampling.seed` and `number`, an integer of 64 bits, by default its place in the list
    of requests: with the number of its result the same tokens come again alone, in any company and order. Requests may
    have one number in common: equal prompts then give equal samples, others share noise, not tokens.

    Raises `TypeError` for a field of another type, `ValueError` for `max_new_tokens` below 1 and a number out of range.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = Sampling()
    eos: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    number: int | None = None

    def __post_init__(self) -> None:
        at_least_one("max_new_tokens", self.max_new_tokens)
        token_ids("prompt", self.prompt)
        token_ids("eos", self.eos)
        if not isinstance(self.sampling, Sampling):
            raise TypeError(f"sampling must be a Sampling, found {self.sampling!r}")
        if isinstance(self.stop, str) or strings(self.stop) is None:
            raise TypeError(f"stop must be a tuple of strings, found {self.stop!r}")
        if self.number is not None:
            _check_number(self.number)


@dataclass(frozen=True)
class Result:
    """What became of one prompt.

    `tokens` are all new tokens, those of the end included. `text` is theirs up to the end-of-text token or the stop
    string, both left out, and None without a tokenizer. `rounds` counts the forwards of the model after prefill.
    `accepted[i]` of them took the draft of place i (0 is the first): one number for each of `draft_steps`, zeros where
    prefill was all that ran; without a draft it is empty. `shared_tokens` of
    the `prompt_tokens` were not run for this prompt: another one that begins alike had run them. `number` is what its
    noise was keyed by: a `Request` with it gives these tokens again.
    """

    tokens: list[int]
    text: str | None
    finish_reason: FinishReason
    rounds: int
    prompt_tokens: int
    accepted: tuple[int, ...] = ()
    shared_tokens: int = 0
    number: int = 0

    @property
    def tokens_per_round(self) -> float:
        """New tokens a forward after prefill, which gave the first: 1 without a draft, 0 where there was no forward."""
        return (len(self.tokens) - 1) / self.rounds if self.rounds else 0.0

    @property
    def acceptance(self) -> tuple[float, ...]:
        """The share of rounds that took the draft of each place, 0 where there was no round."""
        return tuple(count / max(self.rounds, 1) for count in self.accepted)


@dataclass(frozen=True)
class Event:
    """News of the request at place `request` of the list: tokens, the text certain by now, at the end its result.

    One without tokens is the end of a row without a choice.
    """

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


def _check_number(given: Any) -> None:
    """`TypeError` for what is no integer, `ValueError` for one that noise cannot be keyed by."""
    if isinstance(given, bool) or not isinstance(given, Integral):
        raise TypeError(f"number must be an integer, found {given!r:.100}")
    number = int(given)
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"number must be an integer of 64 bits, found one of {number.bit_length()} bits")


def strings(given: Any) -> tuple[str, ...] | None:
    """What is given as a tuple, None if it is no collection of strings."""
    if not isinstance(given, Iterable):
        return None
    found = tuple(given)
    return found if all(isinstance(one, str) for one in found) else None


@dataclass
class Row:
    """A request that has a row of the state, or waits for one: how much of its prompt is in, and what came out so far.

    `number` is its place among all. It begins from the first `start` tokens of its prompt, which prompt number `source`
    runs, and stops on its own way at each of `holds`, where others begin.
    """

    number: int
    request: Request
    text: TextStream | None = None
    source: int | None = None
    start: int = 0
    holds: tuple[int, ...] = ()
    fed: int = 0
    tokens: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    rounds: int = 0
    accepted: list[int] = field(default_factory=list)
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
    def through(self) -> bool:
        """Whether the whole prompt is in."""
        return self.fed == len(self.request.prompt)

    @property
    def waits(self) -> bool:
        """Whether the tokens that it begins from are not in yet."""
        return self.fed < self.start

    def feed(self, chunk: int) -> tuple[int, ...]:
        """The next tokens of the prompt, at most `chunk`, from now on counted as in; none while it waits or is done."""
        if self.waits or not self.live:
            return ()
        stop = next((at for at in self.holds if at > self.fed), len(self.request.prompt))
        piece = self.request.prompt[self.fed : min(self.fed + chunk, stop)]
        self.fed += len(piece)
        return piece

    def take(self, offered: Sequence[int]) -> Event:
        """Take new tokens, up to the one that ends the row, or to a -1 in the place of one."""
        known = len(self.tokens)
        piece = ""
        for token in offered:
            if token < 0:
                self.reason = "no_choice"
            else:
                self.tokens.append(token)
                piece += self._read(token)
            if self.reason is not None:
                piece += self._end()
                break
        self.pieces.append(piece)
        return Event(self.number, tuple(self.tokens[known:]), piece, self._result())

    def count_round(self, accepted: Sequence[bool] = ()) -> None:
        """Count a forward after prefill, and which of its drafts the row took."""
        self.rounds += 1
        self.accepted = [count + new for count, new in zip(self.accepted, accepted, strict=True)]

    def _read(self, token: int) -> str:
        """The text that is certain with `token`, and the reason to end if there is one."""
        if token in self.request.eos:
            self.reason = "eos"
            return self.text.leave_out(token) if self.text is not None else ""
        piece = self.text.push(token) if self.text is not None else ""
        if self.text is not None and self.text.stopped:
            self.reason = "stop"
        elif len(self.tokens) == self.request.max_new_tokens:
            self.reason = "length"
        return piece

    def _end(self) -> str:
        """The text that was held back, if it holds no stop string."""
        piece = self.text.finish() if self.text is not None else ""
        if self.text is not None and self.text.stopped:
            self.reason = "stop"
        return piece

    def _result(self) -> Result | None:
        if self.reason is None:
            return None
        text = None if self.text is None else "".join(self.pieces)
        prompt = len(self.request.prompt)
        accepted = tuple(self.accepted)
        return Result(self.tokens, text, self.reason, self.rounds, prompt, accepted, self.start, self.noise)
