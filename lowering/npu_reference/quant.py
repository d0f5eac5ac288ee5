"""Quantisation of activations: by a scale known beforehand, by token, by blocks of 32, and after a SwiGLU.

A token of zeros has a scale of 0, and the documented quotient 0 / 0 as values: those are undefined here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import (
    FLOATS,
    need,
    need_default,
    need_dtype,
    need_one_dtype,
    need_rank,
    need_shape,
    shown,
)
from .registration import operator

HALVES = (torch.float16, torch.bfloat16)
INT8, QINT8 = 1, 12
"""Torch's numbers of dtypes, as which they reach an operator."""
E4M3 = (24, 292)
"""Torch's number of float8 e4m3, and torch_npu's."""
E4M3_MAX, E4M3_EXPONENT = 448.0, 8
BLOCK = 32
"""Elements that share an exponent."""
BIAS, NOT_A_NUMBER = 127, 255
"""What a byte of an exponent stands for: 2^(byte - 127), or NaN."""
UNDEFINED = -128
"""Stands for an int8 that is not defined."""


def _quantize_like(
    input: Tensor, scales: Tensor, zero_points: Tensor | None, dtype: int, axis: int, div_mode: bool
) -> Tensor:
    need(not div_mode, "div_mode is True; the reference covers False, where scales are multiplied with")
    need(dtype == QINT8, f"dtype is number {dtype}; the reference covers torch.qint8 (number {QINT8})")
    need(axis in (-1, input.dim() - 1), f"axis is {axis}; the reference covers the last one")
    need_dtype(FLOATS, input=input, scales=scales, zero_points=zero_points)
    need_one_dtype(scales=scales, zero_points=zero_points)
    need_rank(1, 8, input=input)
    need_rank(1, 1, scales=scales)
    last = input.shape[-1]
    need(scales.numel() in (1, last), f"scales is {shown(scales)}; expected 1 or {last}, the input's last axis")
    need_shape(scales.shape, "that of scales", zero_points=zero_points)
    need(input.numel() > 0, f"input is {shown(input)}; what the operator does without elements is not documented")
    return torch.empty_like(input, dtype=torch.int8)


@operator("npu_quantize", shapes=_quantize_like)
def npu_quantize(
    input: Tensor, scales: Tensor, zero_points: Tensor | None, dtype: int, axis: int, div_mode: bool
) -> Tensor:
    """round(input * scales + zero_points) as int8, halves to even."""
    scaled = input.float() * scales.float()
    if zero_points is not None:
        scaled = scaled + zero_points.float()
    return _to_int8(scaled)


def _to_int8(x: Tensor) -> Tensor:
    return x.round().clamp(-128, 127).nan_to_num(UNDEFINED).to(torch.int8)


def by_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """(int8, scale of each row): x / scale, where the largest of a row becomes 127."""
    scale = x.float().abs().amax(-1) / 127
    # 0 / 0 of a row of zeros becomes what stands for undefined.
    return _to_int8(x.float() / scale[..., None]), scale


def _dynamic_like(
    input: Tensor, dst_type: int | None, quant_mode: str, dst_type_max: float, **rest: object
) -> tuple[Tensor, Tensor]:
    need_default(**rest)
    need(dst_type in (None, INT8), f"dst_type is number {dst_type}; the reference covers int8")
    need(quant_mode == "pertoken", f"quant_mode is {quant_mode!r}; the reference covers 'pertoken'")
    need(dst_type_max == 0, f"dst_type_max is {dst_type_max}; the reference covers 0, that of the dtype")
    need_dtype(HALVES, input=input)
    need_rank(2, 8, input=input)
    need(input.numel() > 0, f"input is {shown(input)}; what the operator does without elements is not documented")
    return torch.empty_like(input, dtype=torch.int8), input.new_empty(input.shape[:-1], dtype=torch.float32)


@operator("npu_dynamic_quant", shapes=_dynamic_like)
def npu_dynamic_quant(input: Tensor, **rest: object) -> tuple[Tensor, Tensor]:
    """(int8, scale [...]): scale = max|row| / 127, values = round(row / scale)."""
    return by_token(input)


def _blocks_like(
    input: Tensor,
    axis: int,
    round_mode: str,
    dst_type: int,
    block_size: int,
    scale_alg: int | None,
    dst_type_max: float,
    max_low_bound: float = 0.0,
) -> tuple[Tensor, Tensor]:
    need_dtype(FLOATS, input=input)
    need_rank(1, 7, input=input)
    need(axis in (-1, input.dim() - 1), f"axis is {axis}; the reference covers the last one")
    need(dst_type in E4M3, f"dst_type is number {dst_type}; the reference covers float8_e4m3fn, {E4M3}")
    need(round_mode == "rint", f"round_mode is {round_mode!r}; float8 takes 'rint' only")
    need(block_size == BLOCK, f"block_size is {block_size}; the reference covers {BLOCK}")
    need(scale_alg == 0, f"scale_alg is {scale_alg}; the reference covers 0, that of the OCP's specification")
    need(dst_type_max == max_low_bound == 0, "dst_type_max and max_low_bound are for other dtypes and algorithms")
    last = input.shape[-1]
    need(input.dtype != torch.float32 or last >= BLOCK, f"input is float32 and {last} wide; expected {BLOCK} or more")
    need(input.numel() > 0, f"input is {shown(input)}; what the operator does without elements is not documented")
    scale = (*input.shape[:-1], pairs(last), 2)
    return torch.empty_like(input, dtype=torch.float8_e4m3fn), input.new_empty(scale, dtype=torch.uint8)


def pairs(inputs: int) -> int:
    """Pairs of scales of an axis: an odd number of blocks is filled up by one."""
    return -(-inputs // (2 * BLOCK))


@operator("npu_dynamic_mx_quant", shapes=_blocks_like)
def npu_dynamic_mx_quant(input: Tensor, **rest: object) -> tuple[Tensor, Tensor]:
    """(float8 e4m3, bytes of exponents in pairs [... pairs 2])."""
    return by_block(input)


def by_block(x: Tensor) -> tuple[Tensor, Tensor]:
    """floor(log2(max|block|)) - 8 for every 32, and the values over two to its power, rounded and saturated.

    A block with NaN or infinity gets the byte of NaN; one of zeros, byte 0, for which the device's is not documented.
    """
    blocks = 2 * pairs(x.shape[-1])
    padded = torch.nn.functional.pad(x.double(), (0, blocks * BLOCK - x.shape[-1])).unflatten(-1, (blocks, BLOCK))
    largest = padded.abs().amax(-1)
    # From the bits of the number: a rounded logarithm reaches the next power of two too early.
    exponent = torch.where(largest > 0, torch.frexp(largest).exponent - 1 - E4M3_EXPONENT, -BIAS).clamp(min=-BIAS)
    byte = torch.where(largest.isfinite(), exponent + BIAS, NOT_A_NUMBER).to(torch.uint8)
    scaled = (padded * torch.exp2(-exponent.double())[..., None]).flatten(-2)[..., : x.shape[-1]]
    return scaled.clamp(-E4M3_MAX, E4M3_MAX).float().to(torch.float8_e4m3fn), byte.unflatten(-1, (-1, 2))


def of_blocks(values: Tensor, scale: Tensor) -> Tensor:
    """Numbers in float64: values [... inputs] times the powers of two of their blocks [... pairs 2]."""
    power = torch.exp2(scale.double() - BIAS).masked_fill(scale == NOT_A_NUMBER, torch.nan)
    return values.double() * power.flatten(-2).repeat_interleave(BLOCK, -1)[..., : values.shape[-1]]


def _swiglu_like(
    x: Tensor,
    quant_mode: int,
    swiglu_mode: int,
    activate_left: bool,
    clamp_limit: float,
    glu_alpha: float,
    glu_bias: float,
    **rest: object,
) -> tuple[Tensor, Tensor]:
    need_default(**rest)
    need(quant_mode == 1, f"quant_mode is {quant_mode}; the reference covers 1, a scale for each token")
    need(swiglu_mode == 0, f"swiglu_mode is {swiglu_mode}; the reference covers 0, without clamping")
    need_dtype(HALVES, x=x)
    need_rank(2, 2, x=x)
    need(x.shape[1] % 2 == 0, f"x is {shown(x)}; its last axis has no two halves")
    need(x.numel() > 0, f"x is {shown(x)}; what the operator does without elements is not documented")
    tokens, both = x.shape
    return x.new_empty(tokens, both // 2, dtype=torch.int8), x.new_empty(tokens, dtype=torch.float32)


@operator("npu_dequant_swiglu_quant", shapes=_swiglu_like)
def npu_dequant_swiglu_quant(x: Tensor, activate_left: bool, **rest: object) -> tuple[Tensor, Tensor]:
    """(int8, scale of each token) of a * sigmoid(a) * b: a is the second half, or with activate_left the first."""
    first, second = x.float().chunk(2, -1)
    a, b = (first, second) if activate_left else (second, first)
    return by_token(a * a.sigmoid() * b)
