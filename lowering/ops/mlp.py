"""Feed-forward activations."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ..op import op


@op
def swiglu(gate_up: Float[Tensor, "*lead twice_inner"]) -> Float[Tensor, "*lead inner"]:
    """silu(gate) * up, where the last axis holds gate first, then up."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


@op
def geglu(gate_up: Float[Tensor, "*lead twice_inner"]) -> Float[Tensor, "*lead inner"]:
    """gelu(gate) * up with the tanh form of gelu (Gemma3), where the last axis holds gate first, then up."""
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up
