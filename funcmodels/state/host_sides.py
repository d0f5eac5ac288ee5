"""What the host does where a captured forward replays: checks, pages and lengths, and padding to a bucket and back.

`lowering.jit` runs this in place of the function's own Python. `fit` pads a batch to its bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from lowering import HostSide

from ..output import LogitsOf, Output, check_logits, cut
from .batch import Batch, check_ids, check_layout, check_room
from .rows import reserve
from .state import (
    State,
    check_fresh,
    check_usable,
    claim,
    grown_host,
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
    fitted = fit(batch)
    state, after, before = prepared(state, batch, keep_steps)

    def completed(result: tuple[Output, State | None]) -> tuple[Output, State | None]:
        out, new = result
        return cut(out, tokens, logits), after(new)

    return HostSide({"state": state, "batch": fitted}, completed, before)


def with_room(state: State, most: Sequence[int]) -> State:
    """The state, checked to be usable, with pages for `most` more tokens a row."""
    check_usable(state)
    check_room(state, most)
    check_fresh(state)
    return reserve(state, most)


def prepared(
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


def padded(x: Tensor, extra: int, value: float = 0) -> Tensor:
    """`x` [n ...] with `extra` more rows of `value`."""
    return F.pad(x, (0, 0) * (x.ndim - 1) + (0, extra), value=value) if extra else x
