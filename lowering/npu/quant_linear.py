"""Projections with quantised weights: x quantised by one operator, multiplied by npu_quant_matmul.

In int8, by a scale for each token or by one measured beforehand; on 950 also in float8 with an exponent for every 32
inputs. Weights lie as [outputs inputs] in a checkpoint, which the product takes as a transposed view; int8 ones are
prepared in the device's blocked format, and exponents of an odd number of blocks filled up to pairs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from params.quant.values import MX_BLOCK, Int8Weight, MXFP8Weight, StaticInt8Weight
from params.tree import static, tree

from ..ops.linear import linear
from ..weights import PreparedWeight
from .features import npu
from .kernel import HALVES, above, empty, fused, wrong_dtype

NZ = 29
"""Number of the blocked format that the device's matrix unit reads without rearranging."""
MOST = 65535
"""Inputs, and outputs, of a product."""
FLOAT8, EXPONENT = 292, 293
"""torch_npu's numbers of float8_e4m3fn and float8_e8m0fnu: operators do not take Torch's dtype for the second."""
OCP = 0
"""Number of the rule that takes an exponent from the largest number of a block."""
DYNAMIC, STATIC, BLOCKS = "npu_quant_matmul", "npu_quant_matmul_static", "npu_quant_matmul_mx"


@tree
class Int8Blocks(PreparedWeight):
    """An `Int8Weight` [inputs outputs] in blocked format, and its scales [outputs]."""

    kernels = (DYNAMIC,)

    blocked: Tensor
    scale: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Outputs and inputs."""
        return tuple(self.blocked.mT.shape)

    def plain(self) -> Any:
        """The weight as it was."""
        return Int8Weight(self.blocked.mT, self.scale[:, None])


@tree
class StaticInt8Blocks(PreparedWeight):
    """A `StaticInt8Weight` [inputs outputs] in blocked format; 1 / input_scale and the offset once an input."""

    kernels = (STATIC,)

    blocked: Tensor
    scale: Tensor
    correction: Tensor
    input_scale: Tensor
    reciprocal: Tensor
    offset: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Outputs and inputs."""
        return tuple(self.blocked.mT.shape)

    def plain(self) -> Any:
        """The weight as it was, its scale in float32."""
        return StaticInt8Weight(self.blocked.mT, self.scale, self.correction, self.input_scale, self.offset[:1])


@tree
class MXFP8Pairs(PreparedWeight):
    """An `MXFP8Weight` whose odd number of blocks was filled up to `pairs` [outputs pairs 2]."""

    kernels = (BLOCKS,)

    values: Tensor
    pairs: Tensor
    padding: tuple[int, int] = static()

    @property
    def shape(self) -> tuple[int, ...]:
        """Outputs and inputs, without the padding."""
        outputs, inputs = self.values.shape
        return outputs, inputs - sum(self.padding)

    def static_key(self) -> tuple[object, ...]:
        """What a choice of kernel may depend on."""
        return *super().static_key(), self.padding

    def plain(self) -> Any:
        """The weight as it was."""
        return MXFP8Weight(self.values, self.pairs.flatten(1)[:, :-1], self.padding)


def fills_blocks(rows: int, columns: int) -> bool:
    """Whether 8-bit weights of this size make whole blocks: others would be padded, which products do not take."""
    return rows % 16 == 0 and columns % 32 == 0


def blocked(values: Tensor) -> Tensor:
    """Weights [... outputs inputs] as [... inputs outputs] in blocked format."""
    return npu.npu_format_cast(values.detach().mT.contiguous(), NZ)


def in_pairs(scale: Tensor) -> Tensor:
    """Exponents [... blocks] as [... pairs 2]; what fills a pair up stands for 2^-127, and no weight is multiplied."""
    return F.pad(scale, (0, scale.shape[-1] % 2)).unflatten(-1, (-1, 2))


def _prepare_dynamic(weight: Int8Weight) -> Int8Blocks | None:
    outputs, inputs = weight.shape
    if weight.scale.shape[1] != 1 or not fills_blocks(inputs, outputs):
        return None
    return Int8Blocks(blocked(weight.values), weight.scale.flatten())


def _prepare_static(weight: StaticInt8Weight) -> StaticInt8Blocks | None:
    outputs, inputs = weight.shape
    if not fills_blocks(inputs, outputs):
        return None
    return StaticInt8Blocks(
        blocked(weight.values), weight.product_scale(), weight.correction, weight.input_scale, *_by_input(weight)
    )


def _by_input(weight: StaticInt8Weight) -> tuple[Tensor, Tensor]:
    """1 / input_scale and the offset [inputs], in float32."""
    inputs = weight.shape[1]
    return weight.input_scale.float().reciprocal().repeat(inputs), weight.input_offset.float().repeat(inputs)


def _prepare_blocks(weight: MXFP8Weight) -> MXFP8Pairs | None:
    if weight.scale.shape[1] % 2 == 0:
        return None
    return MXFP8Pairs(weight.values, in_pairs(weight.scale), weight.padding)


def _refuse(x: Tensor, weight: Any) -> str | None:
    outputs, inputs = weight.shape
    if x.shape[-1] != inputs:
        return f"takes x of {inputs} inputs, as the weight has; this one has {x.shape[-1]}"
    return wrong_dtype(HALVES, x=x) or empty(x=x) or above(MOST, inputs=inputs, outputs=outputs)


def _refuse_dynamic(x, weight) -> str | None:
    if isinstance(weight, Int8Weight) and weight.scale.shape[1] != 1:
        return f"takes one scale an output; this weight has {weight.scale.shape[1]}, for groups of inputs"
    return _refuse(x, weight)


def _refuse_static(x, weight) -> str | None:
    return _refuse(x, weight)


def _refuse_blocks(x, weight) -> str | None:
    return _refuse(x, weight)


@fused(
    linear,
    DYNAMIC,
    "npu_dynamic_quant",
    "npu_quant_matmul",
    "npu_format_cast",
    refuse=_refuse_dynamic,
    prepare=_prepare_dynamic,
    weights=(Int8Weight,),
)
def _dynamic(x, weight):
    rows, token_scale = npu.npu_dynamic_quant(_flat(x), dst_type=torch.int8)
    if isinstance(weight, Int8Blocks):
        values, scale = weight.blocked, weight.scale
    else:
        values, scale = weight.values.mT, weight.scale.flatten()
    y = npu.npu_quant_matmul(rows, values, scale, pertoken_scale=token_scale, output_dtype=x.dtype)
    return y.view(*x.shape[:-1], -1)


@fused(
    linear,
    STATIC,
    "npu_quantize",
    "npu_quant_matmul",
    "npu_format_cast",
    refuse=_refuse_static,
    prepare=_prepare_static,
    weights=(StaticInt8Weight,),
)
def _static(x, weight):
    if isinstance(weight, StaticInt8Blocks):
        values, scale, factor, offset = weight.blocked, weight.scale, weight.reciprocal, weight.offset
    else:
        values, scale, (factor, offset) = weight.values.mT, weight.product_scale(), _by_input(weight)
    # Scales have x's dtype, and those of 16 bits would move a tenth of the values by a step.
    rows = npu.npu_quantize(_flat(x).float(), factor, offset, torch.qint8, axis=-1, div_mode=False)
    y = npu.npu_quant_matmul(rows, values, scale, bias=weight.correction, output_dtype=x.dtype)
    return y.view(*x.shape[:-1], -1)


@fused(
    linear,
    BLOCKS,
    "npu_dynamic_mx_quant",
    "npu_quant_matmul",
    refuse=_refuse_blocks,
    prepare=_prepare_blocks,
    weights=(MXFP8Weight,),
)
def _blocks(x, weight):
    rows, token_scale = by_block(F.pad(_flat(x), weight.padding))
    pairs = weight.pairs if isinstance(weight, MXFP8Pairs) else in_pairs(weight.scale)
    # Both are views of rows by output, which the product tells by their strides.
    y = npu.npu_quant_matmul(
        rows,
        weight.values.mT,
        turned(pairs),
        pertoken_scale=token_scale,
        output_dtype=x.dtype,
        scale_dtype=EXPONENT,
        pertoken_scale_dtype=EXPONENT,
        group_sizes=[1, 1, MX_BLOCK],
    )
    return y.view(*x.shape[:-1], -1)


def by_block(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [rows inputs] in float8, and its exponents [rows pairs 2]."""
    return npu.npu_dynamic_mx_quant(x, axis=-1, round_mode="rint", dst_type=FLOAT8, block_size=MX_BLOCK, scale_alg=OCP)


def turned(pairs: Tensor) -> Tensor:
    """[... outputs pairs 2] as the view [... pairs outputs 2]."""
    view = pairs.transpose(-3, -2)
    # Of one pair, view and copy differ in strides of axes of size 1, which some versions read: give them a real copy.
    return view.clone(memory_format=torch.contiguous_format) if view.shape[-3] == 1 else view


def _flat(x: Tensor) -> Tensor:
    """[rows inputs]."""
    return x.reshape(-1, x.shape[-1]).contiguous()
