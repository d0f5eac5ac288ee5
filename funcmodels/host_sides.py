"""What the host does where a captured forward replays: checks, pages and lengths, and padding to a bucket and back.

`lowering.jit` runs these in place of the functions' own Python. Each takes `fit`, which pads a batch to its bucket, and
the function's arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from lowering import HostSide

from .batch import Batch, check_ids, check_layout, check_room
from .output import LogitsOf, Output, check_logits, cut
from .rows import reserve
from .sampling import DraftNoise
from .speculative import Carry, Proposal, joined_params, kept_tokens, outputs_for, places_ahead
from .state import (
    Growth,
    State,
    check_fresh,
    check_usable,
    claim,
    committed_host,
    grown_host,
    known,
    new_version,
    replayed,
)
from .step import ready

Fit = Callable[[Batch], Batch]


def forward_on_host(
    fit: Fit, model: Any, params: Any, state: State | None, batch: Batch, *, logits: LogitsOf = "all",
    keep_steps: bool = False, **rest: Any,
) -> HostSide:  # fmt: skip
    """That of `Model.forward`."""
    check_layout(batch)
    check_logits(logits)
    check_ids(batch, model.config.vocab_size)
    tokens = batch.tokens.shape[0]
    padded = fit(batch)
    state, after, before = _forward(state, batch, keep_steps)

    def completed(result: tuple[Output, State | None]) -> tuple[Output, State | None]:
        out, new = result
        return cut(out, tokens, logits), after(new)

    return HostSide({"state": state, "batch": padded}, completed, before)


def extend_on_host(
    fit: Fit, draft: Any, params: Any, state: State, out: Output, batch: Batch, next_tokens: Tensor,
    carry: Carry | None = None,
) -> HostSide:  # fmt: skip
    """That of a draft's `extend`."""
    kept = known(kept_tokens(batch, next_tokens)[1])
    padded = fit(batch)
    extra = padded.tokens.shape[0] - batch.tokens.shape[0]
    hidden = _padded(out.hidden, extra)
    ready_state, after, before = _forward(state, batch, keep_steps=True)

    def completed(result: tuple[State, Carry]) -> tuple[State, Carry]:
        new, carry = result
        new = after(new)
        return replace(new, host=committed_host(new.host, kept)), carry

    # No draft reads logits: without them, outputs with many and with few replay one capture.
    taps = {name: _padded(out.extra[name], extra) for name in outputs_for(draft) if name in out.extra}
    given = {"out": Output(hidden[:0], hidden, taps), "next_tokens": _padded(next_tokens.reshape(-1), extra, -1)}
    given |= {"params": joined_params(draft, params)}
    return HostSide(given | {"state": ready_state, "batch": padded}, completed, before)


def propose_on_host(
    fit: Fit, draft: Any, params: Any, state: State, carry: Carry, steps: int = 3, noise: DraftNoise | None = None,
    **rest: Any,
) -> HostSide:  # fmt: skip
    """That of a draft's `propose`."""
    ahead = (places_ahead(draft, steps),) * state.rows
    state = with_room(state, ahead)

    def completed(result: tuple[Proposal, State]) -> tuple[Proposal, State]:
        proposal, new = result
        return proposal, replace(new, host=replayed(state.host))

    before = partial(claim, state.host, ahead, new_version(state.host, Growth(ahead, ahead)))
    return HostSide({"params": joined_params(draft, params), "state": state}, completed, before)


def with_room(state: State, most: Sequence[int]) -> State:
    """The state, checked to be usable, with pages for `most` more tokens a row."""
    check_usable(state)
    check_room(state, most)
    check_fresh(state)
    return reserve(state, most)


def _forward(
    state: State | None, batch: Batch, keep_steps: bool
) -> tuple[State | None, Callable[[Any], Any], Callable[[], None]]:
    """The state with pages for the batch, what puts the new state's host part in place, and what notes the writing."""
    if state is None:
        return None, lambda new: new, lambda: None
    state, growth = ready(state, batch, keep_steps)
    version = new_version(state.host, growth)
    host = grown_host(state.host, growth, version, keep_steps)
    before = partial(claim, state.host, growth.most, version)
    return state, lambda new: replace(new, host=replayed(host)), before


def _padded(x: Tensor, extra: int, value: float = 0) -> Tensor:
    """`x` [n ...] with `extra` more rows of `value`."""
    return F.pad(x, (0, 0) * (x.ndim - 1) + (0, extra), value=value) if extra else x
