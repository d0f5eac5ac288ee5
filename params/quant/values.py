"""Quantised weights as values: the tensors a checkpoint stores for a projection, and the float weight they stand for.

A parameter tree holds one of these where an unquantised one holds a tensor [outputs inputs], or [experts outputs
inputs]. The ops that read weights look at its type; models do not.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32, Int, Int8, Int32, UInt8
from torch import Tensor

from params.tree import static, tree
from params.weights import WeightValue

MX_BLOCK = 32
"""Elements along the inputs that share an exponent in the MX formats (OCP Microscaling 1.0, section 5.2)."""


class QuantizedWeight(WeightValue):
    """A weight [*experts outputs inputs] in a checkpoint's own form, bit for bit.

    `scheme` is its word in `quant_model_description.json`. `exact` weights keep their dtypes when a tree is cast.
    """

    exact: ClassVar[bool] = True

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The float weight, computed in float32 and rounded to `dtype`."""
        raise NotImplementedError


@tree
class Int8Weight(QuantizedWeight):
    """W8A8_DYNAMIC: int8 with a scale for each output, or for each group of inputs of an output.

    Meant for activations that are quantised token by token: scale max|x| / 127, no offset.
    """

    scheme = "W8A8_DYNAMIC"

    values: Int8[Tensor, "*experts outputs inputs"]
    scale: Float32[Tensor, "*experts outputs groups"]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the float weight."""
        return tuple(self.values.shape)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """values * scale."""
        size = self.shape[-1] // self.scale.shape[-1]
        return times_blocks(self.values.float(), self.scale, size).to(dtype)


@tree
class StaticInt8Weight(QuantizedWeight):
    """W8A8: int8 weight, and int8 activations by one scale and offset that were measured beforehand.

    The product is (round(x / input_scale + input_offset) @ values.T + correction) * deq_scale. `deq_scale` is
    input_scale times the weight's scale, as float32 or, in some checkpoints, with these bits in the low half of an
    int64. `correction` takes the offset out again and holds the module's bias, if it has one.
    """

    scheme = "W8A8"

    values: Int8[Tensor, "outputs inputs"]
    deq_scale: Float32[Tensor, " outputs"] | Int[Tensor, " outputs"]
    correction: Int32[Tensor, " outputs"]
    input_scale: Float32[Tensor, " one"]
    input_offset: Float32[Tensor, " one"]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the float weight."""
        return tuple(self.values.shape)

    def product_scale(self) -> Float32[Tensor, " outputs"]:
        """`deq_scale` as float32, whichever way it is stored."""
        stored = self.deq_scale
        return stored if stored.dtype == torch.float32 else stored.to(torch.int32).view(torch.float32)

    def bias(self) -> Float32[Tensor, " outputs"]:
        """What the correction holds beside the offset's: the module's bias, rounded to multiples of deq_scale."""
        # Exact in float64, where an integer of float32 would not be.
        total = self.correction + self.input_offset.double() * self.values.sum(-1)
        return torch.where(total.abs() > 0.5, total * self.product_scale(), 0).float()

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """values * deq_scale / input_scale."""
        return (self.values.float() * (self.product_scale() / self.input_scale)[:, None]).to(dtype)


@tree
class Int4Weight(QuantizedWeight):
    """W4A8_DYNAMIC: two int4 outputs in a byte, the even one in the low half; activations as for W8A8_DYNAMIC.

    Weight = int4 * second_scale (each group of inputs, where there is one) * scale (each output). `correction`
    [outputs 1], or [outputs 16] for partial sums over equal slices of the inputs, is 8 times the sum of an output's
    weights: Ascend's product of int8 by int4 needs it, the weight's value does not.
    """

    scheme = "W4A8_DYNAMIC"

    packed: Int8[Tensor, "*experts half_outputs inputs"]
    scale: Float32[Tensor, "*experts outputs one"]
    correction: Float32[Tensor, "*experts outputs slices"]
    second_scale: Float32[Tensor, "*experts outputs groups"] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the float weight."""
        *experts, half, inputs = self.packed.shape
        return (*experts, 2 * half, inputs)

    def values(self) -> Int8[Tensor, "*experts outputs inputs"]:
        """The int4 numbers, -8 to 7, one a byte."""
        # Shifting left first moves the low half's sign to the byte's.
        return torch.stack(((self.packed << 4) >> 4, self.packed >> 4), -2).flatten(-3, -2)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """values * second_scale * scale."""
        values = self.values().float() * self.scale
        if self.second_scale is not None:
            values = times_blocks(values, self.second_scale, self.shape[-1] // self.second_scale.shape[-1])
        return values.to(dtype)


class MXWeight(QuantizedWeight):
    """A weight with a power of two for every 32 inputs, the last block perhaps of fewer.

    A byte b of `scale` stands for 2^(b - 127), 255 for NaN. `padding` counts inputs at the left and right that x does
    not have and that count for nothing: where a slice of a longer row begins or ends inside a block.
    """

    scale: UInt8[Tensor, "*experts outputs blocks"]
    padding: tuple[int, int]

    def whole(self) -> Float32[Tensor, "*experts outputs padded_inputs"]:
        """The float weight and its padding, exactly."""
        raise NotImplementedError

    def static_key(self) -> tuple[object, ...]:
        """What a choice of kernel may depend on."""
        return *super().static_key(), self.padding

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The float weight, without the padding."""
        return self.whole()[..., self.padding[0] :][..., : self.shape[-1]].to(dtype)


@tree
class MXFP8Weight(MXWeight):
    """W8A8_MXFP8: float8 e4m3 with a power of two for every 32 inputs, and activations of the same kind."""

    scheme = "W8A8_MXFP8"

    values: Float[Tensor, "*experts outputs inputs"]
    scale: UInt8[Tensor, "*experts outputs blocks"]
    padding: tuple[int, int] = static(default=(0, 0))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the float weight: without the padding."""
        return (*self.values.shape[:-1], self.values.shape[-1] - sum(self.padding))

    def whole(self) -> Float32[Tensor, "*experts outputs padded_inputs"]:
        """values * 2^(scale - 127)."""
        return mx_values(self.values, self.scale)


@tree
class MXFP4Weight(MXWeight):
    """W4A16_MXFP4: two float4 e2m1 inputs in a byte, the even one in the low half, with a power of two for every 32.

    Activations stay as they are.
    """

    scheme = "W4A16_MXFP4"

    packed: UInt8[Tensor, "*experts outputs half_inputs"]
    scale: UInt8[Tensor, "*experts outputs blocks"]
    padding: tuple[int, int] = static(default=(0, 0))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the float weight: without the padding."""
        return (*self.packed.shape[:-1], 2 * self.packed.shape[-1] - sum(self.padding))

    def whole(self) -> Float32[Tensor, "*experts outputs padded_inputs"]:
        """The e2m1 numbers * 2^(scale - 127)."""
        return mx_values(e2m1_values(self.packed), self.scale)


@tree
class SplitWeight(QuantizedWeight):
    """Projections that read one input but are quantised differently: weights [outputs inputs], one below the other.

    Each part is a tensor, a quantised weight, or what a kernel has prepared from one.
    """

    scheme = "a scheme for each part"
    exact = False

    parts: tuple[Any, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the float weight."""
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    def static_key(self) -> tuple[object, ...]:
        """What a choice of kernel may depend on."""
        keys = ((part.shape, part.dtype) if isinstance(part, Tensor) else part.static_key() for part in self.parts)
        return type(self), *keys

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The parts' float weights, one below the other."""
        return torch.cat([dequantized(part, dtype) for part in self.parts])


def dequantized(weight: Tensor | QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """A weight, quantised or not, as floating point of `dtype`."""
    return weight.dequantized(dtype) if isinstance(weight, QuantizedWeight) else weight.to(dtype)


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers of the codes 0 to 7 of a float4; those of 8 to 15 are the same, negative."""


def e2m1_values(packed: UInt8[Tensor, "*lead half_inputs"]) -> Float32[Tensor, "*lead inputs"]:
    """The numbers of two float4 codes a byte, the low half's first."""
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).short()
    # The bits of a float16 whose exponent counts from 14 lower.
    return ((codes & 8) << 12 | (codes & 7) << 9).view(torch.float16).float() * 2.0**14


def mx_values(
    values: Float[Tensor, "*lead inputs"], scale: UInt8[Tensor, "*lead blocks"]
) -> Float32[Tensor, "*lead inputs"]:
    """The numbers that float8 or float4 values and the bytes of their blocks' powers of two stand for, exactly."""
    return times_blocks(values.float(), mx_powers(scale), MX_BLOCK)


def mx_powers(scale: UInt8[Tensor, "*lead blocks"]) -> Float32[Tensor, "*lead blocks"]:
    """The powers of two that bytes stand for."""
    # Float32's exponent bits, but for 0, which is 2^-127, and 255, NaN: Inductor has no float8 of powers.
    special = ((scale == 0) | (scale == 255)).int()
    return ((scale.int() << 23) | (special << 22)).view(torch.float32)


def times_blocks(
    x: Float[Tensor, "*lead inputs"], factors: Float[Tensor, "*lead blocks"], size: int
) -> Float[Tensor, "*lead inputs"]:
    """Every `size` inputs, the last perhaps fewer, times a factor of their own."""
    # Torch 2.13's Inductor reads wrong factors in a part of a block when they are repeated to the length of x.
    blocks = F.pad(x, (0, -x.shape[-1] % size)).unflatten(-1, (-1, size))
    return (blocks * factors[..., None]).flatten(-2)[..., : x.shape[-1]]
