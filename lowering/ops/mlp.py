"""Feed-forward activations."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ..op import op
from .widen import wide

Caps = tuple[float, float | None]
"""What bounds the gate of a SwiGLU, and what bounds the rest of it, if anything does."""


@op
def swiglu(gate_up: Float[Tensor, "*lead twice_inner"], *, caps: Caps | None = None) -> Float[Tensor, "*lead inner"]:
    """silu(gate) * up, where the last axis holds gate first, then up.

    With `caps` (b, c) it is SiTU (Kimi-K3), whose factors are bounded: b tanh(gate / b) sigmoid(gate) * c tanh(up / c),
    in float32 or wider, rounded once. With c None up is as it is.
    """
    gate, up = gate_up.chunk(2, -1)
    if caps is None:
        return F.silu(gate) * up
    gate, up, (gate_cap, up_cap) = wide(gate), wide(up), caps
    up = up if up_cap is None else _bounded(up, up_cap)
    return (_bounded(gate, gate_cap) * gate.sigmoid() * up).to(gate_up.dtype)


def _bounded(x: Tensor, cap: float) -> Tensor:
    return cap * (x / cap).tanh()


@op
def geglu(gate_up: Float[Tensor, "*lead twice_inner"]) -> Float[Tensor, "*lead inner"]:
    """gelu(gate) * up with the tanh form of gelu (Gemma3), where the last axis holds gate first, then up."""
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up
