"""Launches of the rotary embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from ..target import Target
from .launch import Launch
from .norm import lines
from .tiles import Footprint, planned

TURNED = Footprint(copies=6.0, copies_950=4.0, streams=2)
"""Cells of a half."""


def rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, target: Target
) -> tuple[tuple[Launch, Launch], tuple[Tensor, Tensor]]:
    """The op of this name in a launch each for queries and keys, and the result that they fill."""
    (queries, q_out), (keys, k_out) = (_rotary(x, cos, sin, target) for x in (q, k))
    return (queries, keys), (q_out, k_out)


def _rotary(x: Tensor, cos: Tensor, sin: Tensor, target: Target) -> tuple[Launch, Tensor]:
    (x,), _, _, (stride,) = lines(x)
    (tokens, heads, dim), half = x.shape, cos.shape[-1]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    block, rest = (1 << max(size - 1, 0).bit_length() for size in (half, dim - 2 * half))
    tile = planned(target, TURNED, size=x.element_size(), most=heads, width=max(block, rest // 2))
    tensors = {"x": x, "cos": cos, "sin": sin, "out": out}
    sizes = {"tokens": tokens, "heads": heads, "x_stride": heads * dim if x.is_contiguous() else stride}
    constants = {"HALF": half, "DIM": dim, "BLOCK": block, "REST": rest, "TILE": tile}
    jobs, pools = tokens * -(-heads // tile), ("x", "cos", "sin", "out")
    return Launch("rotary", "rotary", tensors | sizes, constants, jobs, pools, ("out",)), out
