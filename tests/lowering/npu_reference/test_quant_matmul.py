"""Products of quantised factors against loops over integers and over blocks, with the published test vectors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lowering
from tests.cases import Draw
from tests.lowering.npu_reference.calls import assert_like, call, refused
from tests.tolerances import assert_close

MATMUL, GROUPED, FUSED = "npu_quant_matmul", "npu_grouped_matmul", "npu_grouped_matmul_swiglu_quant_v2"
E8M0 = 293
BFLOAT, HALF = torch.bfloat16, torch.float16
W = torch.tensor([[10, -20, 30, 40], [-128, 127, 5, -7], [1, 2, 3, 4]], dtype=torch.int8)


def int8(seed: int, *shape: int) -> Tensor:
    return (Draw(torch.float32, seed).ids(256, *shape) - 128).to(torch.int8)


def scales(seed: int, *shape: int) -> Tensor:
    return Draw(torch.float32, seed).uniform(0.001, 0.02, *shape)


def product(dtype: torch.dtype = BFLOAT, **changes: Any) -> dict[str, Any]:
    """7 tokens, 24 inputs, 10 outputs."""
    return {
        "x1": int8(1, 7, 24), "x2": int8(2, 10, 24).mT, "scale": scales(3, 10), "pertoken_scale": scales(4, 7),
        "output_dtype": dtype,
    } | changes  # fmt: skip


def integer_product(x: Tensor, weight: Tensor) -> list[list[int]]:
    """x [tokens inputs] @ weight [inputs outputs] in Python's integers."""
    columns = list(zip(*weight.tolist(), strict=True))
    return [[sum(a * b for a, b in zip(row, column, strict=True)) for column in columns] for row in x.tolist()]


@pytest.mark.parametrize("dtype", [BFLOAT, HALF], ids=str)
@pytest.mark.parametrize("turned", [True, False])
def test_by_token(dtype: torch.dtype, turned: bool) -> None:
    made = product(dtype)
    made["x2"] = made["x2"] if turned else made["x2"].contiguous()
    total = torch.tensor(integer_product(made["x1"], made["x2"])).double()
    expected = total * made["scale"].double() * made["pertoken_scale"].double()[:, None]
    assert_close(call(MATMUL, made), expected.to(dtype))
    assert_like(MATMUL, made)


@pytest.mark.parametrize("dtype", [BFLOAT, HALF], ids=str)
def test_static(dtype: torch.dtype) -> None:
    """The bias counts in units of the scale, before it."""
    bias = Draw(torch.float32, 5).ids(4000, 10).int() - 2000
    made = product(dtype, pertoken_scale=None, bias=bias)
    total = torch.tensor(integer_product(made["x1"], made["x2"])) + bias
    assert_close(call(MATMUL, made), (total.double() * made["scale"].double()).to(dtype))
    assert_like(MATMUL, made)


def test_products_as_published() -> None:
    static = {
        "x1": torch.tensor([[32, -88, 12, 112], [-4, 0, -20, 8]], dtype=torch.int8), "x2": W.mT,
        "scale": torch.tensor([0.00025, 0.0005, 0.000125]), "bias": torch.tensor([2480, -524, 80]).int(),
        "output_dtype": HALF,
    }  # fmt: skip
    assert_close(call(MATMUL, static), torch.tensor([[2.35, -8.26, 0.0525], [0.54, -0.084, 0.006]]).half())
    dynamic = {
        "x1": torch.tensor([[42, -85, 21, 127], [32, 64, -95, 127]], dtype=torch.int8), "x2": W.mT,
        "scale": torch.tensor([0.01, 0.02, 0.005]), "pertoken_scale": torch.tensor([0.023622047, 0.0031496063]),
        "output_dtype": BFLOAT,
    }  # fmt: skip
    wanted = [[1.8515625, -8.0, 0.05224609], [0.04003906, 0.16796875, 0.00604248]]
    torch.testing.assert_close(call(MATMUL, dynamic).float(), torch.tensor(wanted), rtol=1e-6, atol=0)


MATMUL_LIMITS: dict[str, tuple[dict[str, Any], str]] = {
    "integers out": ({"output_dtype": None}, "output_dtype is missing"),
    "float32 out": ({"output_dtype": torch.float32}, "output_dtype is number 6"),
    "no tokens": ({"x1": int8(1, 0, 24), "pertoken_scale": scales(4, 0)}, "neither may be empty"),
    "inner axes": ({"x1": int8(1, 7, 23)}, "inner axes differ"),
    "rank": ({"x1": int8(1, 2, 7, 24)}, "3-dimensional"),
    "strided x": ({"x1": int8(1, 24, 7).mT}, "x1 .* not contiguous"),
    "strided weight": ({"x2": int8(2, 24, 20)[:, ::2]}, "strides"),
    "many outputs": ({"x2": int8(2, 24, 65536), "scale": scales(3, 65536)}, "go to 65535"),
    "many inputs": ({"x1": int8(1, 7, 65536), "x2": int8(2, 65536, 10)}, "go to 65535"),
    "float weight": ({"x2": torch.zeros(24, 10).half()}, "x2 is torch.float16"),
    "half a scale": ({"scale": scales(3, 10).half()}, "scale is torch.float16"),
    "scales": ({"scale": scales(3, 9)}, "one an output"),
    "token scales": ({"pertoken_scale": scales(4, 7, 1)}, "one a token"),
    "token scales' dtype": ({"pertoken_scale": scales(4, 7).bfloat16()}, "pertoken_scale is torch.bfloat16"),
    "bias": ({"bias": torch.zeros(10)}, "bias is torch.float32"),
    "offset": ({"offset": torch.zeros(10)}, "offset"),
    "groups": ({"group_sizes": [1, 1, 32]}, "group_sizes"),
}


@pytest.mark.parametrize("limit", MATMUL_LIMITS)
def test_limits(limit: str) -> None:
    changes, words = MATMUL_LIMITS[limit]
    refused(MATMUL, product(**changes), words)


def test_limits_of_targets_and_scales() -> None:
    call(MATMUL, product(scale=scales(3, 10).bfloat16()))
    refused(MATMUL, product(HALF, scale=scales(3, 10).bfloat16()), "scale is torch.bfloat16")
    refused(MATMUL, blocks(64), "on ascend910b the host code of CANN .* takes int8 or int4 factors")
    with lowering.use(target="ascend950"):
        call(MATMUL, product())


def float8(seed: int, *shape: int) -> Tensor:
    return (Draw(torch.float32, seed).normal(*shape) * 60).to(torch.float8_e4m3fn)


def exponents(seed: int, *shape: int) -> Tensor:
    return (Draw(torch.float32, seed).ids(7, *shape) + 118).to(torch.uint8)


def blocks(inputs: int, dtype: torch.dtype = BFLOAT, **changes: Any) -> dict[str, Any]:
    """5 tokens, 6 outputs."""
    count = -(-inputs // 64)
    return {
        "x1": float8(1, 5, inputs), "x2": float8(2, 6, inputs).mT, "scale": exponents(3, 6, count, 2).transpose(0, 1),
        "pertoken_scale": exponents(4, 5, count, 2), "scale_dtype": E8M0, "pertoken_scale_dtype": E8M0,
        "group_sizes": [1, 1, 32], "output_dtype": dtype,
    } | changes  # fmt: skip


def block_product(x: Tensor, weight: Tensor, scale: Tensor, token_scale: Tensor) -> Tensor:
    """x [tokens inputs] @ weight [inputs outputs], block by block."""
    total = torch.zeros(x.shape[0], weight.shape[1], dtype=torch.float64)
    for at in range(-(-x.shape[1] // 32)):
        part = slice(32 * at, 32 * at + 32)
        powers = token_scale[:, at // 2, at % 2].double()[:, None] + scale[at // 2, :, at % 2].double() - 254
        total += (x.double()[:, part] @ weight.double()[part]) * 2**powers
    return total


@pytest.mark.parametrize("inputs", [32, 48, 64, 96, 100, 160, 4304])
@pytest.mark.parametrize("dtype", [BFLOAT, HALF], ids=str)
def test_blocks(dtype: torch.dtype, inputs: int) -> None:
    made = blocks(inputs, dtype)
    with lowering.use(target="ascend950"):
        expected = block_product(made["x1"], made["x2"], made["scale"], made["pertoken_scale"])
        assert_close(call(MATMUL, made), expected.to(dtype))
        assert_like(MATMUL, made)


BLOCK_LIMITS: dict[str, tuple[dict[str, Any], str]] = {
    "scales as they are stored": ({"scale": exponents(3, 6, 3)}, r"expected \[2, 6, 2\]"),
    "one pair too few": ({"scale": exponents(3, 6, 1, 2).transpose(0, 1)}, r"expected \[2, 6, 2\]"),
    "one pair of tokens too few": ({"pertoken_scale": exponents(4, 5, 1, 2)}, r"expected \[5, 2, 2\]"),
    "copied scales": ({"scale": exponents(3, 2, 6, 2)}, r"expected a view of \[... outputs, pairs, 2\]"),
    "a copied weight": ({"x2": float8(2, 96, 6)}, "expected the transposed view"),
    "Torch's dtype": ({"scale_dtype": torch.float8_e8m0fnu}, "expected 293 for both"),
    "no dtype": ({"pertoken_scale_dtype": None}, "expected 293 for both"),
    "no groups": ({"group_sizes": None}, "group_sizes is None"),
    "no scale of tokens": ({"pertoken_scale": None}, "the tokens' scale is missing"),
    "bias": ({"bias": torch.zeros(6)}, "bias"),
    "float scales": ({"scale": torch.ones(6, 2, 2).transpose(0, 1)}, "scale is torch.float32"),
}


@pytest.mark.parametrize("limit", BLOCK_LIMITS)
def test_limits_of_blocks(limit: str) -> None:
    changes, words = BLOCK_LIMITS[limit]
    with lowering.use(target="ascend950"):
        call(MATMUL, blocks(96))
        refused(MATMUL, blocks(96, **changes), words)


COUNTS = [4, 0, 1, 6]
GROUPS = [group for group, count in enumerate(COUNTS) for _ in range(count)]


def grouped(dtype: torch.dtype = BFLOAT, kind: int = 1, **changes: Any) -> dict[str, Any]:
    """11 rows, 24 inputs, 10 outputs."""
    counts = torch.tensor(COUNTS)
    scale = scales(3, 4, 10)
    return {
        "x": [int8(1, 11, 24)], "weight": [int8(2, 4, 10, 24).mT], "per_token_scale": [scales(4, 11)],
        "scale": [scale.bfloat16() if dtype == BFLOAT else scale], "output_dtype": dtype,
        "group_list": counts if kind else counts.cumsum(0), "split_item": 2, "group_type": 0, "group_list_type": kind,
    } | changes  # fmt: skip


@pytest.mark.parametrize("kind", [0, 1], ids=["running sums", "counts"])
@pytest.mark.parametrize("dtype", [BFLOAT, HALF], ids=str)
def test_groups_of_int8(dtype: torch.dtype, kind: int) -> None:
    made = grouped(dtype, kind)
    (y,) = call(GROUPED, made)
    x, weight, scale, token_scale = (made[name][0] for name in ("x", "weight", "scale", "per_token_scale"))
    for row, group in enumerate(GROUPS):
        total = torch.tensor(integer_product(x[row : row + 1], weight[group]))[0].double()
        assert_close(y[row], (total * scale[group].double() * token_scale[row].double()).to(dtype))
    assert_like(GROUPED, made)


def packed(values: Tensor) -> Tensor:
    """Eight outputs in an int32, the first in its lowest bits: [groups inputs outputs / 8]."""
    words = torch.zeros(*values.shape[:-1], values.shape[-1] // 8, dtype=torch.int64)
    for at in range(8):
        words |= (values[..., at::8].long() & 15) << (4 * at)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def int4(**changes: Any) -> dict[str, Any]:
    """11 rows, 64 inputs, 16 outputs."""
    values, scale = Draw(torch.float32, 2).ids(16, 4, 64, 16) - 8, scales(3, 4, 1, 16)
    return grouped() | {
        "x": [int8(1, 11, 64)], "weight": [packed(values)], "scale": [scale.view(torch.int32).long()],
        "bias": [8 * (values * scale).sum(1)],
    } | changes  # fmt: skip


def test_groups_of_int4() -> None:
    """What the bias holds is what the product leaves out."""
    made = int4()
    values, scale = Draw(torch.float32, 2).ids(16, 4, 64, 16) - 8, scales(3, 4, 1, 16)
    (y,) = call(GROUPED, made)
    for row, group in enumerate(GROUPS):
        total = torch.tensor(integer_product(made["x"][0][row : row + 1], values[group]))[0].double()
        assert_close(y[row], (total * scale[group, 0].double() * made["per_token_scale"][0][row].double()).bfloat16())
    assert_like(GROUPED, made)
    assert packed(torch.tensor([[[0, 1, 2, 3, 4, 5, 6, 7]]]))[0, 0].item() == 0x76543210


def test_int4_as_published() -> None:
    """Of 16 inputs, filled up with zeros to the 64 that the device takes."""
    values = torch.tensor([[(5 * i + 3 * j) % 16 - 8 for i in range(4)] for j in range(16)])
    scale = torch.tensor([0.02, 0.01, 0.03, 0.015])
    whole, factor = torch.zeros(2, 64, 8, dtype=torch.int64), torch.ones(2, 8)
    whole[0, :16, :4], factor[0, :4] = values, scale
    x = torch.tensor([[-127, -90, -53, -16, 21, 58, 95, -123, -86, -49, -12, 25, 62, 99, -119, -82]])
    bias = torch.zeros(2, 8)
    bias[0, :4] = torch.tensor([-1.28, -0.64, -1.92, -0.96])
    made = int4(
        x=[F.pad(x, (0, 48)).to(torch.int8)],
        weight=[packed(whole)],
        scale=[factor[:, None].view(torch.int32).long()], bias=[bias],
        per_token_scale=[torch.tensor([0.01])], group_list=torch.tensor([1, 0]),
    )  # fmt: skip
    (y,) = call(GROUPED, made)
    assert_close(y[0, :4], torch.tensor([0.0912, -0.0505, 0.093, -0.17685]).bfloat16())
    assert made["scale"][0][0, 0, :4].tolist() == [1017370378, 1008981770, 1022739087, 1014350479]


def float4(**changes: Any) -> dict[str, Any]:
    """11 rows, 64 inputs, 64 outputs."""
    codes, draw = Draw(torch.float32, 2).ids(16, 4, 64, 64), Draw(BFLOAT, 1)
    return (
        grouped()
        | {
            "x": [draw.normal(11, 64)],
            "weight": [packed(codes).view(torch.float32)],
            "scale": None,
            "antiquant_scale": [exponents(3, 4, 2, 64)],
            "per_token_scale": None,
        }
        | changes
    )


def test_groups_of_float4() -> None:
    """Numbers by a table of the codes, as the OCP's specification has it."""
    made, codes = float4(), Draw(torch.float32, 2).ids(16, 4, 64, 64).long()
    table = [sign * number for sign in (1, -1) for number in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]
    power = 2.0 ** (made["antiquant_scale"][0].double() - 127)
    numbers = torch.tensor(table).double()[codes] * power.repeat_interleave(32, 1)
    with lowering.use(target="ascend950"):
        (y,) = call(GROUPED, made)
        assert_like(GROUPED, made)
    for row, group in enumerate(GROUPS):
        assert_close(y[row], (made["x"][0][row].double() @ numbers[group]).bfloat16())
    plain = torch.tensor(table)[codes].float()
    with lowering.use(target="ascend950"):
        words = torch.ops.npu.npu_convert_weight_to_int4pack(plain)
        assert torch.equal(words.view(torch.int32), packed(codes))
        refused("npu_convert_weight_to_int4pack", {"weight": plain[..., :12].contiguous()}, "eight of its last axis")
        refused("npu_convert_weight_to_int4pack", {"weight": plain.half()}, "torch.float16")
        refused("npu_convert_weight_to_int4pack", {"weight": plain.mT}, "not contiguous")


def test_limits_of_groups_of_float4() -> None:
    refused(GROUPED, float4(), "on ascend910b .* takes float16, bfloat16 or float32 factors of one dtype")
    with lowering.use(target="ascend950"):
        for changes, words in (
            ({"output_dtype": HALF}, "both must be the same"),
            ({"antiquant_scale": [exponents(3, 4, 16)]}, "blocks"),
            ({"antiquant_scale": [scales(3, 4, 2, 64)]}, "antiquant_scale is torch.float32"),
            ({"per_token_scale": [scales(4, 11)]}, "per_token_scale"),
            ({"x": [int8(1, 11, 64)]}, "x is torch.int8"),
            ({"weight": [torch.zeros(4, 8, 64).mT]}, "not contiguous"),
        ):
            refused(GROUPED, float4(**changes), words)


def grouped_blocks(inputs: int = 96, outputs: int = 6, **changes: Any) -> dict[str, Any]:
    count = -(-inputs // 64)
    return grouped() | {
        "x": [float8(1, 11, inputs)], "weight": [float8(2, 4, outputs, inputs).mT],
        "scale": [exponents(3, 4, outputs, count, 2).transpose(1, 2)], "per_token_scale": [exponents(4, 11, count, 2)],
        "scale_dtype": E8M0, "per_token_scale_dtype": E8M0,
    } | changes  # fmt: skip


@pytest.mark.parametrize("inputs", [64, 96, 160])
def test_groups_of_blocks(inputs: int) -> None:
    made = grouped_blocks(inputs)
    x, weight, scale, token_scale = (made[name][0] for name in ("x", "weight", "scale", "per_token_scale"))
    with lowering.use(target="ascend950"):
        (y,) = call(GROUPED, made)
        assert_like(GROUPED, made)
    for row, group in enumerate(GROUPS):
        one = slice(row, row + 1)
        assert_close(y[one], block_product(x[one], weight[group], scale[group], token_scale[one]).bfloat16())


GROUP_LIMITS: dict[str, tuple[dict[str, Any], str]] = {
    "float32 scales beside bfloat16": (grouped(scale=[scales(3, 4, 10)]), "scale is torch.float32"),
    "bfloat16 scales beside float16": (grouped(HALF, scale=[scales(3, 4, 10).bfloat16()]), "scale is torch.bfloat16"),
    "no scale": (grouped(scale=None), "scale is missing"),
    "no scale of tokens": (grouped(per_token_scale=None), "per_token_scale is missing"),
    "rows of token scales": (grouped(per_token_scale=[scales(4, 10)]), "one a row"),
    "shape of scales": (grouped(scale=[scales(3, 4, 1, 10).bfloat16()]), "groups, outputs"),
    "integers out": (grouped(output_dtype=None), "output_dtype is missing"),
    "bias": (grouped(bias=[torch.zeros(4, 10)]), "bias"),
    "counts": (grouped(group_list=torch.tensor([4, 0, 1, 5])), "does not cover"),
    "inner axes": (grouped(x=[int8(1, 11, 20)]), "inner axes differ"),
    "int4 without what it leaves out": (int4(bias=None), "bias is missing"),
    "int4 with float scales": (int4(scale=[scales(3, 4, 1, 16)]), "scale is torch.float32"),
    "int4 in float16": (int4(output_dtype=HALF), "bfloat16 alone"),
    "int4 by outputs": (int4(weight=[torch.zeros(4, 2, 64).int().mT]), "strides"),
    "int4 of 96 inputs": (
        int4(x=[int8(1, 11, 96)], weight=[torch.zeros(4, 96, 2).int()]),
        "takes int4 weights of inputs in 64s",
    ),
    "int4's scales": (int4(scale=[torch.zeros(4, 16).long()]), "groups, 1, outputs"),
    "exponents of integers": (grouped(scale_dtype=E8M0), "scale_dtype"),
    "blocks": (grouped_blocks(), "on ascend910b .* takes float16, bfloat16 or float32 factors of one dtype, or int8"),
}


@pytest.mark.parametrize("limit", GROUP_LIMITS)
def test_limits_of_groups(limit: str) -> None:
    refused(GROUPED, *GROUP_LIMITS[limit])


def fused(kind: int = 0, **changes: Any) -> dict[str, Any]:
    made = grouped_blocks(96, 256)
    counts = torch.tensor(COUNTS)
    return {
        "x": made["x"][0], "weight": made["weight"], "weight_scale": made["scale"],
        "x_scale": made["per_token_scale"][0], "group_list": counts if kind else counts.cumsum(0), "dequant_mode": 2,
        "dequant_dtype": torch.float32, "quant_mode": 2, "quant_dtype": torch.float8_e4m3fn, "group_list_type": kind,
        "weight_scale_dtype": E8M0, "x_scale_dtype": E8M0,
    } | changes  # fmt: skip


@pytest.mark.parametrize("kind", [0, 1], ids=["running sums", "counts"])
def test_groups_with_a_swiglu(kind: int) -> None:
    """The product of the first half activated and the second, quantised anew in blocks of 32."""
    made = fused(kind)
    with lowering.use(target="ascend950"):
        y, scale = call(FUSED, made)
        assert_like(FUSED, made)
    assert y.shape == (11, 128) and scale.shape == (11, 2, 2)
    numbers = y.double() * torch.exp2(scale.flatten(1).double() - 127).repeat_interleave(32, -1)
    for row, group in enumerate(GROUPS):
        one = slice(row, row + 1)
        weight = made["weight"][0][group], made["weight_scale"][0][group]
        a, b = block_product(made["x"][one], *weight, made["x_scale"][one]).chunk(2, -1)
        wanted = a / (1 + (-a).exp()) * b
        largest = wanted.view(-1, 32).abs().amax(-1)
        # Up to an eighth is lost above 448 of 512, half a step of the mantissa's eighth elsewhere.
        assert ((numbers[one] - wanted).view(-1, 32).abs() <= largest[:, None] / 8).all()
        power = torch.floor(torch.log2(largest)) - 8
        assert torch.equal(scale[row].flatten().double(), power + 127)


def fused_int8(**changes: Any) -> dict[str, Any]:
    """11 rows, 32 inputs, 64 outputs."""
    return {
        "x": int8(1, 11, 32),
        "weight": [int8(2, 4, 32, 64)],
        "weight_scale": [scales(3, 4, 64)],
        "x_scale": scales(4, 11),
        "group_list": torch.tensor(COUNTS).cumsum(0),
    } | changes


def test_groups_of_int8_with_a_swiglu() -> None:
    """By default, which is what 910 takes alone: by token, in float32 between."""
    made = fused_int8()
    y, scale = call(FUSED, made)
    assert_like(FUSED, made)
    for row, group in enumerate(GROUPS):
        total = torch.tensor(integer_product(made["x"][row : row + 1], made["weight"][0][group]))[0].double()
        a, b = (total * made["weight_scale"][0][group].double() * made["x_scale"][row].double()).chunk(2)
        wanted = a / (1 + (-a).exp()) * b
        assert scale[row].item() == pytest.approx(wanted.abs().max().item() / 127, rel=1e-5)
        assert ((y[row] - wanted / scale[row].double()).abs() < 0.5 + 1e-3).all() and y[row].abs().max() == 127
    refused(FUSED, fused_int8(dequant_mode=1), "modes are 1 and 0; the reference covers 0 for torch.int8")
    refused(FUSED, fused_int8(weight_scale=[scales(3, 64)]), "groups, outputs")
    refused(FUSED, fused_int8(weight=[int8(2, 4, 64, 32).mT]), "strides")
    odd = fused_int8(weight=[int8(2, 4, 32, 48)], weight_scale=[scales(3, 4, 48)])
    refused(FUSED, odd, "takes int8 weights of inputs in 16s, up to 65535, and outputs in 32s")


def test_limits_of_groups_with_a_swiglu() -> None:
    refused(FUSED, fused(), "on ascend910b .* takes int8 rows")
    odd = grouped_blocks(96, 192)
    with lowering.use(target="ascend950"):
        for changes, words in (
            ({"dequant_mode": 0}, "modes are 0 and 2"), ({"quant_mode": 0}, "modes are 2 and 0"),
            ({"dequant_dtype": 0}, "dequant_dtype is number 0"), ({"quant_dtype": 1}, "quant_dtype is number 1"),
            ({"group_list_type": 1}, "counts, does not cover"), ({"x_scale_dtype": None}, "expected 293"),
            ({"smooth_scale": torch.ones(4)}, "smooth_scale"), ({"group_list_type": 2}, "group_list_type is 2"),
            ({"weight": odd["weight"], "weight_scale": odd["scale"]}, "192 outputs; expected halves of 64s"),
            ({"group_list": torch.tensor([4, 4, 5, 11]).int()}, "group_list is torch.int32"),
        ):  # fmt: skip
            refused(FUSED, fused() | changes, words)
