"""Norms and SwiGLU against float64 formulas rounded once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import lowering
from lowering.target import named
from tests.cases import Draw
from tests.lowering.npu_reference.calls import assert_like, assert_rounded_once, call, refused

EPS = 3e-5
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NORMS = ("npu_rms_norm", "npu_gemma_rms_norm", "npu_add_rms_norm")


def valid(name: str, dtype: torch.dtype = torch.bfloat16, *lead: int, dim: tuple[int, ...] = (48,)) -> dict[str, Any]:
    draw = Draw(dtype, seed=len(name))
    x, gamma = draw.normal(*(lead or (5, 3)), *dim), draw.normal(*dim)
    if name == "npu_add_rms_norm":
        return {"x1": x, "x2": draw.normal(*x.shape), "gamma": gamma, "epsilon": EPS}
    return {"input": x, "gamma": gamma, "epsilon": EPS}


def expected(x: Tensor, weight: Tensor, axes: int) -> tuple[Tensor, Tensor]:
    wide = x.double()
    rstd = 1 / (wide.square().mean(tuple(range(-axes, 0)), keepdim=True) + EPS).sqrt()
    return wide * rstd * weight, rstd


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [(48,), (4, 12)], ids=str)
@pytest.mark.parametrize("name", NORMS[:2])
def test_norms(name: str, dim: tuple[int, ...], dtype: torch.dtype) -> None:
    arguments = valid(name, dtype, dim=dim)
    weight = arguments["gamma"].double() + (name == "npu_gemma_rms_norm")
    y, rstd = call(name, arguments)
    y64, rstd64 = expected(arguments["input"], weight, len(dim))
    assert_rounded_once(y, y64)
    assert rstd.dtype == torch.float32 and rstd.shape == (5, 3, *(1,) * len(dim))
    torch.testing.assert_close(rstd.double(), rstd64, rtol=1e-6, atol=0)
    assert_like(name, arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sum_is_rounded_and_comes_third(dtype: torch.dtype) -> None:
    arguments = valid("npu_add_rms_norm", dtype)
    y, rstd, total = call("npu_add_rms_norm", arguments)
    assert torch.equal(total, arguments["x1"] + arguments["x2"])
    y64, rstd64 = expected(total, arguments["gamma"].double(), 1)
    assert_rounded_once(y, y64)
    torch.testing.assert_close(rstd.double(), rstd64, rtol=1e-6, atol=0)
    assert_like("npu_add_rms_norm", arguments)


def test_defaults_are_those_of_the_schema() -> None:
    x, gamma = torch.zeros(2, 16), torch.ones(16)
    assert torch.equal(torch.ops.npu.npu_rms_norm(x, gamma)[1], torch.full((2, 1), 1e-6).rsqrt())


def test_shapes_seen_on_the_real_meta_kernels() -> None:
    """x [4 128], as recorded from torch_npu 2.13.0."""
    for name in NORMS:
        outputs = call(name, valid(name, torch.bfloat16, 4, dim=(128,)))
        shapes = [((4, 128), torch.bfloat16), ((4, 1), torch.float32), ((4, 128), torch.bfloat16)]
        assert [(tuple(y.shape), y.dtype) for y in outputs] == shapes[: len(outputs)]


X = {"npu_add_rms_norm": "x1"}
LIMITS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "dtype": (lambda a: {key: x.double() if isinstance(x, Tensor) else x for key, x in a.items()}, "float64"),
    "another dtype of gamma": (lambda a: a | {"gamma": a["gamma"].half()}, "dtypes differ|gamma is torch.float16"),
    "other axes": (lambda a: a | {"gamma": a["gamma"][:24]}, r"gamma is \[24\]"),
}


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("name", NORMS)
def test_limits_of_all_norms(name: str, limit: str) -> None:
    change, words = LIMITS[limit]
    refused(name, change(valid(name)), words)


def test_limits_of_one_norm() -> None:
    gemma, plain = valid("npu_gemma_rms_norm"), valid("npu_rms_norm")
    refused("npu_rms_norm", plain | {"input": plain["input"][0, 0]}, "1-dimensional.* 2 to 8")
    refused("npu_gemma_rms_norm", gemma | {"input": gemma["input"].transpose(0, 1)}, "not contiguous")
    refused("npu_gemma_rms_norm", gemma | {"input": gemma["input"][:0]}, "empty")
    refused("npu_gemma_rms_norm", gemma | {"gamma": gemma["input"]}, "every axis")
    added = valid("npu_add_rms_norm")
    refused("npu_add_rms_norm", added | {"x2": added["x2"][:1]}, "equal shapes")
    with lowering.use(target="ascend950"):
        refused("npu_gemma_rms_norm", gemma, "is built for ascend950 from CANN 9.2.0-beta.1 on")
        call("npu_rms_norm", plain)
    with lowering.use(target=named("ascend950", cann="9.2.0")):
        call("npu_gemma_rms_norm", gemma)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_float32_weight_of_a_narrower_input(dtype: torch.dtype) -> None:
    """Is not rounded to the input's dtype; the result is."""
    draw = Draw(torch.float32, seed=9)
    x, gamma = draw.normal(5, 32).to(dtype), draw.normal(32)
    made = {"input": x, "gamma": gamma}
    y, rstd = call("npu_rms_norm", made)
    unit = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    assert_rounded_once(y, unit * gamma.double())
    assert y.dtype == dtype and rstd.dtype == torch.float32
    assert_like("npu_rms_norm", made)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [-1, 1])
def test_swiglu_activates_the_first_half(dim: int, dtype: torch.dtype) -> None:
    x = Draw(dtype, seed=1).normal(3, 10, 14)
    first, second = x.double().chunk(2, dim)
    assert_rounded_once(torch.ops.npu.npu_swiglu(x, dim=dim), first / (1 + (-first).exp()) * second)
    assert_like("npu_swiglu", {"input": x, "dim": dim})


def test_limits_of_swiglu() -> None:
    x = torch.randn(3, 7)
    refused("npu_swiglu", {"input": x}, "odd")
    refused("npu_swiglu", {"input": x, "dim": 2}, "dim is 2")
    refused("npu_swiglu", {"input": x.double(), "dim": 0}, "float64")
    refused("npu_swiglu", {"input": torch.tensor(1.0)}, "0-dimensional")
    assert torch.ops.npu.npu_swiglu(torch.randn(4, 256)).shape == (4, 128)
