"""Rotary position embedding: angles from positions, and their application to queries and keys.

Angles are computed in float32, whatever dtype they turn. `rotary` turns the halves of the first channels (pairs i,
i + rotary_dim/2) and leaves the others as they are; `rotary_interleaved` turns neighbours (pairs 2i, 2i + 1) and sorts
them, as multi-head latent attention wants it.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..op import op
from .widen import wide


def frequencies(rotary_dim: int, theta: float, device: torch.device) -> Tensor:
    """theta^(-2i/rotary_dim) for i < rotary_dim/2 [half], in float32: radians a place."""
    exponents = torch.arange(0, rotary_dim, 2, device=device, dtype=torch.float32) / rotary_dim
    return 1.0 / theta**exponents


def yarn_frequencies(
    rotary_dim: int, theta: float, factor: float, ramp: tuple[float, float], device: torch.device
) -> Tensor:
    """`frequencies` [half] stretched as `yarn_angles` has it."""
    kept = frequencies(rotary_dim, theta, device)
    index = torch.arange(rotary_dim // 2, device=device, dtype=torch.float32)
    share = ((index - ramp[0]) / (ramp[1] - ramp[0])).clamp(0, 1)
    return kept / factor * share + kept * (1 - share)


def of_height_and_width(rotary_dim: int, sections: tuple[int, int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Which frequencies [half] of `mrope_angles` turn with height, and which with width; the others with time."""
    index = torch.arange(rotary_dim // 2, device=device)
    return (index % 3 == 1) & (index < 3 * sections[1]), (index % 3 == 2) & (index < 3 * sections[2])


@op
def rotary_angles(
    positions: Int[Tensor, " tokens"], *, rotary_dim: int, theta: float, factor: float = 1.0
) -> tuple[Float[Tensor, "tokens half"], Float[Tensor, "tokens half"]]:
    """Cosine and sine of position * theta^(-2i/rotary_dim) / factor, for i < rotary_dim/2.

    `factor` is that of linear scaling: places of a longer text are pressed into the range that was trained.
    """
    angles = positions.float()[:, None] * (frequencies(rotary_dim, theta, positions.device) / factor)
    return angles.cos(), angles.sin()


@op
def yarn_angles(
    positions: Int[Tensor, " tokens"],
    *,
    rotary_dim: int,
    theta: float,
    factor: float,
    ramp: tuple[float, float],
    multiplier: float,
) -> tuple[Float[Tensor, "tokens half"], Float[Tensor, "tokens half"]]:
    """`rotary_angles` stretched to a longer context (YaRN), times `multiplier`.

    Frequency i is kept where i <= ramp[0], divided by `factor` where i >= ramp[1], and goes over between the two.
    """
    angles = positions.float()[:, None] * yarn_frequencies(rotary_dim, theta, factor, ramp, positions.device)
    return angles.cos() * multiplier, angles.sin() * multiplier


@op
def mrope_angles(
    positions: Int[Tensor, "axes tokens"], *, rotary_dim: int, theta: float, sections: tuple[int, int, int]
) -> tuple[Float[Tensor, "tokens half"], Float[Tensor, "tokens half"]]:
    """`rotary_angles` with three positions a token (time, height, width), interleaved over the frequencies.

    Frequency i takes height if i % 3 == 1 and i < 3 * sections[1], width if i % 3 == 2 and i < 3 * sections[2], else
    time (`mrope_section` with `mrope_interleaved` of the Qwen3.5 config).
    """
    height, width = of_height_and_width(rotary_dim, sections, positions.device)
    at_time, at_height, at_width = positions.float()[:, :, None].unbind(0)
    chosen = torch.where(height, at_height, torch.where(width, at_width, at_time))
    angles = chosen * frequencies(rotary_dim, theta, positions.device)
    return angles.cos(), angles.sin()


@op
def rotary(
    q: Float[Tensor, "tokens heads head_dim"],
    k: Float[Tensor, "tokens kv_heads head_dim"],
    cos: Float[Tensor, "tokens half"],
    sin: Float[Tensor, "tokens half"],
) -> tuple[Float[Tensor, "tokens heads head_dim"], Float[Tensor, "tokens kv_heads head_dim"]]:
    """Rotate the first 2 * half channels of queries and keys, pairs (i, i + half); the rest pass bit for bit."""
    cos, sin = cos.to(q.dtype)[:, None], sin.to(q.dtype)[:, None]
    return _rotate_halves(q, cos, sin), _rotate_halves(k, cos, sin)


def _rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), -1)


@op
def rotary_interleaved(
    x: Float[Tensor, "tokens heads head_dim"], cos: Float[Tensor, "tokens half"], sin: Float[Tensor, "tokens half"]
) -> Float[Tensor, "tokens heads head_dim"]:
    """Rotate the first 2 * half channels as complex pairs (2i, 2i + 1), at least in float32 (DeepSeek-V2).

    What comes out is sorted: the first members of all pairs, then the second ones. Queries and keys that were both
    turned so have the same products as in the order of pairs, and Ascend's fused operators leave keys so.
    """
    width = 2 * cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    even, odd = wide(x[..., 0:width:2]), wide(x[..., 1:width:2])
    turned = torch.cat((even * cos - odd * sin, odd * cos + even * sin), -1).to(x.dtype)
    return torch.cat((turned, x[..., width:]), -1)
