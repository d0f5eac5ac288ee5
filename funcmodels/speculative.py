"""Speculative decoding: a draft proposes a window of tokens a row, the model verifies it in one forward.

    proposal, dstate = draft.propose(params, dstate, carry)
    window = proposal.batch(state)
    out, pending = model.forward(params, state, window, keep_steps=True)
    verdict = verify(out, proposal, sampling)
    state = commit(pending, verdict.accepted)
    dstate, carry = draft.extend(params, dstate, out, window, verdict.tokens, carry)

The law of the tokens is that of plain sampling, whatever the draft: every token is drawn by the model's own sampler,
and a draft only decides how many draws of one forward are of use.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from params.tree import map, tree

from .batch import Batch
from .output import Output
from .sampling import RowSampling, Sampling, sample
from .state import State


@tree
class Carry:
    """What a draft goes on from: each row's newest token, not yet run by the model, and the head's state before it."""

    token: Int[Tensor, " rows"]
    hidden: Float[Tensor, "rows hidden"]

    def where(self, new: Tensor, old: Carry) -> Carry:
        """This carry in the rows where `new` is true, `old` elsewhere."""
        return map(lambda x, y: torch.where(new.reshape(-1, *(1,) * (x.ndim - 1)), x, y), self, old)

    def select(self, rows: Int[Tensor, " rows"]) -> Carry:
        """The carry of `rows`."""
        return map(lambda x: x[rows], self)


@tree
class Proposal:
    """A window a row: `root`, its newest token, and the drafts after it. `start` is the place that the root takes."""

    root: Int[Tensor, " rows"]
    tokens: Int[Tensor, "rows drafts"]
    start: Int[Tensor, " rows"]

    def batch(self, state: State) -> Batch:
        """The windows as the batch to verify. Raises as `Batch.from_tokens` does."""
        window = torch.cat((self.root[:, None], self.tokens), 1)
        return Batch.from_tokens(window.flatten(), [window.shape[1]] * window.shape[0], state)


@tree
class Verdict:
    """`accepted` tokens of each row's window count, the root among them; as many new `tokens` follow, then -1."""

    tokens: Int[Tensor, "rows window"]
    accepted: Int[Tensor, " rows"]


def verify(
    out: Output,
    proposal: Proposal,
    sampling: Sampling | RowSampling = Sampling(),
    requests: Int[Tensor, " rows"] | None = None,
) -> Verdict:
    """Draw a token after each token of the windows; drafts count while they equal what was drawn before them.

    `out` is the forward of `proposal.batch(state)` with logits of all tokens. The draw after an accepted draft is
    independent of the comparison that accepted it, so each token has the law of `sample`: an argmax draft x is
    accepted with probability p(x). `requests` number the rows for the sampler's noise (0, 1, ... by default). A row
    with logits that are no numbers ends in a -1 that `accepted` counts.
    """
    rows, steps = proposal.tokens.shape
    width = steps + 1
    if out.logits.shape[0] != rows * width:
        raise ValueError(
            f"verify: {out.logits.shape[0]} rows of logits for {rows} windows of {width} tokens; run "
            "forward(params, state, proposal.batch(state), keep_steps=True) with logits of all tokens"
        )
    device = out.logits.device
    if requests is None:
        requests = torch.arange(rows, device=device)
    if isinstance(sampling, Sampling):
        sampling = RowSampling.of([sampling] * rows, device)
    if sampling.seed.shape[0] != rows or requests.shape[0] != rows:
        raise ValueError(
            f"verify: {rows} windows, settings of {sampling.seed.shape[0]} rows and {requests.shape[0]} requests; give "
            "one of each a window"
        )
    places = torch.arange(width, device=device)
    positions = (proposal.start[:, None] + 1 + places).flatten()
    each = map(lambda x: x.repeat_interleave(width), sampling)
    drawn = sample(out.logits, each, requests.repeat_interleave(width), positions).view(rows, width)
    equal = (drawn[:, :-1] == proposal.tokens).to(torch.int32)
    accepted = 1 + equal.cumprod(1).sum(1)
    return Verdict(torch.where(places < accepted[:, None], drawn, -1), accepted)


def kept_tokens(batch: Batch, next_tokens: Int[Tensor, "*lead"]) -> tuple[Int[Tensor, " tokens"], Int[Tensor, " rows"]]:
    """The token after each place of `batch`, on its device (0 for -1); and how many count a row, where they were given.

    `ValueError` unless there is one a token of the batch, `TypeError` unless they are integers.
    """
    if next_tokens.is_floating_point() or next_tokens.dtype == torch.bool:
        raise TypeError(f"extend: next tokens must be integers, found {next_tokens.dtype}")
    following = next_tokens.reshape(-1)
    tokens = batch.tokens
    if following.shape != tokens.shape:
        raise ValueError(f"extend: {following.shape[0]} next tokens for {tokens.shape[0]} tokens; give one for each")
    counted = torch.cat((following.new_zeros(1), (following >= 0).cumsum(0)))
    kept = counted[_starts(batch, following.device)].diff().to(torch.int32)
    return following.clamp(min=0).to(tokens), kept


def _starts(batch: Batch, device: torch.device) -> Int[Tensor, " ends"]:
    """`query_start` on `device`; on the host from what is known there, without reading the other."""
    if batch.query_start.device == device or not (batch.uniform or batch.counts):
        return batch.query_start.to(device).long()
    counts = batch.counts or (batch.max_query,) * batch.rows
    return torch.tensor([0, *counts], device=device).cumsum(0)


def next_tokens(batch: Batch, last: Int[Tensor, " rows"]) -> Int[Tensor, " tokens"]:
    """The token after each place of a batch of prompts: the next one of the batch, and `last[r]` at row r's end."""
    following = torch.cat((batch.tokens[1:], batch.tokens[:1]))
    ends = batch.query_start[1:].long() - 1
    live = batch.query_start.diff() > 0
    # Idle rows write to a place past the tokens.
    at = torch.where(live, ends, following.shape[0])
    return torch.cat((following, following[:1])).index_copy(0, at, last.to(following))[:-1]


@runtime_checkable
class Draft(Protocol):
    """What proposes tokens. `MtpDraft` says what each function does."""

    def init_state(self, state: State) -> State:
        """An empty state of the draft for the rows of `state`."""
        ...

    def extend(
        self, params: Any, state: State, out: Output, batch: Batch, next_tokens: Tensor, carry: Carry | None = None
    ) -> tuple[State, Carry]:
        """Take in what the model has just run, and the token after each place."""
        ...

    def propose(self, params: Any, state: State, carry: Carry, steps: int = 3) -> tuple[Proposal, State]:
        """`steps` tokens after each row's newest."""
        ...
