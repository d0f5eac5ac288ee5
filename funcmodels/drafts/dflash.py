"""DFlash: the rows of a block propose independently of each other, each the token at its own place.

Source: https://arxiv.org/abs/2602.06036.
"""

from __future__ import annotations

from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from .block import BlockDraft, BlockParams


class DFlashDraft(BlockDraft):
    """A block of `block_size` rows gives one token fewer: the first row is the newest token, which is known."""

    def step_logits(
        self,
        own: BlockParams,
        base: Float[Tensor, "rows vocab"],
        hidden: Float[Tensor, "rows hidden"],
        before: Int[Tensor, " rows"],
        memory: Any,
    ) -> tuple[Float[Tensor, "rows vocab"], Any]:
        """The logits of the row itself."""
        return base, memory
