"""Attention residuals (Kimi-K3), in place of a residual stream.

Sublayers' outputs are added up, some layers at a time: such a sum is a *snapshot* once it is complete, and the *prefix*
while it grows. Each sublayer reads a mean of all of them by weights of its own (see `lowering.ops.attention_residual`).
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from lowering import ops
from params.spec import leaf
from params.tree import tree


@tree
class AttentionResidual:
    """One sublayer's query: the weight of the norm of what is scored, and what it is multiplied by then."""

    norm: Float[Tensor, " hidden"]
    proj: Float[Tensor, " hidden"]

    @staticmethod
    def spec(hidden: int) -> AttentionResidual:
        """Spec of the parameters."""
        return AttentionResidual(norm=leaf((hidden,), "ones"), proj=leaf((hidden,)))


def attention_residual(
    params: AttentionResidual,
    bank: Float[Tensor, "tokens snapshots hidden"],
    prefix: Float[Tensor, "tokens hidden"],
    *,
    eps: float,
) -> Float[Tensor, "tokens hidden"]:
    """What a sublayer reads of the snapshots in `bank` and the prefix."""
    return ops.attention_residual(bank, prefix, params.norm, params.proj, eps=eps)
