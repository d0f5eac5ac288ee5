"""Calls of the operators that quantise activations, and of products with quantised weights."""

from __future__ import annotations

import torch

from .calls import Bad, ints, meta

FP32, FP16, INT8, FP8, U8 = torch.float32, torch.float16, torch.int8, torch.float8_e4m3fn, torch.uint8
A5 = "ascend950"

PRODUCT = {
    "x1": meta(6, 64, dtype=INT8),
    "x2": meta(64, 32, dtype=INT8),
    "scale": meta(32, dtype=FP32),
    "pertoken_scale": meta(6, dtype=FP32),
    "output_dtype": 15,
}
IN_BLOCKS = {
    "x1": meta(6, 96, dtype=FP8),
    "x2": meta(96, 32, dtype=FP8),
    "scale": meta(2, 32, 2, dtype=U8),
    "pertoken_scale": meta(6, 2, 2, dtype=U8),
    "group_sizes": [1, 1, 32],
}

GOOD = {
    "npu_quantize": {
        "input": meta(6, 64),
        "scales": meta(64),
        "zero_points": meta(64),
        "dtype": torch.qint8,
        "axis": -1,
        "div_mode": False,
    },
    "npu_dynamic_quant": {"input": meta(6, 64), "dst_type": 1},
    "npu_dynamic_mx_quant": {"input": meta(6, 64), "dst_type": 292, "scale_alg": 0},
    "npu_dequant_swiglu_quant": {"x": meta(6, 64), "activate_left": True, "quant_mode": 1},
    "npu_quant_matmul": PRODUCT,
}
BAD = {
    "npu_quantize": [
        Bad("scales of x's dtype", {"scales": meta(64, dtype=FP32), "zero_points": None}),
        Bad("offsets of the scales", {"zero_points": meta(64, dtype=FP32)}),
        Bad(
            "x, scales and offsets of one dtype",
            {"input": meta(6, 64, dtype=FP32), "zero_points": None},
            A5,
        ),
        Bad("one scale, or one an element", {"scales": meta(32), "zero_points": meta(32)}),
    ],
    "npu_dynamic_quant": [
        Bad("float16 or bfloat16 of two axes", {"input": meta(64)}),
        Bad("smoothing scales of x's dtype", {"smooth_scales": meta(64, dtype=FP32)}),
        Bad("at most 1024 groups", {"group_index": ints(1025)}),
    ],
    "npu_dynamic_mx_quant": [
        Bad("x of 1 to 7 axes", {"input": meta(6, 16, dtype=FP32)}, A5),
        Bad("blocks in multiples of 32", {"block_size": 48}, A5),
        Bad("for float8 rounding", {"dst_type": FP8, "round_mode": "floor"}, A5),
    ],
    "npu_dequant_swiglu_quant": [
        Bad("quant_mode 0 or 1", {"quant_mode": 2}),
        Bad("without groups any multiple", {"x": meta(6, 96, dtype=torch.int32), "group_index": ints(2)}),
        Bad("of 2 to 8 axes", {"x": meta(6, 64, dtype=FP32)}, A5),
    ],
    "npu_quant_matmul": [
        Bad("int8 or int4 factors", IN_BLOCKS),
        Bad("no empty tensor", {"x1": meta(0, 64, dtype=INT8), "pertoken_scale": None}),
        Bad("float32 scales of the tokens", {"pertoken_scale": meta(6)}),
        Bad("float32 scales for a float16 result", {"scale": meta(32), "output_dtype": 5}),
        Bad("one scale, or one an output", {"scale": meta(16, dtype=FP32)}),
        Bad("an int32 bias", {"bias": meta(32), "pertoken_scale": None}),
        Bad("blocks of group_sizes", IN_BLOCKS | {"pertoken_scale": meta(6, 1, 2, dtype=U8)}, A5),
    ],
}
