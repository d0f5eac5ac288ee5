"""Markov heads of DSpark: what the token before a place adds to the logits there, by a product of low rank.

A block's rows are made all at once and know nothing of each other's tokens. The head puts that right in a short loop:
it looks up the token before in `w1`, and `w2` turns what it finds into one number for each token.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lowering import ops
from lowering.ops.greedy import rounded_sum
from params.spec import leaf
from params.tree import exactly, tree

from ..blocks.linear import BiasedLinear, Linear, project
from .block_config import BlockConfig


@tree
class Markov:
    """The plain head: `w1` is a table of the model's tokens, `w2` a projection to the draft's."""

    by_kind: ClassVar[bool] = True

    w1: Float[Tensor, "vocab rank"]
    w2: Linear

    @staticmethod
    def spec(config: BlockConfig) -> Markov | None:
        """Spec of the head that a config asks for, None where it asks for none."""
        rank, hidden, vocab = config.markov_rank, config.hidden_size, config.vocab_size
        if rank == 0:
            return None
        tables = leaf((vocab, rank)), Linear.spec(rank, config.draft_vocab_size or vocab)
        if config.markov_head_type == "gated":
            return GatedMarkov(*tables, BiasedLinear.spec(hidden + rank, rank))
        if config.markov_head_type == "rnn":
            return RecurrentMarkov(*tables, BiasedLinear.spec(hidden + 2 * rank, 3 * rank))
        return Markov(*tables)


@tree
class GatedMarkov(Markov):
    """What is looked up passes a gate, made from the row's hidden state and from itself."""

    gate: BiasedLinear


@tree
class RecurrentMarkov(Markov):
    """What is looked up updates a memory of the block's tokens: `joint` gives a gate, a candidate and an output."""

    joint: BiasedLinear


def corrected(
    params: Markov,
    base: Float[Tensor, "rows vocab"],
    hidden: Float[Tensor, "rows hidden"],
    before: Int[Tensor, " rows"],
    memory: Float[Tensor, "rows rank"] | None,
) -> tuple[Float[Tensor, "rows vocab"], Float[Tensor, "rows rank"] | None]:
    """Base logits and the head's, as `rounded_sum` adds them; and the memory after this place.

    `base` may have fewer tokens than the head, whose last ones are then padding.
    """
    passed, memory = looked_up(params, hidden, before, memory)
    return rounded_sum(base, project(exactly(params.w2, Linear), passed)), memory


def looked_up(
    params: Markov,
    hidden: Float[Tensor, "rows hidden"],
    before: Int[Tensor, " rows"],
    memory: Float[Tensor, "rows rank"] | None,
) -> tuple[Float[Tensor, "rows rank"], Float[Tensor, "rows rank"] | None]:
    """What goes on to `w2` of the token before a place; and the memory after this place."""
    found = ops.embedding(before, params.w1)
    return _passed(params, found, hidden.to(found.dtype), memory)


def _passed(
    params: Markov, found: Float[Tensor, "rows rank"], hidden: Float[Tensor, "rows hidden"], memory: Tensor | None
) -> tuple[Float[Tensor, "rows rank"], Tensor | None]:
    """What of the looked up goes on to `w2`, and the memory."""
    if isinstance(params, GatedMarkov):
        return torch.sigmoid(project(params.gate, torch.cat((hidden, found), -1))) * found, None
    if isinstance(params, RecurrentMarkov):
        memory = torch.zeros_like(found) if memory is None else memory
        gate, candidate, out = project(params.joint, torch.cat((memory, found, hidden), -1)).chunk(3, -1)
        kept = torch.sigmoid(gate)
        return torch.tanh(out), kept * memory + (1 - kept) * torch.tanh(candidate)
    exactly(params, Markov)
    return found, None
