"""Launches of norms."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.norm import Activation
from ..target import Target
from .launch import Launch
from .tiles import Footprint, planned

GATED = Footprint(copies=3.0, copies_950=2.0, streams=1)
PLAIN = Footprint(copies=3.0, copies_950=2.0, streams=1)
KEPT = Footprint(copies=3.0, copies_950=1.4, streams=1)
"""With deviations written down."""
ADDED = Footprint(copies=3.0, copies_950=2.0, streams=1)


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, *, eps: float, activation: Activation, rounded: bool, target: Target
) -> tuple[Launch, Tensor]:
    """The op of this name with `rounded`, else `gated_rms_norm_fp32`; and the result that the launch fills."""
    dim, out = x.shape[-1], torch.empty_like(x)
    rows, block = x.numel() // dim, _power(dim)
    tile = planned(target, GATED, size=x.element_size(), most=rows, width=block)
    arguments = {"x": x, "gate": gate, "weight": weight, "out": out, "rows": rows, "eps": eps}
    constants = {"DIM": dim, "BLOCK": block, "TILE": tile, "SILU": activation == "silu", "ROUNDED": rounded}
    jobs, pools = -(-rows // tile), ("x", "gate", "out")
    return Launch("norm", "gated_rms_norm", arguments, constants, jobs, pools, ("out",)), out


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, gemma: bool, target: Target) -> tuple[Launch, Tensor]:
    """The op of this name, with `gemma` `gemma_rms_norm`; and the result that the launch fills."""
    return grouped_rms_norm(x, weight, groups=1, eps=eps, gemma=gemma, target=target)


def grouped_rms_norm(
    x: Tensor,
    weight: Tensor,
    *,
    groups: int,
    eps: float,
    gemma: bool = True,
    target: Target,
    rstd: Tensor | None = None,
) -> tuple[Launch, Tensor]:
    """`grouped_gemma_rms_norm`, and the result; `rstd` [rows groups] is filled too, where it is given."""
    dim = x.shape[-1] // groups
    out = torch.empty_like(x, dtype=x.dtype if gemma else torch.result_type(x, weight))
    rows, block = x.numel() // x.shape[-1], _power(dim)
    footprint = PLAIN if rstd is None else KEPT
    tile = planned(target, footprint, size=x.element_size(), most=rows, width=block)
    arguments = {"x": x, "weight": weight, "out": out, "rstd": out if rstd is None else rstd, "rows": rows, "eps": eps}
    constants = {"GROUPS": groups, "DIM": dim, "BLOCK": block, "TILE": tile, "GEMMA": gemma, "KEPT": rstd is not None}
    jobs, fills = groups * -(-rows // tile), ("out", "rstd")
    return Launch("norm", "rms_norm", arguments, constants, jobs, ("x", "out"), fills), out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float, gemma: bool, target: Target
) -> tuple[Launch, tuple[Tensor, Tensor]]:
    """The op of this name, with `gemma` `add_gemma_rms_norm`; and the result that the launch fills."""
    dim, total = x.shape[-1], torch.empty_like(x, dtype=torch.result_type(x, residual))
    out = torch.empty_like(total, dtype=total.dtype if gemma else torch.result_type(total, weight))
    rows, block = x.numel() // dim, _power(dim)
    tile = planned(target, ADDED, size=x.element_size(), most=rows, width=block)
    arguments = {"x": x, "residual": residual, "weight": weight, "out": out, "total": total, "rows": rows, "eps": eps}
    constants = {"DIM": dim, "BLOCK": block, "TILE": tile, "GEMMA": gemma}
    jobs, pools = -(-rows // tile), ("x", "residual", "out", "total")
    return Launch("norm", "add_rms_norm", arguments, constants, jobs, pools, ("out", "total")), (out, total)


def l2_norm(x: Tensor, *, scale: float = 1.0, eps: float = 1e-6, target: Target) -> tuple[Launch, Tensor]:
    """The op of this name, and the result that the launch fills."""
    dim, out = x.shape[-1], torch.empty_like(x)
    rows, block = x.numel() // dim, _power(dim)
    tile = planned(target, PLAIN, size=x.element_size(), most=rows, width=block)
    arguments = {"x": x, "out": out, "rows": rows, "scale": float(scale), "eps": eps}
    constants = {"DIM": dim, "BLOCK": block, "TILE": tile}
    return Launch("norm", "l2_norm", arguments, constants, -(-rows // tile), ("x", "out"), ("out",)), out


def _power(dim: int) -> int:
    """The least power of two that is as large."""
    return 1 << (dim - 1).bit_length()
