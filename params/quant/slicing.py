"""Slices of quantised weights, for a mesh that splits a projection's outputs or its inputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from params.quant.values import (
    MX_BLOCK,
    Int4Weight,
    Int8Weight,
    MXFP8Weight,
    QuantizedWeight,
    SplitWeight,
    StaticInt8Weight,
)
from params.tree import map


def rows(weight: Tensor | QuantizedWeight, start: int, stop: int) -> Tensor | QuantizedWeight:
    """Outputs `start` to `stop`, all inputs. Views of the weight.

    `ValueError` for outputs that the weight does not have, and for int4 where two that share a byte would part.
    """
    _check(weight, start, stop, -2, "outputs")
    if isinstance(weight, SplitWeight):
        return _rows_of_parts(weight, start, stop)
    if isinstance(weight, StaticInt8Weight):
        sliced = [leaf[start:stop] for leaf in (weight.values, weight.deq_scale, weight.correction)]
        return StaticInt8Weight(*sliced, weight.input_scale, weight.input_offset)
    if isinstance(weight, Int4Weight):
        if start % 2 or stop % 2:
            raise ValueError(f"rows: outputs {start}:{stop} of int4, and two share a byte; give even numbers")
        halved = weight.packed[..., start // 2 : stop // 2, :]
        scales = (weight.scale, weight.correction, weight.second_scale)
        return Int4Weight(halved, *(None if leaf is None else leaf[..., start:stop, :] for leaf in scales))
    return map(lambda leaf: leaf[..., start:stop, :], weight)


def columns(weight: Tensor | QuantizedWeight, start: int, stop: int, *, first: bool) -> Tensor | QuantizedWeight:
    """Inputs `start` to `stop`, all outputs: products of such slices add up to the whole product.

    What is added once goes with the slice that is `first`. `ValueError` for inputs that the weight does not have, and
    for a slice that parts a group of inputs with one int8 or int4 scale. A block of MXFP8 may be parted: both sides get
    its scale, and zeros in place of the rest of it (`padding`).
    """
    _check(weight, start, stop, -1, "inputs")
    if isinstance(weight, SplitWeight):
        return SplitWeight(tuple(columns(part, start, stop, first=first) for part in weight.parts))
    if isinstance(weight, Int8Weight):
        return Int8Weight(weight.values[..., start:stop], _groups(weight, weight.scale, start, stop))
    if isinstance(weight, StaticInt8Weight):
        correction = weight.correction if first else torch.zeros_like(weight.correction)
        inputs = weight.input_scale, weight.input_offset
        return StaticInt8Weight(weight.values[:, start:stop], weight.deq_scale, correction, *inputs)
    if isinstance(weight, Int4Weight):
        return _int4_columns(weight, start, stop)
    if isinstance(weight, MXFP8Weight):
        return _mx_columns(weight, start, stop)
    return weight[..., start:stop]


def _check(weight: Tensor | QuantizedWeight, start: int, stop: int, axis: int, what: str) -> None:
    if not 0 <= start < stop <= weight.shape[axis]:
        raise ValueError(f"{what} {start}:{stop} of a weight that has {weight.shape[axis]}")


def _rows_of_parts(weight: SplitWeight, start: int, stop: int) -> Tensor | QuantizedWeight:
    found, base = [], 0
    for part in weight.parts:
        size = part.shape[0]
        low, high = max(start - base, 0), min(stop - base, size)
        if low < high:
            found.append(rows(part, low, high))
        base += size
    return found[0] if len(found) == 1 else SplitWeight(tuple(found))


def _groups(weight: QuantizedWeight, scale: Tensor, start: int, stop: int) -> Tensor:
    """The scales of the groups of inputs in a slice."""
    count, inputs = scale.shape[-1], weight.shape[-1]
    if count == 1:
        return scale
    size = inputs // count
    if start % size or stop % size:
        raise ValueError(f"columns: inputs {start}:{stop} part a group of {size} with one scale; give multiples of it")
    return scale[..., start // size : stop // size]


def _int4_columns(weight: Int4Weight, start: int, stop: int) -> Int4Weight:
    second = weight.second_scale
    second = None if second is None else _groups(weight, second, start, stop)
    size = weight.shape[-1] // weight.correction.shape[-1]
    if start % size == stop % size == 0:
        correction = weight.correction[..., start // size : stop // size]
    else:
        correction = 8 * weight.dequantized()[..., start:stop].sum(-1, keepdim=True)
    return Int4Weight(weight.packed[..., start:stop], weight.scale, correction, second)


def _mx_columns(weight: MXFP8Weight, start: int, stop: int) -> MXFP8Weight:
    if (start, stop) == (0, weight.shape[-1]):
        return weight
    shift = weight.padding[0]
    start, stop = start + shift, stop + shift
    left, right = start % MX_BLOCK, -stop % MX_BLOCK
    # Bytes, since floats of eight bits cannot be padded.
    raw = F.pad(weight.values[..., start:stop].view(torch.uint8), (left, right))
    scale = weight.scale[..., start // MX_BLOCK : -(-stop // MX_BLOCK)]
    return MXFP8Weight(raw.view(weight.values.dtype), scale, (left, right))
