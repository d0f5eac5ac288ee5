"""What a serving loop runs on the device: a step, a round, a draft's prefill; as plain functions, or captured.

Captured functions are kept with the model and the draft they belong to, so that the next call finds them compiled, and
go when these go.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lowering import jit
from params.tree import tree, tree_map

from ..drafts.named import directory_of_draft
from ..drafts.named import draft as make_draft
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
from .requests import Row

T = TypeVar("T")

MOST_KEPT = 32
"""Functions and drafts kept with a model or a draft: past it those go that were used the longest ago."""
BUCKETS = tuple(4**power for power in range(2, 16))
"""Tokens that a batch of prompts is padded to. Far apart: each is a program to compile."""


@tree
class Keys:
    """What a row's draws depend on beside logits and position: its request's number and settings.

    Rows that are not `live` keep their length in a step, whatever it runs.
    """

    numbers: Int[Tensor, " rows"]
    sampling: RowSampling
    live: Bool[Tensor, " rows"]

    @staticmethod
    def of(rows: Sequence[Row], every: Sequence[Sampling], device: torch.device) -> Keys:
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
class Step:
    """Steps of `model`, whose output has the values that `outputs` names. Holds no tensors."""

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


def settled(state: State, lengths: Sequence[int]) -> State:
    """The state when the host has learned its lengths, by reading what was accepted."""
    return replace(state, ledger=state.ledger.at(lengths))


def in_place(old: State, new: State) -> State:
    """`new`, made from `old`, in the tensors of `old`, which nobody uses any more: graphs of a device write there."""
    return replace(tree_map(lambda x, y: x if x is y else x.copy_(y), old, new), ledger=new.ledger)


@dataclass(frozen=True)
class Programs:
    """The functions of a loop: `Step.run`, and with a draft its `extend` and `Round.run`."""

    step: Callable[..., Any]
    extend: Callable[..., Any] | None = None
    round: Callable[..., Any] | None = None
    captured: bool = False

    @staticmethod
    def of(model: Model, draft: Draft | None, backend: str | None) -> Programs:
        """Programs of a model and a draft, captured if a backend of `lowering.jit` is named."""
        step = Step(model, () if draft is None else draft.outputs)
        if backend is None:
            return Programs(step.run) if draft is None else Programs(step.run, draft.extend, Round(model, draft).run)
        kept = partial(_kept_program, backend=backend)
        step = kept(model, step.run, "a step", ("state",), of=step.outputs)
        if draft is None:
            return Programs(step, captured=True)
        extend = kept(draft, draft.extend, "a prefill of the draft", ("state",))
        # A draft may be used with several models.
        round = kept(draft, Round(model, draft).run, "a round", ("state", "drafted"), of=id(model))
        return Programs(step, extend, round, captured=True)


def _kept_program(
    owner: Any, function: Callable[..., Any], what: str, donate: tuple[str, ...], backend: str, of: Any = None
) -> Callable[..., Any]:
    make = partial(jit, function, donate, BUCKETS, backend, watch=partial(capturing, what))
    return _kept(owner, (what, backend, of), make)


def named_draft(model: Model, name: str | Path, params: Any) -> Draft:
    """`fm.draft(model, name)`, the same one each time: what is captured of it is kept with it.

    Parameters of its own come in the dtype of the model's, and where they are.
    """
    if name == "mtp":
        return _kept(model, ("draft", name), lambda: make_draft(model, name))
    directory, like = directory_of_draft(name), params.embed.weight
    key = ("draft", str(directory), like.dtype, like.device)
    return _kept(model, key, lambda: make_draft(model, name, like.dtype, like.device))


_KEEPING = threading.RLock()


class _Kept(dict[Any, Any]):
    """Captured functions by what they are. A copy of their owner, or a pickled one, begins without any."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _Kept, ()


def _kept(owner: Any, key: Any, make: Callable[[], T]) -> T:
    """What `owner` keeps under `key`, made now if there is nothing yet."""
    # Not in a table of ours: captured functions hold their model, which no weak reference would ever lose then.
    # An object without a dictionary of its own keeps nothing.
    kept = getattr(owner, "__dict__", {}).setdefault("_captured", _Kept())
    with _KEEPING:
        found = kept.pop(key) if key in kept else make()
        kept[key] = found  # the newest last
        if len(kept) > MOST_KEPT:
            del kept[next(iter(kept))]
    return found
