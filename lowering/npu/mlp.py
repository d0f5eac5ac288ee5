"""SwiGLU and GeGLU through npu_swiglu and npu_geglu; our layout of gate and up wants the first half activated.

A SwiGLU with caps (SiTU) has no operator and is computed in Torch.
"""

from __future__ import annotations

from torch import Tensor

from ..ops.mlp import Caps, geglu, swiglu
from .features import npu
from .kernel import FLOATS, empty, fused, wrong_dtype

TANH = 1
"""npu_geglu's number for the tanh form of gelu."""


def activated(gate_up: Tensor, caps: Caps | None) -> Tensor:
    """What lies between the two products of a feed-forward block."""
    return npu.npu_swiglu(gate_up, dim=-1) if caps is None else swiglu.body(gate_up, caps=caps)


def _refuse_swiglu(gate_up, *, caps=None) -> str | None:
    if caps is not None:
        return f"has no caps; this call has {caps} (SiTU)"
    return _refuse(gate_up)


def _refuse(gate_up) -> str | None:
    if gate_up.ndim > 8:
        return f"takes 1 to 8 axes; gate_up has {gate_up.ndim}"
    if gate_up.shape[-1] % 2:
        return f"halves the last axis; gate_up has {gate_up.shape[-1]}"
    return wrong_dtype(FLOATS, gate_up=gate_up) or empty(gate_up=gate_up)


@fused(swiglu, "npu_swiglu", "npu_swiglu", refuse=_refuse_swiglu)
def _swiglu(gate_up, *, caps=None):
    return npu.npu_swiglu(gate_up, dim=-1)


@fused(geglu, "npu_geglu", "npu_geglu", refuse=_refuse)
def _geglu(gate_up):
    return npu.npu_geglu(gate_up, dim=-1, approximate=TANH, activate_left=True)[0]
