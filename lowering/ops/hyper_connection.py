"""Hyper-connections: several residual streams, of which a sublayer reads a gated mean and to which its output returns.

    mixed = mean over streams of sigmoid(up silu(down N / streams)) * N,   N = the norm of each stream
    x <- x + 2 sigmoid(inject N / streams) * sublayer(mixed)

Norms, gates and sums are float32 or wider, and rounded once. Source: `Qwen4ExpTextGatedResidual` in transformers 5.24;
there is no doubly stochastic matrix in it, as other hyper-connections have.
"""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ..op import op
from .norm import grouped_gemma_rms_norm
from .widen import wide


@op
def hyper_mix(
    x: Float[Tensor, "tokens streams hidden"],
    norm: Float[Tensor, " joined"],
    down: Float[Tensor, "outputs joined"],
    up: Float[Tensor, "joined rank"],
    *,
    eps: float,
) -> tuple[Float[Tensor, "tokens hidden"], Float[Tensor, "tokens streams"] | None]:
    """What a sublayer reads of the streams, and the weight with which each stream takes its output back.

    `joined` is the streams laid end to end. The first `rank` rows of `down` mix; those behind them, one a stream, give
    the weights, which are None for a connection without such rows.
    """
    streams, rank = x.shape[1], up.shape[1]
    # The streams are weighed as they are before rounding: only what a projection reads is rounded.
    normed = grouped_gemma_rms_norm.body(wide(x.flatten(1)), norm, groups=streams, eps=eps)
    low = wide(F.linear(normed.to(x.dtype), down)) / streams
    gates = wide(F.linear(F.silu(low[:, :rank]).to(x.dtype), up)).sigmoid()
    mixed = (gates * normed).unflatten(-1, (streams, -1)).mean(1).to(x.dtype)
    return mixed, None if down.shape[0] == rank else 2 * low[:, rank:].sigmoid()


@op
def hyper_inject(
    x: Float[Tensor, "tokens streams hidden"],
    y: Float[Tensor, "tokens hidden"],
    weights: Float[Tensor, "tokens streams"],
) -> Float[Tensor, "tokens streams hidden"]:
    """The streams x with a sublayer's output y added to each by its weight."""
    return (wide(x) + weights[..., None] * wide(y)[:, None]).to(x.dtype)
