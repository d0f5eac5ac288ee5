"""Experts with quantised weights: rows sorted by expert and quantised, two grouped products with a SwiGLU between them.

On Ascend 910 rows are int8 by token and weights int8 or int4; on 950 both are float8 with an exponent for every 32
inputs, and one operator does the first product, the SwiGLU and the second quantisation. Weights are prepared in the
device's blocked format where they fill blocks. Plain ones are read through views, but for int4, whose halves of bytes
are moved at each call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from params.quant.values import Int4Weight, Int8Weight, MXFP8Weight
from params.tree import tree

from ..ops.mlp import Caps
from ..ops.moe import experts
from ..weights import PreparedWeight
from .features import npu
from .kernel import HALVES, above, empty, fused, wrong_dtype
from .mlp import activated
from .moe import BY_TOKEN, COUNTS, MOST_CHOICES, MOST_EXPERTS, NZ, ONE_OUTPUT, ROWS_OF_X, UNQUANTIZED, routed
from .quant_linear import ASCEND_910, ASCEND_950, EXPONENT, MOST, blocked, by_block, fills_blocks, in_pairs, turned

INTEGERS, BLOCKS = "npu_grouped_experts_int", "npu_grouped_experts_mx"
SUMS = 0
"""Group sizes are given as running sums."""
IN_BLOCKS = 2
"""Number of the mode with an exponent for every 32 values."""
PAIR = 64
"""Inputs of two exponents, which lie together."""


@tree
class Int8Experts(PreparedWeight):
    """An `Int8Weight` [experts inputs outputs], in blocked format where it fills blocks; scales [experts outputs].

    `rounded` are the scales that a product with a bfloat16 result takes.
    """

    kernels = (INTEGERS,)

    weight: Tensor
    scale: Tensor
    rounded: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Experts, outputs, inputs."""
        return tuple(self.weight.mT.shape)

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.weight.device

    def static_key(self) -> tuple[object, ...]:
        """What a choice of kernel may depend on."""
        return Int8Experts, self.weight.shape

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

    kernels = (INTEGERS,)

    weight: Tensor
    scale: Tensor
    correction: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Experts, outputs, inputs."""
        count, inputs, words = self.weight.shape
        return count, 8 * words, inputs

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.weight.device

    def static_key(self) -> tuple[object, ...]:
        """What a choice of kernel may depend on."""
        return Int4Experts, self.weight.shape

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

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.weight.device

    def static_key(self) -> tuple[object, ...]:
        """What a choice of kernel may depend on."""
        return MXFP8Experts, self.weight.shape

    def plain(self) -> Any:
        """The weights as they were."""
        return MXFP8Weight(self.weight, self.pairs.flatten(-2))

    def factors(self) -> tuple[list[Tensor], list[Tensor]]:
        """The weight and its exponents as views by inputs, which products tell by their strides."""
        return [self.weight.mT], [turned(self.pairs)]


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
    return replace(_blocks(weight), weight=npu.npu_format_cast(weight.values.detach(), NZ))


def _blocks(weight: Any) -> MXFP8Experts:
    """A prepared weight, or a plain one with its exponents in pairs."""
    prepared = isinstance(weight, MXFP8Experts)
    return weight if prepared else MXFP8Experts(weight.values, in_pairs(weight.scale))


def _wrong_integers(weight: Any) -> str | None:
    """A sentence about a weight that grouped products do not take."""
    if isinstance(weight, Int8Weight) and weight.scale.shape[-1] != 1:
        return f"takes one scale an output; this weight has {weight.scale.shape[-1]}, for groups of inputs"
    if isinstance(weight, Int4Weight):
        if weight.second_scale is not None:
            return f"takes one scale an output; this weight has {weight.second_scale.shape[-1]}, for groups of inputs"
        if weight.shape[1] % 8:
            return f"takes int4 weights with outputs in 8s; this one has {weight.shape[1]}"
    return None


def _wrong_blocks(weight: Any) -> str | None:
    outputs, inputs = weight.shape[1:]
    if isinstance(weight, MXFP8Weight) and any(weight.padding):
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
    wrong = _refuse((Int8Weight, Int4Weight, Int8Experts, Int4Experts), x, weights, ids, gate_up, down)
    wrong = wrong or _wrong_integers(gate_up) or _wrong_integers(down)
    int4 = any(isinstance(weight, (Int4Weight, Int4Experts)) for weight in (gate_up, down))
    return wrong or (wrong_dtype((torch.bfloat16,), x=x) if int4 else None)


def _refuse_blocks(x, weights, ids, gate_up, down, *, caps=None) -> str | None:
    wrong = _refuse((MXFP8Weight, MXFP8Experts), x, weights, ids, gate_up, down)
    return wrong or _wrong_blocks(gate_up) or _wrong_blocks(down)


@fused(
    experts, INTEGERS, "npu_moe_init_routing_v2", "npu_grouped_matmul", "npu_dequant_swiglu_quant", "npu_swiglu",
    "npu_dynamic_quant", "npu_moe_token_unpermute", "npu_format_cast",
    only=ASCEND_910, refuse=_refuse_integers, prepare=_prepare, weights=(Int8Weight, Int4Weight),
)  # fmt: skip
def _integers(x, weights, ids, gate_up, down, *, caps=None):
    up, back = _laid(gate_up), _laid(down)
    rows, places, sizes, scale = routed(x, ids, up.shape[0], quant_mode=BY_TOKEN)
    inner, inner_scale = _activated(_product(rows, scale, up, sizes, x.dtype), caps)
    return npu.npu_moe_token_unpermute(_product(inner, inner_scale, back, sizes, x.dtype), places, probs=weights)


def _product(
    rows: Tensor, token_scale: Tensor, weight: Int8Experts | Int4Experts, sizes: Tensor, dtype: torch.dtype
) -> Tensor:
    """Each expert's int8 rows times its weight, and all scales."""
    return npu.npu_grouped_matmul(
        [rows], [weight.weight], per_token_scale=[token_scale], group_list=sizes, group_list_type=COUNTS,
        group_type=ROWS_OF_X, split_item=ONE_OUTPUT, output_dtype=dtype, **weight.factors(dtype),
    )[0]  # fmt: skip


def _activated(gate_up: Tensor, caps: Caps | None) -> tuple[Tensor, Tensor]:
    """The SwiGLU as int8 rows, and their scales. One operator does both, for bfloat16 without caps alone."""
    if gate_up.dtype == torch.bfloat16 and caps is None:
        return npu.npu_dequant_swiglu_quant(gate_up, activate_left=True, quant_mode=1)
    return npu.npu_dynamic_quant(activated(gate_up, caps), dst_type=torch.int8)


@fused(
    experts, BLOCKS, "npu_moe_init_routing_v2", "npu_dynamic_mx_quant", "npu_grouped_matmul_swiglu_quant_v2",
    "npu_grouped_matmul", "npu_moe_token_unpermute", "npu_format_cast",
    only=ASCEND_950, refuse=_refuse_blocks, prepare=_prepare_blocks, weights=(MXFP8Weight,),
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
