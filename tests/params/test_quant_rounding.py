"""Rounding to int8, int4, MXFP8 and MXFP4: published numbers, and tables and loops to compare with."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from params.quant import rounding
from params.quant.values import Int4Weight, Int8Weight, MXFP4Weight, MXFP8Weight, StaticInt8Weight, e2m1_values
from tests.params.modelslim import E4M3, grouped, integers, mxfp4, mxfp8, pack

NAN, INF = float("nan"), float("inf")


def test_symmetric_int8() -> None:
    w = torch.tensor([[0.5, -1.27, 0.3], [0, 0, 0], [1e-12, 0, -1e-12]])
    values, scale = rounding.int8_weight(w)
    assert values.tolist() == [[50, -127, 30], [0, 0, 0], [0, 0, 0]]
    assert scale.flatten().tolist() == pytest.approx([0.01, 1.1920929e-07, 1.1920929e-07], rel=1e-6)
    assert values.dtype == torch.int8 and scale.dtype == torch.float32 and scale.shape == (3, 1)


def test_ties_go_to_even_numbers() -> None:
    w = torch.tensor([[127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]])
    assert rounding.int8_weight(w)[0].tolist() == [[127, 0, 2, 2, 0, -2, -2]]
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, 126.5, 300, -300])
    one, none = torch.ones(1), torch.zeros(1)
    assert rounding.static_int8(x, one, none).tolist() == [0, 2, 2, 0, 126, 127, -128]


def test_tokens() -> None:
    x = torch.tensor([[1, -2, 0.5, 3], [0.1, 0.2, -0.3, 0.4], [0, 0, 0, 0]])
    values, scale = rounding.int8_tokens(x)
    assert values.tolist() == [[42, -85, 21, 127], [32, 64, -95, 127], [0, 0, 0, 0]]
    assert scale.flatten().tolist() == pytest.approx([0.023622047, 0.0031496063, 0], rel=1e-6)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_token_that_is_not_finite_stays_so(bad: float) -> None:
    """Its products are NaN, and its neighbours' are what they were."""
    x = torch.tensor([[1, bad, 2], [3, 4, 5]])
    values, scale = rounding.int8_tokens(x)
    assert (values.float() * scale)[0].isnan().all()
    assert torch.equal(values[1:], rounding.int8_tokens(x[1:])[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 7), (2, 5, 4), (0, 6), (1, 1)])
def test_int8_of_any_shape(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    for values, scale in (rounding.int8_weight(x), rounding.int8_tokens(x)):
        assert values.shape == x.shape and scale.shape == (*shape[:-1], 1) and scale.dtype == torch.float32
        assert ((values.float() * scale - x.float()).abs() <= scale / 2 * 1.0001).all()
        if x.numel():
            assert (values.abs().amax(-1) == 127).all()


@pytest.mark.parametrize(
    ("low", "high", "scale", "offset"),
    [(-1, 3, 0.0156862745, -64), (0.5, 2.55, 0.01, -128), (-2.55, -1, 0.01, 127), (0, 0, 1.1920929e-07, -128)],
)
def test_the_range_of_activations(low: float, high: float, scale: float, offset: float) -> None:
    found = rounding.int8_range(low, high)
    assert [number.item() for number in found] == pytest.approx([scale, offset], rel=1e-6)
    ends = rounding.static_int8(torch.tensor([min(low, 0.0), 0.0, max(high, 0.0)]), *found)
    if high > low:
        assert (ends[0].item(), ends[2].item()) == (-128, 127) and ends[1].item() == offset


W = torch.tensor([[10, -20, 30, 40], [-128, 127, 5, -7], [1, 2, 3, 4]], dtype=torch.int8)
X = torch.tensor([[1, -2, 0.5, 3], [0.1, 0.2, -0.3, 0.4]])


@pytest.mark.parametrize("long", [False, True])
def test_static_products(long: bool) -> None:
    """Input, product and correction as published; `deq_scale` as float32 or as its bits in int64."""
    deq = torch.tensor([964891247, 973279855, 956502639]) if long else torch.tensor([0.00025, 0.0005, 0.000125])
    weight = StaticInt8Weight(
        W, deq, torch.tensor([2480, -524, 80], dtype=torch.int32), torch.tensor([0.025]), torch.tensor([-8.0])
    )
    assert weight.product_scale().tolist() == pytest.approx([0.00025, 0.0005, 0.000125], rel=1e-6)
    quantised = rounding.static_int8(X, weight.input_scale, weight.input_offset)
    assert quantised.tolist() == [[32, -88, 12, 112], [-4, 0, -20, 8]]
    total = quantised.long() @ W.long().T
    assert total.tolist() == [[6920, -15996, 340], [-320, 356, -32]]
    y = (total + weight.correction) * weight.product_scale()
    torch.testing.assert_close(y, torch.tensor([[2.35, -8.26, 0.0525], [0.54, -0.084, 0.006]]), atol=1e-6, rtol=0)
    assert weight.bias().tolist() == pytest.approx([0.5, -0.25, 0], abs=1e-6)
    scales = torch.tensor([0.01, 0.02, 0.005])[:, None]
    torch.testing.assert_close(weight.dequantized(), W.float() * scales)


def test_e4m3_numbers() -> None:
    """The table that other tests compare with is the format's."""
    ours = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert ours.tolist() == E4M3.tolist() and len(E4M3) == 127 and E4M3[0x38] == 1 and E4M3[0x7E] == 448


BLOCK = [1, -3, 0.1, 500, -7.7, 0, 0.001, 449] + [0] * 24
TAIL = [1, -1, 1.9, 1.95, 0.0625, 0.001, 0.3, -0.7]


def test_mxfp8_of_a_whole_and_a_partial_block() -> None:
    values, scale = rounding.mxfp8(torch.tensor([BLOCK + TAIL]), "half_even")
    assert scale.tolist() == [[127, 119]] and values.shape == (1, 40)
    raw = values.view(torch.uint8)[0]
    assert raw[:8].tolist() == [56, 196, 29, 126, 207, 0, 1, 126] and not raw[8:32].any()
    assert raw[32:].tolist() == [120, 248, 126, 126, 88, 40, 106, 243]
    whole = MXFP8Weight(values, scale).dequantized()[0]
    assert whole[:8].tolist() == [1, -3, 0.1015625, 448, -7.5, 0, 0.001953125, 448]
    assert whole[32:].tolist() == [1, -1, 1.75, 1.75, 0.0625, 0.0009765625, 0.3125, -0.6875]


@pytest.mark.parametrize(
    ("largest", "byte", "value"),
    [(447, 127, 448), (448, 127, 448), (449, 127, 448), (464, 127, 448), (465, 127, 448), (511, 127, 448),
     (512, 128, 512), (511.99997, 127, 448), (1.76, 119, 1.75), (1.9, 119, 1.75), (0, 0, 0),
     (1e-45, 0, 0), (2.0**-119, 0, 2.0**-119), (2.0**-118, 1, 2.0**-118), (3.4e38, 246, 448 * 2.0**119)],
)  # fmt: skip
def test_shared_exponents(largest: float, byte: int, value: float) -> None:
    """From the largest number's bits: a logarithm would take 511.99997 for 512."""
    x = torch.zeros(2, 33)
    x[1, 5] = -largest
    values, scale = rounding.mxfp8(x, "half_even")
    assert scale.tolist() == [[0, 0], [byte, 0]]
    assert MXFP8Weight(values, scale).dequantized()[1, 5].item() == -value


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("kind", ["half_even", "half_away"])
def test_a_block_that_is_not_finite_is_nan(bad: float, kind: Any) -> None:
    """All of it, so that nothing wrong passes for a number; the other blocks are untouched."""
    x = torch.ones(70)
    x[40] = bad
    values, scale = rounding.mxfp8(x, kind)
    assert scale.tolist() == [119, 255, 119]
    whole = MXFP8Weight(values[None], scale[None]).dequantized()[0]
    assert whole[32:64].isnan().all() and (whole[:32] == 1).all() and (whole[64:] == 1).all()


TIES = [1.0625, 1.1875, 1.3125, 17, 19, -1.0625, 2.0**-10, 3 * 2.0**-10, 256]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("half_even", [1, 1.25, 1.25, 16, 20, -1, 0, 0.00390625, 256]),
     ("half_away", [1.125, 1.25, 1.375, 18, 20, -1.125, 0.001953125, 0.00390625, 256])],
)  # fmt: skip
def test_ties_of_e4m3(kind: Any, expected: list[float]) -> None:
    values, scale = rounding.mxfp8(torch.tensor(TIES), kind)
    assert scale.tolist() == [127] and values.float().tolist() == expected


@pytest.mark.parametrize("k", [1, 16, 31, 32, 33, 48, 64, 96, 100, 160, 199, 4304])
def test_mxfp8_against_a_table(k: int) -> None:
    """Every element is the table's nearest, by steps and magnitudes of all kinds."""
    random = np.random.default_rng(k)
    w = (random.standard_normal((3, k)) * 2.0 ** random.integers(-20, 20, (3, k))).astype(np.float32)
    w[2] = 0
    w[0] *= random.random(k) < 0.5
    values, scale = rounding.mxfp8(torch.from_numpy(w), "half_away")
    expected = mxfp8(w)
    assert scale.shape == (3, math.ceil(k / 32)) and np.array_equal(scale.numpy(), expected[1])
    # A number that rounds to zero may have either sign.
    raw = values.view(torch.uint8).numpy()
    assert np.array_equal(np.where(raw == 128, 0, raw), np.where(expected[0] == 128, 0, expected[0]))
    even = rounding.mxfp8(torch.from_numpy(w), "half_even")
    assert torch.equal(even[1], scale)
    assert ((even[0].float() - values.float()).abs() <= 32).all()


def test_mxfp8_product() -> None:
    """Scales and a product as published, of inputs that are quantised too."""
    j = torch.arange(64, dtype=torch.float64)
    x = ((j + 1) / 16)[None].float()
    w = torch.stack((torch.cos(j), 0.1 * torch.sin(j / 2))).float()
    quantised = [rounding.mxfp8(tensor, "half_even") for tensor in (x, w)]
    assert quantised[0][1].tolist() == [[120, 121]] and quantised[1][1].tolist() == [[119, 118], [115, 115]]
    assert quantised[0][0].view(torch.uint8).sum().item() == 7204
    assert quantised[1][0].view(torch.uint8).sum(-1).tolist() == [11330, 11472]
    left, right = (MXFP8Weight(*pair).dequantized() for pair in quantised)
    assert (left @ right.T)[0].tolist() == pytest.approx([2.8265381, -0.7096710], abs=1e-6)


def test_e2m1_numbers() -> None:
    """All sixteen; of a byte the low half's first."""
    packed = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE, 0xF2]], dtype=torch.uint8)
    expected = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6, 1, -6]
    found = e2m1_values(packed)[0]
    assert found.tolist() == expected and torch.equal(found.signbit(), torch.tensor(expected).signbit())


def test_ties_of_e2m1() -> None:
    """To even codes, in a block whose power of two is 1; what is above 6 becomes 6."""
    x = torch.zeros(1, 32)
    x[0, :14] = torch.tensor([5, -3, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, -0.25, -5, 6.9, 0, 0.26, -0.74])
    packed, scale = rounding.mxfp4(x)
    assert scale.tolist() == [[127]] and packed[0, :7].tolist() == [214, 32, 66, 100, 232, 7, 145]
    whole = MXFP4Weight(packed, scale).dequantized()[0, :14]
    assert whole.tolist() == [4, -3, 0, 1, 1, 2, 2, 4, 0, -4, 6, 0, 0.5, -0.5]


@pytest.mark.parametrize(
    ("largest", "byte", "value"),
    [(3.4999, 126, 3), (3.5, 127, 4), (6.9999, 127, 6), (7, 128, 8), (1, 125, 1), (0, 0, 0), (1e-45, 0, 0),
     (2.0**-127, 0, 2.0**-127), (2.0**-124, 1, 2.0**-124), (3.4e38, 252, 6 * 2.0**125), (NAN, 255, NAN),
     (INF, 255, NAN)],
)  # fmt: skip
def test_shared_exponents_of_float4(largest: float, byte: int, value: float) -> None:
    """Of a block's largest number once it is rounded to two bits; the other block is what it was."""
    x = torch.full((1, 34), 2.0)
    x[0, :32], x[0, 5] = 0, -largest
    packed, scale = rounding.mxfp4(x)
    assert scale.tolist() == [[byte, 126]]
    found = MXFP4Weight(packed, scale).dequantized()[0]
    assert found[5].item() == pytest.approx(-value, rel=0, abs=0, nan_ok=True) and found[32:].tolist() == [2, 2]


@pytest.mark.parametrize("k", [2, 16, 30, 32, 34, 64, 100, 160, 4304])
def test_mxfp4_against_a_table(k: int) -> None:
    random = np.random.default_rng(k)
    w = (random.standard_normal((3, k)) * 2.0 ** random.integers(-3, 3, (3, k))).astype(np.float32)
    w[1], w[2] = w[1] * 2.0**-130, np.round(w[2] * 4) / 4
    w[0, : min(k, 40)] = 0
    packed, scale = rounding.mxfp4(torch.from_numpy(w))
    expected, whole = mxfp4(w)
    assert np.array_equal(scale.numpy(), expected["weight_scale"]) and scale.shape == (3, math.ceil(k / 32))
    assert np.array_equal(packed.numpy(), expected["weight_packed"]) and packed.shape == (3, k // 2)
    assert np.array_equal(MXFP4Weight(packed, scale).dequantized().numpy(), whole)


INT4 = ((5 * torch.arange(4)[:, None] + 3 * torch.arange(16)) % 16 - 8).to(torch.int8)
INT4_SCALE = torch.tensor([0.02, 0.01, 0.03, 0.015])[:, None]


def test_int4_packing() -> None:
    packed = rounding.pack_int4(INT4)
    assert packed.tolist() == [
        [-40, 11, 62, 97, -108, -57, -6, 45, 80, -125, -74, -23, 28, 79, 114, -91],
        [114, -91, -40, 11, 62, 97, -108, -57, -6, 45, 80, -125, -74, -23, 28, 79],
    ]
    one, many = (rounding.int4_correction(INT4, INT4_SCALE, slices) for slices in (1, 16))
    assert one.flatten().tolist() == pytest.approx([-1.28, -0.64, -1.92, -0.96])
    first = [-1.28, -0.8, -0.32, 0.16, 0.64, 1.12, -0.96, -0.48, 0, 0.48, 0.96, -1.12, -0.64, -0.16, 0.32, 0.8]
    assert many[0].tolist() == pytest.approx(first, abs=1e-6)
    torch.testing.assert_close(many.sum(-1, keepdim=True), one)
    weight = Int4Weight(packed, INT4_SCALE, one)
    assert torch.equal(weight.values(), INT4) and weight.shape == (4, 16)
    torch.testing.assert_close(weight.dequantized(), INT4 * INT4_SCALE)


def test_int4_products() -> None:
    """The product as published, and what the correction is for: bytes cut into halves, the low one less eight."""
    x = ((37 * torch.arange(16)) % 255 - 127) / 100
    values, scale = rounding.int8_tokens(x[None])
    assert values.tolist() == [[-127, -90, -53, -16, 21, 58, 95, -123, -86, -49, -12, 25, 62, 99, -119, -82]]
    assert scale.item() == pytest.approx(0.01)
    total = values.long() @ INT4.long().T
    assert total.tolist() == [[456, -505, 310, -1179]]
    y = total * INT4_SCALE.T * scale
    assert y[0].tolist() == pytest.approx([0.0912, -0.0505, 0.093, -0.17685], abs=1e-7)
    high, low = values.long() >> 4, (values.long() & 15) - 8
    correction = rounding.int4_correction(INT4, INT4_SCALE, 1)
    halves = ((16 * high + low) @ INT4.long().T * INT4_SCALE.T + correction.T) * scale
    torch.testing.assert_close(halves, y, atol=1.5e-7, rtol=0)


def test_second_scales() -> None:
    """Two scales multiply; a group's holds for neighbouring inputs."""
    first, second = torch.tensor([[0.5], [0.25]]), torch.tensor([[0.1, 0.2], [0.3, 0.4]])
    ones = rounding.pack_int4(torch.ones(2, 6, dtype=torch.int8))
    whole = Int4Weight(ones, first, torch.zeros(2, 1), second).dequantized()
    torch.testing.assert_close(whole[:, ::3], torch.tensor([[0.05, 0.1], [0.075, 0.1]]))
    assert torch.equal(whole[:, 0], whole[:, 2]) and torch.equal(whole[:, 3], whole[:, 5])


@pytest.mark.parametrize("top", [7, 127])
@pytest.mark.parametrize("shape", [(2, 3), (6, 40), (4, 4304)])
def test_integers_against_numpy(shape: tuple[int, int], top: int) -> None:
    w = np.random.default_rng(top).standard_normal(shape).astype(np.float32)
    found = (rounding.int4_weight if top == 7 else rounding.int8_weight)(torch.from_numpy(w))
    expected = integers(w, top)
    assert np.array_equal(found[0].numpy(), expected[0]) and np.array_equal(found[1].numpy(), expected[1])
    assert np.array_equal(rounding.pack_int4(found[0]).numpy(), pack(expected[0]))


def test_int8_by_groups() -> None:
    w = np.random.default_rng(2).standard_normal((3, 12)).astype(np.float32)
    values, scale = (torch.from_numpy(array) for array in grouped(w, 127, 4))
    whole = Int8Weight(values, scale).dequantized()
    assert (whole - torch.from_numpy(w)).abs().max() <= scale.max() / 2 * 1.0001
    assert not torch.equal(scale[:, 0], scale[:, 3])


def test_refusals() -> None:
    with pytest.raises(ValueError, match="pack_int4: 3 outputs, and two share a byte"):
        rounding.pack_int4(torch.zeros(3, 2, dtype=torch.int8))
    with pytest.raises(ValueError, match="24 inputs do not make 16 equal slices"):
        rounding.int4_correction(torch.zeros(2, 24, dtype=torch.int8), torch.ones(2, 1), 16)
    with pytest.raises(ValueError, match="mxfp4: 33 inputs, and two share a byte"):
        rounding.mxfp4(torch.zeros(2, 33))


@pytest.mark.parametrize("kind", ["half_even", "half_away"])
def test_under_transforms_and_without_values(kind: Any) -> None:
    """Rounding has nothing that a trace or a map could not hold."""
    x = torch.randn(3, 5, 40, generator=torch.Generator().manual_seed(0))
    for function in (lambda x: rounding.mxfp8(x, kind), rounding.mxfp4, rounding.int8_tokens):
        whole, mapped = function(x), torch.vmap(function)(x)
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(whole, mapped, strict=True))
        shapes = [(tuple(leaf.shape), leaf.dtype) for leaf in function(x.to("meta"))]
        assert shapes == [(tuple(leaf.shape), leaf.dtype) for leaf in whole]
