"""Rotary operators against complex numbers in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import lowering
from tests.cases import Draw
from tests.lowering.npu_reference.calls import assert_like, assert_rounded_once, call, refused

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
APPLY, MUL = "npu_apply_rotary_pos_emb", "npu_rotary_mul"


def angles(draw: Draw, *shape: int, mode: str = "half") -> tuple[Tensor, Tensor]:
    """Cosines and sines of the last axis' planes, at full width."""
    turn = draw.uniform(-3, 3, *shape[:-1], shape[-1] // 2)
    wide = torch.cat((turn, turn), -1) if mode == "half" else turn.repeat_interleave(2, -1)
    return wide.cos().to(draw.dtype), wide.sin().to(draw.dtype)


def turned(x: Tensor, cos: Tensor, sin: Tensor, mode: str) -> Tensor:
    """Each plane as a complex number times cos + i sin."""

    def plane(y: Tensor) -> tuple[Tensor, Tensor]:
        wide, half = y.double().expand(x.shape), x.shape[-1] // 2
        return (wide[..., :half], wide[..., half:]) if mode == "half" else (wide[..., ::2], wide[..., 1::2])

    z = torch.complex(*plane(x)) * torch.complex(plane(cos)[0], plane(sin)[0])
    return torch.cat((z.real, z.imag), -1) if mode == "half" else torch.stack((z.real, z.imag), -1).flatten(-2)


def valid_mul(dtype: torch.dtype = torch.bfloat16, mode: str = "half") -> dict[str, Any]:
    draw = Draw(dtype, seed=2)
    cos, sin = angles(draw, 1, 7, 1, 20, mode=mode)
    return {"input": draw.normal(1, 7, 3, 20), "r1": cos, "r2": sin, "rotary_mode": mode}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_rotary_mul(mode: str, dtype: torch.dtype) -> None:
    arguments = valid_mul(dtype, mode)
    before = arguments["input"].clone()
    y = call(MUL, arguments)
    assert_rounded_once(y, turned(before, arguments["r1"], arguments["r2"], mode))
    assert torch.equal(arguments["input"], before)
    assert_like(MUL, arguments)


@pytest.mark.parametrize(
    "cosines",
    [(1, 7, 1), (2, 7, 1), (2, 7, 3), (7, 1, 1), (1, 1, 3)],
    ids=["1S1D", "BS1D", "BSND", "no layout's", "11SD of BNSD"],
)
def test_layouts_of_cosines(cosines: tuple[int, ...]) -> None:
    draw = Draw(torch.float32, seed=3)
    arguments = {"input": draw.normal(2, 7, 3, 8), **dict(zip(("r1", "r2"), angles(draw, *cosines, 8), strict=True))}
    if cosines == (7, 1, 1):
        refused(MUL, arguments, "fits no layout")
    else:
        assert_rounded_once(call(MUL, arguments), turned(arguments["input"], arguments["r1"], arguments["r2"], "half"))


def test_limits_of_rotary_mul() -> None:
    good = valid_mul()
    x, cos = good["input"], good["r1"]
    refused(MUL, good | {"input": x[0]}, "3-dimensional")
    refused(MUL, good | {"input": x.double()}, "float64")
    refused(MUL, good | {"r1": cos.float(), "r2": cos.float()}, "dtypes differ")
    refused(MUL, good | {"r2": cos[:, :1]}, "equal shapes")
    refused(MUL, good | {"r1": cos[..., :10], "r2": cos[..., :10]}, "last axis must be")
    refused(MUL, good | {"r1": cos * 2}, r"outside \[-1, 1\]")
    refused(MUL, good | {"rotary_mode": "quarter"}, "rotary_mode")
    refused(MUL, good | {"rotate": torch.eye(20).bfloat16()}, "rotate")
    wide = torch.zeros(1, 2, 1, 898).bfloat16()
    refused(MUL, good | {"input": wide, "r1": wide, "r2": wide}, "on ascend910b .* up to 896")
    with lowering.use(target="ascend950"):
        call(MUL, good | {"input": wide, "r1": wide, "r2": wide})
    odd = torch.zeros(1, 2, 1, 9).bfloat16()
    refused(MUL, good | {"input": odd, "r1": odd, "r2": odd}, "even")
    many = torch.zeros(1, 2, 1000, 4).bfloat16()
    refused(MUL, good | {"input": many, "r1": many[:, :, :1], "r2": many[:, :, :1]}, "below 1000")
    rows = torch.zeros(2, 7, 3, 20).bfloat16()
    refused(MUL, valid_mul(mode="interleave") | {"input": rows, "r1": rows[:, :, :1], "r2": rows[:, :, :1]}, "one row")


def valid_apply(dtype: torch.dtype = torch.bfloat16, layout: str = "TND", width: int = 64) -> dict[str, Any]:
    draw = Draw(dtype, seed=4)
    lead = (5,) if layout == "TND" else (2, 5)
    cos, sin = angles(draw, *lead, 1, width)
    return {
        "query": draw.normal(*lead, 3, 64), "key": draw.normal(*lead, 2, 64), "cos": cos, "sin": sin,
        "layout": layout, "rotary_mode": "half",
    }  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["TND", "BSND"])
def test_query_and_key_are_turned_in_place(layout: str, dtype: torch.dtype) -> None:
    arguments = valid_apply(dtype, layout)
    before = {name: arguments[name].clone() for name in ("query", "key")}
    assert_like(APPLY, arguments | before)
    for name, y in zip(before, call(APPLY, arguments), strict=True):
        assert_rounded_once(y, turned(valid_apply(dtype, layout)[name], arguments["cos"], arguments["sin"], "half"))
        assert y.data_ptr() == arguments[name].data_ptr()


@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_part_of_the_channels_on_950(mode: str) -> None:
    good: dict[str, Any] = valid_apply(torch.float32, width=24) | {"rotary_mode": mode}
    good["cos"], good["sin"] = angles(Draw(torch.float32, seed=6), 5, 1, 24, mode=mode)
    before = good["query"].clone()
    refused(APPLY, good | {"rotary_mode": "half"}, "as wide as query")
    with lowering.use(target="ascend950"):
        y = call(APPLY, good)[0]
    assert_rounded_once(y[..., :24], turned(before[..., :24], good["cos"], good["sin"], mode))
    assert torch.equal(y[..., 24:], before[..., 24:])


def test_limits_of_apply_rotary() -> None:
    good = valid_apply()
    query, key, cos = good["query"], good["key"], good["cos"]
    refused(APPLY, good | {"layout": "BNSD"}, "layout is 'BNSD'; ascend910b")
    refused(APPLY, good | {"layout": "BSND"}, "3-dimensional")
    refused(APPLY, good | {"rotary_mode": "interleave"}, "rotary_mode")
    refused(APPLY, good | {"cos": cos.float(), "sin": cos.float()}, "dtypes differ")
    refused(APPLY, good | {"cos": cos[:, 0], "sin": cos[:, 0]}, "2-dimensional")
    refused(APPLY, good | {"sin": cos[:1]}, "equal shapes")
    refused(APPLY, good | {"cos": cos[:4], "sin": cos[:4]}, r"cos is \[4, 1, 64\]; expected \[5, 1, 64\]")
    refused(APPLY, good | {"key": key[:4]}, "number of heads only")
    refused(APPLY, good | {"query": query.transpose(0, 1).contiguous().transpose(0, 1)}, "not contiguous")
    refused(APPLY, {k: x[..., :32].contiguous() if isinstance(x, Tensor) else x for k, x in good.items()}, "64 or 128")
    refused(APPLY, {k: x[:0] if isinstance(x, Tensor) else x for k, x in good.items()}, "empty")
    with lowering.use(target="ascend950"):
        call(APPLY, {k: x[:0] if isinstance(x, Tensor) else x for k, x in good.items()})
        refused(APPLY, good | {"query": query[..., :32].contiguous(), "key": key[..., :32].contiguous()}, "even width")


def test_shapes_seen_on_the_real_meta_kernels() -> None:
    draw = Draw(torch.bfloat16)
    for lead in ((4,), (1, 4)):
        cos = draw.normal(*lead, 1, 128)
        layout = "TND" if len(lead) == 1 else "BSND"
        y = torch.ops.npu.npu_apply_rotary_pos_emb(
            draw.normal(*lead, 8, 128), draw.normal(*lead, 1, 128), cos, cos, layout=layout
        )
        assert [x.shape for x in y] == [(*lead, 8, 128), (*lead, 1, 128)]


INTERLEAVE = "npu_interleave_rope"


def valid_interleave(dtype: torch.dtype = torch.bfloat16, steps: int = 3) -> dict[str, Any]:
    draw = Draw(dtype, seed=6)
    cos, sin = angles(draw, 5, 1, steps, 64)
    return {"x": draw.normal(5, 4, 3, 64), "cos": cos, "sin": sin}


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("steps", [3, 1])
def test_interleave_rope(steps: int, dtype: torch.dtype) -> None:
    """Channel 2i + j of pair i comes out at 32 * j + i; a cosine may serve all steps of its row."""
    arguments = valid_interleave(dtype, steps)
    y = call(INTERLEAVE, arguments)
    # Side by side as the operator wants them; `turned` takes each pair's two next to each other.
    cos, sin = (arguments[name][..., :32].repeat_interleave(2, -1) for name in ("cos", "sin"))
    pairs = turned(arguments["x"], cos, sin, "interleave")
    expected = torch.empty_like(pairs)
    for channel in range(64):
        expected[..., 32 * (channel % 2) + channel // 2] = pairs[..., channel]
    assert_rounded_once(y, expected)
    assert_like(INTERLEAVE, arguments)


def test_limits_of_interleave_rope() -> None:
    good = valid_interleave()
    refused(INTERLEAVE, good | {"x": good["x"].float()}, "x is torch.float32")
    refused(INTERLEAVE, good | {"cos": good["cos"].float()}, "dtypes differ")
    refused(INTERLEAVE, good | {"x": good["x"][0]}, "3-dimensional")
    refused(INTERLEAVE, good | {"x": good["x"].transpose(1, 2)}, "not contiguous")
    refused(INTERLEAVE, good | {"x": good["x"][..., :32].contiguous()}, "the last axis of x is 32")
    refused(INTERLEAVE, good | {"sin": good["sin"][:, :, :1].contiguous()}, "equal shapes")
    half = {name: good[name][..., :32].contiguous() for name in ("cos", "sin")}
    refused(INTERLEAVE, good | half, "each one twice, side by side")
    by_head = {name: good[name].expand(5, 4, 3, 64).contiguous() for name in ("cos", "sin")}
    refused(INTERLEAVE, good | by_head, r"expected \[5, 1, 3 or 1, 64\]")
    with lowering.use(target="ascend950"):
        refused(INTERLEAVE, good, "lowered to ascend950")
