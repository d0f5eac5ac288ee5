"""How a case's weight is quantised."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from params.quant.rounding import int4_correction, int4_weight, int8_range, int8_weight, mxfp4, mxfp8, pack_int4
from params.quant.values import (
    Int4Weight,
    Int8Weight,
    MXFP4Weight,
    MXFP8Weight,
    QuantizedWeight,
    SplitWeight,
    StaticInt8Weight,
)

from .case import Arguments, Draw


def _static(weight: Tensor) -> StaticInt8Weight:
    """For activations from -3 to 4, with a bias, which makes the correction."""
    (values, scale), (input_scale, input_offset) = int8_weight(weight), int8_range(-3.0, 4.0)
    deq_scale, bias = input_scale * scale[:, 0], torch.linspace(-1.0, 2.0, len(weight))
    correction = (bias / deq_scale - input_offset * values.sum(-1)).round().int()
    return StaticInt8Weight(values, deq_scale, correction, input_scale, input_offset)


def _static_by_bits(weight: Tensor) -> StaticInt8Weight:
    """The scale's bits in the low half of an int64."""
    made = _static(weight)
    return replace(made, deq_scale=made.deq_scale.view(torch.int32).long() & 0xFFFFFFFF)


def _int4(weight: Tensor) -> Int4Weight:
    values, scale = int4_weight(weight)
    return Int4Weight(pack_int4(values), scale, int4_correction(values, scale, 1))


def _in_groups(weight: Tensor) -> Tensor:
    """[outputs 4 inputs/4]: the last axis has a scale of its own."""
    return weight.unflatten(-1, (4, -1))


def _int8_groups(weight: Tensor) -> Int8Weight:
    values, scale = int8_weight(_in_groups(weight))
    return Int8Weight(values.flatten(-2), scale[..., 0])


def _int4_groups(weight: Tensor) -> Int4Weight:
    values, scale = int4_weight(_in_groups(weight))
    values, largest = values.flatten(-2), scale.amax(-2)
    second = scale[..., 0] / largest
    return Int4Weight(pack_int4(values), largest, 8 * weight.sum(-1, keepdim=True), second)


QUANTIZED: dict[str, Callable[[Tensor], QuantizedWeight]] = {
    "w8a8": _static,
    "w8a8_by_bits": _static_by_bits,
    "w8a8_dynamic": lambda weight: Int8Weight(*int8_weight(weight)),
    "w8a8_dynamic_groups": _int8_groups,
    "w4a8_dynamic": _int4,
    "w4a8_dynamic_groups": _int4_groups,
    "w8a8_mxfp8": lambda weight: MXFP8Weight(*mxfp8(weight, "half_away")),
    "w8a8_mxfp8_slice": lambda weight: MXFP8Weight(*mxfp8(F.pad(weight, (20, 8)), "half_away"), padding=(20, 8)),
    "w4a16_mxfp4": lambda weight: MXFP4Weight(*mxfp4(weight)),
    "w4a16_mxfp4_slice": lambda weight: MXFP4Weight(*mxfp4(F.pad(weight, (20, 8))), padding=(20, 8)),
    "split": lambda weight: SplitWeight((Int8Weight(*int8_weight(weight[:-6])), weight[-6:])),
}
"""Ways to quantise a float32 weight, by the scheme's word and what is particular about it."""


def with_quantized(make: Callable[[Draw], Arguments], at: int, scheme: str) -> Callable[[Draw], Arguments]:
    """The same arguments with the one at `at` quantised."""

    def changed(draw: Draw) -> Arguments:
        args, kwargs = make(draw)
        return (*args[:at], QUANTIZED[scheme](args[at].float()), *args[at + 1 :]), kwargs

    return changed
