"""Rotary embedding: npu_rotary_mul, npu_interleave_rope on Ascend 910, npu_apply_rotary_pos_emb on Ascend 950.

All want cosines and sines as wide as what they turn: each twice, side by side. Pairs are sorted into halves first;
npu_interleave_rope does that itself, for heads of 64 channels, with cosines of the heads' own 16 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.rotary import mrope_angles, rotary, rotary_angles, rotary_interleaved, yarn_angles
from ..target import ASCEND
from .features import npu
from .kernel import FLOATS, HALVES, above, empty, fused, machine, wrong_dtype

_NO_ANGLES = "no operator makes angles alone"
rotary_angles.without(ASCEND, _NO_ANGLES)
mrope_angles.without(ASCEND, _NO_ANGLES)
yarn_angles.without(ASCEND, _NO_ANGLES)

PARTIAL = ("ascend950",)
"""Targets where npu_apply_rotary_pos_emb turns the first channels of a head; elsewhere it wants whole heads."""
MOST_CHANNELS = {"ascend910b": 896, "ascend910_93": 896, "ascend950": 1024}
"""Channels that npu_rotary_mul turns."""


def side_by_side(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cosines or sines of each pair, once for its first and once for its second member, as halves want them."""
    return torch.cat((x, x), -1).to(dtype)


def _refuse_applied(q, k, cos, sin) -> str | None:
    return _wrong_applied(cos, q=q, k=k)


def _wrong_applied(cos: Tensor, **turned: Tensor) -> str | None:
    head_dim = next(iter(turned.values())).shape[2]
    if head_dim % 2:
        return f"takes an even head_dim; this call has {head_dim}"
    return wrong_dtype(FLOATS, **turned) or empty(**turned, cos=cos) or above(1024, head_dim=head_dim)


def _applied(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    """q and k [tokens heads dim] turned in cos's dtype. The operator writes its arguments, so they are copies."""
    copies = (x.to(cos.dtype, memory_format=torch.contiguous_format, copy=True) for x in (q, k))
    turned = npu.npu_apply_rotary_pos_emb(*copies, cos[:, None], sin[:, None], layout="TND", rotary_mode=mode)
    return turned[0].to(q.dtype), turned[1].to(k.dtype)


@fused(rotary, "npu_apply_rotary_pos_emb", "npu_apply_rotary_pos_emb", only=PARTIAL, refuse=_refuse_applied)
def _halves_in_one(q, k, cos, sin):
    return _applied(q, k, side_by_side(cos, q.dtype), side_by_side(sin, q.dtype), "half")


def _refuse_multiplied(q, k, cos, sin) -> str | None:
    return _wrong_multiplied(cos, q=q, k=k)


def _wrong_multiplied(cos: Tensor, **turned: Tensor) -> str | None:
    return (
        wrong_dtype(FLOATS, **turned)
        or empty(**turned, cos=cos)
        or above(999, heads=max(x.shape[1] for x in turned.values()))
        or above(MOST_CHANNELS[machine(cos).name], channels=2 * cos.shape[1])
    )


def _multiplied(x: Tensor, cos: Tensor, sin: Tensor, mode: str) -> Tensor:
    """x [tokens heads dim] with its first channels turned by cos and sin [tokens channels], the rest as they are."""
    width = cos.shape[-1]
    # One batch of tokens: layout BSND, with the angles as 1S1D.
    angles = (table[None, :, None] for table in (cos, sin))
    turned = npu.npu_rotary_mul(x[None, ..., :width].to(cos.dtype).contiguous(), *angles, rotary_mode=mode)[0]
    return turned.to(x.dtype) if width == x.shape[-1] else torch.cat((turned.to(x.dtype), x[..., width:]), -1)


@fused(rotary, "npu_rotary_mul", "npu_rotary_mul", refuse=_refuse_multiplied)
def _halves(q, k, cos, sin):
    cos, sin = side_by_side(cos, q.dtype), side_by_side(sin, q.dtype)
    return _multiplied(q, cos, sin, "half"), _multiplied(k, cos, sin, "half")


INTERLEAVED_DIM = 64
"""The one size of heads that npu_interleave_rope takes."""


def _refuse_interleaved(x, cos, sin) -> str | None:
    if x.shape[2] != INTERLEAVED_DIM or 2 * cos.shape[1] != INTERLEAVED_DIM:
        return f"turns whole heads of {INTERLEAVED_DIM} channels; this call turns {2 * cos.shape[1]} of {x.shape[2]}"
    return wrong_dtype(HALVES, x=x) or empty(x=x)


@fused(rotary_interleaved, "npu_interleave_rope", "npu_interleave_rope", refuse=_refuse_interleaved)
def _interleaved(x, cos, sin):
    # Layout BNSD of tokens of one step each.
    angles = (side_by_side(table, x.dtype)[:, None, None] for table in (cos, sin))
    return npu.npu_interleave_rope(x[:, :, None].contiguous(), *angles)[:, :, 0]


def _sorted(x: Tensor, width: int) -> Tensor:
    """The first `width` channels with those of even number before those of odd number, then the rest."""
    return torch.cat((x[..., 0:width:2], x[..., 1:width:2], x[..., width:]), -1)


def _refuse_applied_pairs(x, cos, sin) -> str | None:
    return _wrong_applied(cos, x=x)


@fused(
    rotary_interleaved,
    "npu_apply_rotary_pos_emb",
    "npu_apply_rotary_pos_emb",
    only=PARTIAL,
    refuse=_refuse_applied_pairs,
)
def _pairs_in_one(x, cos, sin):
    halves = side_by_side(cos, torch.float32), side_by_side(sin, torch.float32)
    x = _sorted(x, 2 * cos.shape[1])
    # The operator turns keys too: one head stands for them.
    return _applied(x, x[:, :1], *halves, "half")[0]


def _refuse_pairs(x, cos, sin) -> str | None:
    return _wrong_multiplied(cos, x=x)


@fused(rotary_interleaved, "npu_rotary_mul", "npu_rotary_mul", refuse=_refuse_pairs)
def turned_pairs(x, cos, sin):
    """The kernel of `rotary_interleaved` for heads of any size, in float32."""
    halves = side_by_side(cos, torch.float32), side_by_side(sin, torch.float32)
    return _multiplied(_sorted(x, 2 * cos.shape[1]), *halves, "half")
