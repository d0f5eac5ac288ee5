"""Products of quantised factors, one or in groups: exact in integers, float64 over the blocks of MX formats.

The scales are applied in float32, the weight's before the token's, and the result is rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .checks import OperatorError, need, need_contiguous, need_default, need_dtype, need_rank, need_shape, shown
from .quant import BIAS, BLOCK, INT8, NOT_A_NUMBER, by_block, by_token, of_blocks, pairs
from .registration import operator

E8M0 = 293
"""torch_npu's number of the dtype of exponents: Torch's own is not taken."""
DTYPES = {5: torch.float16, 15: torch.bfloat16}
"""Outputs of the references by Torch's numbers."""
FLOAT32, FLOAT8 = 6, 24
MOST = 65535
"""The last axis of each factor."""
FP8 = torch.float8_e4m3fn


def output(dtype: int | None) -> torch.dtype:
    """The dtype of an output, by its number."""
    if dtype is None:
        raise OperatorError("output_dtype is missing; without it the operator returns integers, so name it")
    need(dtype in DTYPES, f"output_dtype is number {dtype}; the reference covers float16 and bfloat16")
    return DTYPES[dtype]


def need_laid(turned: bool | None, **tensors: Tensor) -> None:
    """Each tensor is contiguous, or its last two axes are a view of a contiguous one's: as `turned` says, or either."""
    for name, x in tensors.items():
        plain, other = x.is_contiguous(), x.mT.is_contiguous()
        fits = plain or other if turned is None else other if turned else plain
        need(fits, f"{name} {shown(x)} has strides {list(x.stride())}; expected {_LAID[turned]}")


_LAID = {
    None: "it contiguous, or the transposed view of a contiguous tensor",
    True: "the transposed view of a contiguous tensor",
    False: "it contiguous",
}


def _matmul_like(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    pertoken_scale: Tensor | None,
    bias: Tensor | None,
    output_dtype: int | None,
    pertoken_scale_dtype: int | None,
    scale_dtype: int | None,
    group_sizes: list[int] | None,
    **rest: Any,
) -> Tensor:
    need_default(**rest)
    out = output(output_dtype)
    need_rank(2, 2, x1=x1, x2=x2)
    need(x1.numel() > 0 and x2.numel() > 0, f"x1 is {shown(x1)} and x2 {shown(x2)}; neither may be empty")
    need_contiguous(x1=x1)
    need(x1.shape[1] == x2.shape[0], f"x1 is {shown(x1)} and x2 {shown(x2)}; inner axes differ")
    need(max(x1.shape[1], x2.shape[1]) <= MOST, f"x1 is {shown(x1)} and x2 {shown(x2)}; last axes go to {MOST}")
    if x1.dtype == FP8:
        need_default(bias=bias)
        need(group_sizes == [1, 1, BLOCK], f"group_sizes is {group_sizes}; expected [1, 1, {BLOCK}], one scale a block")
        _need_exponents(scale_dtype, pertoken_scale_dtype)
        _need_blocks(x1, x2, scale, pertoken_scale)
    else:
        need_default(pertoken_scale_dtype=pertoken_scale_dtype, scale_dtype=scale_dtype, group_sizes=group_sizes)
        _need_int8(x1, x2, scale, pertoken_scale, bias, out)
    return x1.new_empty(x1.shape[0], x2.shape[1], dtype=out)


def _need_int8(
    x1: Tensor, x2: Tensor, scale: Tensor, pertoken_scale: Tensor | None, bias: Tensor | None, out: torch.dtype
) -> None:
    """What the documentation's table of dtypes lists for outputs of float16 and bfloat16."""
    need_dtype((torch.int8,), x1=x1, x2=x2)
    need_laid(None, x2=x2)
    need_dtype((torch.float32, torch.bfloat16) if out == torch.bfloat16 else (torch.float32,), scale=scale)
    need_shape(x2.shape[1:], "one an output", scale=scale, bias=bias)
    need_dtype((torch.float32,), pertoken_scale=pertoken_scale)
    need_shape(x1.shape[:1], "one a token", pertoken_scale=pertoken_scale)
    need_dtype((torch.int32,), bias=bias)


def _need_exponents(*dtypes: int | None) -> None:
    said = f"dtypes of the scales are numbers {list(dtypes)}; expected {E8M0} for both, torch_npu.float8_e8m0fnu"
    need(all(dtype == E8M0 for dtype in dtypes), said)


def _need_blocks(x: Tensor, weight: Tensor, scale: Tensor, token_scale: Tensor | None) -> None:
    """Exponents [*groups pairs outputs 2] and [tokens pairs 2]; weight and exponents are views of rows by output."""
    need_dtype((FP8,), x=x, weight=weight)
    need_laid(True, weight=weight)
    tokens, inputs = x.shape
    need(token_scale is not None, "the tokens' scale is missing")
    need_dtype((torch.uint8,), scale=scale, token_scale=token_scale)
    need_shape((tokens, pairs(inputs), 2), "tokens, pairs of blocks, 2", token_scale=token_scale)
    expected = (*weight.shape[:-2], pairs(inputs), weight.shape[-1], 2)
    need_shape(expected, "pairs of blocks, outputs, 2", scale=scale)
    rows = scale.transpose(-3, -2)
    said = f"scale {shown(scale)} has strides {list(scale.stride())}; expected a view of [... outputs, pairs, 2]"
    need(rows.is_contiguous() or scale.shape[-3] == 1, said)


@operator("npu_quant_matmul", shapes=_matmul_like)
def npu_quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    pertoken_scale: Tensor | None,
    bias: Tensor | None,
    output_dtype: int,
    **rest: Any,
) -> Tensor:
    """(x1 @ x2 + bias) * scale * pertoken_scale; for float8 the product of the numbers that blocks stand for."""
    out = output(output_dtype)
    if x1.dtype == FP8:
        return over_blocks(x1, x2, scale, pertoken_scale).to(out)
    total = integers(x1, x2) if bias is None else integers(x1, x2) + bias
    return scaled(total, scale, pertoken_scale).to(out)


def integers(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight, exact."""
    return (x.double() @ weight.double()).to(torch.int32)


def scaled(total: Tensor, scale: Tensor, token_scale: Tensor | None) -> Tensor:
    """Integers [tokens outputs] times the outputs' scales, then the tokens'."""
    product = total.float() * scale.float()
    return product if token_scale is None else product * token_scale[:, None]


def over_blocks(x: Tensor, weight: Tensor, scale: Tensor, token_scale: Any) -> Tensor:
    """x [tokens inputs] @ weight [inputs outputs], as the numbers that they stand for."""
    return of_blocks(x, token_scale) @ of_blocks(weight.mT, scale.transpose(0, 1)).mT


Tensors = list[Tensor] | None
"""One tensor for each weight, or none."""


def only(tensors: Tensors, name: str) -> Tensor:
    """The one tensor of a list that must have one."""
    found = tensors or []
    need(len(found) == 1, f"{name} is missing, or not one tensor")
    return found[0]


def need_quantized_factors(
    x: Tensor,
    weight: Tensor,
    bias: Tensors,
    scale: Tensors,
    per_token_scale: Tensors,
    output_dtype: int | None,
    dtypes: tuple[int | None, int | None],
) -> tuple[int, torch.dtype]:
    """Checks the factors of a quantised `npu_grouped_matmul`; the outputs, and their dtype."""
    need_rank(2, 2, x=x)
    need_rank(3, 3, weight=weight)
    need_contiguous(x=x)
    need(x.shape[1] == weight.shape[1], f"x is {shown(x)} and weight {shown(weight)}; inner axes differ")
    own, token = only(scale, "scale"), only(per_token_scale, "per_token_scale")
    out = output(output_dtype)
    if x.dtype == FP8:
        need_default(bias=bias)
        _need_exponents(*dtypes)
        _need_blocks(x, weight, own, token)
        return weight.shape[2], out
    need_dtype((torch.int8,), x=x)
    need_default(scale_dtype=dtypes[0], per_token_scale_dtype=dtypes[1])
    need_dtype((torch.float32,), per_token_scale=token)
    need_shape(x.shape[:1], "one a row", per_token_scale=token)
    if weight.dtype == torch.int32:
        return _need_int4(weight, only(bias, "bias"), own, out), out
    need_default(bias=bias)
    need_dtype((torch.int8,), weight=weight)
    need_laid(None, weight=weight)
    # The table pairs them so: there is no bfloat16 output with a float32 scale.
    need_dtype((torch.bfloat16 if out == torch.bfloat16 else torch.float32,), scale=own)
    need_shape((weight.shape[0], weight.shape[2]), "groups, outputs", scale=own)
    return weight.shape[2], out


def _need_int4(weight: Tensor, bias: Tensor, scale: Tensor, out: torch.dtype) -> int:
    """Eight int4 outputs in an int32; the number of outputs."""
    groups, _, words = weight.shape
    need(out == torch.bfloat16, "output_dtype is float16; int4 weights are in use with bfloat16 alone")
    need_laid(False, weight=weight)
    need_dtype((torch.int64,), scale=scale)
    need_shape((groups, 1, 8 * words), "groups, 1, outputs", scale=scale)
    # 8 times the sum of each output's weights, which the product leaves out.
    need_dtype((torch.float32,), bias=bias)
    need_shape((groups, 8 * words), "groups, outputs", bias=bias)
    return 8 * words


def need_float4(x: Tensor, weight: Tensor, scale: Tensor, output_dtype: int | None) -> tuple[int, torch.dtype]:
    """Checks 16-bit rows beside float4 weights, eight outputs in a float32; the outputs, and their dtype."""
    need_dtype(DTYPES.values(), x=x)
    need_dtype((torch.float32,), weight=weight)
    need_dtype((torch.uint8,), antiquant_scale=scale)
    need_rank(2, 2, x=x)
    need_rank(3, 3, weight=weight)
    need_contiguous(x=x, weight=weight, antiquant_scale=scale)
    groups, inputs, words = weight.shape
    need(x.shape[1] == inputs, f"x is {shown(x)} and weight {shown(weight)}; inner axes differ")
    need_shape((groups, inputs // BLOCK, 8 * words), "groups, blocks, outputs", antiquant_scale=scale)
    out = output(output_dtype)
    need(out == x.dtype, f"output_dtype is {out} for rows of {x.dtype}; both must be the same")
    return 8 * words, out


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Numbers of the codes 0 to 7; eight more are their negatives."""


def packed(numbers: Tensor) -> Tensor:
    """Eight numbers of float4 in the bits of a float32, the first in the lowest."""
    code = torch.searchsorted(torch.tensor(E2M1), numbers.abs()) + 8 * numbers.signbit()
    words = (code.unflatten(-1, (-1, 8)) << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(words < 2**31, words, words - 2**32).int().view(torch.float32)


def float4(words: Tensor, scale: Tensor) -> Tensor:
    """Numbers in float64 [groups inputs outputs] of packed codes [groups inputs outputs/8] and their exponents."""
    codes = nibbles(words.view(torch.int32)).long() & 15
    power = torch.exp2(scale.double() - BIAS).masked_fill(scale == NOT_A_NUMBER, torch.nan)
    table = torch.tensor([*E2M1, *(-number for number in E2M1)], dtype=torch.float64)
    return table[codes] * power.repeat_interleave(BLOCK, 1)


def quantized_product(x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor, token_scale: Tensor) -> Tensor:
    """One group of `npu_grouped_matmul`: its rows, its weight [inputs outputs], its scales."""
    if x.dtype == FP8:
        return over_blocks(x, weight, scale, token_scale)
    if bias is None:
        return scaled(integers(x, weight), scale, token_scale)
    # Rows reach the product of int4 by int4 in halves, of which the lower is made signed by taking 8 from it.
    total = integers(x.int() - 8, nibbles(weight))
    factor = scale.flatten().to(torch.int32).view(torch.float32)
    return (total.float() * factor + bias) * token_scale[:, None]


def nibbles(words: Tensor) -> Tensor:
    """The eight int4 numbers of each int32, the lowest bits first: [inputs outputs]."""
    each = [(words << (28 - 4 * at)) >> 28 for at in range(8)]
    return torch.stack(each, -1).flatten(-2)


def _swiglu_quant_like(
    x: Tensor, weight: list[Tensor], weight_scale: list[Tensor], x_scale: Tensor, group_list: Tensor,
    dequant_mode: int, dequant_dtype: int, quant_mode: int, quant_dtype: int, group_list_type: int,
    weight_scale_dtype: int | None, x_scale_dtype: int | None, **rest: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    need_default(**rest)
    need(len(weight) == len(weight_scale) == 1, "the reference covers one tensor of weights and one of their scales")
    mode, dtype = (0, INT8) if x.dtype == torch.int8 else (2, FLOAT8)
    modes = f"modes are {dequant_mode} and {quant_mode}; the reference covers {mode} for {x.dtype}"
    need(dequant_mode == quant_mode == mode, modes)
    need(dequant_dtype == FLOAT32, f"dequant_dtype is number {dequant_dtype}; expected float32 ({FLOAT32})")
    need(quant_dtype == dtype, f"quant_dtype is number {quant_dtype}; the reference covers that of x, {dtype}")
    need(group_list_type in (0, 1), f"group_list_type is {group_list_type}; expected 0 (running sums) or 1 (counts)")
    need_rank(2, 2, x=x)
    need_rank(3, 3, weight=weight[0])
    need_contiguous(x=x)
    need(x.shape[1] == weight[0].shape[1], f"x is {shown(x)} and weight {shown(weight[0])}; inner axes differ")
    need_dtype((torch.int64,), group_list=group_list)
    need_shape(weight[0].shape[:1], "one entry a group", group_list=group_list)
    tokens, inner = x.shape[0], weight[0].shape[2] // 2
    if x.dtype == torch.int8:
        need_default(weight_scale_dtype=weight_scale_dtype, x_scale_dtype=x_scale_dtype)
        _need_int8_groups(x, weight[0], weight_scale[0], x_scale)
        return x.new_empty(tokens, inner), x.new_empty(tokens, dtype=torch.float32)
    _need_exponents(weight_scale_dtype, x_scale_dtype)
    _need_blocks(x, weight[0], weight_scale[0], x_scale)
    need(inner % (2 * BLOCK) == 0, f"weight {shown(weight[0])} has {2 * inner} outputs; expected halves of 64s")
    return x.new_empty(tokens, inner), x.new_empty(tokens, pairs(inner), 2, dtype=torch.uint8)


def _need_int8_groups(x: Tensor, weight: Tensor, scale: Tensor, token_scale: Tensor) -> None:
    """Weights are contiguous, for they must be blocked; scales [groups outputs] and [tokens]."""
    need_dtype((torch.int8,), weight=weight)
    need_laid(False, weight=weight)
    need_dtype((torch.float32, torch.bfloat16, torch.float16), scale=scale)
    need_shape((weight.shape[0], weight.shape[2]), "groups, outputs", scale=scale)
    need_dtype((torch.float32,), token_scale=token_scale)
    need_shape(x.shape[:1], "one a row", token_scale=token_scale)


@operator("npu_grouped_matmul_swiglu_quant_v2", shapes=_swiglu_quant_like)
def npu_grouped_matmul_swiglu_quant_v2(
    x: Tensor,
    weight: list[Tensor],
    weight_scale: list[Tensor],
    x_scale: Tensor,
    group_list: Tensor,
    group_list_type: int,
    **rest: Any,
) -> tuple[Tensor, Tensor]:
    """a * sigmoid(a) * b, where a and b are the halves of each group's product, quantised as x is.

    To (float8 e4m3, exponents in pairs) or (int8, the scale of each row); the product is rounded to float32.
    """
    counts = counted(group_list, group_list_type, x.shape[0])
    groups = zip(x.split(counts), weight[0], weight_scale[0], x_scale.split(counts), strict=True)
    products = [quantized_product(rows, one, None, *scales) for rows, one, *scales in groups]
    a, b = torch.cat(products).float().chunk(2, -1)
    return (by_token if x.dtype == torch.int8 else by_block)(a * a.sigmoid() * b)


def counted(group_list: Tensor, group_list_type: int, rows: int) -> list[int]:
    """Rows of each group, from running sums (0) or counts (1), which must cover all `rows`."""
    sums = group_list if group_list_type == 0 else group_list.cumsum(0)
    counts = sums.diff(prepend=sums.new_zeros(1))
    meaning = ("running sums", "counts")[group_list_type]
    need(
        bool((counts >= 0).all()) and int(sums[-1]) == rows,
        f"group_list {group_list.tolist()}, {meaning}, does not cover the {rows} rows of x",
    )
    return counts.tolist()
