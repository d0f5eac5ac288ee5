"""Experts with quantised weights: rows sorted by expert and quantised, two grouped products with a SwiGLU between them.

Rows are int8 by token, and weights int8, on Ascend 910 also int4; one operator does the SwiGLU and the second
quantisation, with prepared int8 weights on 910 the first product too, or two where it has caps or that operator is not
vouched for. On 950 both may be float8 with an exponent
for every 32 inputs, and one operator does the first product, the SwiGLU and the second quantisation; or weights alone
are float4, beside rows as they are. Weights are prepared in the device's blocked format where they fill blocks. Plain
ones are read through views, but for those of 4 bits, which are laid out anew at each call: float4 through the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from params.quant.values import Int4Weight, Int8Weight, MXFP4Weight, MXFP8Weight, MXWeight, e2m1_values
from params.tree import tree

from ..ops.mlp import Caps
from ..ops.moe import experts
from ..weights import PreparedWeight
from .features import npu
from .kernel import HALVES, above, empty, fused, machine, wrong_dtype
from .mlp import activated
from .moe import BY_TOKEN, COUNTS, MOST_CHOICES, MOST_EXPERTS, NZ, ONE_OUTPUT, ROWS_OF_X, UNQUANTIZED, routed
from .quant_linear import EXPONENT, MOST, blocked, by_block, fills_blocks, in_pairs, turned

INTEGERS, APART = "npu_grouped_experts_int", "npu_grouped_experts_int_apart"
BLOCKS, FOUR_BITS = "npu_grouped_experts_mx", "npu_grouped_experts_mx4"
SUMS = 0
"""Group sizes are given as running sums."""
IN_BLOCKS = 2
"""Number of the mode with an exponent for every 32 values."""
FLOAT4_TARGETS = ("ascend950",)
"""Targets whose products take float4 weights."""
PAIR = 64
"""Inputs of two exponents, which lie together."""
MOST_INT4 = 18432
"""Inputs of a product with int4 weights, which come in 64s."""
ASCEND_910 = ("ascend910b", "ascend910_93")
"""Targets whose products take int4 weights with one scale an output; 950 wants scales of groups of inputs."""
MOST_OUTPUTS = 10240
"""Outputs of the operator that multiplies int8 rows, activates and quantises anew."""


@tree
class Int8Experts(PreparedWeight):
    """An `Int8Weight` [experts inputs outputs], in blocked format where it fills blocks; scales [experts outputs].

    `rounded` are the scales that a product with a bfloat16 result takes.
    """

    kernels = (INTEGERS, APART)

    weight: Tensor
    scale: Tensor
    rounded: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Experts, outputs, inputs."""
        return tuple(self.weight.mT.shape)

    def plain(self) -> Any:
        """The weights as they were."""
        return Int8Weight(self.weight.mT, self.scale[..., None])

    def factors(self, dtype: torch.dtype) -> dict[str, list[Tensor]]:
        """What the grouped product takes beside the weight, for a result of `dtype`."""
        return {"scale": [self.rounded if dtype == torch.bfloat16 else self.scale]}


@tree
class Int4Experts(PreparedWeight):
    """An `Int4Weight`, eight outputs in an int32 [experts inputs outputs/8]; in blocked format where it fills blocks.

    `scale` [experts 1 outputs] are int64 with the bits of float32. `correction` [experts outputs] is what the product
    leaves out and adds as a bias: it takes int8 apart into two int4, the lower one less 8.
    """

    kernels = (INTEGERS, APART)

    weight: Tensor
    scale: Tensor
    correction: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Experts, outputs, inputs."""
        count, inputs, words = self.weight.shape
        return count, 8 * words, inputs

    def plain(self) -> Any:
        """The weights as they were, but for the partial sums of the correction."""
        scale = self.scale.to(torch.int32).view(torch.float32).mT
        return Int4Weight(self.weight.view(torch.int8).mT.contiguous(), scale, self.correction[..., None])

    def factors(self, dtype: torch.dtype) -> dict[str, list[Tensor]]:
        """What the grouped product takes beside the weight."""
        return {"scale": [self.scale], "bias": [self.correction]}


@tree
class MXFP8Experts(PreparedWeight):
    """An `MXFP8Weight` [experts outputs inputs] in blocked format, and its exponents [experts outputs pairs 2]."""

    kernels = (BLOCKS,)

    weight: Tensor
    pairs: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Experts, outputs, inputs."""
        return tuple(self.weight.shape)

    def plain(self) -> Any:
        """The weights as they were."""
        return MXFP8Weight(self.weight, self.pairs.flatten(-2))

    def factors(self) -> tuple[list[Tensor], list[Tensor]]:
        """The weight and its exponents as views by inputs, which products tell by their strides."""
        return [self.weight.mT], [turned(self.pairs)]


@tree
class MXFP4Experts(PreparedWeight):
    """An `MXFP4Weight` in blocked format, eight outputs in a float32 [experts inputs outputs/8].

    `scale` are its exponents [experts blocks outputs].
    """

    kernels = (FOUR_BITS,)

    weight: Tensor
    scale: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Experts, outputs, inputs."""
        count, inputs, words = self.weight.shape
        return count, 8 * words, inputs

    def plain(self) -> Any:
        """The weights as they were."""
        low, high = (codes.mT for codes in _codes(self.weight).unflatten(1, (-1, 2)).unbind(2))
        return MXFP4Weight((low | high << 4).contiguous(), self.scale.mT.contiguous())


def _codes(words: Tensor) -> Tensor:
    """The eight codes of 4 bits in each word, the lowest bits first: [experts inputs outputs]."""
    whole = words.view(torch.int32)
    return torch.stack([whole >> 4 * at & 15 for at in range(8)], -1).flatten(-2).to(torch.uint8)


def _prepare(weight: Int8Weight | Int4Weight) -> Int8Experts | Int4Experts | None:
    _, outputs, inputs = weight.shape
    if _wrong_integers(weight) is not None:
        return None
    if isinstance(weight, Int4Weight):
        # Blocks are of bytes here, two outputs in each.
        return _int4(weight, blocked if fills_blocks(inputs, outputs // 2) else _turned)
    return replace(_int8(weight), weight=blocked(weight.values)) if fills_blocks(inputs, outputs) else None


def _laid(weight: Any) -> Any:
    """A prepared weight, or the plain one by inputs."""
    if isinstance(weight, PreparedWeight):
        return weight
    return _int8(weight) if isinstance(weight, Int8Weight) else _int4(weight, _turned)


def _turned(values: Tensor) -> Tensor:
    return values.mT.contiguous()


def _int8(weight: Int8Weight) -> Int8Experts:
    scale = weight.scale[..., 0]
    return Int8Experts(weight.values.mT, scale, scale.bfloat16())


def _int4(weight: Int4Weight, by_inputs: Callable[[Tensor], Tensor]) -> Int4Experts:
    words = by_inputs(weight.packed).view(torch.int32)
    scale = weight.scale.mT.contiguous().view(torch.int32).long()
    return Int4Experts(words, scale, weight.correction.sum(-1))


def _prepare_blocks(weight: MXFP8Weight) -> MXFP8Experts | None:
    if _wrong_blocks(weight) is not None:
        return None
    made = _blocks(weight)
    # Older products of blocks take no blocked weights.
    takes = machine(weight.values).has_cann("9.1.0.pre")
    return replace(made, weight=npu.npu_format_cast(made.weight.detach(), NZ)) if takes else made


def _prepare_four(weight: MXFP4Weight) -> MXFP4Experts | None:
    return _four(weight) if _wrong_blocks(weight) is None else None


def _four(weight: Any) -> MXFP4Experts:
    """A prepared weight, or a plain one laid out: numbers of float32 in the blocks of 16 bits, then packed."""
    if isinstance(weight, MXFP4Experts):
        return weight
    numbers = e2m1_values(weight.packed.detach()).mT.contiguous()
    words = npu.npu_convert_weight_to_int4pack(npu.npu_format_cast(numbers, NZ, customize_dtype=torch.bfloat16))
    return MXFP4Experts(words, weight.scale.mT.contiguous())


def _blocks(weight: Any) -> MXFP8Experts:
    """A prepared weight, or a plain one with its exponents in pairs."""
    prepared = isinstance(weight, MXFP8Experts)
    return weight if prepared else MXFP8Experts(weight.values, in_pairs(weight.scale))


def _wrong_integers(weight: Any) -> str | None:
    """A sentence about a weight that grouped products do not take."""
    if isinstance(weight, Int8Weight) and weight.scale.shape[-1] != 1:
        return f"takes one scale an output; this weight has {weight.scale.shape[-1]}, for groups of inputs"
    if isinstance(weight, Int4Weight) and weight.second_scale is not None:
        return f"takes one scale an output; this weight has {weight.second_scale.shape[-1]}, for groups of inputs"
    return _wrong_int4(weight) if isinstance(weight, (Int4Weight, Int4Experts)) else None


def _wrong_int4(weight: Any) -> str | None:
    target, (_, outputs, inputs) = machine(weight.scale), weight.shape
    if target.name not in ASCEND_910:
        return f"takes int4 weights on {' and '.join(ASCEND_910)}; the target is {target.name}"
    if outputs % 8:
        return f"takes int4 weights with outputs in 8s; this one has {outputs}"
    if inputs % 64 or inputs > MOST_INT4:
        return f"takes int4 weights with inputs in 64s, up to {MOST_INT4}; this one has {inputs}"
    return None


def _wrong_blocks(weight: Any) -> str | None:
    outputs, inputs = weight.shape[1:]
    if isinstance(weight, MXWeight) and any(weight.padding):
        return f"takes weights without padding; this one has {weight.padding}"
    if inputs % PAIR or outputs % PAIR:
        return f"takes weights with inputs and outputs in 64s; this one has {inputs} and {outputs}"
    return None


def _refuse(kinds: tuple[type, ...], x: Tensor, weights: Tensor, ids: Tensor, gate_up: Any, down: Any) -> str | None:
    """A sentence about what all grouped products with quantised weights leave out."""
    for name, weight in (("gate_up", gate_up), ("down", down)):
        if not isinstance(weight, kinds):
            return f"takes {' and '.join(kind.__name__ for kind in kinds)}; {name} is a {type(weight).__name__}"
    count, twice_inner, hidden = gate_up.shape
    if x.shape[1] != hidden:
        return f"takes x of {hidden} inputs, as the weight has; this one has {x.shape[1]}"
    if not 2 <= count <= MOST_EXPERTS:
        return f"takes 2 to {MOST_EXPERTS} experts; this call has {count}"
    return (
        wrong_dtype(HALVES, x=x, weights=weights)
        or empty(x=x)
        or above(MOST, hidden=hidden, twice_inner=twice_inner)
        or above(MOST_CHOICES, choices=ids.shape[1])
    )


def _refuse_integers(x, weights, ids, gate_up, down, *, caps=None) -> str | None:
    wrong = _refuse_apart(x, weights, ids, gate_up, down, caps=caps)
    return wrong or (f"has no caps; this call has {caps} (SiTU)" if caps is not None else None)


def _refuse_apart(x, weights, ids, gate_up, down, *, caps=None) -> str | None:
    wrong = _refuse((Int8Weight, Int4Weight, Int8Experts, Int4Experts), x, weights, ids, gate_up, down)
    wrong = wrong or _wrong_integers(gate_up) or _wrong_integers(down)
    int4 = any(isinstance(weight, (Int4Weight, Int4Experts)) for weight in (gate_up, down))
    return wrong or (wrong_dtype((torch.bfloat16,), x=x) if int4 else None)


def _refuse_blocks(x, weights, ids, gate_up, down, *, caps=None) -> str | None:
    wrong = _refuse((MXFP8Weight, MXFP8Experts), x, weights, ids, gate_up, down)
    return wrong or _wrong_blocks(gate_up) or _wrong_blocks(down)


def _refuse_four(x, weights, ids, gate_up, down, *, caps=None) -> str | None:
    wrong = _refuse((MXFP4Weight, MXFP4Experts), x, weights, ids, gate_up, down)
    return wrong or _wrong_blocks(gate_up) or _wrong_blocks(down)


@fused(
    experts, INTEGERS, "npu_moe_init_routing_v2", "npu_grouped_matmul_swiglu_quant_v2", "npu_grouped_matmul",
    "npu_dequant_swiglu_quant", "npu_moe_token_unpermute", "npu_format_cast",
    refuse=_refuse_integers, prepare=_prepare, weights=(Int8Weight, Int4Weight),
)  # fmt: skip
def _integers(x, weights, ids, gate_up, down, *, caps=None):
    return _by_token(x, weights, ids, _laid(gate_up), _laid(down), _in_one if _fits_one(gate_up) else _in_two)


@fused(
    experts,
    APART,
    "npu_moe_init_routing_v2",
    "npu_grouped_matmul",
    "npu_swiglu",
    "npu_dynamic_quant",
    "npu_moe_token_unpermute",
    "npu_format_cast",
    refuse=_refuse_apart,
    prepare=_prepare,
    weights=(Int8Weight, Int4Weight),
)
def _integers_apart(x, weights, ids, gate_up, down, *, caps=None):
    def inner(*product: Any) -> tuple[Tensor, Tensor]:
        return npu.npu_dynamic_quant(activated(_product(*product), caps), dst_type=torch.int8)

    return _by_token(x, weights, ids, _laid(gate_up), _laid(down), inner)


def _by_token(
    x: Tensor, weights: Tensor, ids: Tensor, up: Any, back: Any, inner: Callable[..., tuple[Tensor, Tensor]]
) -> Tensor:
    """The experts' sum; `inner` gives the SwiGLU of the first product as int8 rows, and their scales."""
    rows, places, sizes, scale = routed(x, ids, up.shape[0], quant_mode=BY_TOKEN)
    between = inner(rows, scale, up, sizes, x.dtype)
    return npu.npu_moe_token_unpermute(_product(*between, back, sizes, x.dtype), places, probs=weights)


def _fits_one(gate_up: Any) -> bool:
    """Whether one operator does the first product too: with int8 weights in blocked format, on 910 from 9.0.0 on."""
    target = machine(gate_up.scale)
    there = target.name in ASCEND_910 and target.has_cann("9.0.0")
    return there and isinstance(gate_up, Int8Experts) and gate_up.shape[1] <= MOST_OUTPUTS


def _in_one(
    rows: Tensor, token_scale: Tensor, weight: Int8Experts, sizes: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The SwiGLU of each expert's int8 rows times its weight, quantised by token; nothing is rounded to `dtype`."""
    # 910 takes the defaults alone for the modes and dtypes: int8 by token, and float32 between.
    sums, scale = sizes.cumsum(0), [weight.scale]
    return npu.npu_grouped_matmul_swiglu_quant_v2(rows, [weight.weight], scale, token_scale, sums, group_list_type=SUMS)


def _in_two(*product: Any) -> tuple[Tensor, Tensor]:
    return npu.npu_dequant_swiglu_quant(_product(*product), activate_left=True, quant_mode=1)


def _product(
    rows: Tensor, token_scale: Tensor, weight: Int8Experts | Int4Experts, sizes: Tensor, dtype: torch.dtype
) -> Tensor:
    """Each expert's int8 rows times its weight, and all scales."""
    return npu.npu_grouped_matmul(
        [rows],
        [weight.weight],
        per_token_scale=[token_scale],
        group_list=sizes,
        group_list_type=COUNTS,
        group_type=ROWS_OF_X,
        split_item=ONE_OUTPUT,
        output_dtype=dtype,
        **weight.factors(dtype),
    )[0]


@fused(
    experts, BLOCKS, "npu_moe_init_routing_v2", "npu_dynamic_mx_quant", "npu_grouped_matmul_swiglu_quant_v2",
    "npu_grouped_matmul", "npu_moe_token_unpermute", "npu_format_cast",
    refuse=_refuse_blocks, prepare=_prepare_blocks, weights=(MXFP8Weight,),
)  # fmt: skip
def _in_blocks(x, weights, ids, gate_up, down, *, caps=None):
    rows, places, sizes, _ = routed(x, ids, gate_up.shape[0], quant_mode=UNQUANTIZED)
    up, back, both = _blocks(gate_up), _blocks(down), by_block(rows)
    inner = _activated_blocks(*both, up, sizes) if caps is None else _capped_blocks(*both, up, sizes, caps, x.dtype)
    return npu.npu_moe_token_unpermute(_block_product(*inner, back, sizes, x.dtype), places, probs=weights)


def _activated_blocks(rows: Tensor, row_scale: Tensor, weight: MXFP8Experts, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """The SwiGLU of each expert's rows times its weight, as float8 rows and their exponents, in one operator."""
    values, exponents = weight.factors()
    return npu.npu_grouped_matmul_swiglu_quant_v2(
        rows, values, exponents, row_scale, sizes.cumsum(0), dequant_mode=IN_BLOCKS, dequant_dtype=torch.float32,
        quant_mode=IN_BLOCKS, quant_dtype=torch.float8_e4m3fn, group_list_type=SUMS, weight_scale_dtype=EXPONENT,
        x_scale_dtype=EXPONENT,
    )  # fmt: skip


def _capped_blocks(
    rows: Tensor, row_scale: Tensor, weight: MXFP8Experts, sizes: Tensor, caps: Caps, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The same of a SwiGLU with caps, which is not among the operator's."""
    return by_block(activated(_block_product(rows, row_scale, weight, sizes, dtype), caps))


def _block_product(rows: Tensor, row_scale: Tensor, weight: MXFP8Experts, sizes: Tensor, dtype: torch.dtype) -> Tensor:
    """Each expert's float8 rows times its weight, and all exponents."""
    values, exponents = weight.factors()
    return npu.npu_grouped_matmul(
        [rows], values, scale=exponents, per_token_scale=[row_scale], group_list=sizes, group_list_type=COUNTS,
        group_type=ROWS_OF_X, split_item=ONE_OUTPUT, output_dtype=dtype, scale_dtype=EXPONENT,
        per_token_scale_dtype=EXPONENT,
    )[0]  # fmt: skip


@fused(
    experts,
    FOUR_BITS,
    "npu_moe_init_routing_v2",
    "npu_grouped_matmul",
    "npu_swiglu",
    "npu_moe_token_unpermute",
    "npu_format_cast",
    "npu_convert_weight_to_int4pack",
    only=FLOAT4_TARGETS,
    refuse=_refuse_four,
    prepare=_prepare_four,
    weights=(MXFP4Weight,),
)
def _in_four_bits(x, weights, ids, gate_up, down, *, caps=None):
    rows, places, sizes, _ = routed(x, ids, gate_up.shape[0], quant_mode=UNQUANTIZED)
    inner = activated(_four_product(rows, _four(gate_up), sizes), caps)
    return npu.npu_moe_token_unpermute(_four_product(inner, _four(down), sizes), places, probs=weights)


def _four_product(rows: Tensor, weight: MXFP4Experts, sizes: Tensor) -> Tensor:
    """Each expert's rows times the numbers of its weight."""
    return npu.npu_grouped_matmul(
        [rows],
        [weight.weight],
        antiquant_scale=[weight.scale],
        group_list=sizes,
        group_list_type=COUNTS,
        group_type=ROWS_OF_X,
        split_item=ONE_OUTPUT,
        output_dtype=rows.dtype,
    )[0]
