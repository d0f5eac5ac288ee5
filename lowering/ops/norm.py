"""Root-mean-square norms. Four conventions coexist in the model families; each is an op of its own.

In all of them the mean of squares is taken in float32 (in float64 for float64 inputs, as all that is said to be in
float32 here) and eps is added to it, inside the reciprocal root.
`*_rstd` forms also return the reciprocal deviation, `add_*` forms the sum that was normalised. A preference for the
plain form holds for those that contain it.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ..op import op
from ..weights import PreparedWeight, plain
from .widen import wide

Activation = Literal["silu", "sigmoid"]


def normalise(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x with unit root mean square along its last axis, and its reciprocal deviation, both in float32 or wider."""
    x = wide(x)
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * rstd, rstd


@op
def rms_norm(x: Float[Tensor, "*lead dim"], weight: Float[Tensor, " dim"], *, eps: float) -> Float[Tensor, "*lead dim"]:
    """Unit root mean square, rounded to x's dtype, then times the weight (DeepSeek-V2, Kimi, Qwen3)."""
    return normalise(x, eps)[0].to(x.dtype) * weight


@op(contains=("rms_norm",))
def rms_norm_rstd(
    x: Float[Tensor, "*lead dim"], weight: Float[Tensor, " dim"], *, eps: float
) -> tuple[Float[Tensor, "*lead dim"], Float[Tensor, "*lead 1"]]:
    """`rms_norm`, and the float32 reciprocal deviation of each row."""
    unit, rstd = normalise(x, eps)
    return unit.to(x.dtype) * weight, rstd


@op(contains=("rms_norm",))
def add_rms_norm(
    x: Float[Tensor, "*lead dim"], residual: Float[Tensor, "*lead dim"], weight: Float[Tensor, " dim"], *, eps: float
) -> tuple[Float[Tensor, "*lead dim"], Float[Tensor, "*lead dim"]]:
    """`rms_norm` of the rounded sum x + residual, and that sum."""
    total = x + residual
    return rms_norm.body(total, weight, eps=eps), total


@op
def gemma_rms_norm(
    x: Float[Tensor, "*lead dim"], weight: Float[Tensor, " dim"] | PreparedWeight, *, eps: float
) -> Float[Tensor, "*lead dim"]:
    """Unit root mean square times (1 + weight), all in float32, rounded once (Gemma3, Qwen3.5)."""
    return (normalise(x, eps)[0] * (1 + wide(plain(weight)))).to(x.dtype)


@op(contains=("gemma_rms_norm",))
def gemma_rms_norm_rstd(
    x: Float[Tensor, "*lead dim"], weight: Float[Tensor, " dim"] | PreparedWeight, *, eps: float
) -> tuple[Float[Tensor, "*lead dim"], Float[Tensor, "*lead 1"]]:
    """`gemma_rms_norm`, and the float32 reciprocal deviation of each row."""
    unit, rstd = normalise(x, eps)
    return (unit * (1 + wide(plain(weight)))).to(x.dtype), rstd


@op(contains=("gemma_rms_norm",))
def add_gemma_rms_norm(
    x: Float[Tensor, "*lead dim"],
    residual: Float[Tensor, "*lead dim"],
    weight: Float[Tensor, " dim"] | PreparedWeight,
    *,
    eps: float,
) -> tuple[Float[Tensor, "*lead dim"], Float[Tensor, "*lead dim"]]:
    """`gemma_rms_norm` of the rounded sum x + residual, and that sum."""
    total = x + residual
    return gemma_rms_norm.body(total, weight, eps=eps), total


@op
def gated_rms_norm(
    x: Float[Tensor, "*lead dim"],
    gate: Float[Tensor, "*lead dim"],
    weight: Float[Tensor, " dim"],
    *,
    eps: float,
    activation: Activation,
) -> Float[Tensor, "*lead dim"]:
    """Norm first, gate second, with a rounding between: weight * cast(unit x), times act(gate) (gated delta net)."""
    scaled = weight * normalise(x, eps)[0].to(x.dtype)
    return (wide(scaled) * activate(wide(gate), activation)).to(x.dtype)


@op
def gated_rms_norm_fp32(
    x: Float[Tensor, "*lead dim"],
    gate: Float[Tensor, "*lead dim"],
    weight: Float[Tensor, " dim"],
    *,
    eps: float,
    activation: Activation,
) -> Float[Tensor, "*lead dim"]:
    """weight * unit x * act(gate), all in float32, rounded once (Kimi delta attention)."""
    return (wide(weight) * normalise(x, eps)[0] * activate(wide(gate), activation)).to(x.dtype)


@op(contains=("gemma_rms_norm",))
def grouped_gemma_rms_norm(
    x: Float[Tensor, "*lead dim"], weight: Float[Tensor, " dim"], *, groups: int, eps: float
) -> Float[Tensor, "*lead dim"]:
    """`gemma_rms_norm` with an own mean of squares for each of `groups` equal parts of the axis (Qwen4 streams)."""
    unit = normalise(x.unflatten(-1, (groups, -1)), eps)[0].flatten(-2)
    return (unit * (1 + wide(weight))).to(x.dtype)


def activate(x: Tensor, activation: Activation) -> Tensor:
    """The gate's activation."""
    return F.silu(x) if activation == "silu" else torch.sigmoid(x)
