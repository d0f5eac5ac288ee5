"""Float to int8, int4, MXFP8 and MXFP4: how weights are rounded once, and activations at every call.

All arithmetic is in float32, whatever the input. Ties go to the even neighbour, except where a rounding is named.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32, Int8, UInt8
from torch import Tensor

from params.quant.values import E2M1, MX_BLOCK, times_blocks

Rounding = Literal["half_even", "half_away"]
"""Where a number halfway between two goes: to the even one (activations on Ascend), away from zero (ModelSlim)."""

EPS = torch.finfo(torch.float32).eps
"""Smallest scale of a weight's row."""
E4M3_MAX = 448.0
_E4M3_EXPONENT, _E4M3_MIN_EXPONENT, _E4M3_MANTISSA = 8, -6, 3
_E2M1_EXPONENT = 2
_QUARTER = 1 << 21
"""A quarter in the mantissa of float32: half of what two neighbours of e2m1 differ by, where their exponents are 0."""
_BIAS, _NAN = 127, 255
"""Of float32's exponent bits and of a scale's byte alike: what stands for 2^0, and what for NaN."""


def int8_weight(w: Float[Tensor, "*lead inputs"]) -> tuple[Int8[Tensor, "*lead inputs"], Float32[Tensor, "*lead one"]]:
    """Rows as int8 and their scales [... 1], max|w| / 127, at least `EPS`: a row of zeros gets that and zeros."""
    scale = _largest(w).div(127).clamp(min=EPS)
    return _rounded(w.float() / scale, -128, 127), scale


def int8_tokens(x: Float[Tensor, "*lead inputs"]) -> tuple[Int8[Tensor, "*lead inputs"], Float32[Tensor, "*lead one"]]:
    """Tokens as int8 and their scales [... 1], max|x| / 127: 0 for a token of zeros.

    A token with NaN or infinity gets zeros and that scale, so that products with it are NaN.
    """
    scale = _largest(x).div(127)
    return _rounded(x.float() / torch.where(scale == 0, 1.0, scale), -128, 127), scale


def static_int8(
    x: Float[Tensor, "*lead inputs"], scale: Float32[Tensor, " one"], offset: Float32[Tensor, " one"]
) -> Int8[Tensor, "*lead inputs"]:
    """round(x / scale + offset) as int8, saturated; NaN becomes 0."""
    return _rounded(x.float() / scale + offset, -128, 127)


def int8_range(low: float, high: float) -> tuple[Float32[Tensor, " one"], Float32[Tensor, " one"]]:
    """Scale and offset [1] with which `static_int8` spreads its 256 numbers over `low` to `high` and zero."""
    bounds = torch.tensor([[min(low, 0.0)], [max(high, 0.0)]], dtype=torch.float32, device="cpu")
    bottom, top = bounds.unbind()
    scale = ((top - bottom) / 255).clamp(min=EPS)
    return scale, torch.round(-bottom / scale) - 128


def int4_weight(w: Float[Tensor, "*lead inputs"]) -> tuple[Int8[Tensor, "*lead inputs"], Float32[Tensor, "*lead one"]]:
    """Rows as numbers from -8 to 7, one a byte, and their scales [... 1], max|w| / 7, at least `EPS`."""
    scale = _largest(w).div(7).clamp(min=EPS)
    return _rounded(w.float() / scale, -8, 7), scale


def pack_int4(values: Int8[Tensor, "*lead outputs inputs"]) -> Int8[Tensor, "*lead half_outputs inputs"]:
    """Two outputs in a byte, the even one in the low half. `ValueError` for an odd number of outputs."""
    if values.shape[-2] % 2:
        raise ValueError(f"pack_int4: {values.shape[-2]} outputs, and two share a byte; their number must be even")
    return (values[..., 1::2, :] << 4) | (values[..., 0::2, :] & 15)


def int4_correction(
    values: Int8[Tensor, "*lead outputs inputs"], scale: Float32[Tensor, "*lead outputs one"], slices: int
) -> Float32[Tensor, "*lead outputs slices"]:
    """8 times the sum of an output's weights, in partial sums over equally many inputs each (`Int4Weight`)."""
    if values.shape[-1] % slices:
        raise ValueError(f"int4_correction: {values.shape[-1]} inputs do not make {slices} equal slices")
    return 8 * (values.float() * scale).unflatten(-1, (slices, -1)).sum(-1)


def mx_scales(x: Float[Tensor, "*lead inputs"]) -> UInt8[Tensor, "*lead blocks"]:
    """floor(log2(max|x|)) - 8 + 127 of every 32 inputs, the last block perhaps of fewer; 0 at least, as for zeros.

    A block with NaN or infinity gets 255, which stands for NaN: an error shows and does not saturate.
    """
    largest = _exponent_bits(_largest_of_blocks(x))
    return torch.where(largest == _NAN, _NAN, (largest - _E4M3_EXPONENT).clamp(min=0)).to(torch.uint8)


def mxfp8(
    x: Float[Tensor, "*lead inputs"], rounding: Rounding
) -> tuple[Float[Tensor, "*lead inputs"], UInt8[Tensor, "*lead blocks"]]:
    """Float8 e4m3 values, and the byte of the power of two for every 32: `MXFP8Weight`'s form.

    A block's largest number lies in [256, 512) of its power of two; what is above 448 becomes 448. Values in a block
    whose byte is 255 mean nothing.
    """
    scale = mx_scales(x)
    reciprocal = _power(254 - scale.int().clamp(max=253))
    scaled = times_blocks(x.float(), reciprocal, MX_BLOCK)
    if rounding == "half_away":
        scaled = _half_away(scaled)
    # Out of range, a cast saturates or gives NaN, depending on Torch's version.
    return scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


def mxfp4(
    x: Float[Tensor, "*lead inputs"],
) -> tuple[UInt8[Tensor, "*lead half_inputs"], UInt8[Tensor, "*lead blocks"]]:
    """Two float4 e2m1 codes a byte, and the byte of the power of two for every 32: `MXFP4Weight`'s form.

    As compressed-tensors rounds: a block's largest number lies in [3.5, 7) of its power of two, what is above 6 becomes
    6, and ties go to the code that is even. A block with NaN or infinity gets the byte 255. `ValueError` for an odd
    number of inputs.
    """
    if x.shape[-1] % 2:
        raise ValueError(f"mxfp4: {x.shape[-1]} inputs, and two share a byte; their number must be even")
    largest = _largest_of_blocks(x)
    # As float4 has it, 1.75 rounds to two.
    exponent = ((largest.view(torch.int32) + _QUARTER) >> 23).clamp(max=_NAN - 1)
    finite = _exponent_bits(largest) < _NAN
    scale = torch.where(finite, (exponent - _E2M1_EXPONENT).clamp(min=0), _NAN).to(torch.uint8)
    scaled = times_blocks(x.float(), _power(254 - scale.int().clamp(max=253)), MX_BLOCK)
    codes = _e2m1_codes(scaled).to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, scale


def _e2m1_codes(x: Tensor) -> Tensor:
    """The codes of the nearest float4 numbers; a number is above as many of them as midpoints lie below it."""
    middles = [(low + high) / 2 for low, high in pairwise(E2M1)]
    # Halfway to an even code is past the middle.
    passed = [x.abs() >= middle if code % 2 else x.abs() > middle for code, middle in enumerate(middles)]
    return torch.stack(passed).sum(0) + 8 * torch.signbit(x)


def _half_away(x: Tensor) -> Tensor:
    """The nearest numbers with e4m3's mantissa, of two equally near the one away from zero."""
    exponent = (_exponent_bits(x) - _BIAS).clamp(_E4M3_MIN_EXPONENT, _E4M3_EXPONENT)
    step = _power(exponent - _E4M3_MANTISSA + _BIAS)
    count = x.abs() / step
    whole = count.floor()
    return torch.copysign((whole + (count - whole >= 0.5)) * step, x)


def _largest_of_blocks(x: Tensor) -> Tensor:
    """Magnitudes [... blocks] in float32."""
    blocks = F.pad(x.float(), (0, -x.shape[-1] % MX_BLOCK)).unflatten(-1, (-1, MX_BLOCK))
    return blocks.abs().amax(-1)


def _exponent_bits(x: Tensor) -> Tensor:
    """floor(log2|x|) + 127 from the bits, where a logarithm would round the neighbour below a power of two up to it."""
    return x.abs().view(torch.int32) >> 23


def _power(bits: Tensor) -> Tensor:
    """2^(bits - 127), exactly, for bits from 1 to 254."""
    return (bits << 23).view(torch.float32)


def _largest(x: Tensor) -> Tensor:
    """Magnitudes [... 1] in float32, which a CPU compares faster than bfloat16."""
    return x.float().abs().amax(-1, keepdim=True)


def _rounded(x: Tensor, low: int, high: int) -> Tensor:
    """`x` as int8; its own memory is worked in."""
    # The other two have no rule for vmap in place.
    return x.round_().nan_to_num(nan=0.0).clamp(low, high).to(torch.int8)
