"""The functions of a run, plain or captured: a step, a round, a draft's prefill. What is captured goes with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lowering import jit
from params.tree import tree, tree_map

from ..drafts.protocol import Draft
from ..drafts.round import Round
from ..model import Model
from ..output import Output
from ..sampling.draws import sample
from ..sampling.penalties import TokenCounts
from ..sampling.settings import RowSampling, Sampling
from ..state.batch import Batch
from ..state.state import State
from .progress import capturing
from .scheduler import Continuation

BUCKETS = tuple(4**power for power in range(2, 16))
"""Tokens that a batch of prompts is padded to. Far apart: each is a program to compile."""


@tree
class Keys:
    """What draws depend on beside logits and position: a request's number and settings. Only `live` rows get longer."""

    numbers: Int[Tensor, " rows"]
    sampling: RowSampling
    live: Bool[Tensor, " rows"]

    @staticmethod
    def of(rows: Sequence[Continuation], every: Sequence[Sampling], device: torch.device) -> Keys:
        """Keys of `rows`, some of them live; `every` are the settings that rows may come to have.

        What is static in them depends on what kinds of settings the rows have, and on no more of who they are.
        """
        asked = [row.request.sampling for row in rows if row.live]
        kinds = [any(some) for some in zip(*(_kinds(one) for one in asked), strict=True)]
        like = [one for one in every if all(kind or not has for kind, has in zip(kinds, _kinds(one), strict=True))]
        each = [row.request.sampling if row.live else asked[0] for row in rows]
        sampling = tree_map(lambda x: x[: len(rows)], RowSampling.of([*each, *like], device))
        # Rows that all draw and rows of both kinds run one program. So do most bounds of k, rounded.
        largest_k = power_of_two(sampling.largest_k) if sampling.largest_k else 0
        sampling = replace(sampling, mixed=not sampling.greedy, largest_k=largest_k)
        numbers = torch.tensor([row.noise for row in rows], dtype=torch.int64, device="cpu").to(device)
        return Keys(numbers, sampling, torch.tensor([row.live for row in rows], device="cpu").to(device))


def power_of_two(count: int) -> int:
    """The power of two that holds `count`."""
    return 1 << (count - 1).bit_length()


def _kinds(sampling: Sampling) -> tuple[bool, bool, bool]:
    """Whether it draws, penalises, and biases: what makes programs of different kinds."""
    return sampling.temperature > 0, sampling.penalised, bool(sampling.logit_bias)


@dataclass(frozen=True)
class NextToken:
    """A token more for each row: a forward of `model`, whose output has the values that `outputs` names, and a draw."""

    model: Model
    outputs: tuple[str, ...] = ()

    def run(
        self, params: Any, state: State, batch: Batch, keys: Keys, counts: TokenCounts | None = None
    ) -> tuple[Int[Tensor, " rows"], Output, State]:
        """Run the batch and draw a token after each row's last; of no meaning for a row that has none in the batch.

        Returns the tokens, the output of the forward and the state. The host counts the tokens of rows that are not
        live: `settled` puts that right.
        """
        out, new = self.model.forward(params, state, batch, logits="last", outputs=self.outputs)
        drawn = self.model.agreed(sample(out.logits, keys.sampling, keys.numbers, new.lengths, counts))
        return drawn, out, replace(new, lengths=torch.where(keys.live, new.lengths, state.lengths))


@dataclass(frozen=True)
class Programs:
    """The functions that run `model`, plain or `captured`; with a `draft`, those of rounds of `steps` drafts too."""

    model: Model
    step: Callable[..., Any]
    captured: bool
    draft: Draft | None = None
    steps: int = 0
    extend: Any = None
    round: Any = None

    @staticmethod
    def of(model: Model, draft: Draft | None = None, steps: int = 0, backend: str | None = None) -> Programs:
        """The functions of a model and a draft, captured if a backend of `lowering.jit` is named."""

        def made(function: Callable[..., Any], what: str, *donated: str) -> Callable[..., Any]:
            if backend is None:
                return function
            return jit(function, donated, BUCKETS, backend, watch=partial(capturing, what))

        captured, outputs = backend is not None, () if draft is None else draft.outputs
        step = made(NextToken(model, outputs).run, "a step", "state")
        if draft is None:
            return Programs(model, step, captured)
        extend = made(draft.extend, "a prefill of the draft", "state")
        run = made(Round(model, draft).run, "a round", "state", "drafted")
        return Programs(model, step, captured, draft, steps, extend, run)
