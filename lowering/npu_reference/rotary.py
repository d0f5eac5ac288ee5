"""Rotary position embedding with cosines and sines given at full width: float32 inside, one rounding at the end."""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import ASCEND_950, FLOATS, need, need_contiguous, need_dtype, need_one_dtype, need_rank, shown, soc
from .registration import operator

Pair = tuple[Tensor, Tensor]


def turned(x: Tensor, mode: str) -> Tensor:
    """x rotated by a quarter turn in each plane: planes (i, i + half) for half, (2i, 2i + 1) for interleave."""
    if mode == "half":
        low, high = x.chunk(2, -1)
        return torch.cat((-high, low), -1)
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((-odd, even), -1).flatten(-2)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, mode: str) -> Tensor:
    """The first channels of x, as many as cos has, rotated; the others as they are."""
    width = cos.shape[-1]
    head = x[..., :width].float()
    y = head * cos.float() + turned(head, mode) * sin.float()
    return torch.cat((y.to(x.dtype), x[..., width:]), -1)


# Which axis of a 4-dimensional input is batch, sequence and heads.
_AXES = {"BNSD": (0, 2, 1), "BSND": (0, 1, 2), "SBND": (1, 0, 2)}


def _rotary_mul_fits(x: Tensor, r1: Tensor, mode: str, layout: str) -> bool:
    """Whether r1 broadcasts to x as the layout demands, inside the layout's limits."""
    batch, sequence, heads = _AXES[layout]
    wanted = [x.shape[batch], x.shape[sequence], x.shape[heads]]
    given = [r1.shape[batch], r1.shape[sequence], r1.shape[heads]]
    per_sequence = given == [1, wanted[1], 1]
    if mode == "interleave":
        return per_sequence and wanted[0] * wanted[2] < 1000
    per_row = given == [wanted[0], wanted[1], 1]
    return (per_sequence or per_row or given == wanted) and wanted[0] < 1000 and wanted[2] < 1000


def _rotary_mul_like(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str, rotate: Tensor | None) -> Tensor:
    need(rotate is None, "the reference does not cover a rotate matrix")
    need(rotary_mode in ("half", "interleave"), f"rotary_mode is {rotary_mode!r}; expected 'half' or 'interleave'")
    need_dtype(FLOATS, input=input)
    need_one_dtype(input=input, r1=r1, r2=r2)
    need_rank(4, 4, input=input, r1=r1, r2=r2)
    width = input.shape[-1]
    need(width % 2 == 0, f"the last axis of input is {width}; expected an even size")
    need(r1.shape == r2.shape, f"r1 is {shown(r1)} and r2 {shown(r2)}; the operator takes equal shapes")
    need(r1.shape[-1] == width, f"r1 is {shown(r1)}; its last axis must be that of the input {shown(input)}")
    need(
        any(_rotary_mul_fits(input, r1, rotary_mode, layout) for layout in _AXES),
        f"r1 {shown(r1)} fits no layout of the input {shown(input)} for {rotary_mode}: cosines of BNSD are 11SD, B1SD "
        "or BNSD, of BSND 1S1D, BS1D or BSND, of SBND S11D, SB1D or SBND, with B and N below 1000; interleave takes "
        "those of one row only, with B * N below 1000",
    )
    return torch.empty_like(input)


@operator("npu_rotary_mul", shapes=_rotary_mul_like)
def npu_rotary_mul(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str, rotate: Tensor | None) -> Tensor:
    """input * r1 + (input, a quarter turn on) * r2; r1 are cosines, r2 sines."""
    for name, values in (("r1", r1), ("r2", r2)):
        need(not values.numel() or float(values.abs().max()) <= 1, f"{name} has values outside [-1, 1]")
    return rotated(input, r1, r2, rotary_mode)


INTERLEAVED_WIDTH = 64
"""The one width of heads that are sorted and turned at once."""


def sorted_and_turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x with its even channels before its odd ones, then rotated by halves, in float32."""
    halves = torch.cat((x[..., ::2], x[..., 1::2]), -1).float()
    return halves * cos.float() + turned(halves, "half") * sin.float()


def need_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """The limits that operators share which sort and turn: x [B N S 64], cosines [B 1 S 64] or [B 1 1 64]."""
    need_dtype((torch.float16, torch.bfloat16), x=x)
    need_one_dtype(x=x, cos=cos, sin=sin)
    need_rank(4, 4, x=x, cos=cos, sin=sin)
    need_contiguous(x=x, cos=cos, sin=sin)
    batch, _, steps, _ = x.shape
    need(cos.shape == sin.shape, f"cos is {shown(cos)} and sin {shown(sin)}; the operator takes equal shapes")
    need(
        tuple(cos.shape) in ((batch, 1, steps, INTERLEAVED_WIDTH), (batch, 1, 1, INTERLEAVED_WIDTH)),
        f"cos is {shown(cos)}; expected [{batch}, 1, {steps} or 1, {INTERLEAVED_WIDTH}]: each one twice, side by side",
    )


def _interleave_like(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    need(soc() != ASCEND_950, "known to run on ascend910b and ascend910_93; the call is lowered to ascend950")
    need_interleaved(x, cos, sin)
    width = x.shape[-1]
    need(width == INTERLEAVED_WIDTH, f"the last axis of x is {width}; expected {INTERLEAVED_WIDTH}")
    return torch.empty_like(x)


@operator("npu_interleave_rope", shapes=_interleave_like)
def npu_interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x with neighbours rotated; the first members of all pairs come first, then the second ones."""
    return sorted_and_turned(x, cos, sin).to(x.dtype)


_ROTARY_LAYOUTS = {"TND": 3, "BSND": 4, "SBND": 4, "BNSD": 4}


def _apply_like(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str, rotary_mode: str) -> Pair:
    wide = soc() == ASCEND_950
    layouts = tuple(_ROTARY_LAYOUTS) if wide else ("TND", "BSND")
    modes = ("half", "interleave") if wide else ("half",)
    need(layout in layouts, f"layout is {layout!r}; {soc()} takes {' or '.join(layouts)}")
    need(rotary_mode in modes, f"rotary_mode is {rotary_mode!r}; the reference covers {' or '.join(modes)} on {soc()}")
    need_dtype(FLOATS, query=query)
    need_one_dtype(query=query, key=key, cos=cos, sin=sin)
    rank = _ROTARY_LAYOUTS[layout]
    need_rank(rank, rank, query=query, key=key, cos=cos, sin=sin)
    # Written in place: through a copy of a strided view the update would be lost.
    need_contiguous(query=query, key=key, cos=cos, sin=sin)
    _need_rotary_shapes(query, key, cos, sin, layout, wide)
    return torch.empty_like(query), torch.empty_like(key)


def _need_rotary_shapes(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str, wide: bool) -> None:
    width, turns = query.shape[-1], cos.shape[-1]
    heads = layout.index("N")
    expected = [*query.shape[:-1], turns]
    expected[heads] = 1
    one_row = [1 if axis == layout.find("B") else size for axis, size in enumerate(expected)]
    allowed = [expected, one_row] if wide else [expected]
    need(cos.shape == sin.shape, f"cos is {shown(cos)} and sin {shown(sin)}; the operator takes equal shapes")
    need(list(cos.shape) in allowed, f"cos is {shown(cos)}; expected {expected} for query {shown(query)} as {layout}")
    rest = [axis for axis in range(query.dim()) if axis != heads]
    need(
        all(query.shape[axis] == key.shape[axis] for axis in rest),
        f"query is {shown(query)} and key {shown(key)}; as {layout} they may differ in the number of heads only",
    )
    if wide:
        need(width <= 1024, f"the last axis of query is {width}; expected at most 1024")
        need(turns <= width and turns % 2 == 0, f"cos is {turns} wide; expected an even width up to {width}")
        return
    need(width in (64, 128), f"the last axis of query is {width}; expected 64 or 128 on {soc()}")
    need(turns == width, f"cos is {turns} wide; on {soc()} it must be as wide as query ({width})")
    need(min(query.numel(), key.numel()) > 0, f"query is {shown(query)}; empty tensors are not taken on {soc()}")


@operator("npu_apply_rotary_pos_emb", shapes=_apply_like)
def npu_apply_rotary_pos_emb(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str, rotary_mode: str
) -> Pair:
    """query and key rotated in place, and returned. The schema does not say that they are written."""
    for x in (query, key):
        x.copy_(rotated(x, cos, sin, rotary_mode))
    return query, key
