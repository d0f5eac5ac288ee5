"""Products with quantised weights: known numbers, formulas written again from the schemes, and every kernel for them.

What is written again takes integers in int64 and finds a float8 by looking through all of them, so that it shares no
rounding, cast or product with the package.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

import lowering
from funcmodels.blocks.linear import Linear
from funcmodels.blocks.mlp import Experts
from lowering import LoweringError, ops
from lowering.ops.quant import integer_product
from lowering.portable.quant import MXMatrix, PackedInt8
from params.quant.rounding import int4_correction, int4_weight, int8_weight, mxfp4, mxfp8, pack_int4
from params.quant.values import (
    Int4Weight,
    Int8Weight,
    MXFP4Weight,
    MXFP8Weight,
    SplitWeight,
    StaticInt8Weight,
    dequantized,
    mx_values,
)
from params.tree import tree_map
from tests.cases import Draw
from tests.tolerances import assert_close

pytestmark = [
    # As jvp and Inductor are loaded.
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
]
VNNI = torch.cpu._is_vnni_supported()


def ints(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int8)


# Known numbers

W = ints([[10, -20, 30, 40], [-128, 127, 5, -7], [1, 2, 3, 4]])
W_SCALE = torch.tensor([0.01, 0.02, 0.005])
X = torch.tensor([[1, -2, 0.5, 3], [0.1, 0.2, -0.3, 0.4]])


@pytest.mark.parametrize(
    "deq_scale",
    [torch.tensor([0.00025, 0.0005, 0.000125]), torch.tensor([964891247, 973279855, 956502639])],
    ids=["float32", "bits_in_int64"],
)
def test_a_static_product(deq_scale: Tensor) -> None:
    """The correction takes the offset out and holds the bias [.5, -.25, 0]."""
    weight = StaticInt8Weight(
        W, deq_scale, torch.tensor([2480, -524, 80], dtype=torch.int32), torch.tensor([0.025]), torch.tensor([-8.0])
    )
    expected = torch.tensor([[2.35, -8.26, 0.0525], [0.54, -0.084, 0.006]])
    for kernel in on_this_cpu("torch_int8"):
        with lowering.use(linear=kernel):
            assert torch.allclose(ops.linear(X, weight), expected, rtol=0, atol=1e-6)


def test_a_dynamic_product() -> None:
    """In float32, and rounded once to bfloat16."""
    weight = Int8Weight(W, W_SCALE[:, None])
    expected = torch.tensor([[1.8496062, -8.0102367, 0.05232283], [0.04, 0.168063, 0.0060314960]])
    half = torch.tensor([[1.8515625, -8.0, 0.05224609], [0.04003906, 0.16796875, 0.00604248]])
    for kernel in on_this_cpu("torch_int8"):
        with lowering.use(linear=kernel):
            assert torch.allclose(ops.linear(X, weight), expected, rtol=2e-7, atol=0)
            assert torch.allclose(ops.linear(X.bfloat16(), weight).float(), half, rtol=1e-6, atol=0)


def test_an_mx_product() -> None:
    """64 inputs, two blocks each with a power of two of its own."""
    j = torch.arange(64)
    x = ((j + 1) / 16)[None]
    w = torch.stack((torch.cos(j.double()), 0.1 * torch.sin(j.double() / 2))).float()
    weight = MXFP8Weight(*mxfp8(w, "half_away"))
    assert weight.scale.tolist() == [[119, 118], [115, 115]]
    assert mxfp8(x, "half_even")[1].tolist() == [[120, 121]]
    for kernel in ("torch", "torch_mxfp8"):
        with lowering.use(linear=kernel):
            assert torch.allclose(ops.linear(x, weight), torch.tensor([[2.8265381, -0.7096710]]), rtol=3e-7, atol=0)
            found = ops.linear(x.bfloat16(), weight)
            assert torch.equal(found, torch.tensor([[2.828125, -0.7109375]]).bfloat16())


def test_an_int4_product() -> None:
    """The correction is the device's affair: whatever it is, the product is that of the numbers."""
    i, j = torch.arange(4)[:, None], torch.arange(16)
    values, scale = ((5 * i + 3 * j) % 16 - 8).to(torch.int8), torch.tensor([0.02, 0.01, 0.03, 0.015])[:, None]
    packed = pack_int4(values)
    assert packed[0].tolist() == [-40, 11, 62, 97, -108, -57, -6, 45, 80, -125, -74, -23, 28, 79, 114, -91]
    x = (((37 * j) % 255 - 127) / 100)[None].float()
    expected = torch.tensor([[0.0912, -0.0505, 0.093, -0.17685]])
    for correction in (int4_correction(values, scale, 1), int4_correction(values, scale, 16), scale * torch.nan):
        weight = Int4Weight(packed, scale, correction)
        for kernel in on_this_cpu("torch_int8"):
            with lowering.use(linear=kernel):
                assert torch.allclose(ops.linear(x, weight), expected, rtol=1e-6, atol=0)


EXPERTS_X = torch.tensor([[1, -0.5, 0.25, 2], [0.5, 0.5, -1, 0], [-2, 1, 0, 0.5]])
EXPERTS_Y = torch.tensor([
    [0.004169, -0.008339, 0.002269, 0.016677], [-0.00054, -0.000757, -0.000974, -0.001191],
    [0.016173, -0.032346, 0.039508, 0.064692],
])  # fmt: skip


def test_int8_experts() -> None:
    """Two experts of inner size 2, one choice a token."""
    gate = ints([[[10, -20, 30, 40], [5, 6, -7, 8]], [[-3, 2, 1, 0], [50, -60, 70, -80]]])
    up = ints([[[1, 2, 3, 4], [-4, -3, -2, -1]], [[9, 8, 7, 6], [11, -12, 13, -14]]])
    down = ints([[[1, 2], [3, 4], [5, 6], [7, 8]], [[-1, 1], [2, -2], [3, 3], [-4, 4]]])
    scale = torch.tensor([[0.01, 0.02, 0.03, 0.04], [0.02, 0.01, 0.05, 0.03]])[..., None]
    both = Int8Weight(torch.cat((gate, up), 1), scale), Int8Weight(down, torch.full((2, 4, 1), 0.05))
    ids = torch.tensor([[1], [0], [1]])
    for kernel in on_this_cpu("torch_quantized_grouped"):
        with lowering.use(experts=kernel):
            found = ops.experts(EXPERTS_X, torch.ones(3, 1), ids, *both)
        assert torch.allclose(found, EXPERTS_Y, rtol=0, atol=6e-7)


def on_this_cpu(*kernels: str) -> tuple[str, ...]:
    """The reference, and these where the processor has what they need."""
    return ("torch", *(kernels if VNNI else ()))


# The formulas again


def int8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Integers, and the scale of each row in float32, where every kernel has it."""
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    return (x.float() / scale).nan_to_num(0.0).round().long(), scale.double()


def by_token(x: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    """In int64 within a group, the groups in float64."""
    rows, token_scale = int8_rows(x)
    groups = scale.shape[-1]
    split = (each.unflatten(-1, (groups, -1)) for each in (rows, values.long()))
    sums = torch.einsum("...gk,ngk->...ng", *split)
    return (sums.double() * scale.double()).sum(-1) * token_scale


POSITIVE = sorted(
    {m / 8 * 2.0**-6 for m in range(8)} | {(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)} - {480}
)
"""Every number of float8 e4m3 that is not negative. An even place is an even mantissa."""


def nearest(x: float) -> float:
    """The nearest float8, of two equally near the one with an even mantissa; 448 above it."""
    size = min(abs(x), 448.0)
    at = min(range(len(POSITIVE)), key=lambda index: (abs(POSITIVE[index] - size), index % 2))
    return math.copysign(POSITIVE[at], x)


def mx_row(row: list[float]) -> list[float]:
    """The numbers that an MX row stands for."""
    found = []
    for start in range(0, len(row), 32):
        block = row[start : start + 32]
        power = 2.0 ** (max(-127, math.frexp(max(map(abs, block)))[1] - 1 - 8) if any(block) else 0)
        found += [nearest(x / power) * power for x in block]
    return found


def mx(x: Tensor) -> Tensor:
    return torch.tensor([mx_row(row) for row in x.double().reshape(-1, x.shape[-1]).tolist()]).double().view(x.shape)


def float4(weight: MXFP4Weight) -> Tensor:
    """The numbers of packed codes, one by one."""
    numbers = (0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6)
    rows = [[numbers[code] for byte in row for code in (byte & 15, byte >> 4)] for row in weight.packed.tolist()]
    powers = torch.exp2(weight.scale.double() - 127).repeat_interleave(32, -1)
    return torch.tensor(rows).double() * powers[:, : 2 * weight.packed.shape[1]]


def formula(x: Tensor, weight: Any) -> Tensor:
    """x times the weight in float64."""
    if isinstance(weight, Tensor):
        return x.double() @ weight.double().T
    if isinstance(weight, SplitWeight):
        return torch.cat([formula(x, part) for part in weight.parts], -1)
    if isinstance(weight, MXFP8Weight):
        left, right = weight.padding
        padded = torch.cat((x.new_zeros(*x.shape[:-1], left), x, x.new_zeros(*x.shape[:-1], right)), -1)
        powers = torch.exp2(weight.scale.double() - 127).repeat_interleave(32, -1)[:, : padded.shape[-1]]
        return mx(padded) @ (weight.values.double() * powers).T
    if isinstance(weight, MXFP4Weight):
        left = weight.padding[0]
        return x.double() @ float4(weight)[:, left : left + x.shape[-1]].T
    if isinstance(weight, StaticInt8Weight):
        rows = (x.float() / weight.input_scale + weight.input_offset).round().clamp(-128, 127).long()
        return (rows @ weight.values.long().T + weight.correction) * weight.product_scale().double()
    if isinstance(weight, Int4Weight):
        halves = torch.stack([torch.tensor([(byte & 15, byte >> 4) for byte in row]) for row in weight.packed.tolist()])
        values = halves.transpose(1, 2).flatten(0, 1)
        second = 1.0 if weight.second_scale is None else weight.second_scale
        return by_token(x, torch.where(values > 7, values - 16, values), weight.scale * second)
    return by_token(x, weight.values, weight.scale)


def int8(w: Tensor) -> Int8Weight:
    return Int8Weight(*int8_weight(w))


def static(w: Tensor) -> StaticInt8Weight:
    """With activations from -2.5 to 4 in mind."""
    (values, scale), input_scale = int8_weight(w), torch.tensor([6.5 / 255])
    correction = torch.arange(len(w), dtype=torch.int32) * 7 - values.int().sum(-1, dtype=torch.int32) * -30
    return StaticInt8Weight(values, scale[:, 0] * input_scale, correction, input_scale, torch.tensor([-30.0]))


def int8_groups(w: Tensor) -> Int8Weight:
    values, scale = int8_weight(w.unflatten(-1, (2, -1)))
    return Int8Weight(values.flatten(-2), scale[..., 0])


def int4(w: Tensor) -> Int4Weight:
    values, scale = int4_weight(w)
    return Int4Weight(pack_int4(values), scale, int4_correction(values, scale, 1))


def int4_groups(w: Tensor) -> Int4Weight:
    made, second = int4(w), torch.linspace(0.5, 2, 2 * w.shape[-2]).view(-1, 2)
    return Int4Weight(made.packed, made.scale, made.correction, second)


def mx_weight(w: Tensor) -> MXFP8Weight:
    return MXFP8Weight(*mxfp8(w, "half_away"))


def mx4_weight(w: Tensor) -> MXFP4Weight:
    return MXFP4Weight(*mxfp4(w))


def split(w: Tensor) -> SplitWeight:
    return SplitWeight((int8(w[:2]), static(w[2:4]), w[4:5], mx_weight(w[5:])))


KINDS: dict[str, Callable[[Tensor], Any]] = {
    "int8": int8, "static": static, "int4": int4, "mx": mx_weight, "int8_groups": int8_groups,
    "int4_groups": int4_groups, "mx4": mx4_weight, "split": split,
}  # fmt: skip
BY_EXPERT = ("int8", "int4", "mx", "mx4")


def kernels_of(weight: Any) -> list[str]:
    """The kernels of `linear` that take the weight here; the reference is one."""
    x = torch.empty(1, weight.shape[-1])
    kernels = (kernel for kernel in ops.linear.serving("cpu") if kernel.reads(weight))
    return [kernel.name for kernel in kernels if kernel.refuse is None or kernel.refuse(x, weight) is None]


@pytest.mark.parametrize("inputs", [32, 48, 64, 96, 100, 160, 4304])
@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_that_of_the_formula(kind: str, inputs: int) -> None:
    """For every kernel that takes it, in float32 and bfloat16, with a token of zeros and a block of them."""
    draw = Draw(torch.float32, seed=inputs)
    weight, x = KINDS[kind](draw.normal(8, inputs)), draw.normal(2, 3, inputs)
    x[0, 1] = 0
    x[1, 2, :32] = 0
    x[1, 0] *= 1e-3
    assert len(kernels_of(weight)) > ("groups" not in kind and (VNNI or kind in ("mx", "mx4", "split")))
    for dtype in (torch.float32, torch.bfloat16):
        given = x.to(dtype)
        own = (
            SplitWeight(tuple(p.to(dtype) if isinstance(p, Tensor) else p for p in weight.parts))
            if kind == "split"
            else weight
        )
        expected = formula(given, own)
        for kernel in kernels_of(own):
            with lowering.use(linear=kernel):
                found = ops.linear(given, own)
            assert found.dtype == dtype
            assert_close(found, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_of_the_range(kind: str) -> None:
    """The largest integers everywhere: sums are exact beyond the numbers that float32 can count."""
    inputs = 4304
    weight = KINDS[kind](torch.ones(8, inputs) * torch.tensor([[1.0], [-1.0]] * 4))
    x = torch.full((2, inputs), 8.0)
    x[1] *= -1
    for kernel in kernels_of(weight):
        with lowering.use(linear=kernel):
            assert_close(ops.linear(x, weight), formula(x, weight))


def test_integer_sums_are_exact() -> None:
    """Odd ones far above 2^24 too, which float32 would round."""
    x, values = torch.full((2, 4303), 127, dtype=torch.int8), torch.full((3, 4303), -127, dtype=torch.int8)
    assert integer_product(x, values).tolist() == [[-127 * 127 * 4303] * 3] * 2


@pytest.mark.parametrize("padding", [(20, 8), (31, 0), (0, 5)], ids=str)
def test_a_slice_of_a_longer_row_keeps_its_blocks(padding: tuple[int, int]) -> None:
    """x has none of the zeros at its ends, which make the first block begin before it."""
    draw, inputs = Draw(torch.float32), 100
    w, x = draw.normal(6, inputs), draw.normal(3, inputs)
    padded = torch.nn.functional.pad(w, padding)
    even = torch.nn.functional.pad(padded, (0, padded.shape[1] % 2))
    for weight in (
        MXFP8Weight(*mxfp8(padded, "half_away"), padding=padding),
        MXFP4Weight(*mxfp4(even), padding=(padding[0], padding[1] + padded.shape[1] % 2)),
    ):
        assert weight.shape == (6, inputs)
        for kernel in kernels_of(weight):
            with lowering.use(linear=kernel):
                assert_close(ops.linear(x, weight), formula(x, weight))


def test_the_ends_of_the_powers_of_two() -> None:
    """Byte 0 is 2^-127, 255 is NaN."""
    values = torch.ones(1, 96).to(torch.float8_e4m3fn)
    found = mx_values(values, torch.tensor([[0, 254, 255]], dtype=torch.uint8))[0, ::32].tolist()
    assert found[:2] == [2.0**-127, 2.0**127] and math.isnan(found[2])


@pytest.mark.parametrize("lead", [(), (1,), (0,), (2, 0, 3), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_leading_axes(kind: str, lead: tuple[int, ...]) -> None:
    """Any, empty ones too; each token is on its own."""
    draw = Draw(torch.float16)
    weight, x = KINDS[kind](draw.normal(8, 64).float()), draw.normal(*lead, 64)
    if isinstance(weight, SplitWeight):
        weight = SplitWeight(tuple(part.half() if isinstance(part, Tensor) else part for part in weight.parts))
    for kernel in kernels_of(weight):
        with lowering.use(linear=kernel):
            found = ops.linear(x, weight)
            assert found.shape == (*lead, 8) and found.dtype == torch.float16
            alone = [ops.linear(row[None], weight)[0] for row in x.reshape(-1, 64)]
            assert_close(found.reshape(-1, 8), torch.stack(alone) if alone else found.new_zeros(0, 8))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "split"])
def test_kernels_for_integers_equal_the_reference_bit_for_bit(kind: str) -> None:
    """Odd sizes, and views with gaps."""
    for seed, (rows, inputs, outputs) in enumerate(((1, 2, 2), (3, 34, 6), (17, 998, 22), (40, 1030, 2))):
        draw = Draw(torch.bfloat16, seed)
        weight, x = KINDS[kind](draw.normal(outputs, inputs).float()), draw.normal(rows, 2 * inputs)[:, ::2]
        for kernel in kernels_of(weight) if "mx" not in kind else ():
            for given in (x, x.float()):
                with lowering.use(linear=kernel):
                    assert torch.equal(ops.linear(given, weight), ops.linear.body(given, weight))


@pytest.mark.parametrize(("kind", "most"), [("int8", 0.0137), ("mx", 0.054), ("int4", 0.176), ("mx4", 0.153)])
def test_errors_are_those_of_the_scheme(kind: str, most: float) -> None:
    """Against the float product of Gaussian numbers; a wrong rounding is worse by far, none at all is better."""
    draw = Draw(torch.float32)
    x, w = draw.normal(64, 512), draw.normal(256, 512)
    error = (ops.linear(x, KINDS[kind](w)) - x @ w.T).norm() / (x @ w.T).norm()
    assert most / 2 < error < most


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_stays_in_its_token(kind: str) -> None:
    """Padding may hold anything. Where a scale is the token's own, NaN and infinity become NaN and are seen."""
    draw = Draw(torch.float32)
    weight, x = KINDS[kind](draw.normal(8, 96)), draw.normal(4, 96)
    for value in (torch.nan, torch.inf):
        bad = x.clone()
        bad[1, 40], bad[3] = value, value
        for kernel in kernels_of(weight):
            with lowering.use(linear=kernel):
                found, expected = ops.linear(bad, weight), ops.linear(x, weight)
            assert torch.equal(found[::2], expected[::2])
            if kind == "mx4":
                assert not found[1::2].isfinite().any()
            elif kind not in ("static", "split"):
                assert found[1::2].isnan().all()


# Experts


def expert(weight: Any, at: int) -> Any:
    return tree_map(lambda leaf: leaf[at], weight)


def mixed(x: Tensor, weights: Tensor, ids: Tensor, gate_up: Any, down: Any) -> Tensor:
    """Token by token in float64, but for what lies between the products, which has the dtype of x."""
    y = torch.zeros(x.shape, dtype=torch.float64)
    for token, choice in ((token, choice) for token in range(len(x)) for choice in range(ids.shape[1])):
        at = int(ids[token, choice])
        inner = formula(x[token, None], expert(gate_up, at)).to(x.dtype)
        gate, up = inner.chunk(2, -1)
        inner = torch.nn.functional.silu(gate) * up
        y[token] += weights[token, choice].double() * formula(inner, expert(down, at))[0]
    return y


def draw_experts(kind: str, dtype: torch.dtype, *, tokens: int, hidden: int = 40, inner: int = 24) -> tuple[Any, ...]:
    """Arguments of `experts`: 7 of them, the last two chosen by nobody, the first by every token."""
    draw = Draw(dtype, tokens)
    make = KINDS[kind]
    gate_up = make(draw.normal(7, 2 * inner, hidden).float() / 6)
    down = make(draw.normal(7, hidden, inner).float() / 5)
    ids = torch.cat((torch.zeros(tokens, 1, dtype=torch.int64), 1 + draw.distinct(4, tokens, 1)), 1)
    return draw.normal(tokens, hidden), draw.uniform(0.1, 1.0, tokens, 2).to(dtype), ids, gate_up, down


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("tokens", [1, 3, 9])
@pytest.mark.parametrize("kind", BY_EXPERT)
def test_experts_are_those_of_the_formula(kind: str, tokens: int, dtype: torch.dtype) -> None:
    """Ragged and empty experts, through each kernel; experts that nobody chose may hold scales that are not numbers."""
    args = draw_experts(kind, dtype, tokens=tokens)
    expected = mixed(*args)
    for weight in args[3:]:
        weight.scale[5:] = 255 if "mx" in kind else torch.nan
    reason = "what lies between the products is rounded to few bits, so a last bit before it may come to one of those"
    for kernel in kernels_of_experts(args):
        with lowering.use(experts=kernel):
            found = ops.experts(*args)
        assert found.dtype == dtype
        assert_close(found, expected, looser=4 if dtype == torch.bfloat16 else 1, reason=reason)


def kernels_of_experts(args: tuple[Any, ...]) -> list[str]:
    kernels = (kernel for kernel in ops.experts.serving("cpu") if kernel.reads(args[3]))
    return [kernel.name for kernel in kernels if kernel.refuse is None or kernel.refuse(*args) is None]


def test_kernels_of_experts_are_chosen_by_their_tokens() -> None:
    """One that reads ids on the host where it may, else a look-up for few choices, else the reference."""
    few, many = draw_experts("mx", torch.float32, tokens=3), draw_experts("mx", torch.float32, tokens=4)
    assert kernels_of_experts(few) == ["torch_quantized_grouped", "torch_quantized_gathered", "torch"]
    assert kernels_of_experts(many) == ["torch_quantized_grouped", "torch"]
    meta = tree_map(lambda leaf: leaf.to("meta"), few)
    with lowering.use(target="cpu"):
        assert ops.experts.explain(*meta).kernel.name == "torch_quantized_gathered"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.skipif(not VNNI, reason="needs AVX512-VNNI")
def test_kernels_of_experts_add_up_as_the_reference_does(kind: str, dtype: torch.dtype) -> None:
    """One choice a token leaves nothing to add up: equal bit for bit."""
    x, weights, ids, *both = draw_experts(kind, dtype, tokens=5)
    args = (x, weights[:, 1:], ids[:, 1:], *both)
    expected = ops.experts.body(*args)
    for kernel in kernels_of_experts(args):
        with lowering.use(experts=kernel):
            assert torch.equal(ops.experts(*args), expected)


def test_experts_of_which_one_weight_is_plain() -> None:
    """The reference takes them; kernels say that they do not."""
    x, weights, ids, gate_up, down = draw_experts("int8", torch.float32, tokens=3)
    plain = dequantized(down, torch.float32)
    choice = ops.experts.explain(x, weights, ids, gate_up, plain)
    assert choice.kernel.name == "torch"
    assert "one of this call's is plain" in choice.refused["torch_quantized_grouped"]
    inner = mixed(x, weights, ids, gate_up, tree_map(lambda leaf: leaf, plain))
    assert_close(ops.experts(x, weights, ids, gate_up, plain), inner)


# Latent attention is in test_mla_ops.py's cases; here, what it is prepared to.


def test_prepared_weights() -> None:
    """int4 as int8, MX as bfloat16, bits as float32, part by part; products stay the same, and the tree as it was."""
    draw = Draw(torch.float32)
    w, x = draw.normal(8, 64), draw.normal(5, 64)
    by_bits = static(w)
    by_bits = StaticInt8Weight(
        by_bits.values, by_bits.deq_scale.view(torch.int32).long(), by_bits.correction, by_bits.input_scale,
        by_bits.input_offset,
    )  # fmt: skip
    given = (
        int8(w),
        by_bits,
        int4(w),
        int4_groups(w),
        mx_weight(w),
        mx4_weight(w),
        SplitWeight((int4(w), mx_weight(w[1:]), w[2:])),
    )
    before = tree_map(torch.clone, given)
    ready: list[Any] = [lowering.prepare(Linear(weight), target="cpu").weight for weight in given]
    assert given == before
    if VNNI:
        assert isinstance(ready[2], Int8Weight) and ready[1].deq_scale.dtype == torch.float32
        assert isinstance(ready[6].parts[0], Int8Weight)
    assert ready[0] is given[0] and all(isinstance(x, MXMatrix) for x in (*ready[4:6], ready[6].parts[1]))
    assert [weight.shape for weight in ready] == [weight.shape for weight in given]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for one, two in zip(ready[:6], given[:6], strict=True):
            assert torch.equal(ops.linear(x.to(dtype), one), ops.linear(x.to(dtype), two))
    assert torch.equal(ops.linear(x, ready[6]), ops.linear(x, given[6]))


@pytest.mark.skipif(not VNNI, reason="needs AVX512-VNNI")
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_packed_weights_equal_the_reference_bit_for_bit(kind: str) -> None:
    """At any number of rows, sums past what float32 counts included, eager and captured."""
    weight = KINDS[kind](Draw(torch.float32).normal(1020, 1030))
    ready = lowering.prepare(Linear(weight), target="cpu").weight
    assert isinstance(ready, PackedInt8) and ready.shape == weight.shape
    for rows in (0, 1, 2, 5, 33):
        for dtype in (torch.float32, torch.bfloat16):
            x = Draw(dtype, rows).normal(rows, 1030)
            with lowering.record() as report:
                found = ops.linear(x, ready)
            assert report.rows[0].kernel == "torch_int8_packed"
            captured = lowering.jit(ops.linear, backend="fx")(x, ready)
            assert torch.equal(found, ops.linear.body(x, weight)) and torch.equal(captured, found)
    with pytest.raises(LoweringError, match=r"x has 4.*PackedInt8|only the kernel it was prepared for"):
        ops.linear(torch.ones(2, 4), ready)
    small = KINDS[kind](torch.ones(4, 8))
    choice = ops.linear.explain(torch.ones(2, 8), small)
    assert "packs those of 1048576 elements or more" in choice.refused["torch_int8_packed"]


def test_prepared_experts_are_the_same() -> None:
    """For both kernels; the reference says that it cannot read what only they can."""
    for kind in BY_EXPERT:
        x, weights, ids, gate_up, down = draw_experts(kind, torch.float32, tokens=3)
        ready = lowering.prepare(Experts(gate_up, down), target="cpu")
        for kernel in kernels_of_experts((x, weights, ids, gate_up, down)):
            if kernel != "torch":
                with lowering.use(experts=kernel):
                    found = ops.experts(x, weights, ids, ready.gate_up, ready.down)
                    assert torch.equal(found, ops.experts(x, weights, ids, gate_up, down))
    with lowering.use(experts="torch"), pytest.raises(LoweringError, match="use the plain parameters"):
        ops.experts(x, weights, ids, ready.gate_up, ready.down)


# Errors


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_refused_in_words(kind: str) -> None:
    """Whoever asks for them: rounding would give zeros, and nobody would see."""
    w, x = Draw(torch.float32).normal(8, 64), torch.randn(3, 64)
    weight = KINDS[kind](w)

    def total(x: Tensor) -> Tensor:
        return ops.linear(x, weight).sum()

    for run in (
        lambda: total(x.clone().requires_grad_()),
        lambda: torch.func.grad(total)(x),
        lambda: torch.func.jvp(total, (x,), (x,)),
        lambda: torch.func.vmap(torch.func.grad(total))(x),
    ):
        with pytest.raises(LoweringError, match=r"no gradient.*dequantize"):
            run()
    with torch.no_grad():
        total(x.clone().requires_grad_())


@pytest.mark.parametrize("kind", KINDS)
def test_x_of_another_width_is_refused(kind: str) -> None:
    """By every kernel, in the reference's words."""
    weight = KINDS[kind](Draw(torch.float32).normal(8, 64))
    with pytest.raises(LoweringError, match=r"x has 32 inputs.*takes 64"):
        ops.linear(torch.ones(2, 32), weight)


def test_refusals() -> None:
    """Each kernel says what it does not take."""
    one = int8(torch.ones(2, 1))
    assert ops.linear(torch.full((3, 1), 2.0), one).tolist() == [[2.0, 2.0]] * 3
    if VNNI:
        assert "2 inputs or more" in ops.linear.explain(torch.ones(3, 1), one).refused["torch_int8"]
        w = torch.randn(8, 64)
        refused = ops.linear.explain(torch.ones(3, 64), int8_groups(w)).refused
        assert refused["torch_int8"] == "takes one scale for each output; this weight has 2"
        assert "has 2" in ops.linear.explain(torch.ones(3, 64), int4_groups(w)).refused["torch_int8"]
    choice = ops.linear.explain(torch.ones(3, 12), int8(torch.randn(8, 12)), target="cuda")
    assert choice.refused["cuda_int8"] == "takes inputs and outputs in multiples of 8; the weight has 12 and 8"
    assert ops.linear.explain(torch.ones(3, 16), int8(torch.randn(8, 16)), target="cuda").kernel.name == "cuda_int8"
    assert "the weight of this call is plain" in ops.linear.explain(torch.ones(3, 4), torch.ones(2, 4)).refused["split"]


def test_without_vnni_integers_go_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN's sums may saturate there."""
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    x, weight = torch.ones(31, 68), int8(torch.randn(6, 68))
    choice = ops.linear.explain(x, weight)
    assert choice.kernel.name == "torch" and "AVX512-VNNI" in choice.refused["torch_int8"]
    ops.linear._choices.clear()


# Capture and reports


@pytest.mark.parametrize("inputs", [64, 100])
@pytest.mark.parametrize("kind", ["mx", "mx4"])
def test_what_a_compiler_is_told_of_decoded_weights(kind: str, inputs: int) -> None:
    """Shape, dtype and strides, for blocks of fewer than 32 too."""
    weight = KINDS[kind](Draw(torch.float32).normal(6, inputs))
    stored = weight.packed if kind == "mx4" else weight.values
    torch.library.opcheck(torch.ops.funcmodels.mx_matrix.default, (stored, weight.scale), test_utils="test_faketensor")


@pytest.mark.parametrize("backend", ["fx", pytest.param("inductor", marks=pytest.mark.compile)])
def test_captured_calls_equal_eager_ones(backend: str) -> None:
    """On other values than those traced with, ids that choose other experts among them; weights prepared or not."""
    kinds = KINDS if backend == "fx" else ("int8", "mx")
    linears, routed = (
        every_kind(kinds),
        {kind: draw_experts(kind, torch.float32, tokens=1) for kind in BY_EXPERT if kind in kinds},
    )
    params = linears, {kind: Experts(*args[3:]) for kind, args in routed.items()}
    params = (lowering.prepare(params, target="cpu"), *([params] if backend == "fx" else []))

    def all_of_them(params: Any, x: Tensor, tokens: Tensor, shares: Tensor, ids: Tensor) -> list[Tensor]:
        found = []
        for linears, experts in params:
            found += [ops.linear(x, one.weight) for one in linears]
            found += [ops.experts(tokens, shares, ids, one.gate_up, one.down) for one in experts.values()]
        return found

    step, draw = lowering.jit(all_of_them, backend=backend), Draw(torch.float32)
    tokens, shares, ids = routed["int8"][:3]
    for factor, chosen in ((1, ids), (2, ids.flip(1) + 1)):
        given = (params, draw.normal(5, 64), tokens * factor, shares, chosen)
        assert_close(step(*given), all_of_them(*given), looser=4, reason="a last bit before what is quantised again")


def every_kind(kinds: Iterable[str]) -> list[Linear]:
    """A weight [8 64] of each."""
    w = Draw(torch.float32).normal(8, 64)
    return [Linear(KINDS[kind](w)) for kind in kinds]


def test_parts_are_reported_and_counted() -> None:
    """A run and a dry run show the kernel that each part gets, as often as the split weight is read."""
    w = Draw(torch.float32).normal(8, 64)
    weight = SplitWeight((int8(w), w[:3], mx_weight(w)))

    def layers(x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + ops.linear(x, weight).sum()
        return ops.linear(x, w)

    x = torch.ones(5, 64)
    with lowering.record() as ran:
        layers(x)
    counts = {row.kernel: 0 for row in ran.rows}
    for row in ran.rows:
        counts[row.kernel] += row.count
    assert counts["split"] == 3 and counts["torch_mxfp8"] == 3 and sum(counts.values()) == 13
    for _ in range(2):
        assert lowering.explain(layers, x).rows == ran.rows
    low = lowering.lower(layers, x, target="cpu")
    assert sum(call.count for call in low.calls) == 13


def test_a_split_weight_asked_for_by_name() -> None:
    """The name is that of the whole; parts get the kernels that suit them."""
    w = Draw(torch.float32).normal(8, 64)
    weight, x = SplitWeight((int8(w), w[:3])), torch.ones(2, 64)
    with lowering.use(linear="split"):
        found = ops.linear(x, weight)
    assert_close(found, formula(x, weight))
    with lowering.use(linear="torch_mxfp8"), pytest.raises(LoweringError, match="takes no SplitWeight"):
        ops.linear(x, weight)
