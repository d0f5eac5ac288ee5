"""Attention residuals: a sublayer reads a weighted mean of earlier sums of sublayers' outputs, in place of one sum.

Source: Attention Residuals (Kimi-K3): the weights are a softmax over scores of those sums, one query a sublayer.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ..op import op
from .norm import normalise
from .widen import wide


@op
def attention_residual(
    bank: Float[Tensor, "tokens snapshots hidden"],
    prefix: Float[Tensor, "tokens hidden"],
    norm: Float[Tensor, " hidden"],
    proj: Float[Tensor, " hidden"],
    *,
    eps: float,
) -> Float[Tensor, "tokens hidden"]:
    """The mean of a token's rows, those of `bank` and then `prefix`, by the softmax of their scores.

    A row's score is `proj` times its root-mean-square norm, whose weight is `norm`. It is the rows themselves that the
    mean is of. All is in float32 or wider, rounded once. With an empty bank it is `prefix`.
    """
    rows = wide(torch.cat((bank, prefix[:, None]), 1))
    scores = normalise(rows, eps)[0] @ (wide(norm) * wide(proj))
    return (scores.softmax(-1)[:, None] @ rows)[:, 0].to(prefix.dtype)
