"""Products with quantised weights, as formulas: what every kernel for them is held to.

A weight's scheme says how x is quantised at each call. Sums of products of integers, and of float8, are exact; scales
are float32, applied the output's first and then the token's; the result is rounded once, to the dtype of x.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int8, Int32
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack
from torch.autograd import forward_ad

from params.quant.rounding import int8_tokens, mxfp8, static_int8
from params.quant.values import (
    Int4Weight,
    Int8Weight,
    MXFP4Weight,
    MXFP8Weight,
    QuantizedWeight,
    StaticInt8Weight,
    mx_values,
)
from params.tree import tree_map

from ..errors import LoweringError
from .widen import wide_dtype

EXACT = 1024
"""Products of two int8 whose sum float32 holds without rounding: each is 2^14 at most, and float32 counts to 2^24."""
_DIFFERENTIATES = (TransformType.Grad, TransformType.Jvp)


def quantized_linear(x: Float[Tensor, "*lead inputs"], weight: QuantizedWeight) -> Float[Tensor, "*lead outputs"]:
    """x, quantised as the weight's scheme has it, times the weight; in the dtype of x. A token of zeros gives zeros.

    Raises `LoweringError` under gradients, and for x of another width than the weight's.
    """
    refuse_gradients(x)
    if x.shape[-1] != weight.shape[-1]:
        raise LoweringError(
            f"linear: x has {x.shape[-1]} inputs and the {weight.scheme} weight {list(weight.shape)} takes "
            f"{weight.shape[-1]}; hand it the activations of its own module"
        )
    return _FORMULAS[type(weight)](x, weight).to(x.dtype)


def refuse_gradients(x: Tensor) -> None:
    """`LoweringError` where a derivative would be taken: rounding has none that means anything."""
    forward = forward_ad._current_level >= 0
    differentiated = any(level.key() in _DIFFERENTIATES for level in get_interpreter_stack() or ())
    if forward or differentiated or (x.requires_grad and torch.is_grad_enabled()):
        raise LoweringError(
            "linear: a product with a quantised weight has no gradient; to train, make float parameters of the "
            "quantised ones with params.dequantize(tree, dtype)"
        )


def integer_product(
    x: Int8[Tensor, "*lead inputs"], values: Int8[Tensor, "outputs inputs"]
) -> Int32[Tensor, "*lead outputs"]:
    """x @ values.T, exactly and on any device: float32 over so few inputs at a time that it counts."""
    blocks = zip(x.float().split(EXACT, -1), values.float().split(EXACT, -1), strict=True)
    return reduce(torch.add, ((a @ b.mT).int() for a, b in blocks))


def of_expert(weight: Any, expert: int) -> Any:
    """One expert's weight [outputs inputs] of all experts' [experts outputs inputs], quantised or not."""
    return tree_map(lambda leaf: leaf[expert], weight)


def _int8(x: Tensor, weight: Int8Weight) -> Tensor:
    return _by_token(x, weight.values, weight.scale)


def _int4(x: Tensor, weight: Int4Weight) -> Tensor:
    # Its correction is for products that take int8 apart; a whole product has nothing to correct.
    scale = weight.scale if weight.second_scale is None else weight.second_scale * weight.scale
    return _by_token(x, weight.values(), scale)


def _by_token(x: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    """Tokens in int8, each by its own scale; the weight's are [outputs groups], of equally many inputs each."""
    rows, token_scale = int8_tokens(x)
    size = values.shape[-1] // scale.shape[-1]
    groups = zip(rows.split(size, -1), values.split(size, -1), scale.unbind(-1), strict=True)
    dtype = wide_dtype(x)
    return token_scale * reduce(torch.add, (integer_product(a, b).to(dtype) * factor for a, b, factor in groups))


def _static(x: Tensor, weight: StaticInt8Weight) -> Tensor:
    rows = static_int8(x, weight.input_scale, weight.input_offset)
    sums = integer_product(rows, weight.values) + weight.correction
    return sums.to(wide_dtype(x)) * weight.product_scale()


def _mxfp8(x: Tensor, weight: MXFP8Weight) -> Tensor:
    # Float8 times a power of two is exact in float32, a product of two in float64.
    rows = mx_values(*mxfp8(F.pad(x, weight.padding), "half_even"))
    return rows.double() @ mx_values(weight.values, weight.scale).double().mT


def _mxfp4(x: Tensor, weight: MXFP4Weight) -> Tensor:
    # The weight is exact in float32; x is taken as it is.
    return x.double() @ weight.dequantized(torch.float64).mT


_FORMULAS: dict[type[QuantizedWeight], Callable[[Tensor, Any], Tensor]] = {
    Int8Weight: _int8,
    StaticInt8Weight: _static,
    Int4Weight: _int4,
    MXFP8Weight: _mxfp8,
    MXFP4Weight: _mxfp4,
}
