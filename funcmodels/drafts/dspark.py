"""DSpark: a block's rows propose, and a Markov head lets each place know the token before it.

Only the head runs place after place; the layers run once. Source: SGLang 0.5.23, which runs published drafts.
"""

from __future__ import annotations

from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from .block import BlockDraft, BlockParams
from .markov import corrected


class DSparkDraft(BlockDraft):
    """A block proposes `block_size` tokens, each row the one after its own place.

    Where `sample_from_anchor` is false it has a row more, and rows propose for their own places, as in DFlash.
    """

    def step_logits(
        self, own: BlockParams, base: Float[Tensor, "rows vocab"], hidden: Float[Tensor, "rows hidden"],
        before: Int[Tensor, " rows"], memory: Any,
    ) -> tuple[Float[Tensor, "rows vocab"], Any]:  # fmt: skip
        """Those of the row, corrected by the token before; those of the row itself where there is no Markov head."""
        return (base, memory) if own.markov is None else corrected(own.markov, base, hidden, before, memory)
