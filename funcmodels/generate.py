"""Generation: many prompts through a state of few rows, each row given to the next prompt when it is done.

    results = generate(model, params, ["def f(", "class A:"], max_new_tokens=64)
    for event in serve(model, params, [Request((1, 2, 3), 8)]): ...

`generate` is for prompts in, results out; `serve` is the loop below it, a stream of events.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from .batch import Batch
from .model import Model, at_least_one
from .rows import release, select
from .sampling import RowSampling, Sampling, sample
from .state import State
from .text import TextStream, Tokenizer, special_ids

FinishReason = Literal["length", "eos", "stop"]
Prompt = Sequence[int] | str


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
        _ids("prompt", self.prompt)
        _ids("eos", self.eos)
        if not isinstance(self.sampling, Sampling):
            raise TypeError(f"sampling must be a Sampling, found {self.sampling!r}")
        if isinstance(self.stop, str) or _strings(self.stop) is None:
            raise TypeError(f"stop must be a tuple of strings, found {self.stop!r}")


@dataclass(frozen=True)
class Result:
    """What became of one prompt.

    `tokens` are all new tokens, those of the end included. `text` is theirs up to the end-of-text token or the stop
    string, both left out, and None without a tokenizer. `rounds` counts the forwards of the model after prefill.
    """

    tokens: list[int]
    text: str | None
    finish_reason: FinishReason
    rounds: int
    prompt_tokens: int


@dataclass(frozen=True)
class Event:
    """News of request number `request`: tokens, the text that is certain by now, and at the end its result."""

    request: int
    tokens: tuple[int, ...]
    text: str
    result: Result | None = None


def generate(
    model: Model,
    params: Any,
    prompts: Sequence[Prompt],
    max_new_tokens: int = 64,
    draft: str | None = None,
    sampling: Sampling | Sequence[Sampling] = Sampling(),
    eos: int | Sequence[int] | None = None,
    stop: str | Sequence[str] = (),
    stream: Callable[[Event], None] | None = None,
    rows: int | None = None,
    page_size: int = 128,
    chunk: int = 512,
) -> list[Result]:
    """Continue each prompt; results in the order of the prompts.

    Prompts are lists of token ids, or strings where the checkpoint has a tokenizer. `params` are plain or prepared.
    `sampling` is one for all or one a prompt. `eos` defaults to the checkpoint's; `()` never ends at a token. At most
    `rows` prompts (8 by default) run at a time, and prefill takes `chunk` tokens a row and round. `stream` is called
    with each event. A prompt's tokens depend on its own number, settings and text; on others only through rounding.

    Raises `ValueError` before any work for a prompt that is empty, too long or out of the vocabulary, and `TypeError`
    for an argument of another type.
    """
    if draft not in (None, "none"):
        raise ValueError(f"generate: drafts are not there yet, found draft={draft!r}; leave draft out")
    requests = requests_of(model, prompts, max_new_tokens, sampling, eos, stop)
    results: dict[int, Result] = {}
    for event in serve(model, params, requests, rows=rows, page_size=page_size, chunk=chunk):
        if stream is not None:
            stream(event)
        if event.result is not None:
            results[event.request] = event.result
    return [results[index] for index in range(len(requests))]


def requests_of(
    model: Model,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    sampling: Sampling | Sequence[Sampling] = Sampling(),
    eos: int | Sequence[int] | None = None,
    stop: str | Sequence[str] = (),
) -> list[Request]:
    """Prompts as `generate` takes them, checked and tokenised, as requests for `serve`."""
    if isinstance(prompts, str) or any(isinstance(prompt, int) for prompt in prompts):
        raise ValueError("prompts is a list of prompts, each a string or a list of token ids; put one prompt in a list")
    each = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
    if len(each) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts and {len(each)} samplings were given; give one, or one a prompt")
    ends = _eos(model, eos)
    stops = (stop,) if isinstance(stop, str) else _strings(stop)
    if stops is None:
        raise TypeError(f"stop must be a string or a list of strings, found {stop!r}; leave it out for none")
    return [
        Request(_tokens(model, index, prompt), max_new_tokens, one, ends, stops)
        for index, (prompt, one) in enumerate(zip(prompts, each, strict=True))
    ]


def serve(
    model: Model,
    params: Any,
    requests: Sequence[Request],
    *,
    rows: int | None = None,
    page_size: int = 128,
    chunk: int = 512,
) -> Iterator[Event]:
    """Run requests, `rows` at a time, and give an event for each whenever it has new tokens.

    Noise is keyed by a request's number, so a request gives the same tokens whatever runs beside it.
    """
    for name, value in (("rows", 8 if rows is None else rows), ("chunk", chunk), ("page_size", page_size)):
        at_least_one(name, value)
    for index, request in enumerate(requests):
        _check(model, index, request)
    return _rounds(model, params, list(requests), min(rows or 8, len(requests)), page_size, chunk)


def _tokens(model: Model, index: int, prompt: Prompt) -> tuple[int, ...]:
    """The ids of a prompt; of an empty one, the id that begins texts, if there is one."""
    tokenizer = model.tokenizer
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError(f"prompt {index} is a string, and this model has no tokenizer; give a list of token ids")
        prompt = tokenizer.encode(prompt)
    tokens = _ids(f"prompt {index}", prompt)
    if tokens:
        return tokens
    bos = tokenizer.bos if tokenizer is not None else next(iter(special_ids("bos", model.config_json)), None)
    if bos is None:
        raise ValueError(f"prompt {index} is empty, and the model has no bos_token_id to begin with; give a token")
    return (bos,)


def _eos(model: Model, eos: int | Sequence[int] | None) -> tuple[int, ...]:
    if eos is None:
        return special_ids("eos", model.config_json) if model.tokenizer is None else model.tokenizer.eos
    return _ids("eos", eos if isinstance(eos, Iterable) else [eos])


def _ids(name: str, given: Any) -> tuple[int, ...]:
    """Token ids as integers. `TypeError` for anything that would have to be rounded or read as text."""
    try:
        return tuple(map(operator.index, given))
    except TypeError:
        raise TypeError(f"{name} must be a list of integer token ids, found {given!r:.100}") from None


def _strings(given: Any) -> tuple[str, ...] | None:
    """What is given as a tuple, None if it is no collection of strings."""
    if not isinstance(given, Iterable):
        return None
    found = tuple(given)
    return found if all(isinstance(one, str) for one in found) else None


def _check(model: Model, index: int, request: Request) -> None:
    """`ValueError` for a request that cannot be run to its end."""
    vocab, room, prompt = model.config.vocab_size, model.config.max_position_embeddings, request.prompt
    if not prompt:
        raise ValueError(f"prompt {index} is empty; give at least one token")
    outside = [token for token in prompt if not 0 <= token < vocab]
    if outside:
        raise ValueError(f"prompt {index} has token ids outside the vocabulary (0..{vocab - 1}): {outside[:10]}")
    if len(prompt) + request.max_new_tokens > room:
        raise ValueError(
            f"prompt {index}: {len(prompt)} tokens and {request.max_new_tokens} new ones do not fit in the "
            f"{room} positions of this model; shorten the prompt or lower max_new_tokens"
        )
    if "" in request.stop:
        raise ValueError("a stop string is empty; leave it out")
    if request.stop and _tokenizer(model) is None:
        raise ValueError(f"stop strings {list(request.stop)} need a tokenizer, and this model has none; use eos ids")


def _tokenizer(model: Model) -> Tokenizer | None:
    return model.tokenizer if model.tokenizer is not None and model.tokenizer.available else None


@dataclass
class _Row:
    """A request that has a row of the state: how much of its prompt is in, and what came out so far."""

    number: int
    request: Request
    text: TextStream | None
    fed: int = 0
    tokens: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    rounds: int = 0
    reason: FinishReason | None = None

    def next_input(self, chunk: int) -> Sequence[int]:
        """The next part of the prompt; after it, the newest token."""
        prompt = self.request.prompt
        return prompt[self.fed : self.fed + chunk] if self.fed < len(prompt) else self.tokens[-1:]

    def advance(self, inputs: int) -> bool:
        """Count `inputs` tokens as fed; whether the whole prompt is in, so that the row's last logits are wanted."""
        prefill = self.fed < len(self.request.prompt)
        self.fed += inputs if prefill else 0
        self.rounds += not prefill
        return self.fed == len(self.request.prompt)

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
        return Result(self.tokens, text, self.reason, self.rounds, len(self.request.prompt))


def _rounds(
    model: Model, params: Any, requests: list[Request], rows: int, page_size: int, chunk: int
) -> Iterator[Event]:
    """One forward a round over the rows in use; a row that is done goes to the next request, or is given up."""
    tokenizer = _tokenizer(model)
    waiting = deque(
        _Row(number, request, None if tokenizer is None else TextStream(tokenizer, request.stop))
        for number, request in enumerate(requests)
    )
    table = [waiting.popleft() for _ in range(rows)]
    if not table:
        return
    weight = params.embed.weight
    longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
    max_len = -(-longest // page_size) * page_size
    state = model.init_state(rows, max_len, dtype=weight.dtype, device=weight.device, page_size=page_size)
    keys = _keys(table, weight.device)
    while table:
        offers, state = _round(model, params, state, table, keys, chunk)
        yield from (row.take(offer) for row, offer in zip(table, offers, strict=True) if offer)
        if any(row.reason is not None for row in table):
            state, table = _refilled(state, table, waiting)
            keys = _keys(table, weight.device)


_Keys = tuple[Int[Tensor, " rows"], RowSampling]


def _keys(table: Sequence[_Row], device: torch.device) -> _Keys:
    """What the draws of each row depend on beside logits and position."""
    numbers = torch.tensor([row.number for row in table], dtype=torch.int64).to(device)
    return numbers, RowSampling.of([row.request.sampling for row in table], device)


@torch.no_grad()
def _round(
    model: Model, params: Any, state: State, table: Sequence[_Row], keys: _Keys, chunk: int
) -> tuple[list[list[int]], State]:
    """One forward: the new tokens of each row, none while its prompt is not through. Reads the device once."""
    inputs = [row.next_input(chunk) for row in table]
    out, after = model.forward(params, state, Batch.from_lists(inputs, state), logits="last")
    ready = [row.advance(len(new)) for row, new in zip(table, inputs, strict=True)]
    if not any(ready):
        return [[] for _ in table], after
    numbers, sampling = keys
    tokens = sample(out.logits, sampling, numbers, after.lengths).tolist()
    for row, token, through in zip(table, tokens, ready, strict=True):
        if through and token < 0:
            raise FloatingPointError(
                f"prompt {row.number}: the largest logit after {len(row.tokens)} new tokens is NaN or infinite; "
                "check the parameters and their dtype"
            )
    return [[token] if through else [] for token, through in zip(tokens, ready, strict=True)], after


@torch.no_grad()
def _refilled(state: State, table: list[_Row], waiting: deque[_Row]) -> tuple[State, list[_Row]]:
    """Rows that are done emptied and given to requests that wait; with none waiting, the state without these rows."""
    done = [place for place, row in enumerate(table) if row.reason is not None]
    if len(done) == len(table) and not waiting:
        return release(state), []
    state = release(state, done)
    for place in done:
        if waiting:
            table[place] = waiting.popleft()
    left = [place for place, row in enumerate(table) if row.reason is None]
    if len(left) < len(table):
        state = select(state, left)
    return state, [table[place] for place in left]
