"""Grouped matrix products and the cast of a weight to the device's own layout: sums in float32, rounded once."""

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
from .registration import operator

INNER_LIMIT = 65536
"""The last axes of both factors lie below it."""

FORMATS = {2: "ND", 29: "NZ"}
"""Layouts of a weight by the number that the driver gives them."""


def _grouped_like(
    x: list[Tensor], weight: list[Tensor], group_list: Any, split_item: int, group_type: Any, group_list_type: int,
    act_type: int, **rest: Any,
) -> list[Tensor]:  # fmt: skip
    need_default(act_type=act_type or None, **rest)
    single = len(x) == len(weight) == 1
    need(single, f"{len(x)} tensors x and {len(weight)} tensors weight; the reference covers one of each")
    need(group_type == 0, f"group_type is {group_type}; the reference covers 0, groups of rows")
    need(split_item in (2, 3), f"split_item is {split_item}; group_type 0 takes 2 or 3, one output")
    need(group_list_type in (0, 1), f"group_list_type is {group_list_type}; expected 0 (running sums) or 1 (counts)")
    _need_factors(x[0], weight[0])
    experts = weight[0].shape[0]
    need(group_list is not None, "group_list is missing; group_type 0 needs it")
    need_dtype((torch.int64,), group_list=group_list)
    need_shape((experts,), "one entry a group", group_list=group_list)
    need(experts <= 1024, f"weight has {experts} groups; expected at most 1024")
    need(group_list_type == 0 or experts > 1, "group_list has one entry; with group_list_type 1 it takes two or more")
    return [x[0].new_empty(x[0].shape[0], weight[0].shape[2])]


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
    x: list[Tensor], weight: list[Tensor], group_list: Tensor, group_list_type: int, **rest: Any
) -> list[Tensor]:
    """[rows of each group times the group's weight]. Groups follow each other in x and cover it."""
    tokens = x[0].shape[0]
    need_values(0, tokens, "rows", group_list=group_list)
    sums = group_list if group_list_type == 0 else group_list.cumsum(0)
    counts = sums.diff(prepend=sums.new_zeros(1))
    meaning = ("running sums", "counts")[group_list_type]
    need(
        bool((counts >= 0).all()) and int(sums[-1]) == tokens,
        f"group_list {group_list.tolist()}, {meaning}, does not cover the {tokens} rows of x",
    )
    parts = x[0].split(counts.tolist())
    products = [(rows.float() @ one.float()).to(rows.dtype) for rows, one in zip(parts, weight[0], strict=True)]
    return [torch.cat(products)]


def _format_like(input: Tensor, acl_format: int, customize_dtype: int | None, input_dtype: int | None) -> Tensor:
    need_default(customize_dtype=customize_dtype, input_dtype=input_dtype)
    need(acl_format in FORMATS, f"acl_format is {acl_format}; the reference covers {FORMATS}")
    need_contiguous(input=input)
    return torch.empty_like(input)


@operator("npu_format_cast", shapes=_format_like)
def npu_format_cast(input: Tensor, acl_format: int, customize_dtype: int | None, input_dtype: int | None) -> Tensor:
    """A copy. The layout is a property of device memory, which shows in no shape and no value."""
    return input.clone()
