"""Calls of routing and of grouped products."""

from __future__ import annotations

import torch
from torch import Tensor

from .calls import Bad, ints, meta

FP32, FP16, INT8, FP8, U8 = torch.float32, torch.float16, torch.int8, torch.float8_e4m3fn, torch.uint8
INT32, INT64 = torch.int32, torch.int64
A5 = "ascend950"


def of_int8(k: int = 64, n: int = 32, scale: torch.dtype = torch.bfloat16) -> dict[str, list[Tensor]]:
    """Factors of an int8 product."""
    return {
        "x": [meta(6, k, dtype=INT8)],
        "weight": [meta(4, k, n, dtype=INT8)],
        "scale": [meta(4, n, dtype=scale)],
        "per_token_scale": [meta(6, dtype=FP32)],
    }


def of_int4(k: int = 64) -> dict[str, list[Tensor]]:
    """Factors of a product with int4 weights."""
    return of_int8(k) | {
        "weight": [ints(4, k, 4)],
        "scale": [meta(4, 1, 32, dtype=INT64)],
        "bias": [meta(4, 32, dtype=FP32)],
    }


def of_blocks() -> dict[str, list[Tensor]]:
    """Factors in blocks, with exponents."""
    return {
        "x": [meta(6, 96, dtype=FP8)],
        "weight": [meta(4, 32, 96, dtype=FP8).mT],
        "scale": [meta(4, 32, 2, 2, dtype=U8).transpose(1, 2)],
        "per_token_scale": [meta(6, 2, 2, dtype=U8)],
    }


def of_float4(k: int = 64) -> dict[str, list[Tensor]]:
    """Factors of a product with float4 weights."""
    return {
        "x": [meta(6, k)],
        "weight": [meta(4, k, 8, dtype=FP32)],
        "antiquant_scale": [meta(4, k // 32, 64, dtype=U8)],
    }


GROUPS = {"group_list": meta(4, dtype=INT64), "group_list_type": 1}
MX = {
    "x": meta(6, 64, dtype=FP8),
    "weight": [meta(4, 128, 64, dtype=FP8).mT],
    "x_scale": meta(6, 1, 2, dtype=U8),
    "weight_scale": [meta(4, 128, 1, 2, dtype=U8).transpose(1, 2)],
    "dequant_mode": 2,
    "quant_mode": 2,
}

GOOD = {
    "npu_moe_gating_top_k": {
        "x": meta(6, 64),
        "k": 4,
        "bias": meta(64),
        "k_group": 2,
        "group_count": 8,
        "group_select_mode": 1,
        "norm_type": 1,
    },
    "npu_moe_gating_top_k_softmax_v2": {"x": meta(6, 64), "k": 4, "renorm": 1},
    "npu_moe_init_routing_v2": {
        "x": meta(6, 64),
        "expert_idx": ints(6, 2),
        "expert_num": 8,
        "expert_tokens_num_flag": True,
        "expert_tokens_num_type": 1,
        "active_expert_range": [0, 8],
    },
    "npu_moe_token_unpermute": {
        "permuted_tokens": meta(12, 64),
        "sorted_indices": ints(12),
        "probs": meta(6, 2, dtype=FP32),
    },
    "npu_grouped_matmul": {
        "x": [meta(6, 64)],
        "weight": [meta(4, 64, 32)],
        "split_item": 2,
        "group_type": 0,
        "output_dtype": 15,
        **GROUPS,
    },
    "npu_convert_weight_to_int4pack": {"weight": ints(4, 64, 32)},
    "npu_grouped_matmul_swiglu_quant_v2": {
        "x": meta(6, 64, dtype=INT8),
        "weight": [meta(4, 64, 32, dtype=INT8)],
        "weight_scale": [meta(4, 32, dtype=FP32)],
        "x_scale": meta(6, dtype=FP32),
        **GROUPS,
    },
}
BAD = {
    "npu_moe_gating_top_k": [
        Bad("x of [tokens, experts]", {"k": 17}),
        Bad("groups that part the experts", {"group_count": 7}),
        Bad("groups of two experts", {"group_count": 64, "k_group": 8}),
        Bad("groups filled up to 32s", {"x": meta(6, 512), "bias": None, "group_count": 128}),
        Bad("renorm 0", {"renorm": 1}, cann="8.5.0"),
        Bad("renorm 0 or 1", {"renorm": 2}),
        Bad("norm_type 0 or 1", {"norm_type": 2}),
        Bad("a bias of x's dtype", {"bias": meta(64, dtype=FP32)}),
    ],
    "npu_moe_gating_top_k_softmax_v2": [
        Bad("of two or three axes", {"x": meta(64)}),
        Bad("1 choice to as many", {"k": 65}),
        Bad("renorm 0 or 1", {"renorm": 2}),
    ],
    "npu_moe_init_routing_v2": [
        Bad("int8 that is not quantised again", {"x": meta(6, 64, dtype=INT8), "quant_mode": 1}),
        Bad("int32 ids", {"expert_idx": ints(6, 2, dtype=INT64)}),
        Bad("up to 10240 experts", {"expert_num": 5121, "expert_tokens_num_type": 2}),
        Bad("quant_mode -1, 0 or 1", {"quant_mode": 2}),
        Bad("expert_tokens_num_flag True", {"expert_tokens_num_flag": False}, A5),
    ],
    "npu_moe_token_unpermute": [
        Bad("int32 places", {"sorted_indices": ints(12, dtype=INT64)}),
        Bad("probabilities of [tokens, choices]", {"probs": meta(5, 2)}),
        Bad("up to 512 choices", {"permuted_tokens": meta(513, 64), "probs": meta(1, 513)}),
        Bad("padded_mode False", {"padded_mode": True}, A5),
    ],
    "npu_grouped_matmul": [
        Bad("group_type -1, 0 or 2", {"split_item": 0}),
        Bad("int64 counts, one a weight", {"group_list": ints(4)}),
        Bad("inner axes of up to 65535", {"x": [meta(6, 1)], "weight": [meta(4, 1, 65536)]}),
        Bad("factors of one dtype", {"weight": [meta(4, 64, 32, dtype=FP16)]}),
        Bad(
            "no float32 factors", {"x": [meta(6, 64, dtype=FP32)], "weight": [meta(4, 64, 32, dtype=FP32)]}, A5, "8.5.0"
        ),
        Bad("int8 factors with bfloat16 scales", of_int8(scale=FP32)),
        Bad("int8 factors with float32 scales", of_int8() | {"output_dtype": 5}, A5),
        Bad("float32 scales of int8 rows", of_int8() | {"per_token_scale": [meta(6)]}),
        Bad("int4 weights of inputs in 64s", of_int4(96)),
        Bad("int4 weights with 64-bit scales", of_int4() | {"bias": None}),
        Bad("int4 weights with scales of groups", of_int4(), A5),
        Bad("float4 weights of inputs and outputs in 64s", of_float4(96), A5),
        Bad("float4 weights without scales", of_float4() | {"per_token_scale": [meta(6, dtype=FP32)]}, A5),
        Bad("float8 factors with exponents", of_blocks() | {"bias": [meta(4, 32)]}, A5),
    ],
    "npu_convert_weight_to_int4pack": [
        Bad("the last in 8s", {"weight": ints(4, 64, 36)}),
        Bad("int32", {"weight": meta(4, 64, 32, dtype=FP32)}),
    ],
    "npu_grouped_matmul_swiglu_quant_v2": [
        Bad("int8 rows", MX),
        Bad("int8 weights of inputs in 16s", {"weight": [meta(4, 64, 16, dtype=INT8)]}),
        Bad("one entry a weight in group_list, or fewer", {"group_list": meta(5, dtype=INT64)}),
        Bad("modes of blocks", MX | {"quant_mode": 0}, A5),
        Bad("outputs that have two halves", MX | {"group_list": meta(3, dtype=INT64)}, A5),
        Bad(
            "exponents laid out as the weight is",
            MX
            | {"weight": [meta(4, 64, 128, dtype=FP8)]}
            | {"weight_scale": [meta(4, 128, 2, 2, dtype=U8).transpose(1, 2)]},
            A5,
        ),
    ],
}
