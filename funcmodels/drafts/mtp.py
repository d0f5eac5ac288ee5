"""Drafting with a model's own multi-token prediction head, one token after the other.

The head's row at place j joins the model's hidden state there with the token at j + 1 and predicts the token at j + 2.
Its keys and values live in a state of its own, of the same lengths as the model's. The first draft comes from the last
hidden state that `extend` made; each later one from the head's own hidden state and the draft before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lowering import captured_with, ops
from lowering.jit.tape import beforehand
from params.modes import lasting

from ..family import MtpHead
from ..model import Model, S, at_least_one
from ..output import LogitsOf, Output
from ..sampling.draws import DraftNoise
from ..state.batch import Batch
from ..state.ledger import Ledger
from ..state.state import State, check_usable, commit, like, rewound
from .checks import check_carry, check_empty, check_hidden, check_noise, check_output
from .protocol import Carry, Draft, Proposal, extend_inputs, kept_tokens, propose_inputs


@dataclass(frozen=True)
class MtpDraft(Draft):
    """The draft head of `model`. Holds no tensors: its parameters are those of the model, `params.mtp`."""

    model: Model

    @property
    def head(self) -> MtpHead:
        """The head's functions. `ValueError` for a model of a family that has none."""
        if self.model.family.mtp is None:
            raise ValueError(f"draft: models of type {self.model.config_json['model_type']!r} have no mtp head")
        return self.model.family.mtp

    @lasting
    def forward(
        self,
        params: Any,
        state: S,
        batch: Batch,
        hidden: Float[Tensor, "tokens hidden"],
        *,
        logits: LogitsOf = "all",
        keep_steps: bool = False,
    ) -> tuple[Output, S]:
        """The head alone: `batch` holds the token after each place, `hidden` is what the model made at the place.

        The logits at a place are those of the token two places on. `state=None` computes the batch alone, for training.
        Raises as `Model.forward` does, `ValueError` for hidden states of another shape or dtype than this head reads.
        """
        check_hidden(params, batch, hidden)
        return self.head.forward(self.model.local, params, state, batch, hidden, logits=logits, keep_steps=keep_steps)

    @lasting
    def init_state(self, state: State) -> State:
        """An empty state of the head for the rows of `state`, which must be empty too (`StateError` if not)."""
        check_empty(state)
        return like(state, partial(self.head.init_entries, self.model.local))

    @lasting
    def own_state(
        self,
        rows: int,
        max_len: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        page_size: int = 128,
    ) -> State:
        """An empty state of the head for rows of a model that is not run here; arguments as for `Model.init_state`."""
        entries = partial(self.head.init_entries, self.model.local)
        return self.model.empty_state(entries, rows, max_len, dtype, None, device, page_size)

    @captured_with(extend_inputs)
    @lasting
    def extend(
        self,
        params: Any,
        state: State,
        out: Output,
        batch: Batch,
        next_tokens: Int[Tensor, "*lead"],
        carry: Carry | None = None,
    ) -> tuple[State, Carry]:
        """Take in what the model has just run: `out` and `batch` of its forward, and the token after each place.

        Of each row the places before the first -1 of `next_tokens` count: all of a prompt, of a verified window those
        that were accepted, which is how `verify` gives them. A row of which none count keeps its `carry`. On the host,
        `next_tokens` leave the state's lengths known there. Returns the head's state and the carry to propose from.
        Raises `ValueError` for an output or next tokens of another batch, `StateError` for a carry of other rows.
        """
        check_output(out, batch)
        if carry is not None:
            check_carry(state, carry)
        following, kept = kept_tokens(batch, next_tokens)
        fed = replace(batch, tokens=following)
        made, state = self.forward(params, state, fed, out.hidden, logits=None, keep_steps=True)
        state = commit(state, kept)
        kept = kept.to(following.device)
        last = (batch.query_start[:-1] + kept - 1).clamp(min=0).long()
        new = Carry(following[last], made.hidden[last])
        return state, new if carry is None else new.where(kept > 0, carry)

    @captured_with(propose_inputs)
    @lasting
    @torch.no_grad()
    def propose(
        self, params: Any, state: State, carry: Carry, steps: int = 3, noise: DraftNoise | None = None
    ) -> tuple[Proposal, State]:
        """The `steps` likeliest tokens after each row's newest, one after the other; drawn ones with `noise`.

        Drafts drawn with `DraftNoise` leave in `proposal.logits` the law that each came from. What the head writes on
        the way lies past the lengths of `state`; the state returned has the same value, and the pages taken for it.
        Raises `ValueError` for less than one step, a row without room for them or noise of other rows, `StateError` for
        a carry of other rows.
        """
        at_least_one("propose: steps", steps)
        check_usable(state)
        check_carry(state, carry)
        check_noise(state, noise)
        beforehand(Ledger.check_room, state.ledger, (steps - 1,) * state.rows, state.max_len)
        after, hidden, drafts, laws = state, carry.hidden, [], []
        for step in range(steps):
            if step:
                batch = Batch.from_tokens(drafts[-1], [1] * state.rows, after)
                out, after = self.forward(params, after, batch, hidden, logits=None)
                hidden = out.hidden
            read, weight = self.head.read(self.model.local, params, hidden)
            if noise is None:
                token = ops.greedy_token(read, weight)
            else:
                token, law = noise.draw(ops.linear(read, weight), state.lengths + 1 + step)
                laws += [] if law is None else [law]
            drafts.append(self.model.agreed(token))
        kept = torch.stack(laws, 1) if laws else None
        return Proposal(carry.token, torch.stack(drafts, 1), state.lengths, kept), rewound(after, state)
