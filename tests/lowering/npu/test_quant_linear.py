"""Projections with quantised weights on Ascend: bit for bit what the formulas give, prepared or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import lowering
from lowering import LoweringError, Policy, npu_reference, ops
from lowering.kernel import FUSED, there
from lowering.npu.quant_linear import Int8Blocks, MXFP8Pairs, StaticInt8Blocks, in_pairs, turned
from lowering.target import ASCEND, Target, named
from params import tree
from params.quant.rounding import int8_range, int8_weight, mxfp8, static_int8
from params.quant.values import Int8Weight, MXFP8Weight, SplitWeight, StaticInt8Weight
from params.tree import tree_map
from tests.cases import Draw

BFLOAT, HALF = torch.bfloat16, torch.float16
HALVES = {"bf16": BFLOAT, "f16": HALF}
ASCEND_910, ASCEND_950 = "ascend910b", "ascend950"
DYNAMIC, STATIC, BLOCKS = "npu_quant_matmul", "npu_quant_matmul_static", "npu_quant_matmul_mx"
CANN = ("8.5.0", "9.0.0", "9.1.0")
WIDTHS = (32, 48, 64, 96, 100, 160, 4304)


@pytest.fixture(scope="module", autouse=True)
def operators() -> None:
    """The namespace `npu`, on the CPU."""
    npu_reference.load()


def weight(kind: type, outputs: int, inputs: int, seed: int = 0) -> Any:
    """A quantised weight of normal values."""
    plain = Draw(torch.float32, seed).normal(outputs, inputs)
    if kind is MXFP8Weight:
        return MXFP8Weight(*mxfp8(plain, "half_away"))
    values, scale = int8_weight(plain)
    if kind is Int8Weight:
        return Int8Weight(values, scale)
    input_scale, input_offset = int8_range(-3.1, 4.7)
    correction = (Draw(torch.float32, seed + 1).ids(8000, outputs) - 4000).int()
    return StaticInt8Weight(values, input_scale * scale[:, 0], correction, input_scale, input_offset)


KINDS = {
    DYNAMIC: (Int8Weight, ASCEND_910), STATIC: (StaticInt8Weight, ASCEND_910), BLOCKS: (MXFP8Weight, ASCEND_950),
}  # fmt: skip
EVERYWHERE = [
    *((DYNAMIC, name, cann) for name in ASCEND for cann in CANN),
    *((STATIC, name, cann) for name in ASCEND for cann in CANN),
    *((BLOCKS, ASCEND_950, cann) for cann in CANN),
]
"""Kernels, and the targets with a CANN that serve them."""


def run(x: Tensor, made: Any, target: str | Target, kernel: str) -> Tensor:
    """The product on a target, which must choose the kernel by itself, be it by CANN's statement."""
    with lowering.use(Policy(evidence="stated"), target=target), lowering.record() as report:
        y = ops.linear(x, made)
    (row,) = report.rows
    assert row.kernel == kernel and FUSED not in row.refused
    return y


@pytest.mark.parametrize("dtype", HALVES.values(), ids=HALVES)
@pytest.mark.parametrize("inputs", WIDTHS)
@pytest.mark.parametrize("kernel", KINDS)
def test_products_are_the_formulas_bit_for_bit(kernel: str, inputs: int, dtype: torch.dtype) -> None:
    """A weight prepared, where it is, gives the same; the plain one is left as it was."""
    kind, target = KINDS[kernel]
    made, x = weight(kind, 64, inputs), Draw(dtype, 4).normal(3, 2, inputs)
    expected = ops.linear.body(x, made)
    assert torch.equal(run(x, made, target, kernel), expected) and expected.dtype == dtype
    before = tree_map(Tensor.clone, made)
    prepared = ops.linear.kernels[kernel].prepare(made) or made  # type: ignore[misc]
    assert torch.equal(run(x, prepared, target, kernel), expected)
    assert tree.equal(made, before) and prepared.shape == made.shape and prepared.device == made.device
    one = Draw(dtype, 5).normal(inputs)
    assert torch.equal(run(one, prepared, target, kernel), ops.linear.body(one, made))


@pytest.mark.parametrize(("kernel", "name", "cann"), EVERYWHERE)
def test_every_machine_multiplies_alike(kernel: str, name: str, cann: str) -> None:
    """Prepared for the machine or not."""
    made, x, target = weight(KINDS[kernel][0], 64, 96), Draw(BFLOAT, 4).normal(3, 96), named(name, cann=cann)
    expected = ops.linear.body(x, made)
    for one in (made, there(target, ops.linear.kernels[kernel].prepare, made) or made):  # type: ignore[arg-type]
        assert torch.equal(run(x, one, target, kernel), expected)


def test_static_values_would_move_with_scales_of_16_bits() -> None:
    """A tenth of them by a step, in bfloat16: hence float32 for x too."""
    made = weight(StaticInt8Weight, 64, 4096)
    x = Draw(BFLOAT, 4).uniform(-3.1, 4.7, 8, 4096).to(BFLOAT)
    factor, offset = made.input_scale.reciprocal().repeat(4096), made.input_offset.repeat(4096)
    given = {"dtype": torch.qint8, "axis": -1, "div_mode": False}
    wide = torch.ops.npu.npu_quantize(x.float(), factor, offset, **given)
    narrow = torch.ops.npu.npu_quantize(x, factor.to(BFLOAT), offset.to(BFLOAT), **given)
    assert torch.equal(wide, static_int8(x, made.input_scale, made.input_offset))
    moved = (wide.int() - narrow.int()).abs()
    assert moved.max() >= 1 and (moved > 0).float().mean() > 0.05


def test_published_products() -> None:
    """Four inputs, three outputs, two tokens; the static one with its bias in the correction."""
    values = torch.tensor([[10, -20, 30, 40], [-128, 127, 5, -7], [1, 2, 3, 4]], dtype=torch.int8)
    x = torch.tensor([[1, -2, 0.5, 3], [0.1, 0.2, -0.3, 0.4]])
    scale, input_scale, input_offset = torch.tensor([0.01, 0.02, 0.005]), torch.tensor([0.025]), torch.tensor([-8.0])
    by_token = Int8Weight(values, scale[:, None])
    wanted = torch.tensor([[1.8496062, -8.0102367, 0.05232283], [0.04, 0.168063, 0.0060314960]])
    torch.testing.assert_close(run(x.half(), by_token, ASCEND_910, DYNAMIC).float(), wanted, rtol=2e-3, atol=2e-5)
    static = StaticInt8Weight(
        values, input_scale * scale, torch.tensor([2480, -524, 80]).int(), input_scale, input_offset
    )
    wanted = torch.tensor([[2.35, -8.26, 0.0525], [0.54, -0.084, 0.006]])
    torch.testing.assert_close(run(x.half(), static, ASCEND_910, STATIC).float(), wanted, rtol=1e-3, atol=0)


def test_a_published_product_in_blocks() -> None:
    at = torch.arange(64)
    plain = torch.stack((torch.cos(at), 0.1 * torch.sin(at / 2)))
    made = MXFP8Weight(*mxfp8(plain, "half_away"))
    assert made.scale.tolist() == [[119, 118], [115, 115]]
    y = run(((at + 1) / 16).bfloat16(), made, ASCEND_950, BLOCKS)
    assert y.tolist() == [2.828125, -0.7109375]


@pytest.mark.parametrize("kernel", KINDS)
def test_a_token_of_zeros_and_one_of_no_numbers(kernel: str) -> None:
    """The first gives zeros (static: what the correction stands for), the second touches no other."""
    kind, target = KINDS[kernel]
    made, x = weight(kind, 32, 96), Draw(BFLOAT, 6).normal(4, 96)
    x[1] = 0
    expected = run(x, made, target, kernel)
    assert kind is StaticInt8Weight or not expected[1].any()
    x[2] = torch.nan
    found = run(x, made, target, kernel)
    assert torch.equal(found[[0, 1, 3]], expected[[0, 1, 3]])


@pytest.mark.parametrize(("stored", "inputs"), [(0, 100), (20, 108), (13, 115)])
def test_a_slice_that_begins_inside_a_block(stored: int, inputs: int) -> None:
    """x gets as many zeros at both sides as the weight has."""
    right = 128 - stored - inputs if stored else 0
    plain = torch.nn.functional.pad(Draw(torch.float32, 1).normal(24, inputs), (stored, right))
    made = MXFP8Weight(*mxfp8(plain, "half_away"), padding=(stored, right))
    x = Draw(BFLOAT, 2).normal(5, inputs)
    expected = ops.linear.body(x, made)
    for one in (made, ops.linear.kernels[BLOCKS].prepare(made) or made):  # type: ignore[misc]
        assert one.shape == (24, inputs)
        assert torch.equal(run(x, one, ASCEND_950, BLOCKS), expected)


def test_layouts() -> None:
    """Blocks where they are filled, pairs where a number is odd; everything else stays as it is stored."""
    prepare = {name: ops.linear.kernels[name].prepare for name in KINDS}
    by_token = prepare[DYNAMIC](weight(Int8Weight, 32, 48))  # type: ignore[misc]
    assert isinstance(by_token, Int8Blocks) and by_token.blocked.shape == (48, 32) and by_token.scale.shape == (32,)
    assert by_token.blocked.is_contiguous()
    static = prepare[STATIC](weight(StaticInt8Weight, 32, 48))  # type: ignore[misc]
    assert isinstance(static, StaticInt8Blocks) and static.reciprocal.shape == static.offset.shape == (48,)
    assert static.reciprocal.dtype == torch.float32
    pairs = prepare[BLOCKS](weight(MXFP8Weight, 6, 4304))  # type: ignore[misc]
    assert isinstance(pairs, MXFP8Pairs) and pairs.pairs.shape == (6, 68, 2) and not pairs.pairs[:, 67, 1].any()
    for name, shape in ((DYNAMIC, (24, 48)), (DYNAMIC, (32, 40)), (STATIC, (40, 48)), (BLOCKS, (6, 64))):
        assert prepare[name](weight(KINDS[name][0], *shape)) is None  # type: ignore[misc]
    groups = Int8Weight(torch.ones(32, 64, dtype=torch.int8), torch.ones(32, 2))
    assert prepare[DYNAMIC](groups) is None  # type: ignore[misc]


def test_pairs_of_scales() -> None:
    """Published strides: of 96 inputs, four exponents where three are stored; of 4304, 136 where 135 are."""
    for blocks, shape, last in ((3, (2, 2, 2), [[2, 0], [3, 0]]), (135, (68, 2, 2), [[134, 0], [135, 0]])):
        scale = (torch.arange(2)[:, None] + torch.arange(blocks)).to(torch.uint8)
        view = turned(in_pairs(scale))
        assert view.shape == shape and view[-1].tolist() == last and view[0].tolist() == [[0, 1], [1, 2]]
        assert view.stride() == (2, blocks + 1, 1)
    one = turned(in_pairs(torch.tensor([[0], [1]], dtype=torch.uint8)))
    assert one.tolist() == [[[0, 0], [1, 0]]] and one.stride() == (4, 2, 1), "a copy: strides of size 1 may be read"


@pytest.mark.parametrize("kernel", KINDS)
def test_prepared_weights_are_read_back(kernel: str) -> None:
    """Bit for bit, by the reference, where the kernel does not take a call."""
    kind, target = KINDS[kernel]
    made = weight(kind, 32, 96)
    prepared = ops.linear.kernels[kernel].prepare(made)  # type: ignore[misc]
    assert tree.equal(prepared.plain(), made)
    x = Draw(torch.float32, 3).normal(5, 96)
    with lowering.use(target=target):
        for call in (x, x[:0].bfloat16(), x[:0]):
            assert torch.equal(ops.linear(call, prepared), ops.linear.body(call, made))
    assert torch.equal(ops.linear(x.half(), prepared), ops.linear.body(x.half(), made))


REFUSALS = [
    (DYNAMIC, torch.zeros(2, 64), 32, 64, "takes float16, bfloat16; x is float32"),
    (STATIC, torch.zeros(2, 64), 32, 64, "takes float16, bfloat16; x is float32"),
    (BLOCKS, torch.zeros(2, 64), 32, 64, "takes float16, bfloat16; x is float32"),
    (DYNAMIC, torch.zeros(0, 64).half(), 32, 64, r"takes no empty tensor; x is \[0, 64\]"),
    (BLOCKS, torch.zeros(2, 65536).half(), 1, 65536, "takes at most 65535 inputs; this call has 65536"),
    (DYNAMIC, torch.zeros(2, 8).half(), 65536, 8, "takes at most 65535 outputs; this call has 65536"),
    (STATIC, torch.zeros(2, 60).half(), 32, 64, "takes x of 64 inputs, as the weight has; this one has 60"),
]


@pytest.mark.parametrize(("kernel", "x", "outputs", "inputs", "sentence"), REFUSALS)
def test_refusals(kernel: str, x: Tensor, outputs: int, inputs: int, sentence: str) -> None:
    kind, target = KINDS[kernel]
    with lowering.use(Policy({"linear": kernel}), target=target), pytest.raises(LoweringError, match=sentence):
        ops.linear(x, weight(kind, outputs, inputs))


def test_other_refusals() -> None:
    x = torch.zeros(2, 64).half()
    groups = Int8Weight(torch.ones(32, 64, dtype=torch.int8), torch.ones(32, 2))
    choice = ops.linear.explain(x, groups, target=ASCEND_910)
    assert choice.kernel.name not in KINDS
    assert choice.refused[DYNAMIC] == "takes one scale an output; this weight has 2, for groups of inputs"
    assert choice.refused[STATIC] == "takes no Int8Weight (W8A8_DYNAMIC)"
    plain = ops.linear.explain(x, torch.zeros(32, 64).half(), target=ASCEND_910)
    assert plain.refused[DYNAMIC] == "takes Int8Weight; the weight of this call is plain"
    assert "no fused operator adds to it for a plain weight" in plain.refused[FUSED]
    stated = ops.linear.explain(x, weight(StaticInt8Weight, 32, 64), target=ASCEND_950).refused[STATIC]
    assert stated.startswith("npu_quantize is stated by CANN, not documented or in use for ascend950")
    elsewhere = ops.linear.explain(x, weight(MXFP8Weight, 32, 64), target="ascend910_93").refused[BLOCKS]
    assert elsewhere == "serves ascend950; target is ascend910_93"


def test_parts_go_to_their_own_kernels() -> None:
    """One part of int8, one plain: prepared, each has its own layout."""
    made = SplitWeight((weight(Int8Weight, 64, 96), Draw(BFLOAT, 8).normal(8, 96)))
    x = Draw(BFLOAT, 9).normal(5, 96)
    expected = ops.linear.body(x, made)
    parts = tuple(ops.linear.kernels[DYNAMIC].prepare(part) for part in made.parts[:1])  # type: ignore[misc]
    prepared = SplitWeight((*parts, made.parts[1]))
    for one in (made, prepared):
        with lowering.use(target=ASCEND_910), lowering.record() as report:
            assert torch.equal(ops.linear(x, one), expected)
        assert DYNAMIC in {row.kernel for row in report.rows}
