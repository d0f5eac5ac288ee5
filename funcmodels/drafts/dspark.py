"""DSpark: a block's rows propose, and a Markov head lets each place know the token before it.

Only the head runs place after place; the layers run once. Source: SGLang 0.5.23, which runs published drafts.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lowering import ops
from lowering.ops.greedy import own_logits
from params.tree import exactly

from ..blocks.linear import Linear
from .block import BlockDraft, BlockParams
from .markov import corrected, looked_up


class DSparkDraft(BlockDraft):
    """A block proposes `block_size` tokens, each row the one after its own place.

    Where `sample_from_anchor` is false it has a row more, and rows propose for their own places, as in DFlash.
    """

    def step_logits(
        self,
        own: BlockParams,
        base: Float[Tensor, "rows vocab"],
        hidden: Float[Tensor, "rows hidden"],
        before: Int[Tensor, " rows"],
        memory: Any,
    ) -> tuple[Float[Tensor, "rows vocab"], Any]:
        """The row's logits, corrected by the token before, or as they are where there is no Markov head."""
        return (base, memory) if own.markov is None else corrected(own.markov, base, hidden, before, memory)

    def likeliest(
        self,
        own: BlockParams,
        read: Float[Tensor, "rows drafts inputs"],
        hidden: Float[Tensor, "rows drafts hidden"],
        root: Int[Tensor, " rows"],
        head: Any,
        ids: Int[Tensor, " draft_vocab"] | None,
    ) -> Int[Tensor, "rows drafts"]:
        """Place after place, each by the token before it; where there is no Markov head, all at once."""
        if own.markov is None:
            return super().likeliest(own, read, hidden, root, head, ids)
        base = own_logits(read.flatten(0, 1), head).unflatten(0, read.shape[:2])
        tokens, memory = [root], None
        for place in range(read.shape[1]):
            passed, memory = looked_up(own.markov, hidden[:, place], tokens[-1], memory)
            token = ops.greedy_markov_token(base[:, place], passed, exactly(own.markov.w2, Linear).weight, head, ids)
            tokens.append(self.model.agreed(token))
        return torch.stack(tokens[1:], 1)
