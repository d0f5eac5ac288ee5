"""Launches of gated norms."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.norm import Activation
from ..target import Target
from .launch import Launch
from .tiles import Footprint, planned

GATED = Footprint(copies=3.0, copies_950=2.0, streams=1)


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, *, eps: float, activation: Activation, rounded: bool, target: Target
) -> tuple[Launch, Tensor]:
    """The op of this name with `rounded`, else `gated_rms_norm_fp32`; and the result that the launch fills."""
    dim, out = x.shape[-1], torch.empty_like(x)
    rows, block = x.numel() // dim, 1 << (dim - 1).bit_length()
    tile = planned(target, GATED, size=x.element_size(), most=rows, width=block)
    arguments = {"x": x, "gate": gate, "weight": weight, "out": out, "rows": rows, "eps": eps}
    constants = {"DIM": dim, "BLOCK": block, "TILE": tile, "SILU": activation == "silu", "ROUNDED": rounded}
    jobs, pools = -(-rows // tile), ("x", "gate", "out")
    return Launch("norm", "gated_rms_norm", arguments, constants, jobs, pools, ("out",)), out
