"""Hyper-connections: the parameters of one, and what stands where other models have a norm and a residual sum."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from lowering import ops
from params.spec import TensorSpec
from params.tree import exactly, tree, unchecked

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


def hyper_connection_spec(hidden: int, streams: int, rank: int, *, writes: bool = True) -> HyperConnection:
    """Spec of the parameters."""
    joined = streams * hidden
    parts = (rank, streams) if writes else None
    return unchecked(
        HyperConnection,
        norm=unchecked(Norm, weight=TensorSpec((joined,), "zeros")),
        down=TensorSpec((sum(parts or (rank,)), joined), parts=parts),
        up=TensorSpec((joined, rank)),
    )


def read_streams(
    params: HyperConnection, x: Float[Tensor, "tokens streams hidden"], *, eps: float
) -> tuple[Float[Tensor, "tokens hidden"], Float[Tensor, "tokens streams"] | None]:
    """A sublayer's input, and the weights with which its output goes back to each stream (`ops.hyper_inject`)."""
    return ops.hyper_mix(x, exactly(params.norm, Norm).weight, params.down, params.up, eps=eps)
