"""Quantisation of activations, and products with quantised weights."""

from __future__ import annotations

import math
from typing import Any

import torch

from .check import ASCEND_910, ASCEND_950, ONN, OP, HostCheck, enter
from .norm import FLOATS, HALVES

V3 = "quant/ascend_quant_v2/op_host/op_api/aclnn_ascend_quant_v3.cpp CheckDtypeCompatible"
DYNAMIC = f"{ONN} v8.5.0 quant/dynamic_quant/op_host/op_api/aclnn_dynamic_quant.cpp"
BLOCKS = f"{ONN} v8.5.0 quant/dynamic_mx_quant/op_host/arch35/dynamic_mx_quant_tiling_arch35.cpp"
DEQUANT = f"{ONN} v8.5.0 quant/dequant_swiglu_quant/op_host"
PRODUCT = f"{ONN} v8.5.0 matmul/quant_batch_matmul_v3/op_api/quant_matmul_checker.cpp"
FP8, FP16, BF16, FP32 = torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32


def dtype_of(given: Any) -> Any:
    """A dtype that is given as itself, or as Torch's or torch_npu's number of it."""
    return {5: FP16, 6: FP32, 15: BF16, 24: FP8, 292: FP8}.get(given, given)


enter(
    "npu_quantize",
    HostCheck(
        "scales of x's dtype, where x is float16 or bfloat16",
        lambda c: c.div_mode or c.input.dtype == FP32 or c.scales.dtype == c.input.dtype,
        f"{ONN} v8.5.0 {V3}",
    ),
    HostCheck(
        "x, scales and offsets of one dtype",
        lambda c: c.div_mode or len({x.dtype for x in (c.input, c.scales, c.zero_points) if x is not None}) == 1,
        f"{ONN} v8.5.0 quant/ascend_quant_v2/op_host, tiling of arch35",
        targets=ASCEND_950,
    ),
    HostCheck(
        "offsets of the scales' dtype and shape",
        lambda c: (
            c.div_mode
            or c.zero_points is None
            or (c.zero_points.dtype == c.scales.dtype and c.zero_points.shape == c.scales.shape)
        ),
        f"{ONN} v8.5.0 {V3}",
    ),
    HostCheck(
        "one scale, or one an element of the axis, the last or the one before it",
        lambda c: (
            c.div_mode
            or (
                c.axis in (-1, -2, c.input.ndim - 1, c.input.ndim - 2)
                and c.scales.numel() in (1, c.input.shape[c.axis])
            )
        ),
        f"{ONN} v8.5.0 quant/ascend_quant_v2/op_host/op_api/aclnn_ascend_quant_v3.cpp CheckShape",
    ),
)

enter(
    "npu_dynamic_quant",
    HostCheck(
        "float16 or bfloat16 of two axes or more, none of no width",
        lambda c: c.input.dtype in HALVES and c.input.ndim >= 2 and c.input.shape[-1] > 0,
        f"{DYNAMIC} CheckOpDim, CheckDtype",
    ),
    HostCheck(
        "smoothing scales of x's dtype",
        lambda c: c.smooth_scales is None or c.smooth_scales.dtype == c.input.dtype,
        f"{DYNAMIC} CheckDtype",
    ),
    HostCheck(
        "at most 1024 groups",
        lambda c: c.group_index is None or c.group_index.numel() <= 1024,
        f"{DYNAMIC} CheckShape",
    ),
)

enter(
    "npu_dynamic_mx_quant",
    HostCheck(
        "x of 1 to 7 axes; float32 in blocks of 32 along an axis of 32 or more",
        lambda c: (
            c.input.dtype in FLOATS
            and 1 <= c.input.ndim <= 7
            and (c.input.dtype != FP32 or (c.block_size == 32 and c.input.shape[c.axis] >= 32))
        ),
        f"{BLOCKS} CheckDtype, CheckShape",
    ),
    HostCheck(
        "blocks in multiples of 32, up to 1024",
        lambda c: 0 < c.block_size <= 1024 and c.block_size % 32 == 0,
        f"{BLOCKS} GetAttr",
    ),
    HostCheck(
        "for float8 rounding 'rint' and scale_alg 0 or 1",
        lambda c: dtype_of(c.dst_type) != FP8 or (c.round_mode == "rint" and c.scale_alg in (0, 1)),
        f"{BLOCKS} GetAttr",
    ),
)

enter(
    "npu_dequant_swiglu_quant",
    HostCheck(
        "quant_mode 0 or 1, swiglu_mode 0 to 2, x of two axes or more",
        lambda c: c.quant_mode in (0, 1) and c.swiglu_mode in (0, 1, 2) and c.x.ndim > 1,
        f"{OP} DequantSwigluQuantKernelNpuOpApi.cpp",
    ),
    HostCheck(
        "int32, float16 or bfloat16 of an even last axis; without groups any multiple",
        lambda c: (
            c.x.dtype in (torch.int32, *HALVES)
            and c.x.shape[-1] % 2 == 0
            and (c.group_index is None or (c.x.dtype != FP16 and c.x.shape[-1] % 64 == 0))
        ),
        f"{DEQUANT}/dequant_swiglu_quant_tiling_base.cpp and dequant_swiglu_quant_tiling.cpp CheckXAndGroupIndexDtype",
        targets=ASCEND_910,
    ),
    HostCheck(
        "int32, float16 or bfloat16 of 2 to 8 axes",
        lambda c: c.x.dtype in (torch.int32, *HALVES) and c.x.shape[-1] % 2 == 0 and 2 <= c.x.ndim <= 8,
        f"{DEQUANT}/dequant_swiglu_quant_tiling_arch35.cpp GetInputX",
        targets=ASCEND_950,
    ),
)


def in_blocks(c: Any) -> bool:
    """Whether a product is of float8 factors with exponents."""
    return c.x1.dtype == FP8


enter(
    "npu_quant_matmul",
    HostCheck(
        "int8 or int4 factors",
        lambda c: c.x1.dtype in (torch.int8, torch.int32) and c.x2.dtype in (torch.int8, torch.int32),
        f"{PRODUCT} CheckDtype",
        targets=ASCEND_910,
    ),
    HostCheck(
        "no empty tensor",
        lambda c: c.x1.numel() > 0 and c.x2.numel() > 0,
        f"{PRODUCT} CheckEmptyTensor",
    ),
    HostCheck(
        "float32 scales of the tokens, one each",
        lambda c: (
            in_blocks(c)
            or c.pertoken_scale is None
            or (c.pertoken_scale.dtype == FP32 and c.pertoken_scale.shape == c.x1.shape[:1])
        ),
        f"{PRODUCT} CheckDimValue, CheckDtype",
    ),
    HostCheck(
        "float32 scales for a float16 result, float32 or bfloat16 ones for bfloat16",
        lambda c: (
            in_blocks(c)
            or dtype_of(c.output_dtype) not in HALVES
            or c.scale.dtype == FP32
            or (dtype_of(c.output_dtype) == BF16 and c.scale.dtype == BF16)
        ),
        f"{PRODUCT} CheckDtype",
    ),
    HostCheck(
        "one scale, or one an output",
        lambda c: in_blocks(c) or (c.scale.ndim == 1 and c.scale.numel() in (1, c.x2.shape[-1])),
        f"{PRODUCT} CheckDimValue",
    ),
    HostCheck(
        "an int32 bias; beside scales of tokens also a float32 one, or one of the result's dtype",
        lambda c: (
            in_blocks(c)
            or c.bias is None
            or c.bias.dtype == torch.int32
            or (c.pertoken_scale is not None and c.bias.dtype in FLOATS)
        ),
        f"{PRODUCT} CheckDtype",
    ),
    HostCheck(
        "blocks of group_sizes [1, 1, 32], exponents [rows, pairs, 2] of x and [pairs, outputs, 2] of the weight",
        lambda c: (
            not in_blocks(c)
            or (
                c.group_sizes == [1, 1, 32]
                and c.pertoken_scale is not None
                and c.pertoken_scale.shape == (c.x1.shape[0], math.ceil(c.x1.shape[1] / 64), 2)
                and c.scale.shape == (math.ceil(c.x1.shape[1] / 64), c.x2.shape[1], 2)
            )
        ),
        f"{PRODUCT} CheckDimValueMicroScaling, CheckGroupSizeShape",
        targets=ASCEND_950,
    ),
)
