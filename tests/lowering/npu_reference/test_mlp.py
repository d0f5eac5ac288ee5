"""The gated activations' references against float64 formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from .calls import assert_like, assert_rounded_once, call, refused

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def halves(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def tanh_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def exact_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "dim"), [((5, 240), -1), ((400,), 0), ((9, 40, 5), 1)])
def test_swiglu_activates_the_first_half(shape: tuple[int, ...], dim: int, dtype: torch.dtype) -> None:
    arguments = {"input": halves(dtype, *shape), "dim": dim}
    a, b = arguments["input"].double().chunk(2, dim)
    assert_rounded_once(call("npu_swiglu", arguments), a / (1 + (-a).exp()) * b)
    assert_like("npu_swiglu", arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("left", [False, True, None])
@pytest.mark.parametrize("approximate", [0, 1, None])
@pytest.mark.parametrize(("shape", "dim"), [((5, 240), -1), ((9, 40, 5), 1)])
def test_geglu(
    shape: tuple[int, ...], dim: int, approximate: int | None, left: bool | None, dtype: torch.dtype
) -> None:
    """By default the second half, and the form with a tanh."""
    given: dict[str, Any] = {"approximate": approximate, "activate_left": left}
    arguments = {"input": halves(dtype, *shape), "dim": dim, **{k: v for k, v in given.items() if v is not None}}
    a, b = arguments["input"].double().chunk(2, dim)
    gate, up = (a, b) if left else (b, a)
    gelu = (exact_gelu if approximate == 0 else tanh_gelu)(gate)
    product, activated = call("npu_geglu", arguments)
    assert_rounded_once(product, gelu * up)
    assert_rounded_once(activated, gelu)
    assert_like("npu_geglu", arguments)


@pytest.mark.parametrize("name", ["npu_swiglu", "npu_geglu"])
def test_refusals(name: str) -> None:
    refused(name, {"input": halves(torch.float32, 4, 7), "dim": -1}, "its size is odd")
    refused(name, {"input": halves(torch.float32, 4, 8), "dim": 2}, "dim is 2")
    refused(name, {"input": halves(torch.float64, 4, 8), "dim": -1}, "input is torch.float64")


def test_geglu_knows_two_forms() -> None:
    refused("npu_geglu", {"input": halves(torch.float32, 4, 8), "approximate": 2}, r"expected 0 \(none\) or 1")
