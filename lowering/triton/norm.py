"""Launches of norms."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import LoweringError
from ..ops.norm import Activation
from ..target import Target
from .launch import Launch
from .tiles import Footprint, planned

GATED = Footprint(copies=3.0, copies_950=2.0, streams=1)
PLAIN = Footprint(copies=3.0, copies_950=2.0, streams=1)
KEPT = Footprint(copies=3.0, copies_950=1.4, streams=1)
"""With deviations written down."""
ADDED = Footprint(copies=3.0, copies_950=2.0, streams=1)


class Lines(NamedTuple):
    """Tensors [rows groups dim] as they lie: `groups` vectors behind each other, and the places from row to row."""

    tensors: tuple[Tensor, ...]
    rows: int
    groups: int
    strides: tuple[int, ...]


def lines(*tensors: Tensor) -> Lines:
    """Tensors [*lead dim] of one shape as lines. What is not [tokens heads dim] cut from rows is copied."""
    shape, dim = tensors[0].shape, tensors[0].shape[-1]
    if len(shape) != 3 or all(x.is_contiguous() for x in tensors):
        tensors = tuple(x.contiguous() for x in tensors)
        return Lines(tensors, tensors[0].numel() // dim, 1, (dim,) * len(tensors))
    tensors = tuple(x if x.stride()[1:] == (dim, 1) else x.contiguous() for x in tensors)
    return Lines(tensors, shape[0], shape[1], tuple(x.stride(0) for x in tensors))


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, *, eps: float, activation: Activation, rounded: bool, target: Target
) -> tuple[Launch, Tensor]:
    """The op of this name with `rounded`, else `gated_rms_norm_fp32`; and the result that the launch fills."""
    (x, gate), rows, groups, strides = lines(x, gate)
    dim, out = x.shape[-1], torch.empty_like(x, memory_format=torch.contiguous_format)
    block = _power(dim)
    tile = planned(target, GATED, size=x.element_size(), most=rows, width=block)
    tensors = {"x": x, "gate": gate, "weight": weight, "out": out}
    sizes = {"rows": rows, "groups": groups, "x_stride": strides[0], "gate_stride": strides[1], "eps": eps}
    constants = {"DIM": dim, "BLOCK": block, "TILE": tile, "SILU": activation == "silu", "ROUNDED": rounded}
    jobs, pools = groups * -(-rows // tile), ("x", "gate", "out")
    return Launch("norm", "gated_rms_norm", tensors | sizes, constants, jobs, pools, ("out",)), out


def rms_norm(
    x: Tensor, weight: Tensor, *, eps: float, gemma: bool, target: Target, rstd: Tensor | None = None
) -> tuple[Launch, Tensor]:
    """The op of this name, with `gemma` `gemma_rms_norm`, and the result; `rstd` [*lead 1] is filled too, if given."""
    (x,), rows, groups, (stride,) = lines(x)
    out = torch.empty_like(
        x, dtype=x.dtype if gemma else torch.result_type(x, weight), memory_format=torch.contiguous_format
    )
    sizes = {"rows": rows, "groups": groups, "x_stride": stride, "eps": eps}
    return _rms_norm(x, weight, out, rstd, sizes, x.shape[-1], {"GEMMA": gemma, "APART": False}, target), out


def rms_norm_rstd(
    x: Tensor, weight: Tensor, *, eps: float, gemma: bool, target: Target
) -> tuple[Launch, tuple[Tensor, Tensor]]:
    """The op of this name, with `gemma` `gemma_rms_norm_rstd`; and the result that the launch fills."""
    rstd = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
    launch, out = rms_norm(x, weight, eps=eps, gemma=gemma, target=target, rstd=rstd)
    return launch, (out, rstd)


def grouped_rms_norm(
    x: Tensor, weight: Tensor, *, groups: int, eps: float, target: Target, rstd: Tensor | None = None
) -> tuple[Launch, Tensor]:
    """`grouped_gemma_rms_norm`, and the result; `rstd` [rows groups] is filled too, where it is given."""
    joined, out = x.shape[-1], torch.empty_like(x)
    sizes = {"rows": x.numel() // joined, "groups": groups, "x_stride": joined, "eps": eps}
    return _rms_norm(x, weight, out, rstd, sizes, joined // groups, {"GEMMA": True, "APART": True}, target), out


def _rms_norm(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    rstd: Tensor | None,
    sizes: dict[str, int | float],
    dim: int,
    kind: dict[str, bool],
    target: Target,
) -> Launch:
    rows, block = int(sizes["rows"]), _power(dim)
    tile = _tile(x, rows, block, target, kept=rstd is not None)
    tensors = {"x": x, "weight": weight, "out": out, "rstd": out if rstd is None else rstd}
    constants = {"DIM": dim, "BLOCK": block, "TILE": tile, **kind, "KEPT": rstd is not None}
    jobs, fills = int(sizes["groups"]) * -(-rows // tile), ("out", "rstd")
    return Launch("norm", "rms_norm", tensors | sizes, constants, jobs, ("x", "out"), fills)


def _tile(x: Tensor, rows: int, block: int, target: Target, *, kept: bool) -> int:
    """On Ascend 950 two rows at least where deviations are kept: its compiler ends on a store of a single one."""
    footprint, least = KEPT if kept else PLAIN, 2 if kept and target.name == "ascend950" else 1
    tile = planned(target, footprint, size=x.element_size(), most=max(rows, least), width=block)
    if tile < least:
        raise LoweringError(f"{least} rows of {block} cells do not fit the unified buffer of {target.name}")
    return tile


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float, gemma: bool, target: Target
) -> tuple[Launch, tuple[Tensor, Tensor]]:
    """The op of this name, with `gemma` `add_gemma_rms_norm`; and the result that the launch fills."""
    dim, total = x.shape[-1], torch.empty_like(x, dtype=torch.result_type(x, residual))
    out = torch.empty_like(total, dtype=total.dtype if gemma else torch.result_type(total, weight))
    rows, block = x.numel() // dim, _power(dim)
    tile = planned(target, ADDED, size=x.element_size(), most=rows, width=block)
    tensors = {"x": x, "residual": residual, "weight": weight, "out": out, "total": total}
    constants = {"DIM": dim, "BLOCK": block, "TILE": tile, "GEMMA": gemma}
    jobs, pools = -(-rows // tile), ("x", "residual", "out", "total")
    sizes = {"rows": rows, "eps": eps}
    return Launch("norm", "add_rms_norm", tensors | sizes, constants, jobs, pools, ("out", "total")), (out, total)


def l2_norm(x: Tensor, *, scale: float = 1.0, eps: float = 1e-6, target: Target) -> tuple[Launch, Tensor]:
    """The op of this name, and the result that the launch fills."""
    (x,), rows, groups, (stride,) = lines(x)
    dim, out = x.shape[-1], torch.empty_like(x, memory_format=torch.contiguous_format)
    block = _power(dim)
    tile = planned(target, PLAIN, size=x.element_size(), most=rows, width=block)
    arguments = {"x": x, "out": out, "rows": rows, "groups": groups, "x_stride": stride, "scale": float(scale)}
    constants = {"DIM": dim, "BLOCK": block, "TILE": tile}
    jobs = groups * -(-rows // tile)
    return Launch("norm", "l2_norm", arguments | {"eps": eps}, constants, jobs, ("x", "out"), ("out",)), out


def _power(dim: int) -> int:
    """The least power of two that is as large."""
    return 1 << (dim - 1).bit_length()
