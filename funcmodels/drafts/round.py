"""A whole speculative round as one pure function of fixed shapes, to be captured as one graph.

    step = lowering.jit(Round(model, draft).run, donate=("state", "drafted"))
    verdict, state, drafted, carry = step(params, state, drafted, carry, sampling, requests, most)

Nothing in it depends on how many tokens were accepted: a row that has finished, or has not begun, takes `most` = 0.
Where accepted counts stay on a device, the host has only bounds of the rows' lengths afterwards: kernels that take
lists of lengths need `read_lengths` of both states before the next round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lowering import HostSide, host_side

from ..model import Model
from ..sampling.draws import CoupledNoise, DraftNoise
from ..sampling.penalties import TokenCounts
from ..sampling.settings import RowSampling
from ..state.host_sides import with_room
from ..state.state import (
    Growth,
    Host,
    State,
    claim,
    commit,
    committed_host,
    grown_host,
    known,
    new_version,
)
from .protocol import (
    Carry,
    Draft,
    Verdict,
    checked,
    joined_params,
    model_params,
    outputs_for,
    places_ahead,
    proposed,
    verify,
)


def _run_on_host(
    fit: Callable[[Any], Any], round: Round, params: Any, state: State, drafted: State, *args: Any, steps: int = 3,
    **rest: Any,
) -> HostSide:  # fmt: skip
    """What the host does where a captured round replays: pages for the windows of both states, and their lengths."""
    state, host, begin = _with_window(state, steps + 1)
    drafted, drafted_host, begin_draft = _with_window(drafted, steps + 1, places_ahead(round.draft, steps))

    def before() -> None:
        begin()
        begin_draft()

    def completed(result: tuple[Verdict, State, State, Carry]) -> tuple[Verdict, State, State, Carry]:
        verdict, new, drafted, carry = result
        accepted = known(verdict.accepted)
        new = replace(new, host=committed_host(host, accepted))
        return verdict, new, replace(drafted, host=committed_host(drafted_host, accepted)), carry

    both = joined_params(round.draft, params)
    return HostSide({"params": both, "state": state, "drafted": drafted}, completed, before)


def _with_window(state: State, width: int, ahead: int = 0) -> tuple[State, Host, Callable[[], None]]:
    """The state with pages for `width` more tokens a row, or for what is written `ahead`; its host's part then.

    And what notes the writing.
    """
    counts = (width,) * state.rows
    state = with_room(state, [max(width, ahead)] * state.rows)
    growth = Growth(counts, counts)
    version = new_version(state.host, growth)
    grown = grown_host(state.host, growth, version, keep=True)
    return state, grown, partial(claim, state.host, counts, version)


@dataclass(frozen=True)
class Round:
    """Rounds of `model` with `draft`. Holds no tensors."""

    model: Model
    draft: Draft

    @host_side(_run_on_host)
    def run(
        self,
        params: Any,
        state: State,
        drafted: State,
        carry: Carry,
        sampling: RowSampling,
        requests: Int[Tensor, " rows"],
        most: Int[Tensor, " rows"],
        counts: TokenCounts | None = None,
        *,
        steps: int = 3,
        drawn: bool = False,
        embedded: Float[Tensor, "rows block hidden"] | None = None,
    ) -> tuple[Verdict, State, State, Carry]:
        """Propose `steps` tokens a row, verify them, commit, and extend the draft's state.

        `drafted` is the draft's state. At most `most` tokens of a row count, of 0..steps + 1. `sampling`, `requests`
        and `counts` are those of `verify`. Where all rows are greedy, drafts are the likeliest tokens. Else rows that
        draw are offered what the noise of their own draws picks from the draft's logits (`CoupledNoise`), which changes
        no token; with `drawn`, what noise apart picks, accepted by its law (`DraftNoise`), which changes no law.
        `embedded` is that of a block draft's `propose`. Returns what was emitted (-1 past it), both states, and the
        carry. Raises as its parts do.
        """
        given = {"noise": _noise(sampling, requests, drawn), "embedded": embedded}
        options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        proposal, drafted = proposed(self.draft, params, drafted, carry, steps, **options)
        window = proposal.batch(state)
        outputs = outputs_for(self.draft)
        out, pending = self.model.forward(model_params(params), state, window, outputs=outputs, keep_steps=True)
        verdict = verify(out, proposal, sampling, requests, counts)
        tokens, accepted = self.model.agreed(torch.cat((verdict.tokens, verdict.accepted[:, None]), 1)).split(
            (steps + 1, 1), 1
        )
        accepted = torch.minimum(accepted[:, 0], most.to(accepted))
        places = torch.arange(steps + 1, device=accepted.device)
        verdict = Verdict(torch.where(places < accepted[:, None], tokens, -1), accepted)
        state = commit(pending, accepted)
        found = self.draft.extend(params, drafted, out, window, verdict.tokens, carry)
        drafted, carry = checked(self.draft, "extend", found, State, Carry)
        return verdict, state, drafted, carry


def _noise(sampling: RowSampling, requests: Int[Tensor, " rows"], drawn: bool) -> DraftNoise | None:
    """What drafts are drawn with. Decided by what the host knows of the rows: captured, each answer is a program."""
    if sampling.greedy:
        return None
    return (DraftNoise if drawn else CoupledNoise)(sampling, requests)
