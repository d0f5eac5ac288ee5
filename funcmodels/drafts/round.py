"""A whole speculative round as one pure function of fixed shapes, to be captured as one graph.

    step = lowering.jit(Round(model, draft).run, donate=("state", "drafted"))
    verdict, state, drafted, carry = step(params, state, drafted, carry, sampling, requests, most)

Nothing in it depends on how many tokens were accepted: a row that has finished, or has not begun, takes `most` = 0.
Where accepted counts stay on a device, the host has only bounds of the rows' lengths afterwards: kernels that take
lists of lengths need `read_lengths` of both states before the next round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lowering import captured_with

from ..model import Model
from ..sampling.draws import CoupledNoise, DraftNoise
from ..sampling.penalties import TokenCounts
from ..sampling.settings import RowSampling
from ..state.state import State, commit
from .protocol import Carry, Draft, Verdict, checked, model_params, proposed, verify


def _inputs(fit: Any, round: Round, params: Any, *args: Any, **named: Any) -> dict[str, Any]:
    """What a round is captured with."""
    return {"params": round.draft.joined(params)}


@dataclass(frozen=True)
class Round:
    """Rounds of `model` with `draft`. Holds no tensors."""

    model: Model
    draft: Draft

    @captured_with(_inputs)
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
        wanted: dict[str, Any] = {"outputs": self.draft.outputs, "keep_steps": True}
        out, pending = self.model.forward(model_params(params), state, window, **wanted)
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
