"""Rotary embedding: npu_rotary_mul on Ascend 910, npu_apply_rotary_pos_emb on Ascend 950.

Both want cosines and sines as wide as what they turn: each twice, side by side for halves and neighbouring for pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.rotary import mrope_angles, rotary, rotary_angles, rotary_interleaved
from ..target import ASCEND
from .features import npu
from .kernel import FLOATS, above, empty, fused, wrong_dtype

_NO_ANGLES = (
    "no fused operator makes angles alone; npu_mrope reads them from a table in every layer, and ours are made once a "
    "forward"
)
rotary_angles.without(ASCEND, _NO_ANGLES)
mrope_angles.without(ASCEND, _NO_ANGLES)

PARTIAL = ("ascend950",)
"""Targets where npu_apply_rotary_pos_emb turns the first channels of a head; elsewhere it wants whole heads."""


def _refuse_multiplied(q, k, cos, sin) -> str | None:
    return (
        wrong_dtype(FLOATS, q=q, k=k)
        or empty(q=q, k=k, cos=cos)
        or above(999, heads=max(q.shape[1], k.shape[1]))
        or above(895, channels=2 * cos.shape[1])
    )


def _side_by_side(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.cat((x, x), -1).to(dtype)


def _neighbours(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.repeat_interleave(2, -1).to(dtype)


def _multiplied(x: Tensor, cos: Tensor, sin: Tensor, mode: str) -> Tensor:
    """x [tokens heads dim] with its first channels turned by cos and sin [tokens channels], the rest as they are."""
    width = cos.shape[-1]
    # One batch of tokens: layout BSND, with the angles as 1S1D.
    angles = (table[None, :, None] for table in (cos, sin))
    turned = npu.npu_rotary_mul(x[None, ..., :width].to(cos.dtype).contiguous(), *angles, rotary_mode=mode)[0]
    return turned.to(x.dtype) if width == x.shape[-1] else torch.cat((turned.to(x.dtype), x[..., width:]), -1)


@fused(rotary, "npu_rotary_mul", "npu_rotary_mul", refuse=_refuse_multiplied)
def _halves(q, k, cos, sin):
    cos, sin = _side_by_side(cos, q.dtype), _side_by_side(sin, q.dtype)
    return _multiplied(q, cos, sin, "half"), _multiplied(k, cos, sin, "half")


@fused(rotary_interleaved, "npu_rotary_mul", "npu_rotary_mul", refuse=_refuse_multiplied)
def _pairs(q, k, cos, sin):
    cos, sin = _neighbours(cos, torch.float32), _neighbours(sin, torch.float32)
    return _multiplied(q, cos, sin, "interleave"), _multiplied(k, cos, sin, "interleave")


def _refuse_applied(q, k, cos, sin) -> str | None:
    if q.shape[2] % 2:
        return f"takes an even head_dim; this call has {q.shape[2]}"
    return wrong_dtype(FLOATS, q=q, k=k) or empty(q=q, k=k, cos=cos) or above(1024, head_dim=q.shape[2])


def _applied(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    """q and k [tokens heads dim] turned in cos's dtype. The operator writes its arguments, so they are copies."""
    copies = (x.to(cos.dtype, memory_format=torch.contiguous_format, copy=True) for x in (q, k))
    turned = npu.npu_apply_rotary_pos_emb(*copies, cos[:, None], sin[:, None], layout="TND", rotary_mode=mode)
    return turned[0].to(q.dtype), turned[1].to(k.dtype)


@fused(rotary, "npu_apply_rotary_pos_emb", "npu_apply_rotary_pos_emb", only=PARTIAL, refuse=_refuse_applied)
def _halves_in_one(q, k, cos, sin):
    return _applied(q, k, _side_by_side(cos, q.dtype), _side_by_side(sin, q.dtype), "half")


@fused(rotary_interleaved, "npu_apply_rotary_pos_emb", "npu_apply_rotary_pos_emb", only=PARTIAL, refuse=_refuse_applied)
def _pairs_in_one(q, k, cos, sin):
    return _applied(q, k, _neighbours(cos, torch.float32), _neighbours(sin, torch.float32), "interleave")
