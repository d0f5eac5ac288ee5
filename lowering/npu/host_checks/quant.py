"""Quantisation of activations."""

from __future__ import annotations

import torch

from .check import ONN, HostCheck, enter

V3 = "quant/ascend_quant_v2/op_host/op_api/aclnn_ascend_quant_v3.cpp CheckDtypeCompatible"

enter(
    "npu_quantize",
    HostCheck(
        "scales of x's dtype, where x is float16 or bfloat16",
        lambda c: c.div_mode or c.input.dtype == torch.float32 or c.scales.dtype == c.input.dtype,
        f"{ONN} v8.5.0 {V3}",
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
)
