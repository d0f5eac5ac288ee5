"""What every draft checks before it computes: that what it is given belongs together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import StateError
from ..output import Output
from ..sampling.draws import DraftNoise
from ..state.batch import Batch
from ..state.state import State
from .protocol import Carry


def check_empty(state: State) -> None:
    """`StateError` for a state that holds tokens, which a new draft has not seen."""
    if any(state.ledger.lengths):
        raise StateError(
            f"the state already holds tokens ({list(state.ledger.lengths)}) that the draft has not seen; make the "
            "draft's state from the empty state, and extend it with every forward"
        )


def check_output(out: Output, batch: Batch) -> None:
    """`ValueError` for an output of another batch."""
    if out.hidden.shape[0] != batch.tokens.shape[0]:
        raise ValueError(
            f"extend: the output is of {out.hidden.shape[0]} tokens, the batch has {batch.tokens.shape[0]}; give "
            "the batch that the model's forward made this output from"
        )


def check_hidden(params: Any, batch: Batch, hidden: Tensor) -> None:
    """`ValueError` for hidden states that the mtp head of `params` does not read."""
    if params.mtp is None:  # the head says so
        return
    shape, dtype = (batch.tokens.shape[0], params.mtp.hidden_norm.weight.shape[-1]), params.embed.weight.dtype
    if hidden.shape != shape or hidden.dtype != dtype:
        raise ValueError(
            f"draft: hidden states are {list(hidden.shape)} of {hidden.dtype}, this head reads {list(shape)} of {dtype}"
            " (tokens of the batch, values); give what the model's forward has in out.hidden"
        )


def check_carry(state: State, carry: Carry) -> None:
    """`StateError` for a carry of other rows."""
    rows = carry.token.shape[0]
    if rows != state.rows:
        raise StateError(f"the carry has {rows} rows, the state has {state.rows}; select the same rows of both")


def check_noise(state: State, noise: DraftNoise | None) -> None:
    """`ValueError` for noise of other rows."""
    if noise is None:
        return
    settings, requests = noise.sampling.seed.shape[0], noise.requests.shape[0]
    if settings != state.rows or requests != state.rows:
        raise ValueError(
            f"propose: noise of {settings} settings and {requests} requests, the state has {state.rows} rows; give one "
            "of each a row"
        )


def check_embedded(embedded: Tensor, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """`ValueError` for blocks embedded otherwise than the draft's are."""
    if embedded.shape != shape or embedded.dtype != dtype:
        raise ValueError(
            f"propose: embedded is {list(embedded.shape)} of {embedded.dtype}, this draft's blocks are {list(shape)} "
            f"(rows, block, hidden) of {dtype}; give what draft.embed(params, carry.token) gives"
        )
