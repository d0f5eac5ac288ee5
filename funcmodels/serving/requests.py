"""Requests and what becomes of them: the values that `generate` and `serve` take and give."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal

from ..checkpoint.text import TextStream, special_ids
from ..model import Model, at_least_one
from ..sampling.settings import Sampling

Prompt = Sequence[int] | str
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
            raise TypeError(f"sampling must be a Sampling, found {self.sampling!r:.100}")
        if isinstance(self.stop, str) or strings(self.stop) is None:
            raise TypeError(f"stop must be a tuple of strings, found {self.stop!r:.100}")
        if self.number is not None:
            _check_number(self.number)


@dataclass(frozen=True)
class Result:
    """What became of one prompt.

    `tokens` are all new tokens, those of the end included. `text` is theirs up to the end-of-text token or the stop
    string, both left out, and None without a tokenizer. `rounds` counts the forwards of the model after prefill.
    `accepted[i]` of them took the draft of place i (0 is the first): one number for each of `draft_steps`, zeros where
    prefill was all that ran; without a draft it is empty. `shared_tokens` of the `prompt_tokens` were not run for this
    prompt: another one that begins alike had run them. `number` keyed its noise: a `Request` with it repeats `tokens`.
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
        if any(one is True or one is False for one in given):
            raise TypeError
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
    found: tuple[Any, ...] = tuple(given) if isinstance(given, Iterable) else (None,)
    return found if all(isinstance(one, str) for one in found) else None


def requests_of(
    model: Model,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    sampling: Sampling | Sequence[Sampling] = Sampling(),
    eos: int | Sequence[int] | None = None,
    stop: str | Sequence[str] = (),
    numbers: Sequence[int] | None = None,
) -> list[Request]:
    """Prompts as `generate` takes them, checked and tokenised, as requests for `serve`."""
    prompts = prompts if isinstance(prompts, str) else _list("prompts", prompts)
    if isinstance(prompts, str) or any(isinstance(prompt, int) for prompt in prompts):
        raise ValueError("prompts is a list of prompts, each a string or a list of token ids; put one prompt in a list")
    each = [sampling] * len(prompts) if isinstance(sampling, Sampling) else _list("sampling", sampling)
    if len(each) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts and {len(each)} samplings were given; give one, or one a prompt")
    ends = _eos(model, eos)
    stops = (stop,) if isinstance(stop, str) else strings(stop)
    if stops is None:
        raise TypeError(f"stop must be a string or a list of strings, found {stop!r:.100}; leave it out for none")
    keyed = _list("numbers", range(len(prompts)) if numbers is None else numbers)
    if len(keyed) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts and {len(keyed)} numbers were given; give one a prompt")
    return [
        Request(_tokens(model, index, prompt), max_new_tokens, one, ends, stops, number)
        for index, (prompt, one, number) in enumerate(zip(prompts, each, keyed, strict=True))
    ]


def _list(name: str, given: Any) -> list[Any]:
    if not isinstance(given, Iterable):
        raise TypeError(f"{name} must be a list with one a prompt, found {given!r:.100}")
    return list(given)


def _tokens(model: Model, index: int, prompt: Prompt) -> tuple[int, ...]:
    """The ids of a prompt; of an empty one, the id that begins texts, if there is one."""
    tokenizer = model.tokenizer
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError(f"prompt {index} is a string, and this model has no tokenizer; give a list of token ids")
        prompt = tokenizer.encode(prompt)
    tokens = token_ids(f"prompt {index}", prompt)
    if tokens:
        return tokens
    bos = tokenizer.bos if tokenizer is not None else next(iter(special_ids("bos", model.config_json)), None)
    if bos is None:
        raise ValueError(f"prompt {index} is empty, and the model has no bos_token_id to begin with; give a token")
    return (bos,)


def _eos(model: Model, eos: int | Sequence[int] | None) -> tuple[int, ...]:
    if eos is None:
        return special_ids("eos", model.config_json) if model.tokenizer is None else model.tokenizer.eos
    return token_ids("eos", eos if isinstance(eos, Iterable) else [eos])


def check_request(model: Model, index: int, request: Request) -> None:
    """`ValueError` for a request that cannot be run to its end, `TypeError` for what is none."""
    if not isinstance(request, Request):
        raise TypeError(f"serve: expected a list of fm.Request, found {request!r:.100} at place {index}")
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
    biased = [token for token, _ in request.sampling.logit_bias if token >= vocab]
    if biased:
        raise ValueError(
            f"prompt {index}: logit_bias has token ids outside the vocabulary (0..{vocab - 1}): {biased[:10]}"
        )
    if "" in request.stop:
        raise ValueError("a stop string is empty; leave it out")
    if request.stop and text_of(model, request) is None:
        raise ValueError(
            f"stop strings {list(request.stop)!s:.100} need a tokenizer, and this model has none; use eos ids"
        )


def text_of(model: Model, request: Request) -> TextStream | None:
    """What decodes the request's new tokens, if the model has a tokenizer that is installed."""
    tokenizer = model.tokenizer
    return TextStream(tokenizer, request.stop) if tokenizer is not None and tokenizer.available else None
