"""Quantisation of activations against loops over Python numbers, with the published test vectors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor

import lowering
from lowering.target import ASCEND, named
from tests.cases import Draw
from tests.lowering.npu_reference.calls import assert_like, call, refused

STATIC, DYNAMIC, BLOCKS, SWIGLU = (
    "npu_quantize", "npu_dynamic_quant", "npu_dynamic_mx_quant", "npu_dequant_swiglu_quant",
)  # fmt: skip
HALVES = (torch.bfloat16, torch.float16)
X = [[1, -2, 0.5, 3], [0.1, 0.2, -0.3, 0.4]]


def int8(x: float) -> int:
    """Python's round goes to the even neighbour too."""
    return max(-128, min(127, round(x)))


def static(of: torch.dtype = torch.bfloat16, expanded: bool = True, **changes: Any) -> dict[str, Any]:
    scale, offset = torch.tensor([1 / 0.0123]).to(of), torch.tensor([-8.0]).to(of)
    if expanded:
        scale, offset = scale.repeat(24), offset.repeat(24)
    x = Draw(of, seed=1).normal(3, 2, 24)
    return {
        "input": x, "scales": scale, "zero_points": offset, "dtype": torch.qint8, "axis": -1, "div_mode": False
    } | changes  # fmt: skip


@pytest.mark.parametrize("expanded", [True, False])
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
def test_static(dtype: torch.dtype, expanded: bool) -> None:
    made = static(dtype, expanded)
    y = call(STATIC, made)
    scale = made["scales"][0].item()
    # One rounding of the product in float32 may cross a half.
    near = [abs(x * scale % 1 - 0.5) < 1e-4 for x in made["input"].flatten().tolist()]
    expected = [int8(x * scale - 8) for x in made["input"].flatten().tolist()]
    assert y.dtype == torch.int8 and not any(near)
    assert y.flatten().tolist() == expected and -128 in expected and 127 in expected
    assert_like(STATIC, made)


def test_static_as_published() -> None:
    made = {
        "input": torch.tensor(X), "scales": torch.tensor([1 / 0.025]), "zero_points": torch.tensor([-8.0]),
        "dtype": torch.qint8, "axis": -1, "div_mode": False,
    }  # fmt: skip
    assert call(STATIC, made).tolist() == [[32, -88, 12, 112], [-4, 0, -20, 8]]
    plain = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5])
    made |= {"input": plain, "scales": torch.ones(1), "zero_points": None}
    assert call(STATIC, made).tolist() == [0, 2, 2, 0, -2, -2]


STATIC_LIMITS: dict[str, tuple[dict[str, Any], str]] = {
    "quotients": ({"div_mode": True}, "div_mode is True"),
    "other dtype": ({"dtype": torch.int32}, "dtype is number 3"),
    "axis": ({"axis": 1}, "axis is 1"),
    "offsets of another dtype": ({"zero_points": torch.zeros(24).int()}, "zero_points is torch.int32"),
    "offsets of another float": ({"zero_points": torch.zeros(24).half()}, "dtypes differ"),
    "offsets of another shape": ({"zero_points": torch.zeros(1)}, "that of scales"),
    "scales": ({"scales": torch.ones(8), "zero_points": None}, "expected 1 or 24"),
    "float64": ({"input": torch.zeros(3, 24).double()}, "float64"),
    "no tokens": ({"input": torch.zeros(0, 24)}, "without elements"),
}


@pytest.mark.parametrize("limit", STATIC_LIMITS)
def test_limits_of_static(limit: str) -> None:
    changes, words = STATIC_LIMITS[limit]
    refused(STATIC, static(torch.float32, **changes), words)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_scales_have_the_dtype_of_what_they_scale(dtype: torch.dtype) -> None:
    """On every machine; 950 wants it of float32 too."""
    made, wide = static(dtype), static(torch.float32)
    factors = {name: wide[name] for name in ("scales", "zero_points")}
    refused(STATIC, made | factors, "takes scales of x's dtype")
    wide |= {"scales": made["scales"], "zero_points": made["zero_points"]}
    call(STATIC, wide)
    with lowering.use(target="ascend950"):
        call(STATIC, made)
        refused(STATIC, wide, "takes x, scales and offsets of one dtype")


@pytest.mark.parametrize("lead", [(5,), (3, 2)], ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_by_token(dtype: torch.dtype, lead: tuple[int, ...]) -> None:
    x = Draw(dtype, seed=2).normal(*lead, 37)
    y, scale = call(DYNAMIC, {"input": x})
    for row, own, factor in zip(x.view(-1, 37).tolist(), y.view(-1, 37).tolist(), scale.flatten(), strict=True):
        assert factor.item() == pytest.approx(max(map(abs, row)) / 127, rel=1e-7)
        assert own == [int8(value / factor.item()) for value in row] and max(map(abs, own)) == 127
    assert scale.shape == lead and scale.dtype == torch.float32
    assert_like(DYNAMIC, {"input": x})


def test_by_token_as_published() -> None:
    y, scale = call(DYNAMIC, {"input": torch.tensor(X).half()})
    assert y.tolist() == [[42, -85, 21, 127], [32, 64, -95, 127]]
    torch.testing.assert_close(scale, torch.tensor([0.023622047, 0.0031496063]), rtol=3e-4, atol=0)


def test_a_token_of_zeros_has_scale_zero_and_values_that_mean_nothing() -> None:
    y, scale = call(DYNAMIC, {"input": torch.tensor([[0.0, 0.0], [1.0, -2.0]]).half()})
    assert scale[0] == 0 and (y[0] != 0).any() and y[1].tolist() == [64, -127]


def test_limits_of_by_token() -> None:
    x = torch.randn(3, 8).half()
    refused(DYNAMIC, {"input": x.float()}, "float32")
    refused(DYNAMIC, {"input": x[0]}, "1-dimensional")
    refused(DYNAMIC, {"input": x[:0]}, "without elements")
    refused(DYNAMIC, {"input": x, "dst_type": torch.quint4x2}, "dst_type is number 16")
    refused(DYNAMIC, {"input": x, "quant_mode": "perchannel"}, "quant_mode is 'perchannel'")
    refused(DYNAMIC, {"input": x, "smooth_scales": x[0]}, "smooth_scales")
    refused(DYNAMIC, {"input": x, "dst_type_max": 15.0}, "dst_type_max is 15")


@pytest.mark.parametrize(
    ("name", "arguments"),
    [(STATIC, static()), (DYNAMIC, {"input": torch.ones(2, 8).half()})],
)  # fmt: skip
def test_int8_is_the_same_everywhere(name: str, arguments: dict[str, Any]) -> None:
    """950 included."""
    found = []
    for target in ASCEND:
        with lowering.use(target=target):
            found.append(pytree.tree_leaves(call(name, arguments)))
    assert all(torch.equal(x, y) for others in found[1:] for x, y in zip(found[0], others, strict=True))


def blocks(input: Tensor, **changes: Any) -> dict[str, Any]:
    return {
        "input": input, "axis": -1, "round_mode": "rint", "dst_type": 292, "block_size": 32, "scale_alg": 0
    } | changes  # fmt: skip


def e4m3(x: float) -> float:
    """The nearest number of float8 e4m3, of two equally near the even one; 448 at most."""
    if x == 0:
        return x
    step = 2.0 ** (max(math.frexp(abs(x))[1] - 1, -6) - 3)
    return math.copysign(min(round(abs(x) / step) * step, 448.0), x)


@pytest.mark.parametrize("width", [1, 32, 40, 64, 96, 100, 160, 4304])
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
def test_by_block(dtype: torch.dtype, width: int) -> None:
    """Bytes of exponents come in pairs, of which the last may belong to no block."""
    x = Draw(dtype, seed=width).normal(3, width) * 4
    with lowering.use(target="ascend950"):
        if dtype == torch.float32 and width < 32:
            refused(BLOCKS, blocks(x), "expected 32 or more")
            return
        y, scale = call(BLOCKS, blocks(x))
        assert_like(BLOCKS, blocks(x))
    count = math.ceil(width / 32)
    assert y.dtype == torch.float8_e4m3fn and scale.shape == (3, math.ceil(count / 2), 2)
    for row, own, bytes_ in zip(x.tolist(), y.float().tolist(), scale.flatten(1).tolist(), strict=True):
        assert bytes_[count:] in ([], [0])
        for at in range(count):
            part = row[32 * at : 32 * at + 32]
            exponent = math.frexp(max(map(abs, part)))[1] - 1 - 8
            assert bytes_[at] == exponent + 127
            assert own[32 * at : 32 * at + 32] == [e4m3(value / 2.0**exponent) for value in part]


def test_by_block_as_published() -> None:
    first = [1, -3, 0.1, 500, -7.7, 0, 0.001, 449] + [0] * 24
    rest = [1, -1, 1.9, 1.95, 0.0625, 0.001, 0.3, -0.7]
    with lowering.use(target="ascend950"):
        y, scale = call(BLOCKS, blocks(torch.tensor([first + rest])))
        assert scale.flatten().tolist() == [127, 119]
        assert y.view(torch.uint8)[0, :8].tolist() == [56, 196, 29, 126, 207, 0, 1, 126]
        assert y.view(torch.uint8)[0, 32:].tolist() == [120, 248, 126, 126, 88, 40, 106, 243]
        largest = [448, 449, 464, 465, 511, 512, 1.76, 1.9, math.nextafter(512, 0)]
        x = torch.zeros(9, 32)
        x[:, 3] = torch.tensor(largest)
        y, scale = call(BLOCKS, blocks(x))
    assert scale[:, 0, 0].tolist() == [127] * 5 + [128, 119, 119, 128]
    value = y[:, 3].double() * torch.exp2(scale[:, 0, 0].double() - 127)
    assert value.tolist() == [448] * 5 + [512, 1.75, 1.75, 512]


def test_blocks_of_nothing_and_of_no_number() -> None:
    x = torch.zeros(3, 64)
    x[1, 5], x[2, 40] = torch.nan, -torch.inf
    with lowering.use(target="ascend950"):
        y, scale = call(BLOCKS, blocks(x))
    assert not y[0].float().any()
    assert (scale.flatten(1) == 255).tolist() == [[False, False], [True, False], [False, True]]


def test_limits_of_by_block() -> None:
    x = torch.randn(2, 64)
    refused(BLOCKS, blocks(x), "is neither documented for ascend910b nor in use on it, nor does CANN state it")
    with lowering.use(target="ascend950"):
        for changes, words in (
            ({"dst_type": 296}, "dst_type is number 296"), ({"axis": 0}, "axis is 0"),
            ({"round_mode": "round"}, "round_mode is 'round'"), ({"block_size": 64}, "block_size is 64"),
            ({"scale_alg": 1}, "scale_alg is 1"), ({"dst_type_max": 6.0}, "dst_type_max"),
            ({"max_low_bound": 1.0}, "max_low_bound"), ({"input": x.double()}, "float64"),
            ({"input": x[:0]}, "without elements"),
        ):  # fmt: skip
            refused(BLOCKS, blocks(x) | changes, words)
        assert call(BLOCKS, blocks(x, dst_type=torch.float8_e4m3fn))[0].dtype == torch.float8_e4m3fn


@pytest.mark.parametrize("left", [True, False, None])
def test_swiglu_by_token(left: bool | None) -> None:
    """By default the second half is activated; nothing is rounded to bfloat16 in between."""
    x = Draw(torch.bfloat16, seed=3).normal(5, 44) * 3
    made = {"x": x, "quant_mode": 1} | ({} if left is None else {"activate_left": left})
    y, scale = call(SWIGLU, made)
    for row, own, factor in zip(x.tolist(), y.tolist(), scale.tolist(), strict=True):
        a, b = (row[:22], row[22:]) if left else (row[22:], row[:22])
        product = [one / (1 + math.exp(-one)) * two for one, two in zip(a, b, strict=True)]
        assert factor == pytest.approx(max(map(abs, product)) / 127, rel=1e-6)
        exact = [value / factor for value in product]
        assert all(abs(value - int8(z)) == 0 or abs(z % 1 - 0.5) < 1e-4 for value, z in zip(own, exact, strict=True))
    assert_like(SWIGLU, made)


def test_limits_of_swiglu_by_token() -> None:
    x = torch.randn(3, 8).bfloat16()
    good = {"x": x, "quant_mode": 1}
    for changes, words in (
        ({"quant_mode": 0}, "quant_mode is 0"), ({"x": x.float()}, "float32"), ({"x": x[0]}, "1-dimensional"),
        ({"x": x[:, :7]}, "no two halves"), ({"swiglu_mode": 1}, "swiglu_mode is 1"),
        ({"x": x[:0]}, "without elements"), ({"weight_scale": torch.ones(1, 8)}, "weight_scale"),
        ({"group_index": torch.tensor([3])}, "group_index"),
    ):  # fmt: skip
        refused(SWIGLU, good | changes, words)
    for target in ASCEND:
        with lowering.use(target=target):
            call(SWIGLU, good | {"x": x.half()})
    with lowering.use(target=named("ascend910_93", cann="8.5.0")):
        refused(SWIGLU, good, "is built for ascend910_93 from CANN 9.0.0 on")
