"""Launches of gated activations."""

from __future__ import annotations

from torch import Tensor

from ..ops.mlp import Caps
from ..target import Target
from .launch import Launch
from .tiles import Footprint, planned

GLU = Footprint(copies=2.0, copies_950=1.0, streams=2)
CAPPED = Footprint(copies=7.0, copies_950=1.0, streams=2)


def swiglu(gate_up: Tensor, *, caps: Caps | None = None, target: Target) -> tuple[Launch, Tensor]:
    """The op of this name, and the result that the launch fills."""
    gate, up = caps or (1.0, None)
    constants = {"GELU": False, "CAPPED": caps is not None, "UP_CAPPED": up is not None}
    return _glu(gate_up, {"gate_cap": float(gate), "up_cap": float(up or 1.0)}, constants, target)


def geglu(gate_up: Tensor, *, target: Target) -> tuple[Launch, Tensor]:
    """The op of this name, and the result that the launch fills."""
    constants = {"GELU": True, "CAPPED": False, "UP_CAPPED": False}
    return _glu(gate_up, {"gate_cap": 1.0, "up_cap": 1.0}, constants, target)


def _glu(gate_up: Tensor, caps: dict[str, float], constants: dict[str, bool], target: Target) -> tuple[Launch, Tensor]:
    inner = gate_up.shape[-1] // 2
    rows, out = gate_up.numel() // (2 * inner), gate_up.new_empty(*gate_up.shape[:-1], inner)
    footprint = CAPPED if constants["CAPPED"] else GLU
    tile = planned(target, footprint, size=gate_up.element_size(), most=inner)
    arguments = {"gate_up": gate_up, "out": out, "rows": rows, "inner": inner}
    jobs = rows * -(-inner // tile)
    launch = Launch("glu", "glu", arguments | caps, constants | {"TILE": tile}, jobs, ("gate_up", "out"), ("out",))
    return launch, out
