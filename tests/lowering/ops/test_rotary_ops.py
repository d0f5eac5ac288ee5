"""Rotary angles and turns against complex numbers in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV2Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2RotaryEmbedding

from funcmodels.models.deepseek_v2_config import read_config
from lowering import ops
from lowering.op import Op
from tests.cases import Draw
from tests.tolerances import assert_close

POSITIONS = (0, 1, 5, 700, 2355)
THETA = 1e7


def frequencies(rotary_dim: int, theta: float = THETA) -> Tensor:
    """theta^(-2i / rotary_dim) in float64."""
    return torch.tensor([theta ** (-2 * i / rotary_dim) for i in range(rotary_dim // 2)], dtype=torch.float64)


def turned(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """x [tokens heads dim] with its first channels turned as complex numbers by angles [tokens half].

    What comes out has the real parts first in both layouts.
    """
    half = angles.shape[-1]
    wide = x.double()
    real, imaginary = (
        (wide[..., 0 : 2 * half : 2], wide[..., 1 : 2 * half : 2])
        if interleaved
        else (wide[..., :half], wide[..., half : 2 * half])
    )
    pairs = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((pairs.real, pairs.imag, wide[..., 2 * half :]), -1)


def both(op: Op, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys turned, at once or one after the other."""
    return op(q, k, cos, sin) if op is ops.rotary else (op(q, cos, sin), op(k, cos, sin))


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
    for x, y in zip((q, k), both(op, q, k, angles.cos(), angles.sin()), strict=True):
        assert y.dtype == dtype
        assert torch.equal(y[..., rotary_dim:], x[..., rotary_dim:])
        assert_close(y, turned(x, angles.double(), interleaved))


def test_position_zero_changes_nothing() -> None:
    """Bit for bit; pairs are sorted all the same."""
    draw = Draw(torch.bfloat16)
    q, k = draw.normal(2, 3, 32), draw.normal(2, 1, 32)
    cos, sin = ops.rotary_angles(torch.zeros(2, dtype=torch.int32), rotary_dim=16, theta=1e4)
    order = [*range(0, 16, 2), *range(1, 16, 2), *range(16, 32)]
    for op, expected in ((ops.rotary, (q, k)), (ops.rotary_interleaved, (q[..., order], k[..., order]))):
        assert all(torch.equal(a, b) for a, b in zip(both(op, q, k, cos, sin), expected, strict=True))


def test_scores_depend_on_distance_alone() -> None:
    """q at p and k at p - 4 give one score for every p, whichever layout."""
    draw = Draw(torch.float32)
    q, k = draw.normal(1, 1, 24).expand(6, 1, 24), draw.normal(1, 1, 24).expand(6, 1, 24)
    at = torch.tensor([4, 5, 9, 33, 64, 100], dtype=torch.int32)
    for op in (ops.rotary, ops.rotary_interleaved):
        turned_q, _ = both(op, q, k, *ops.rotary_angles(at, rotary_dim=24, theta=1e4))
        _, turned_k = both(op, q, k, *ops.rotary_angles(at - 4, rotary_dim=24, theta=1e4))
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


def test_yarn_angles_are_those_of_transformers() -> None:
    """With a cut ramp and an uncut one, a multiplier of its own, one from the config, and the plain one."""
    at = torch.tensor(POSITIONS, dtype=torch.int32)
    base = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 4096}
    for more in (
        {},
        {"mscale": 1.0, "mscale_all_dim": 0.707},
        {"attention_factor": 1.3, "truncate": False},
        {"beta_fast": 8, "beta_slow": 8, "factor": 3.0},
    ):
        rope = base | more
        theirs = DeepseekV2Config(rope_parameters=dict(rope), max_position_embeddings=163840, q_lora_rank=None)
        sizes = {"vocab_size": 7, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        dims = {"kv_lora_rank": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 64, "v_head_dim": 4}
        ours = read_config({**sizes, **dims, "num_experts_per_tok": 1, "rope_parameters": rope})
        expected = DeepseekV2RotaryEmbedding(theirs)(torch.zeros(1), at[None].long())[0]
        stretch = {"factor": ours.factor, "ramp": ours.ramp, "multiplier": ours.angle_multiplier}
        found = ops.yarn_angles(at, rotary_dim=64, theta=1e4, **stretch)
        reason = "an angle of 2355 rounded to float32 is off by 1e-4 radians"
        assert_close(found, (expected.real, expected.imag), looser=20, reason=reason)
