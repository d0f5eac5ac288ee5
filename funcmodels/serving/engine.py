"""`Engine`: prompts in, results out, for any number of calls. `generate` and `serve` make one for a single call.

engine = Engine(model, params, draft="mtp", backend="inductor")
results = engine.generate(["def f(", "class A:"], max_new_tokens=64)
for event in engine.serve([Request((1, 2, 3), 8)]): ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from params.modes import lasting
from params.tree import num_bytes

from ..checkpoint.parallel import check_same, refusals_told
from ..drafts.named import directory_of_draft
from ..drafts.named import draft as named_draft
from ..drafts.protocol import Draft
from ..model import Model, at_least_one
from ..sampling.settings import Sampling
from ..state.step import MAX_KEPT_STEPS
from .prefixes import pages_held, plan
from .programs import Programs, power_of_two
from .progress import shown
from .requests import Event, Prompt, Request, Result, check_request, requests_of, text_of
from .runner import DraftRunner, Runner
from .scheduler import Continuation, Scheduler


@dataclass(eq=False, repr=False)
class Engine:
    """A model and its parameters, plain or prepared, with what runs them: `generate` collects results, `serve` streams.

    At most `rows` prompts run at a time, and prefill takes `chunk` tokens a row and round. `draft="mtp"`, the directory
    of a block draft, or a `Draft` speculates: each round it proposes `draft_steps` tokens a row (3 by default, of a
    block draft all of a block) and the model verifies them in one forward, which changes how many rounds are needed and
    nothing else. `recurrent_dtype` is that of delta-rule matrices (float32 by default; Ascend's operators take
    bfloat16). `backend` names one of `lowering.jit`: rounds are captured, which takes from seconds to minutes for each
    program (Inductor, which takes plain `params` alone), and replayed by all calls of the same sizes, until the engine
    goes. Calls may go on side by side, in threads too. See docs/serving.md.

    Raises `ValueError` for sizes out of range and for what is no draft of the model, `TypeError` for other types. All
    ranks of a model that several share must be given the same, here and in each call, or each raises `ValueError`.
    """

    model: Model
    params: Any
    draft: str | Path | Draft | None = None
    backend: str | None = None
    _: KW_ONLY
    draft_steps: int | None = None
    rows: int = 8
    page_size: int = 128
    chunk: int = 512
    recurrent_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        facts: dict[str, Any] = {"rows": self.rows, "chunk": self.chunk, "page_size": self.page_size}
        with refusals_told(self.model.ranks, self.params):
            for name, value in facts.items():
                at_least_one(name, value)
            draft = _draft(self.model, self.draft, self.params)
            steps = _draft_steps(draft, self.draft_steps)
            self._programs = Programs.of(self.model, draft, steps, self.backend)
        facts |= {"draft_steps": steps, "recurrent_dtype": self.recurrent_dtype, "backend": self.backend}
        facts |= {"draft": type(draft).__name__, "config": self.model.config}
        check_same(self.model.ranks, facts, self.params)

    def generate(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int = 64,
        sampling: Sampling | Sequence[Sampling] = Sampling(),
        eos: int | Sequence[int] | None = None,
        stop: str | Sequence[str] = (),
        stream: Callable[[Event], None] | None = None,
        numbers: Sequence[int] | None = None,
    ) -> list[Result]:
        """Continue each prompt; results in the order of the prompts.

        Prompts are lists of token ids, or strings where the checkpoint has a tokenizer. `sampling` is one for all or
        one a prompt, greedy by default, whatever the checkpoint advises: that is `fm.Sampling.of(model)`. `numbers` are
        what the prompts' noise is keyed by beside the seed (0, 1, ... by default): with a result's `number` a prompt
        gives the same tokens again, alone or in any company. `eos` defaults to the checkpoint's; `()` never ends at a
        token. `stream` is called with each event; without it, a terminal shows progress. A prompt's tokens depend on
        its own number, settings and text; on others, and on the draft, only through rounding. Prompts next to each
        other that begin with the same `page_size` tokens or more run those once (`Result.shared_tokens`).

        Raises `ValueError` before any work for a prompt that is empty, too long or out of the vocabulary, `TypeError`
        for an argument of another type. Where logits are no numbers, or every token is forbidden, that prompt alone
        ends, with the reason "no_choice".
        """
        with refusals_told(self.model.ranks, self.params):
            requests = requests_of(self.model, prompts, max_new_tokens, sampling, eos, stop, numbers)
            if stream is not None and not callable(stream):
                raise TypeError(f"stream must be a function that takes an Event, found {stream!r:.100}")
        results: dict[int, Result] = {}
        serving = self.serve(requests)
        with nullcontext(stream) if stream is not None else shown(len(requests), serving.state_bytes) as tell:
            for event in serving:
                tell(event)
                if event.result is not None:
                    results[event.request] = event.result
        return [results[index] for index in range(len(requests))]

    def serve(self, requests: Sequence[Request]) -> Serving:
        """Run requests: an iterator that gives an event for each whenever it has new tokens.

        Noise is keyed by a request's number, so a request gives the same tokens whatever runs beside it. An event's
        `request` is a place in `requests`, whatever the numbers. The iterator's `state_bytes` is the memory that the
        rows take. Raises as `generate` does.
        """
        with refusals_told(self.model.ranks, self.params):
            if not isinstance(requests, Sequence):
                raise TypeError(f"serve: expected a list of fm.Request, found {requests!r:.100}")
            for index, request in enumerate(requests):
                check_request(self.model, index, request)
        facts = {field.name: [getattr(request, field.name) for request in requests] for field in fields(Request)}
        check_same(self.model.ranks, {"the number of prompts": len(requests)} | facts, self.params)
        if not requests:
            return Serving(iter(()), 0)
        shares = plan([request.prompt for request in requests], self.page_size)
        runner = self._runner(requests, pages_held(shares, self.page_size))
        waiting = [
            Continuation(at, request, share, text_of(self.model, request), [0] * self._programs.steps)
            for at, (request, share) in enumerate(zip(requests, shares, strict=True))
        ]
        scheduler = Scheduler(waiting, runner.states[0].rows, self.chunk, self._programs.captured)
        return Serving(_events(scheduler, runner), sum(map(num_bytes, runner.states)))

    @lasting
    def _runner(self, requests: Sequence[Request], held: int) -> Runner:
        """A runner of empty rows with room for the longest request, beside `held` pages for what others begin from."""
        programs, weight, page = self._programs, self.params.embed.weight, self.page_size
        # A row's last window may reach as far past its end as there are drafts.
        longest = max(len(request.prompt) + request.max_new_tokens for request in requests) + programs.steps
        rows, width = min(self.rows, len(requests)), -(-longest // page)
        if programs.captured:
            # Few sizes for all calls: each other one is captured anew.
            rows, width, held = min(self.rows, power_of_two(rows)), _rounded(width), held and _rounded(held)
        kinds, pages = (weight.dtype, self.recurrent_dtype, weight.device), rows * width + held if held else None
        state = self.model.init_state(rows, width * page, *kinds, page_size=page, pages=pages)
        settings = list(dict.fromkeys(replace(request.sampling, seed=0) for request in requests))
        return (Runner if programs.draft is None else DraftRunner)(programs, self.params, [state], settings)


@dataclass(eq=False)
class Serving(Iterator[Event]):
    """The events of requests, a round whenever those of the last are taken; `state_bytes` is the memory of the rows."""

    events: Iterator[Event]
    state_bytes: int

    def __iter__(self) -> Iterator[Event]:
        return self.events

    def __next__(self) -> Event:
        return next(self.events)


def _events(scheduler: Scheduler, runner: Runner) -> Iterator[Event]:
    """Rounds until all requests have ended. What is left half-way, or fails, returns all that it holds."""
    while scheduler.unfinished:
        runner.change(scheduler.refill())
        offers = runner.run(scheduler.turns())
        yield from scheduler.take(offers)


def _draft(model: Model, given: str | Path | Draft | None, params: Any) -> Draft | None:
    """The draft that is named or given. Parameters of its own come in the dtype of the model's, and where they are."""
    if given is None or given == "none":
        return None
    if given == "mtp":
        return named_draft(model, "mtp")
    if isinstance(given, (str, Path)):
        directory, like = directory_of_draft(given), params.embed.weight
        return named_draft(model, directory, like.dtype, like.device)
    if isinstance(given, type) or not isinstance(given, Draft):
        known = "'mtp', 'none', a draft's directory or an instance of fm.Draft"
        raise TypeError(f"draft must be {known}, found {given!r:.100}")
    return given


def _draft_steps(draft: Draft | None, asked: int | None) -> int:
    """How many tokens are proposed a round. `ValueError` for more than the draft proposes, or a state can drop."""
    own = None if draft is None else draft.most_steps
    most = min(own or MAX_KEPT_STEPS, MAX_KEPT_STEPS - 1)
    steps = asked if asked is not None else 3 if own is None else most
    at_least_one("draft_steps", steps, most)
    return steps


def _rounded(count: int) -> int:
    """The power of two, or one and a half of one, that holds `count`."""
    power = power_of_two(count)
    return power * 3 // 4 if count <= power * 3 // 4 else power


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
    """Continue each prompt, with an `Engine` for this call alone; results in the order of the prompts.

    The arguments are those of `Engine` and `Engine.generate`, and so are the errors. What a backend captures goes with
    the call: hold an `Engine` to capture once for many.
    """
    sizes: dict[str, Any] = {"page_size": page_size, "chunk": chunk, "recurrent_dtype": recurrent_dtype}
    sizes |= {"draft_steps": draft_steps, "rows": 8 if rows is None else rows}
    engine = Engine(model, params, draft, backend, **sizes)
    return engine.generate(prompts, max_new_tokens, sampling, eos, stop, stream, numbers)


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
    """Run requests as `Engine.serve` does, with an `Engine` for this call alone, whose arguments these are."""
    sizes: dict[str, Any] = {"page_size": page_size, "chunk": chunk, "recurrent_dtype": recurrent_dtype}
    sizes |= {"draft_steps": draft_steps, "rows": 8 if rows is None else rows}
    return Engine(model, params, draft, backend, **sizes).serve(requests)
