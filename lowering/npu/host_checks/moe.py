"""Routing, and grouped products."""

from __future__ import annotations

import math
from typing import Any

import torch

from .check import ASCEND_910, ASCEND_950, OP, OT, HostCheck, enter
from .norm import FLOATS, HALVES
from .quant import BF16, FP8, FP16, FP32, dtype_of

GATING = f"{OT} v8.5.0 moe/moe_gating_top_k/op_host/moe_gating_top_k_tiling.cpp"
SOFTMAX = f"{OT} v8.5.0 moe/moe_gating_top_k_softmax_v2/op_host/moe_gating_top_k_softmax_v2_tiling_base.cpp"
ROUTING = f"{OT} v8.5.0 moe/moe_init_routing_v3/op_host"
UNPERMUTE = f"{OT} v8.5.0 moe/moe_token_unpermute/op_host"
GROUPED = f"{OT} v8.5.0 gmm/grouped_matmul/op_host"
ON_950 = f"{OT} v9.0.0 gmm/grouped_matmul/op_host/op_api/grouped_matmul_950_checker.cpp"
FOUR_BITS = f"{OT} v9.0.0 gmm/grouped_matmul/op_host/op_api/grouped_matmul_weight_quant_950_checker.cpp"
SWIGLU = f"{OT} v9.0.0 gmm/grouped_matmul_swiglu_quant_v2/op_host"

enter(
    "npu_moe_gating_top_k",
    HostCheck(
        "x of [tokens, experts], up to 2048 experts, 1 choice to as many as the kept groups have experts",
        lambda c: (
            c.x.ndim == 2 and c.x.shape[1] <= 2048 and 1 <= c.k <= c.k_group * (c.x.shape[1] // max(c.group_count, 1))
        ),
        f"{GATING} CheckInputShape, CheckAttr",
    ),
    HostCheck(
        "groups that part the experts evenly, as many kept as there are at most",
        lambda c: c.group_count > 0 and c.x.shape[1] % c.group_count == 0 and 1 <= c.k_group <= c.group_count,
        f"{GATING} CheckAttr",
    ),
    HostCheck(
        "groups of two experts or more, where the two best count",
        lambda c: c.group_select_mode != 1 or c.x.shape[1] >= 2 * c.group_count,
        f"{GATING} CheckAttr",
    ),
    HostCheck(
        "up to 2048 experts in groups filled up to 32s, where some groups are kept",
        lambda c: (
            c.group_count in (0, 1, c.x.shape[1], c.k_group)
            or c.group_count * math.ceil(c.x.shape[1] / c.group_count / 32) * 32 <= 2048
        ),
        f"{GATING} CheckAttr",
    ),
    HostCheck("renorm 0", lambda c: c.renorm == 0, f"{GATING} CheckAttr", until="9.0.0"),
    HostCheck(
        "renorm 0 or 1", lambda c: c.renorm in (0, 1), f"{OT} v9.0.0, the same", targets=ASCEND_910, since="9.0.0"
    ),
    HostCheck("norm_type 0 or 1", lambda c: c.norm_type in (0, 1), f"{GATING} CheckAttr", targets=ASCEND_910),
    HostCheck(
        "a bias of x's dtype, one number an expert",
        lambda c: c.bias is None or (c.bias.dtype == c.x.dtype and c.bias.shape == c.x.shape[1:]),
        f"{GATING} CheckInputShape",
    ),
)

enter(
    "npu_moe_gating_top_k_softmax_v2",
    HostCheck(
        "float16, bfloat16 or float32 of two or three axes",
        lambda c: c.x.dtype in FLOATS and c.x.ndim in (2, 3),
        f"{SOFTMAX} CheckInShape",
    ),
    HostCheck(
        "1 choice to as many as there are experts, up to 1024",
        lambda c: 1 <= c.k <= min(c.x.shape[-1], 1024),
        f"{SOFTMAX} CheckInShape",
    ),
    HostCheck("renorm 0 or 1", lambda c: c.renorm in (0, 1), f"{SOFTMAX} CheckOptionalAttr"),
)

enter(
    "npu_moe_init_routing_v2",
    HostCheck(
        "x of two axes, float16, bfloat16, float32, or int8 that is not quantised again",
        lambda c: c.x.ndim == 2 and (c.x.dtype in FLOATS or (c.x.dtype == torch.int8 and c.quant_mode == -1)),
        f"{ROUTING}/moe_init_routing_v3_tiling.cpp CheckDtype",
    ),
    HostCheck(
        "int32 ids of [tokens, choices]",
        lambda c: c.expert_idx.dtype == torch.int32 and c.expert_idx.ndim == 2 and len(c.expert_idx) == len(c.x),
        f"{ROUTING}/moe_init_routing_v3_tiling.cpp CheckInputShape",
    ),
    HostCheck(
        "up to 10240 experts, 5120 where their rows come as keys and values",
        lambda c: c.expert_num <= (5120 if c.expert_tokens_num_type == 2 else 10240),
        f"{ROUTING}/moe_init_routing_v3_tiling.cpp CheckAttr",
    ),
    HostCheck(
        "quant_mode -1, 0 or 1",
        lambda c: c.quant_mode in (-1, 0, 1),
        f"{ROUTING}/moe_init_routing_v3_tiling.cpp CheckAttr",
        targets=ASCEND_910,
    ),
    HostCheck(
        "expert_tokens_num_flag True",
        lambda c: c.expert_tokens_num_flag,
        f"{ROUTING}/moe_init_routing_v3_tiling_arch35.cpp CheckSetAttrs",
        targets=ASCEND_950,
    ),
)

enter(
    "npu_moe_token_unpermute",
    HostCheck(
        "rows of two axes, int32 places",
        lambda c: c.permuted_tokens.ndim == 2 and c.sorted_indices.dtype == torch.int32,
        f"{UNPERMUTE}/op_api/aclnn_moe_token_unpermute.cpp",
    ),
    HostCheck(
        "probabilities of [tokens, choices], in any float, as many as rows",
        lambda c: c.probs is None or (c.probs.dtype in FLOATS and c.probs.numel() == len(c.permuted_tokens)),
        f"{UNPERMUTE}/moe_token_unpermute_tiling.cpp",
    ),
    HostCheck(
        "up to 512 choices",
        lambda c: c.probs is None or c.probs.shape[1] <= 512,
        f"{UNPERMUTE}/moe_token_unpermute_tiling.cpp",
    ),
    HostCheck(
        "padded_mode False",
        lambda c: not c.padded_mode,
        f"{UNPERMUTE}/op_api/aclnn_moe_token_unpermute.cpp",
        targets=ASCEND_950,
    ),
)


def _kind(c: Any) -> tuple[Any, Any]:
    """The dtypes of both factors."""
    return c.x[0].dtype, c.weight[0].dtype


def _int4(c: Any) -> bool:
    return _kind(c) == (torch.int8, torch.int32)


def _float4(c: Any) -> bool:
    """Whether eight float4 are in each float32 of the weight."""
    return c.x[0].dtype in HALVES and c.weight[0].dtype == FP32 and c.antiquant_scale is not None


def _inner(c: Any) -> int:
    """The inner axis of a product."""
    return c.weight[0].shape[-2]


def _own(tensors: Any) -> Any:
    """The one tensor of a list; None without a list."""
    return tensors[0] if tensors else None


def _transposed(x: Any) -> bool:
    return x.stride(-2) == 1 and x.shape[-2] > 1


enter(
    "npu_grouped_matmul",
    HostCheck(
        "group_type -1, 0 or 2, one result of groups of rows with split_item 2 or 3",
        lambda c: c.group_type in (-1, 0, 2) and (c.group_type != 0 or c.split_item in (2, 3)),
        f"{OP} GroupedMatmulKernelNpuOpApi.cpp; {GROUPED}/op_api/aclnn_grouped_matmul.cpp CheckCaseSplitM",
    ),
    HostCheck(
        "up to 1024 int64 counts, one a weight",
        lambda c: (
            c.group_list is None
            or (c.group_list.dtype == torch.int64 and c.group_list.numel() == len(c.weight[0]) <= 1024)
        ),
        f"{GROUPED}/op_api/aclnn_grouped_matmul.cpp CheckGroupListCommonTensor",
    ),
    HostCheck(
        "inner axes of up to 65535",
        lambda c: c.x[0].shape[-1] <= 65535 and c.weight[0].shape[-1] <= 65535,
        f"{GROUPED}/op_tiling/grouped_matmul_tiling.cpp CheckMKN",
    ),
    HostCheck(
        "float16, bfloat16 or float32 factors of one dtype, or int8 by int8 or int4",
        lambda c: _kind(c) in (*((x, x) for x in FLOATS), (torch.int8, torch.int8)) or _int4(c),
        f"{GROUPED}/op_api/aclnn_grouped_matmul.cpp CheckMatmulDataType",
        targets=ASCEND_910,
    ),
    HostCheck(
        "no float32 factors",
        lambda c: FP32 not in _kind(c) or c.antiquant_scale is not None,
        f"{GROUPED}/op_api/aclnn_grouped_matmul.cpp CheckNonQuantMatmulDataType",
        targets=ASCEND_950,
        until="9.0.0",
    ),
    HostCheck(
        "int8 factors with bfloat16 scales for a bfloat16 result, float32 ones for float16",
        lambda c: (
            _kind(c) != (torch.int8, torch.int8)
            or dtype_of(c.output_dtype) not in HALVES
            or _own(c.scale).dtype == {BF16: BF16, FP16: FP32}[dtype_of(c.output_dtype)]
        ),
        f"{GROUPED}/op_api/aclnn_grouped_matmul.cpp CheckQuantParamsDtype",
        targets=ASCEND_910,
    ),
    HostCheck(
        "int8 factors with float32 scales, for a bfloat16 result perhaps bfloat16 ones",
        lambda c: (
            _kind(c) != (torch.int8, torch.int8)
            or _own(c.scale).dtype in ((FP32, BF16) if dtype_of(c.output_dtype) == BF16 else (FP32,))
        ),
        f"{ON_950} CheckInt8QuantDtype",
        targets=ASCEND_950,
    ),
    HostCheck(
        "float32 scales of int8 rows, one each",
        lambda c: (
            c.x[0].dtype != torch.int8
            or c.per_token_scale is None
            or (_own(c.per_token_scale).dtype == FP32 and _own(c.per_token_scale).shape == c.x[0].shape[:1])
        ),
        f"{GROUPED}/op_api/aclnn_grouped_matmul.cpp CheckPerTokenScale",
    ),
    HostCheck(
        "int4 weights of inputs in 64s, up to 18432, that the groups of scales part",
        lambda c: (
            not _int4(c) or (_inner(c) % 64 == 0 and _inner(c) <= 18432 and _inner(c) % _own(c.scale).shape[1] == 0)
        ),
        f"{GROUPED}/op_tiling/grouped_matmul_tiling.cpp A8W4Tiling",
        targets=ASCEND_910,
    ),
    HostCheck(
        "int4 weights with 64-bit scales [groups, groups of inputs, outputs] and a float32 bias [groups, outputs]",
        lambda c: (
            not _int4(c)
            or (
                _own(c.scale).dtype in (torch.int64, torch.uint64)
                and _own(c.scale).ndim == 3
                and c.bias is not None
                and _own(c.bias).dtype == FP32
            )
        ),
        f"{GROUPED}/op_api/aclnn_grouped_matmul.cpp CheckA8W4QuantParams",
        targets=ASCEND_910,
    ),
    HostCheck(
        "int4 weights with scales of groups of inputs beside them",
        lambda c: not _int4(c) or c.antiquant_scale is not None,
        f"{FOUR_BITS} CheckAntiQuantParams",
        targets=ASCEND_950,
    ),
    HostCheck(
        "float4 weights of inputs and outputs in 64s, with exponents [groups, blocks of 32, outputs]",
        lambda c: (
            not _float4(c)
            or (
                c.weight[0].is_contiguous()
                and _inner(c) % 64 == 0
                and 8 * c.weight[0].shape[-1] % 64 == 0
                and _own(c.antiquant_scale).dtype == torch.uint8
                and _own(c.antiquant_scale).shape == (len(c.weight[0]), _inner(c) // 32, 8 * c.weight[0].shape[-1])
            )
        ),
        f"{FOUR_BITS} CheckDimValue, CheckAntiQuantDtype, CheckGroupSize, CheckTransposeStatus",
        targets=ASCEND_950,
    ),
    HostCheck(
        "float4 weights without scales, offsets or scales of the rows, and a result of x's dtype",
        lambda c: (
            not _float4(c)
            or (
                c.scale is c.offset is c.antiquant_offset is c.per_token_scale is None
                and dtype_of(c.output_dtype) in (None, c.x[0].dtype)
            )
        ),
        f"{FOUR_BITS} CheckQuantParams, CheckYDtype",
        targets=ASCEND_950,
    ),
    HostCheck(
        "float8 factors with exponents [rows, pairs, 2] and [groups, pairs, outputs, 2], without a bias",
        lambda c: (
            _kind(c) != (FP8, FP8)
            or (
                c.bias is None
                and c.per_token_scale is not None
                and _own(c.per_token_scale).shape == (len(c.x[0]), math.ceil(_inner(c) / 64), 2)
                and _own(c.scale).shape == (len(c.weight[0]), math.ceil(_inner(c) / 64), c.weight[0].shape[-1], 2)
            )
        ),
        f"{ON_950} CheckGroupedMatmulMxfp8, CheckGroupedMatmulMxShape",
        targets=ASCEND_950,
    ),
)

enter(
    "npu_grouped_matmul_swiglu_quant_v2",
    HostCheck(
        "int8 rows",
        lambda c: c.x.dtype == torch.int8,
        f"{OT} v9.0.0 gmm/grouped_matmul_swiglu_quant_v2/op_host/op_api/aclnn_grouped_matmul_swiglu_quant_v2.cpp",
        targets=ASCEND_910,
    ),
    HostCheck(
        "int8 weights of inputs in 16s, up to 65535, and outputs in 32s, up to 10240",
        lambda c: (
            c.weight[0].dtype != torch.int8
            or (
                c.weight[0].shape[-2] % 16 == 0
                and c.weight[0].shape[-2] <= 65535
                and c.weight[0].shape[-1] % 32 == 0
                and c.weight[0].shape[-1] <= 10240
            )
        ),
        f"{SWIGLU}/op_api/gmm_dsq_base.h CheckSingleTensorListTypeA8W8, CheckInputOutShapeA8W8",
        targets=ASCEND_910,
    ),
    HostCheck(
        "one entry a weight in group_list, or fewer",
        lambda c: c.group_list.dtype == torch.int64 and c.group_list.numel() <= len(c.weight[0]),
        f"{SWIGLU}, aclnn",
        targets=ASCEND_910,
    ),
    HostCheck(
        "modes of blocks for float8 rows, a float32 product, no smoothing, bias or assistance",
        lambda c: (
            c.x.dtype != FP8
            or c.x_scale.ndim == 1
            or (
                c.dequant_mode == c.quant_mode == 2
                and dtype_of(c.dequant_dtype) == FP32
                and c.smooth_scale is c.bias is c.weight_assist_matrix is None
            )
        ),
        f"{SWIGLU}/op_tiling/arch35/grouped_matmul_swiglu_quant_v2_basic_tiling.cpp CheckDtype",
        targets=ASCEND_950,
    ),
    HostCheck(
        "one entry a weight in group_list, and outputs that have two halves",
        lambda c: c.group_list.numel() == len(c.weight[0]) and c.weight[0].shape[-1] % 2 == 0,
        f"{SWIGLU}/op_tiling/arch35/grouped_matmul_swiglu_quant_v2_basic_tiling.cpp CheckDims",
        targets=ASCEND_950,
    ),
    HostCheck(
        "exponents laid out as the weight is, transposed or not",
        lambda c: (
            c.x.dtype != FP8
            or c.weight_scale[0].ndim != 4
            or _transposed(c.weight[0]) == (not c.weight_scale[0].is_contiguous())
            or c.weight_scale[0].shape[-3] == 1
        ),
        f"{SWIGLU}/op_tiling/arch35/grouped_matmul_swiglu_quant_v2_basic_tiling.cpp",
        targets=ASCEND_950,
    ),
)

enter(
    "npu_convert_weight_to_int4pack",
    HostCheck(
        "int32 or float32 of two or three axes, the last in 8s",
        lambda c: (
            c.weight.dtype in (torch.int32, FP32)
            and c.weight.ndim in (2, 3)
            and c.weight.shape[-1] % 8 == 0
            and c.weight.is_contiguous()
        ),
        f"{OP} ConvertWeightToINT4PackKernelNpuOpApi.cpp int4pack_params_check",
    ),
    HostCheck(
        "int32",
        lambda c: c.weight.dtype == torch.int32,
        f"{OP} ConvertWeightToINT4PackKernelNpuOpApi.cpp npu_convert_weight_to_int4pack",
        targets=ASCEND_910,
    ),
)
