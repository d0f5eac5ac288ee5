"""Grouped matrix products and the cast of a weight to the device's own layout: sums in float32, rounded once.

Quantised factors are those of `quant_matmul`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .checks import (
    FLOATS,
    need,
    need_contiguous,
    need_default,
    need_dtype,
    need_one_dtype,
    need_rank,
    need_shape,
    need_values,
    shown,
)
from .quant_matmul import counted, float4, need_float4, need_quantized_factors, only, output, packed, quantized_product
from .registration import operator

INNER_LIMIT = 65536
"""The last axes of both factors lie below it."""

FORMATS = {2: "ND", 29: "NZ"}
"""Layouts of a weight by the number that the driver gives them."""


BF16 = 15
"""Torch's number of the dtype whose blocks float4 weights are cast to, which are packed after."""

QUANTIZED = (torch.int8, torch.float8_e4m3fn)
"""Dtypes of x with which its scales come along."""


def _grouped_like(
    x: list[Tensor], weight: list[Tensor], group_list: Any, split_item: int, group_type: Any, group_list_type: int,
    act_type: int, bias: Any, scale: Any, antiquant_scale: Any, per_token_scale: Any, output_dtype: int | None,
    scale_dtype: int | None, per_token_scale_dtype: int | None, **rest: Any,
) -> list[Tensor]:  # fmt: skip
    need_default(act_type=act_type or None, **rest)
    single = len(x) == len(weight) == 1
    need(single, f"{len(x)} tensors x and {len(weight)} tensors weight; the reference covers one of each")
    need(group_type == 0, f"group_type is {group_type}; the reference covers 0, groups of rows")
    need(split_item in (2, 3), f"split_item is {split_item}; group_type 0 takes 2 or 3, one output")
    need(group_list_type in (0, 1), f"group_list_type is {group_list_type}; expected 0 (running sums) or 1 (counts)")
    outputs, dtype = weight[0].shape[-1], x[0].dtype
    dtypes = scale_dtype, per_token_scale_dtype
    if antiquant_scale is not None:
        need_default(bias=bias, scale=scale, per_token_scale=per_token_scale, scale_dtype=scale_dtype)
        outputs, dtype = need_float4(x[0], weight[0], only(antiquant_scale, "antiquant_scale"), output_dtype)
    elif x[0].dtype in QUANTIZED:
        outputs, dtype = need_quantized_factors(x[0], weight[0], bias, scale, per_token_scale, output_dtype, dtypes)
    else:
        need_default(bias=bias, scale=scale, per_token_scale=per_token_scale, output_dtype=output_dtype)
        need_default(scale_dtype=scale_dtype, per_token_scale_dtype=per_token_scale_dtype)
        _need_factors(x[0], weight[0])
    experts = weight[0].shape[0]
    need(group_list is not None, "group_list is missing; group_type 0 needs it")
    need_dtype((torch.int64,), group_list=group_list)
    need_shape((experts,), "one entry a group", group_list=group_list)
    need(experts <= 1024, f"weight has {experts} groups; expected at most 1024")
    need(group_list_type == 0 or experts > 1, "group_list has one entry; with group_list_type 1 it takes two or more")
    return [x[0].new_empty(x[0].shape[0], outputs, dtype=dtype)]


def _need_factors(x: Tensor, weight: Tensor) -> None:
    need_dtype(FLOATS, x=x)
    need_one_dtype(x=x, weight=weight)
    need_rank(2, 2, x=x)
    need_rank(3, 3, weight=weight)
    need_contiguous(x=x)
    need(x.shape[1] == weight.shape[1], f"x is {shown(x)} and weight {shown(weight)}; inner axes differ")
    turned = not weight.is_contiguous()
    need(
        not turned or weight.mT.is_contiguous(),
        f"weight {shown(weight)} has strides {list(weight.stride())}; expected it contiguous, or a transposed view of "
        "such a tensor",
    )
    inner = max(x.shape[1], weight.shape[1 if turned else 2])
    need(inner < INNER_LIMIT, f"an inner axis is {inner}; expected less than {INNER_LIMIT}")


@operator("npu_grouped_matmul", shapes=_grouped_like)
def npu_grouped_matmul(
    x: list[Tensor], weight: list[Tensor], group_list: Tensor, group_list_type: int, bias: Any, scale: Any,
    antiquant_scale: Any, per_token_scale: Any, output_dtype: int | None, **rest: Any,
) -> list[Tensor]:  # fmt: skip
    """[rows of each group times the group's weight]. Groups follow each other in x and cover it."""
    tokens = x[0].shape[0]
    need_values(0, tokens, "rows", group_list=group_list)
    counts = counted(group_list, group_list_type, tokens)
    parts = zip(x[0].split(counts), weight[0], strict=True)
    if antiquant_scale is not None:
        numbers = float4(weight[0], antiquant_scale[0])
        products = [rows.double() @ one for rows, one in zip(x[0].split(counts), numbers, strict=True)]
        return [torch.cat(products).to(output(output_dtype))]
    if x[0].dtype not in QUANTIZED:
        return [torch.cat([(rows.float() @ one.float()).to(rows.dtype) for rows, one in parts])]
    biases = [None] * len(counts) if bias is None else bias[0]
    scales = zip(biases, scale[0], per_token_scale[0].split(counts), strict=True)
    products = [quantized_product(*factors, *own) for factors, own in zip(parts, scales, strict=True)]
    return [torch.cat(products).to(output(output_dtype))]


def _format_like(input: Tensor, acl_format: int, customize_dtype: int | None, input_dtype: int | None) -> Tensor:
    need_default(input_dtype=input_dtype)
    need(customize_dtype in (None, BF16), f"customize_dtype is number {customize_dtype}; the reference covers {BF16}")
    need(acl_format in FORMATS, f"acl_format is {acl_format}; the reference covers {FORMATS}")
    need_contiguous(input=input)
    return torch.empty_like(input)


@operator("npu_format_cast", shapes=_format_like)
def npu_format_cast(input: Tensor, acl_format: int, customize_dtype: int | None, input_dtype: int | None) -> Tensor:
    """A copy. The layout is a property of device memory, which shows in no shape and no value."""
    return input.clone()


def _packed_like(weight: Tensor, inner_k_tiles: int) -> Tensor:
    need_default(inner_k_tiles=inner_k_tiles or None)
    need_dtype((torch.float32,), weight=weight)
    need_rank(2, 3, weight=weight)
    need_contiguous(weight=weight)
    need(weight.shape[-1] % 8 == 0, f"weight is {shown(weight)}; eight of its last axis share a word")
    return weight.new_empty((*weight.shape[:-1], weight.shape[-1] // 8))


@operator("npu_convert_weight_to_int4pack", shapes=_packed_like)
def npu_convert_weight_to_int4pack(weight: Tensor, inner_k_tiles: int) -> Tensor:
    """The codes of numbers of float4, eight in the bits of a float32. Those of int32 the reference leaves out."""
    return packed(weight)
