"""Hyper-connections: the parameters of one, and what stands where other models have a norm and a residual sum."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from lowering import ops
from params.spec import leaf
from params.tree import exactly, tree

from .linear import Norm


@tree
class HyperConnection:
    """Reads one input from all streams, and writes the output back to them.

    Streams are laid end to end in the norm's weight and in `joined` axes. `down` rows: the mix, then one a stream that
    weighs what is written back; one that only reads has none of these.
    """

    norm: Norm
    down: Float[Tensor, "outputs joined"]
    up: Float[Tensor, "joined rank"]

    @staticmethod
    def spec(hidden: int, streams: int, rank: int, *, writes: bool = True) -> HyperConnection:
        """Spec of the parameters; one that does not write back only reads."""
        joined = streams * hidden
        parts = (rank, streams) if writes else None
        down = leaf((sum(parts or (rank,)), joined), parts=parts)
        return HyperConnection(Norm(leaf((joined,), "zeros")), down, leaf((joined, rank)))


def read_streams(
    params: HyperConnection, x: Float[Tensor, "tokens streams hidden"], *, eps: float
) -> tuple[Float[Tensor, "tokens hidden"], Float[Tensor, "tokens streams"] | None]:
    """A sublayer's input, and the weights with which its output goes back to each stream (`ops.hyper_inject`)."""
    return ops.hyper_mix(x, exactly(params.norm, Norm).weight, params.down, params.up, eps=eps)
