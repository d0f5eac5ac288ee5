"""What the host does where a captured draft replays: what `state.host_sides` has for the model's own forward."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from lowering import HostSide

from ..output import Output
from ..sampling.draws import DraftNoise
from ..state.batch import Batch
from ..state.host_sides import Fit, padded, prepared, with_room
from ..state.state import Growth, State, claim, committed_host, known, new_version, replayed
from .protocol import Carry, Proposal, joined_params, kept_tokens, outputs_for, places_ahead


def extend_on_host(
    fit: Fit, draft: Any, params: Any, state: State, out: Output, batch: Batch, next_tokens: Tensor,
    carry: Carry | None = None,
) -> HostSide:  # fmt: skip
    """That of a draft's `extend`."""
    kept = known(kept_tokens(batch, next_tokens)[1])
    fitted = fit(batch)
    extra = fitted.tokens.shape[0] - batch.tokens.shape[0]
    hidden = padded(out.hidden, extra)
    ready_state, after, before = prepared(state, batch, keep_steps=True)

    def completed(result: tuple[State, Carry]) -> tuple[State, Carry]:
        new, carry = result
        new = after(new)
        return replace(new, host=committed_host(new.host, kept)), carry

    # No draft reads logits: without them, outputs with many and with few replay one capture.
    taps = {name: padded(out.extra[name], extra) for name in outputs_for(draft) if name in out.extra}
    given = {"out": Output(hidden[:0], hidden, taps), "next_tokens": padded(next_tokens.reshape(-1), extra, -1)}
    given |= {"params": joined_params(draft, params)}
    return HostSide(given | {"state": ready_state, "batch": fitted}, completed, before)


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
