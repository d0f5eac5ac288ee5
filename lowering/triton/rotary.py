"""Launches of the rotary embedding and its angles."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.rotary import frequencies, of_height_and_width, yarn_frequencies
from ..target import Target
from .launch import Launch
from .norm import lines
from .tiles import Footprint, planned

TURNED = Footprint(copies=6.0, copies_950=4.0, streams=2)
"""Cells of a half; those that pass, which go through one buffer as they are, count as an eighth."""
PAIRS = Footprint(copies=6.0, copies_950=4.0, streams=2)
ANGLES = Footprint(copies=24.0, copies_950=26.0, streams=0)
MORE_ANGLES = Footprint(copies=11.5, copies_950=26.0, streams=0)
"""Of several places a token, where 910's compiler lets more values share a place."""


def rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, target: Target
) -> tuple[tuple[Launch, Launch], tuple[Tensor, Tensor]]:
    """The op of this name in a launch each for queries and keys, and the result that they fill."""
    (queries, q_out), (keys, k_out) = (_turned(x, cos, sin, "rotary", TURNED, target) for x in (q, k))
    return (queries, keys), (q_out, k_out)


def rotary_interleaved(x: Tensor, cos: Tensor, sin: Tensor, *, target: Target) -> tuple[Launch, Tensor]:
    """The op of this name, and the result that the launch fills."""
    return _turned(x, cos, sin, "rotary_interleaved", PAIRS, target)


def _turned(
    x: Tensor, cos: Tensor, sin: Tensor, name: str, footprint: Footprint, target: Target
) -> tuple[Launch, Tensor]:
    (x,), _, _, (stride,) = lines(x)
    (tokens, heads, dim), half = x.shape, cos.shape[-1]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    block, rest = (1 << max(size - 1, 0).bit_length() for size in (half, dim - 2 * half))
    tile = planned(target, footprint, size=x.element_size(), most=heads, width=block + rest // 8)
    tensors = {"x": x, "cos": cos, "sin": sin, "out": out}
    sizes = {"tokens": tokens, "heads": heads, "x_stride": heads * dim if x.is_contiguous() else stride}
    constants = {"HALF": half, "DIM": dim, "BLOCK": block, "REST": rest, "TILE": tile}
    jobs, pools = tokens * -(-heads // tile), ("x", "cos", "sin", "out")
    return Launch("rotary", name, tensors | sizes, constants, jobs, pools, ("out",)), out


def rotary_angles(
    positions: Tensor, *, rotary_dim: int, theta: float, factor: float = 1.0, target: Target
) -> tuple[Launch, tuple[Tensor, Tensor]]:
    """The op of this name, and the result that the launch fills. Torch makes the frequencies: an `exp` is too rough."""
    return _angles(positions[None], frequencies(rotary_dim, theta, positions.device)[None] / factor, 1.0, target)


def yarn_angles(
    positions: Tensor,
    *,
    rotary_dim: int,
    theta: float,
    factor: float,
    ramp: tuple[float, float],
    multiplier: float,
    target: Target,
) -> tuple[Launch, tuple[Tensor, Tensor]]:
    """The op of this name, and the result that the launch fills."""
    rates = yarn_frequencies(rotary_dim, theta, factor, ramp, positions.device)
    return _angles(positions[None], rates[None], multiplier, target)


def mrope_angles(
    positions: Tensor, *, rotary_dim: int, theta: float, sections: tuple[int, int, int], target: Target
) -> tuple[Launch, tuple[Tensor, Tensor]]:
    """The op of this name, and the result that the launch fills."""
    height, width = of_height_and_width(rotary_dim, sections, positions.device)
    turned = torch.stack((~(height | width), height, width))
    return _angles(positions, turned * frequencies(rotary_dim, theta, positions.device), 1.0, target)


def _angles(
    positions: Tensor, rates: Tensor, multiplier: float, target: Target
) -> tuple[Launch, tuple[Tensor, Tensor]]:
    (axes, tokens), half = positions.shape, rates.shape[1]
    cos, sin = rates.new_empty(tokens, half), rates.new_empty(tokens, half)
    block = 1 << (half - 1).bit_length()
    tile = planned(target, ANGLES if axes == 1 else MORE_ANGLES, size=rates.element_size(), most=tokens, width=block)
    arguments = {"positions": positions, "rates": rates, "cos": cos, "sin": sin, "tokens": tokens}
    constants = {"AXES": axes, "HALF": half, "BLOCK": block, "TILE": tile}
    jobs, fills = -(-tokens // tile), ("cos", "sin")
    return Launch("rotary", "angles", arguments | {"multiplier": float(multiplier)}, constants, jobs, fills, fills), (
        cos,
        sin,
    )
