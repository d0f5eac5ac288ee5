"""Rotary angles and turns against complex numbers in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowering import ops
from tests.cases import Draw
from tests.tolerances import assert_close

POSITIONS = (0, 1, 5, 700, 2355)
THETA = 1e7


def frequencies(rotary_dim: int, theta: float = THETA) -> Tensor:
    """theta^(-2i / rotary_dim) in float64."""
    return torch.tensor([theta ** (-2 * i / rotary_dim) for i in range(rotary_dim // 2)], dtype=torch.float64)


def turned(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """x [tokens heads dim] with its first channels turned as complex numbers by angles [tokens half]."""
    half = angles.shape[-1]
    wide = x.double()
    real, imaginary = (
        (wide[..., 0 : 2 * half : 2], wide[..., 1 : 2 * half : 2])
        if interleaved
        else (wide[..., :half], wide[..., half : 2 * half])
    )
    pairs = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angles), angles)[:, None]
    first = torch.view_as_real(pairs).flatten(-2) if interleaved else torch.cat((pairs.real, pairs.imag), -1)
    return torch.cat((first, wide[..., 2 * half :]), -1)


@pytest.mark.parametrize("rotary_dim", [64, 6])
def test_angles(rotary_dim: int) -> None:
    """The exponent is over rotary_dim, not head_dim; angles are exact to float32."""
    cos, sin = ops.rotary_angles(torch.tensor(POSITIONS, dtype=torch.int32), rotary_dim=rotary_dim, theta=THETA)
    angles = torch.tensor(POSITIONS, dtype=torch.float64)[:, None] * frequencies(rotary_dim)
    assert cos.dtype == sin.dtype == torch.float32
    reason = "an angle of 2355 rounded to float32 is off by 1e-4 radians; the oracle's formula has the same law"
    assert_close((cos, sin), (angles.cos(), angles.sin()), dtype=torch.float32, looser=20, reason=reason)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(256, 64), (16, 16), (13, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_turns(head_dim: int, rotary_dim: int, interleaved: bool, dtype: torch.dtype) -> None:
    """Pairs turn as complex numbers; channels past rotary_dim pass bit for bit."""
    draw = Draw(dtype)
    q, k = draw.normal(5, 3, head_dim), draw.normal(5, 1, head_dim)
    angles = torch.tensor(POSITIONS)[:, None].float() * frequencies(rotary_dim).float()
    op = ops.rotary_interleaved if interleaved else ops.rotary
    for x, y in zip((q, k), op(q, k, angles.cos(), angles.sin()), strict=True):
        assert y.dtype == dtype
        assert torch.equal(y[..., rotary_dim:], x[..., rotary_dim:])
        assert_close(y, turned(x, angles.double(), interleaved))


def test_position_zero_changes_nothing() -> None:
    """Bit for bit, in both layouts."""
    draw = Draw(torch.bfloat16)
    q, k = draw.normal(2, 3, 32), draw.normal(2, 1, 32)
    cos, sin = ops.rotary_angles(torch.zeros(2, dtype=torch.int32), rotary_dim=16, theta=1e4)
    for op in (ops.rotary, ops.rotary_interleaved):
        assert all(torch.equal(a, b) for a, b in zip(op(q, k, cos, sin), (q, k), strict=True))


def test_scores_depend_on_distance_alone() -> None:
    """q at p and k at p - 4 give one score for every p, whichever layout."""
    draw = Draw(torch.float32)
    q, k = draw.normal(1, 1, 24).expand(6, 1, 24), draw.normal(1, 1, 24).expand(6, 1, 24)
    at = torch.tensor([4, 5, 9, 33, 64, 100], dtype=torch.int32)
    for op in (ops.rotary, ops.rotary_interleaved):
        turned_q, _ = op(q, k, *ops.rotary_angles(at, rotary_dim=24, theta=1e4))
        _, turned_k = op(q, k, *ops.rotary_angles(at - 4, rotary_dim=24, theta=1e4))
        scores = (turned_q * turned_k).sum(-1)[:, 0]
        assert_close(scores, scores[:1].expand(6), looser=10, reason="angles of up to 100 radians round in float32")


def test_text_mrope_is_plain_rope() -> None:
    """Three equal rows of positions: bit for bit the plain angles."""
    at = torch.tensor(POSITIONS, dtype=torch.int32)
    plain = ops.rotary_angles(at, rotary_dim=64, theta=THETA)
    three = ops.mrope_angles(at.expand(3, -1), rotary_dim=64, theta=THETA, sections=(11, 11, 10))
    assert all(torch.equal(a, b) for a, b in zip(plain, three, strict=True))


def test_mrope_interleaves_the_axes() -> None:
    """Each frequency takes the axis that the rule of three names: time, height, width."""
    at = torch.tensor([[3], [50], [700]], dtype=torch.int32)
    sections = (4, 3, 2)
    cos, sin = ops.mrope_angles(at, rotary_dim=18, theta=1e4, sections=sections)
    axes = [
        1 if i % 3 == 1 and i < 3 * sections[1] else 2 if i % 3 == 2 and i < 3 * sections[2] else 0 for i in range(9)
    ]
    assert set(axes) == {0, 1, 2} and axes[8] == 0
    angles = (at[axes, 0].double() * frequencies(18, 1e4))[None]
    reason = "an angle of 700 rounds to 3e-5 radians in float32"
    assert_close((cos, sin), (angles.cos(), angles.sin()), dtype=torch.float32, looser=10, reason=reason)
