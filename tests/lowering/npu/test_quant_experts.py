"""Experts with quantised weights on Ascend, against a loop with the roundings of the operators' documentation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import lowering
from lowering import TARGETS, LoweringError, Policy, npu_reference, ops
from lowering.kernel import FUSED, there
from lowering.npu import quant_experts
from lowering.npu.quant_experts import Int4Experts, Int8Experts, MXFP4Experts, MXFP8Experts
from lowering.target import Target, named
from params import tree
from params.quant.rounding import int4_correction, int4_weight, int8_weight, mxfp4, mxfp8, pack_int4
from params.quant.values import Int4Weight, Int8Weight, MXFP4Weight, MXFP8Weight
from params.tree import tree_map
from tests.cases import Draw
from tests.tolerances import assert_close

BFLOAT, HALF = torch.bfloat16, torch.float16
ASCEND_910, ASCEND_950 = "ascend910b", "ascend950"
INTEGERS, APART = "npu_grouped_experts_int", "npu_grouped_experts_int_apart"
BLOCKS, FOUR_BITS = "npu_grouped_experts_mx", "npu_grouped_experts_mx4"
EXPERTS, HIDDEN, INNER, TOKENS, CHOICES = 5, 128, 64, 9, 3


@pytest.fixture(scope="module", autouse=True)
def operators() -> None:
    """The namespace `npu`, on the CPU."""
    npu_reference.load()


def int8(plain: Tensor) -> Int8Weight:
    return Int8Weight(*int8_weight(plain))


def int4(plain: Tensor) -> Int4Weight:
    """With the correction in as many parts as an exporter writes for what a mesh slices."""
    values, scale = int4_weight(plain)
    return Int4Weight(pack_int4(values), scale, int4_correction(values, scale, 16))


def blocks(plain: Tensor) -> MXFP8Weight:
    return MXFP8Weight(*mxfp8(plain, "half_away"))


def four(plain: Tensor) -> MXFP4Weight:
    return MXFP4Weight(*mxfp4(plain))


def call(make: Any, dtype: torch.dtype, back: Any = None, seed: int = 0) -> tuple[Any, ...]:
    """Arguments of `experts`, whose last one no token chooses."""
    draw = Draw(torch.float32, seed)
    up = make(draw.normal(EXPERTS, 2 * INNER, HIDDEN) / HIDDEN**0.5)
    down = (back or make)(draw.normal(EXPERTS, HIDDEN, INNER) / INNER**0.5)
    weights = draw.uniform(0.1, 1.0, TOKENS, CHOICES).to(dtype)
    return draw.normal(TOKENS, HIDDEN).to(dtype), weights, draw.distinct(EXPERTS - 1, TOKENS, CHOICES), up, down


def product(x: Tensor, weight: Any, expert: int, dtype: torch.dtype) -> Tensor:
    """A token, quantised, times an expert's weight, in float64."""
    if isinstance(weight, MXFP4Weight):
        return weight.dequantized(torch.float64)[expert] @ x.double()
    if isinstance(weight, MXFP8Weight):
        return in_blocks(x) @ weight.dequantized(torch.float64)[expert].mT
    step = x.abs().max() / 127
    integers = torch.round(x / step).double()
    values = weight.values if isinstance(weight, Int8Weight) else weight.values()
    scale = weight.scale[expert, :, 0]
    if isinstance(weight, Int8Weight) and dtype == BFLOAT:
        scale = scale.bfloat16()
    return (values[expert].double() @ integers) * scale.double() * step.double()


def in_blocks(x: Tensor) -> Tensor:
    """The numbers nearest to x in float8 with a power of two for every 32."""
    parts = x.double().view(-1, 32)
    power = torch.exp2(torch.floor(torch.log2(parts.abs().amax(-1, keepdim=True))) - 8)
    return ((parts / power).clamp(-448, 448).float().to(torch.float8_e4m3fn).double() * power).flatten()


def expected(
    x: Tensor, weights: Tensor, ids: Tensor, up: Any, down: Any, apart: bool = False, in_one: bool = False
) -> Tensor:
    """Token by token and choice by choice. Two operators that are `apart` round between them; none rounds `in_one`."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, chosen in enumerate(ids.tolist()):
        for at, expert in enumerate(chosen):
            both = product(x[token].float(), up, expert, torch.float32 if in_one else x.dtype)
            gate, value = (both if in_one or isinstance(up, MXFP8Weight) else both.to(x.dtype)).float().chunk(2)
            inner = gate * gate.sigmoid() * value
            inner = inner.to(x.dtype).float() if apart else inner
            out[token] += weights[token, at].double() * product(inner, down, expert, x.dtype).to(x.dtype).double()
    return out


SCHEMES = {
    "int8_bf16": (int8, BFLOAT, None, INTEGERS, ASCEND_910),
    "int8_f16": (int8, HALF, None, INTEGERS, "ascend910_93"),
    "int8_apart_bf16": (int8, BFLOAT, None, APART, ASCEND_950),
    "int8_apart_f16": (int8, HALF, None, APART, ASCEND_950),
    "int8_apart_old": (int8, BFLOAT, None, APART, named("ascend910_93", cann="8.5.0")),
    "int4": (int4, BFLOAT, None, INTEGERS, ASCEND_910),
    "int4_then_int8": (int4, BFLOAT, int8, INTEGERS, ASCEND_910),
    "blocks_bf16": (blocks, BFLOAT, None, BLOCKS, ASCEND_950),
    "blocks_f16": (blocks, HALF, None, BLOCKS, ASCEND_950),
    "four_bf16": (four, BFLOAT, None, FOUR_BITS, ASCEND_950),
    "four_f16": (four, HALF, None, FOUR_BITS, named(ASCEND_950, cann="8.5.0")),
}


def run(args: tuple[Any, ...], target: str | Target, kernel: str) -> Tensor:
    """The experts on a target, which must choose the kernel by itself."""
    with lowering.use(target=target), lowering.record() as report:
        y = ops.experts(*args)
    (row,) = report.rows
    assert row.kernel == kernel and FUSED not in row.refused
    return y


def prepared(args: tuple[Any, ...], kernel: str) -> tuple[Any, ...]:
    target = TARGETS[ASCEND_950 if kernel == FOUR_BITS else ASCEND_910]
    with lowering.use(target=target):
        made = [ops.experts.kernels[kernel].prepare(weight) for weight in args[3:]]  # type: ignore[misc]
    assert all(weight is not None for weight in made)
    return *args[:3], *made


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_experts(scheme: str, seed: int) -> None:
    """A last bit of the intermediate may come to a step of its scale, in few values; none in most of them."""
    make, dtype, back, kernel, target = SCHEMES[scheme]
    args = call(make, dtype, back, seed)
    y, wanted = run(args, target, kernel), expected(*args, apart=kernel in (APART, FOUR_BITS)).to(dtype)
    assert (y == wanted).float().mean() > 0.9
    assert_close(y, wanted, looser=2.0, reason="a step of int8 in one of the sums' terms")
    before = tree_map(Tensor.clone, args)
    laid = run(prepared(args, kernel), target, kernel)
    assert tree.equal(args, before)
    if isinstance(args[3], Int8Weight) and kernel == INTEGERS:  # one operator multiplies, activates and quantises
        wanted = expected(*args, in_one=True).to(dtype)
        assert (laid == wanted).float().mean() > 0.9
        assert_close(laid, wanted, looser=2.0, reason="a step of int8 in one of the sums' terms")
    else:
        assert torch.equal(laid, y)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_experts_are_near_the_formulas_and_the_float_weights(scheme: str) -> None:
    """Scales are rounded to bfloat16 for some of the products, intermediates to steps of int8 or float8."""
    make, dtype, back, kernel, target = SCHEMES[scheme]
    args = call(make, dtype, back, seed=4)
    y = run(args, target, kernel).double()

    def away(other: Tensor) -> float:
        return float((y - other.double()).norm() / other.double().norm())

    assert away(ops.experts.body(*args)) < (0.03 if make is blocks else 0.015)
    plain = [weight.dequantized() for weight in args[3:]]
    bound = {int8: 0.03, int4: 0.03, blocks: 0.09, four: 0.015}[make]
    assert away(ops.experts.body(args[0].float(), args[1].float(), args[2], *plain)) < bound


def test_published_experts() -> None:
    """Two experts of two channels and three tokens of four, each choosing one."""
    w1 = [[[10, -20, 30, 40], [5, 6, -7, 8]], [[-3, 2, 1, 0], [50, -60, 70, -80]]]
    w3 = [[[1, 2, 3, 4], [-4, -3, -2, -1]], [[9, 8, 7, 6], [11, -12, 13, -14]]]
    w2 = [[[1, 2], [3, 4], [5, 6], [7, 8]], [[-1, 1], [2, -2], [3, 3], [-4, 4]]]
    up = torch.cat([torch.tensor(w) for w in (w1, w3)], 1).to(torch.int8)
    scale = torch.tensor([[0.01, 0.02, 0.03, 0.04], [0.02, 0.01, 0.05, 0.03]])[..., None]
    down = Int8Weight(torch.tensor(w2, dtype=torch.int8), torch.full((2, 4, 1), 0.05))
    x = torch.tensor([[1, -0.5, 0.25, 2], [0.5, 0.5, -1, 0], [-2, 1, 0, 0.5]])
    wanted = [[0.00417, -0.008339, 0.002269, 0.016678], [-0.000544, -0.000763, -0.000983, -0.001202],
              [0.016139, -0.032278, 0.039426, 0.064556]]  # fmt: skip
    for dtype, close in ((BFLOAT, 1e-2), (HALF, 1e-2)):
        args = x.to(dtype), torch.ones(3, 1, dtype=dtype), torch.tensor([[1], [0], [1]]), Int8Weight(up, scale), down
        y = run(args, ASCEND_910, INTEGERS).float()
        torch.testing.assert_close(y, torch.tensor(wanted), rtol=close, atol=2e-5)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_token_of_zeros_and_one_of_no_numbers(scheme: str) -> None:
    make, dtype, back, kernel, target = SCHEMES[scheme]
    x, *rest = call(make, dtype, back)
    x[2] = 0
    usual = run((x, *rest), target, kernel)
    assert not usual[2].any()
    x[5] = torch.nan
    found = run((x, *rest), target, kernel)
    others = torch.arange(TOKENS) != 5
    assert torch.equal(found[others], usual[others])


def test_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of int8 by inputs; int4 eight outputs a word; float8 as stored, its exponents in pairs."""
    prepare = ops.experts.kernels[INTEGERS].prepare
    *_, up, _ = prepared(call(int8, BFLOAT), INTEGERS)
    assert isinstance(up, Int8Experts) and up.weight.shape == (EXPERTS, HIDDEN, 2 * INNER) and up.weight.is_contiguous()
    assert up.scale.dtype == torch.float32 and up.rounded.dtype == BFLOAT
    *_, up, down = prepared(call(int4, BFLOAT), INTEGERS)
    assert isinstance(up, Int4Experts) and up.weight.shape == (EXPERTS, HIDDEN, 2 * INNER // 8)
    assert up.scale.shape == (EXPERTS, 1, 2 * INNER) and up.scale.dtype == torch.int64
    assert up.correction.shape == (EXPERTS, 2 * INNER) and down.correction.shape == (EXPERTS, HIDDEN)
    *_, up, _ = prepared(call(blocks, BFLOAT), BLOCKS)
    assert isinstance(up, MXFP8Experts) and up.pairs.shape == (EXPERTS, 2 * INNER, 2, 2)
    *_, up, _ = prepared(call(four, BFLOAT), FOUR_BITS)
    assert isinstance(up, MXFP4Experts) and up.weight.shape == (EXPERTS, HIDDEN, 2 * INNER // 8)
    assert up.weight.dtype == torch.float32 and up.scale.shape == (EXPERTS, HIDDEN // 32, 2 * INNER)
    zeros = torch.zeros(2, 24, 64, dtype=torch.int8)
    assert prepare(Int8Weight(zeros, torch.ones(2, 24, 1))) is None  # type: ignore[misc]
    assert prepare(Int8Weight(zeros, torch.ones(2, 24, 2))) is None  # type: ignore[misc]
    bytes_ = Int4Weight(zeros, torch.ones(2, 48, 1), torch.ones(2, 48, 1))
    with monkeypatch.context() as patch:
        patch.setattr(quant_experts, "blocked", None)
        words = prepare(bytes_)  # type: ignore[misc]
    assert isinstance(words, Int4Experts) and words.weight.shape == (2, 64, 6)
    assert there(TARGETS[ASCEND_950], prepare, bytes_) is None  # type: ignore[arg-type]
    assert prepare(Int4Weight(zeros[..., :48], torch.ones(2, 48, 1), torch.ones(2, 48, 1))) is None  # type: ignore[misc]
    assert prepare(Int4Weight(zeros[:, :6], torch.ones(2, 12, 1), torch.ones(2, 12, 1))) is None  # type: ignore[misc]


def test_published_int4() -> None:
    """Bytes as stored, and the words that the product takes: bytes 10 32 54 76 are 0x76543210."""
    stored = torch.zeros(1, 32, 64, dtype=torch.int8)
    stored[0, :4, 0] = torch.tensor([0x10, 0x32, 0x54, 0x76], dtype=torch.int8)
    scale = torch.ones(1, 64, 1)
    scale[0, :4, 0] = torch.tensor([0.02, 0.01, 0.03, 0.015])
    made = ops.experts.kernels[INTEGERS].prepare(Int4Weight(stored, scale, torch.ones(1, 64, 16)))  # type: ignore[misc]
    assert isinstance(made, Int4Experts)
    assert made.weight[0, 0, 0] == 0x76543210 and (made.correction == 16).all()
    assert made.scale[0, 0, :4].tolist() == [1017370378, 1008981770, 1022739087, 1014350479]


@pytest.mark.parametrize("scheme", ["int8_f16", "int4", "blocks_bf16", "four_bf16"])
def test_prepared_weights_are_read_back(scheme: str) -> None:
    """By the reference, where the kernel does not take a call. Partial sums of a correction are summed."""
    make, dtype, back, kernel, target = SCHEMES[scheme]
    args = call(make, dtype, back)
    laid = prepared(args, kernel)
    for weight, stored in zip(laid[3:], args[3:], strict=True):
        one = weight.plain()
        assert weight.shape == stored.shape and torch.equal(one.dequantized(), stored.dequantized())
        assert tree.equal(one, stored) or make is int4
    empty = args[0][:0], args[1][:0], args[2][:0]
    with lowering.use(target=target):
        assert ops.experts(*empty, *laid[3:]).shape == (0, HIDDEN)
    wide = args[0].float(), args[1].float(), args[2]
    assert torch.equal(ops.experts(*wide, *laid[3:]), ops.experts.body(*wide, *args[3:]))


def changed(args: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    return *args[:at], value, *args[at + 1 :]


GOOD, FOUR, MX = call(int8, BFLOAT), call(int4, BFLOAT), call(blocks, BFLOAT)
ONE_GROUP = Int8Weight(torch.ones(EXPERTS, 2 * INNER, HIDDEN, dtype=torch.int8), torch.ones(EXPERTS, 2 * INNER, 2))
TWO_STAGES = Int4Weight(FOUR[3].packed, FOUR[3].scale, FOUR[3].correction, torch.ones(EXPERTS, 2 * INNER, 4))
NARROW = int4(torch.ones(EXPERTS, 2 * INNER - 4, HIDDEN))
SHORT, LONG = int4(torch.ones(EXPERTS, 2 * INNER, 96)), int4(torch.ones(EXPERTS, HIDDEN, 18496))
PADDED = MXFP8Weight(MX[3].values, MX[3].scale, padding=(0, 32))
SLIM = blocks(torch.ones(EXPERTS, 2 * INNER, 96))


REFUSALS = [
    (INTEGERS, changed(GOOD, 0, GOOD[0].float()), "takes float16, bfloat16; x is float32"),
    (INTEGERS, changed(GOOD, 1, GOOD[1].half()), "takes one dtype; found x bfloat16, weights float16"),
    (INTEGERS, (GOOD[0][:0], GOOD[1][:0], GOOD[2][:0], *GOOD[3:]), r"takes no empty tensor; x is \[0, 128\]"),
    (INTEGERS, changed(GOOD, 3, ONE_GROUP), "takes one scale an output; this weight has 2, for groups of inputs"),
    (INTEGERS, changed(FOUR, 3, TWO_STAGES), "takes one scale an output; this weight has 4, for groups of inputs"),
    (INTEGERS, changed(FOUR, 3, NARROW), "takes int4 weights with outputs in 8s; this one has 124"),
    (INTEGERS, (FOUR[0][:, :96], *FOUR[1:3], SHORT, FOUR[4]), "with inputs in 64s, up to 18432; this one has 96"),
    (INTEGERS, changed(FOUR, 4, LONG), "with inputs in 64s, up to 18432; this one has 18496"),
    (APART, changed(GOOD, 0, GOOD[0].float()), "takes float16, bfloat16; x is float32"),
    (INTEGERS, (FOUR[0].half(), FOUR[1].half(), *FOUR[2:]), "takes bfloat16; x is float16"),
    (INTEGERS, changed(GOOD, 0, GOOD[0][:, :64]), "takes x of 128 inputs, as the weight has; this one has 64"),
    (INTEGERS, changed(GOOD, 4, torch.zeros(EXPERTS, HIDDEN, INNER)), "down is a Tensor"),
    (INTEGERS, (*GOOD[:2], GOOD[2][:, :1], *(tree_map(lambda x: x[:1], w) for w in GOOD[3:])), "2 to 1024 experts"),
    (FOUR_BITS, changed(call(four, BFLOAT), 3, MX[3]), r"takes no MXFP8Weight \(W8A8_MXFP8\)"),
    (FOUR_BITS, changed(call(four, BFLOAT), 4, four(torch.ones(EXPERTS, HIDDEN, 32))), "this one has 32 and 128"),
    (BLOCKS, (MX[0][:, :96], *MX[1:3], PADDED, MX[4]), r"takes weights without padding; this one has \(0, 32\)"),
    (BLOCKS, (MX[0][:, :96], *MX[1:3], SLIM, MX[4]), "inputs and outputs in 64s; this one has 96 and 128"),
    (BLOCKS, changed(MX, 4, blocks(torch.ones(EXPERTS, HIDDEN, 32))), "outputs in 64s; this one has 32 and 128"),
]  # fmt: skip


@pytest.mark.parametrize(("kernel", "args", "sentence"), REFUSALS)
def test_refusals(kernel: str, args: tuple[Any, ...], sentence: str) -> None:
    target = ASCEND_950 if kernel in (BLOCKS, FOUR_BITS) else ASCEND_910
    with lowering.use(Policy({"experts": kernel}), target=target), pytest.raises(LoweringError, match=sentence):
        ops.experts(*args)


def test_plain_experts_have_a_kernel_of_their_own() -> None:
    """On 950 too."""
    plain = [weight.dequantized(BFLOAT) for weight in MX[3:]]
    choice = ops.experts.explain(*MX[:3], *plain, target=ASCEND_950)
    assert choice.kernel.name == "npu_grouped_experts"


def test_int4_is_for_the_910() -> None:
    """Scales of groups of inputs, which 950 wants, our int4 weights do not have."""
    with lowering.use(Policy({"experts": INTEGERS}), target=ASCEND_950), pytest.raises(LoweringError) as error:
        ops.experts(*FOUR)
    assert "takes int4 weights on ascend910b and ascend910_93; the target is ascend950" in str(error.value)


def test_caps_are_computed_apart() -> None:
    """The one operator has none."""
    caps = (0.5, 0.25)
    with lowering.use(target=ASCEND_910), lowering.record() as report:
        y = ops.experts(*GOOD, caps=caps)
    (row,) = report.rows
    assert row.kernel == APART and row.refused[INTEGERS] == "has no caps; this call has (0.5, 0.25) (SiTU)"
    exact = ops.experts.body(*GOOD, caps=caps)
    assert (y.double() - exact.double()).norm() < 0.015 * exact.double().norm()


@pytest.mark.parametrize(("cann", "in_one"), [("8.5.0", False), ("9.0.0", True), ("9.1.0", True)])
def test_prepared_int8_is_multiplied_and_activated_in_one(
    cann: str, in_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the CANN on that takes blocked weights there; plain ones are not blocked."""
    called = []
    operator = torch.ops.npu.npu_grouped_matmul_swiglu_quant_v2

    def noted(*args: Any, **kwargs: Any) -> Any:
        called.append(1)
        return operator(*args, **kwargs)

    monkeypatch.setattr(quant_experts.npu, operator.__name__, noted, raising=False)
    target = named(ASCEND_910, cann=cann)
    run(GOOD, target, INTEGERS)
    assert not called
    run(prepared(GOOD, INTEGERS), target, INTEGERS)
    assert called == [1] * in_one


@pytest.mark.parametrize(("cann", "formats"), [("9.0.0", 0), ("9.1.0", 2)])
def test_older_products_take_no_blocked_float8(cann: str, formats: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their exponents are prepared all the same."""
    made = []
    monkeypatch.setattr(quant_experts.npu, "npu_format_cast", lambda x, _: made.append(x) or x, raising=False)
    target = named(ASCEND_950, cann=cann)
    laid = [there(target, ops.experts.kernels[BLOCKS].prepare, weight) for weight in MX[3:]]  # type: ignore[arg-type]
    assert len(made) == formats and all(isinstance(weight, MXFP8Experts) for weight in laid)
    assert torch.equal(run((*MX[:3], *laid), target, BLOCKS), run(MX, target, BLOCKS))


def test_a_report_says_why_torch_multiplies_by_quantised_experts() -> None:
    """No operator of the 910 reads blocks with a shared exponent; where one serves, others are not mentioned."""
    shown = str(lowering.explain(ops.experts, *MX, target=ASCEND_910))
    assert f"{INTEGERS}: takes no MXFP8Weight" in shown and "torch" in shown
    assert "takes no" not in str(lowering.explain(ops.experts, *MX, target=ASCEND_950))
    assert "takes no" not in str(lowering.explain(ops.experts, *MX, target="cpu"))
