"""Norms against formulas in float64 that round exactly where each convention does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lowering import OPS, ops
from tests.cases import Draw
from tests.tolerances import assert_close

EPS = 1e-6
DTYPES = [torch.float32, torch.bfloat16]


def unit(x: Tensor) -> Tensor:
    """x over its root mean square, in float64."""
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt()


def activated(gate: Tensor, activation: str) -> Tensor:
    """The gate's activation, in float64."""
    wide = gate.double()
    return wide / (1 + (-wide).exp()) if activation == "silu" else 1 / (1 + (-wide).exp())


def plain(x: Tensor, weight: Tensor) -> Tensor:
    """Rounded before the weight, and again after it."""
    return (unit(x).to(x.dtype).double() * weight.double()).to(x.dtype)


def gemma(x: Tensor, weight: Tensor) -> Tensor:
    """Times 1 + weight, rounded once."""
    return (unit(x) * (1 + weight.double())).to(x.dtype)


def ulps(actual: Tensor, expected: Tensor) -> int:
    """The largest difference in units in the last place of bfloat16."""
    ordered = [torch.where((b := x.view(torch.int16).int()) < 0, -32768 - b, b) for x in (actual, expected)]
    return int((ordered[0] - ordered[1]).abs().max())


@pytest.fixture(params=DTYPES, ids=["f32", "bf16"])
def drawn(request: Any) -> tuple[Tensor, Tensor, Tensor]:
    """x, a second tensor of its shape, and a weight."""
    draw = Draw(request.param, seed=3)
    return draw.normal(4, 3, 48), draw.normal(4, 3, 48), draw.normal(48)


def assert_rounds_alike(actual: Tensor, expected: Tensor) -> None:
    """Equal in float32 bounds; in bfloat16 to one unit in the last place, and mostly to the bit."""
    assert actual.dtype == expected.dtype
    if actual.dtype == torch.bfloat16:
        assert ulps(actual, expected) <= 1
        assert (actual == expected).float().mean() > 0.99
    else:
        assert_close(actual, expected)


def test_plain_norm_rounds_before_the_weight(drawn: tuple[Tensor, Tensor, Tensor]) -> None:
    """The form with the deviation gives the same output, and 1 / rms in float32."""
    x, _, weight = drawn
    assert_rounds_alike(ops.rms_norm(x, weight, eps=EPS), plain(x, weight))
    y, rstd = ops.rms_norm_rstd(x, weight, eps=EPS)
    assert torch.equal(y, ops.rms_norm.body(x, weight, eps=EPS))
    assert_close(rstd, (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt())
    assert rstd.dtype == torch.float32


def test_gemma_norm_rounds_once(drawn: tuple[Tensor, Tensor, Tensor]) -> None:
    """Also in the form with the deviation."""
    x, _, weight = drawn
    assert_rounds_alike(ops.gemma_rms_norm(x, weight, eps=EPS), gemma(x, weight))
    y, rstd = ops.gemma_rms_norm_rstd(x, weight, eps=EPS)
    assert_rounds_alike(y, gemma(x, weight))
    assert_close(rstd, (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt())


def test_added_norms_normalise_the_rounded_sum(drawn: tuple[Tensor, Tensor, Tensor]) -> None:
    """Both the norm of the sum and the sum itself are returned, norm first."""
    x, residual, weight = drawn
    total = (x.double() + residual.double()).to(x.dtype)
    for op, formula in ((ops.add_rms_norm, plain), (ops.add_gemma_rms_norm, gemma)):
        y, kept = op(x, residual, weight, eps=EPS)
        assert torch.equal(kept, total)
        assert_rounds_alike(y, formula(total, weight))


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_gated_norms(drawn: tuple[Tensor, Tensor, Tensor], activation: Any) -> None:
    """The delta-net form rounds between norm and gate, the Kimi form only at the end."""
    x, gate, weight = drawn
    y = ops.gated_rms_norm(x, gate, weight, eps=EPS, activation=activation)
    assert_rounds_alike(y, (plain(x, weight).double() * activated(gate, activation)).to(x.dtype))
    y = ops.gated_rms_norm_fp32(x, gate, weight, eps=EPS, activation=activation)
    assert_rounds_alike(y, (unit(x) * weight.double() * activated(gate, activation)).to(x.dtype))


def test_grouped_norm_has_one_mean_a_group(drawn: tuple[Tensor, Tensor, Tensor]) -> None:
    """Scaling one group leaves the others' bits alone."""
    x, _, weight = drawn
    y = ops.grouped_gemma_rms_norm(x, weight, groups=3, eps=EPS)
    parts = [gemma(a, b) for a, b in zip(x.chunk(3, -1), weight.chunk(3), strict=True)]
    assert_rounds_alike(y, torch.cat(parts, -1))
    scaled = torch.cat((x[..., :16] * 64, x[..., 16:]), -1)
    assert torch.equal(ops.grouped_gemma_rms_norm(scaled, weight, groups=3, eps=EPS)[..., 16:], y[..., 16:])


def test_the_conventions_differ_in_bfloat16() -> None:
    """So that taking one for another cannot pass."""
    draw = Draw(torch.bfloat16)
    x, gate, weight = draw.normal(64, 64), draw.normal(64, 64), draw.normal(64)
    kwargs: Any = {"eps": EPS, "activation": "silu"}
    assert not torch.equal(
        ops.gated_rms_norm(x, gate, weight, **kwargs), ops.gated_rms_norm_fp32(x, gate, weight, **kwargs)
    )
    once = (unit(x) * weight.double()).bfloat16()
    assert not torch.equal(ops.rms_norm(x, weight, eps=EPS), once)


def test_gemma_weight_survives_bfloat16() -> None:
    """1 + 0.003 is 1 in bfloat16: adding before widening would lose the weight."""
    x = Draw(torch.bfloat16).normal(1, 1152)
    weight = torch.full((1152,), 0.003, dtype=torch.bfloat16)
    x[0, 7] = 3000.0
    y = ops.gemma_rms_norm(x, weight, eps=EPS)
    assert_rounds_alike(y, gemma(x, weight))
    assert not torch.equal(y, ops.gemma_rms_norm(x, torch.zeros_like(weight), eps=EPS))
    assert (weight + 1 == 1).all()


def test_a_large_value_does_not_lose_the_mean() -> None:
    """One 3000 among unit values: a mean of squares taken in bfloat16 would be off by per cents."""
    x = Draw(torch.bfloat16).normal(2, 1152)
    x[:, 5] = 3000.0
    _, rstd = ops.rms_norm_rstd(x, torch.ones(1152, dtype=torch.bfloat16), eps=EPS)
    assert_close(rstd, (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt())


NORMS = [name for name in OPS if "rms_norm" in name]


@pytest.mark.parametrize("name", NORMS)
def test_a_float32_weight_takes_bfloat16_input(name: str) -> None:
    """Finite, in x's dtype except where the plain convention promotes; never NaN."""
    draw = Draw(torch.bfloat16)
    op, x = OPS[name], draw.normal(3, 24)
    kwargs: dict[str, Any] = {"eps": EPS}
    kwargs |= {"activation": "silu"} if "gated" in name else {"groups": 2} if "grouped" in name else {}
    more = (draw.normal(3, 24),) if "add" in name or "gated" in name else ()
    found = op(x, *more, draw.normal(24, dtype=torch.float32), **kwargs)
    for y in found if isinstance(found, tuple) else (found,):
        assert y.isfinite().all()


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("fill", [0.0, 1e-30, 1e18])
def test_extreme_rows_stay_finite(name: str, fill: float) -> None:
    """Zeros and tiny values are held up by eps; squares of 1e18 still fit in float32."""
    op, x = OPS[name], torch.full((2, 24), fill)
    kwargs: dict[str, Any] = {"eps": EPS}
    kwargs |= {"activation": "silu"} if "gated" in name else {"groups": 2} if "grouped" in name else {}
    more = (torch.zeros(2, 24),) if "add" in name or "gated" in name else ()
    found = op(x, *more, torch.ones(24), **kwargs)
    for y in found if isinstance(found, tuple) else (found,):
        assert y.isfinite().all()
