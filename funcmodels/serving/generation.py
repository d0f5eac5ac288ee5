"""Generation: prompts in, results out.

    results = generate(model, params, ["def f(", "class A:"], max_new_tokens=64, draft="mtp")
    for event in serve(model, params, [Request((1, 2, 3), 8)]): ...

`generate` checks, tokenises and collects; `serve` streams events. The loop below them is in `serving`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.parallel import check_same, refusals_told
from ..checkpoint.text import TextStream, Tokenizer, special_ids
from ..drafts.protocol import Draft
from ..model import Model, at_least_one
from ..sampling.settings import Sampling
from ..state.step import MAX_KEPT_STEPS
from .loop import Serving, Setup
from .programs import Programs, named_draft
from .progress import shown
from .requests import Event, Request, Result, Row, strings, token_ids

Prompt = Sequence[int] | str


def generate(
    model: Model,
    params: Any,
    prompts: Sequence[Prompt],
    max_new_tokens: int = 64,
    draft: str | Path | Draft | None = None,
    draft_steps: int | None = None,
    sampling: Sampling | Sequence[Sampling] = Sampling(),
    eos: int | Sequence[int] | None = None,
    stop: str | Sequence[str] = (),
    stream: Callable[[Event], None] | None = None,
    rows: int | None = None,
    page_size: int = 128,
    chunk: int = 512,
    recurrent_dtype: torch.dtype | None = None,
    backend: str | None = None,
    numbers: Sequence[int] | None = None,
) -> list[Result]:
    """Continue each prompt; results in the order of the prompts.

    Prompts are lists of token ids, or strings where the checkpoint has a tokenizer. `params` are plain or prepared.
    `draft="mtp"`, or the directory of a block draft, speculates: each round the draft proposes `draft_steps` tokens a
    row (3 by default, of a block draft all of a block) and the model verifies them in one forward, which changes how
    many rounds are needed and nothing else. `sampling` is one for all or one a prompt, greedy by default, whatever the
    checkpoint advises: that is `fm.Sampling.of(model)`. `numbers` are what the prompts' noise is keyed by beside the
    seed (0, 1, ... by default): with a result's `number` a prompt gives the same tokens again, alone or in any company.
    `eos` defaults to the checkpoint's; `()` never ends at a token. At most `rows` prompts (8 by default) run at a
    time, and prefill takes `chunk` tokens a row and round. `recurrent_dtype` is that of delta-rule matrices (float32 by
    default; Ascend's operators take bfloat16). `stream` is called with each event; without it, a terminal shows
    progress. A prompt's tokens depend on its own number, settings and text; on others, and on the draft, only through
    rounding.

    Prompts next to each other that begin with the same `page_size` tokens or more run those once
    (`Result.shared_tokens`). The pages of all rows hold rows x (longest prompt with its new tokens, and `draft_steps`)
    tokens, each rounded up to pages; what is held for prompts still to come adds the longest shared beginning.

    `backend` names one of `lowering.jit`: rounds are captured, which takes from seconds to minutes for each program
    (Inductor, which takes plain `params` alone), and replayed. Programs are kept with the model, for calls of the same
    sizes. See docs/serving.md.

    Raises `ValueError` before any work for a prompt that is empty, too long or out of the vocabulary, `TypeError` for
    an argument of another type. Where logits are no numbers, or every token is forbidden, that prompt alone ends, with
    the reason "no_choice". All ranks of a model that several share must be given the same, or each raises `ValueError`.
    """
    with refusals_told(model.ranks, params):
        requests = requests_of(model, prompts, max_new_tokens, sampling, eos, stop, numbers)
    results: dict[int, Result] = {}
    setup: dict[str, Any] = {"draft_steps": draft_steps, "recurrent_dtype": recurrent_dtype, "backend": backend}
    serving = serve(model, params, requests, draft=draft, rows=rows, page_size=page_size, chunk=chunk, **setup)
    with nullcontext(stream) if stream is not None else shown(len(requests), serving.state_bytes) as tell:
        for event in serving:
            tell(event)
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
    numbers: Sequence[int] | None = None,
) -> list[Request]:
    """Prompts as `generate` takes them, checked and tokenised, as requests for `serve`."""
    if isinstance(prompts, str) or any(isinstance(prompt, int) for prompt in prompts):
        raise ValueError("prompts is a list of prompts, each a string or a list of token ids; put one prompt in a list")
    each = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
    if len(each) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts and {len(each)} samplings were given; give one, or one a prompt")
    ends = _eos(model, eos)
    stops = (stop,) if isinstance(stop, str) else strings(stop)
    if stops is None:
        raise TypeError(f"stop must be a string or a list of strings, found {stop!r}; leave it out for none")
    keyed = list(range(len(prompts)) if numbers is None else numbers)
    if len(keyed) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts and {len(keyed)} numbers were given; give one a prompt")
    return [
        Request(_tokens(model, index, prompt), max_new_tokens, one, ends, stops, number)
        for index, (prompt, one, number) in enumerate(zip(prompts, each, keyed, strict=True))
    ]


def serve(
    model: Model,
    params: Any,
    requests: Sequence[Request],
    *,
    draft: str | Path | Draft | None = None,
    draft_steps: int | None = None,
    rows: int | None = None,
    page_size: int = 128,
    chunk: int = 512,
    recurrent_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Serving:
    """Run requests, `rows` at a time: an iterator that gives an event for each whenever it has new tokens.

    Noise is keyed by a request's number, so a request gives the same tokens whatever runs beside it. An event's
    `request` is a place in `requests`, whatever the numbers. The arguments are those of `generate`. The iterator's
    `state_bytes` is the memory that the rows take.
    """
    with refusals_told(model.ranks, params):
        how = (draft, draft_steps, rows, page_size, chunk, recurrent_dtype, backend)
        waiting, setup = _set_up(model, params, requests, *how)
    facts = {"the number of prompts": len(requests)}
    facts |= {field.name: [getattr(request, field.name) for request in requests] for field in fields(Request)}
    facts |= {name: getattr(setup, name) for name in ("rows", "page_size", "chunk", "draft_steps", "recurrent_dtype")}
    facts |= {"backend": backend, "draft": type(setup.draft).__name__, "config": model.config}
    check_same(model.ranks, facts, params)
    return Serving(model, params, waiting, setup)


def _set_up(
    model: Model, params: Any, requests: Sequence[Request], draft: str | Path | Draft | None, draft_steps: int | None,
    rows: int | None, page_size: int, chunk: int, recurrent_dtype: torch.dtype | None, backend: str | None,
) -> tuple[list[Row], Setup]:  # fmt: skip
    """The rows that requests are to have, which are checked, and how to run them."""
    sizes = {"rows": 8 if rows is None else rows, "chunk": chunk, "page_size": page_size}
    if draft_steps is not None:
        sizes["draft_steps"] = draft_steps
    for name, value in sizes.items():
        at_least_one(name, value)
    for index, request in enumerate(requests):
        _check(model, index, request)
    if isinstance(draft, (str, Path)):
        draft = None if draft == "none" else named_draft(model, draft, params)
    if draft is not None and (isinstance(draft, type) or not isinstance(draft, Draft)):
        raise TypeError(
            "draft must be 'mtp', 'none', the directory of a draft, or an object derived from fm.Draft, found "
            f"{draft!r}"
        )
    steps = _draft_steps(draft, draft_steps)
    tokenizer = _tokenizer(model)
    places = 0 if draft is None else steps
    waiting = [
        Row(at, request, None if tokenizer is None else TextStream(tokenizer, request.stop), accepted=[0] * places)
        for at, request in enumerate(requests)
    ]
    programs = Programs.of(model, draft, backend)
    return waiting, Setup(programs, sizes["rows"], page_size, chunk, draft, steps, recurrent_dtype)


def _draft_steps(draft: Draft | None, asked: int | None) -> int:
    """How many tokens are proposed a round. `ValueError` for more than the draft proposes, or a state can drop."""
    own = None if draft is None else draft.most_steps
    most = min(own or MAX_KEPT_STEPS, MAX_KEPT_STEPS - 1)
    if asked is None:
        return 3 if own is None else most
    if asked > most:
        raise ValueError(f"draft_steps must be at most {most}, found {asked}")
    return asked


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
    biased = [token for token, _ in request.sampling.logit_bias if token >= vocab]
    if biased:
        raise ValueError(
            f"prompt {index}: logit_bias has token ids outside the vocabulary (0..{vocab - 1}): {biased[:10]}"
        )
    if "" in request.stop:
        raise ValueError("a stop string is empty; leave it out")
    if request.stop and _tokenizer(model) is None:
        raise ValueError(f"stop strings {list(request.stop)} need a tokenizer, and this model has none; use eos ids")


def _tokenizer(model: Model) -> Tokenizer | None:
    return model.tokenizer if model.tokenizer is not None and model.tokenizer.available else None
