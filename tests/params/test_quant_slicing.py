"""Quantised weights on a mesh: what a rank holds of each kind, and that the ranks together hold the whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import params
from params.names.rules import ExpertStack, Merged, Names, Plain
from params.quant import rounding
from params.quant.values import (
    Int4Weight,
    Int8Weight,
    MXFP4Weight,
    MXFP8Weight,
    QuantizedWeight,
    SplitWeight,
    StaticInt8Weight,
    dequantized,
)
from params.sharding import Inputs, OfExperts, Outputs, Rule
from tests.params.conftest import Experts, Linear
from tests.params.modelslim import export, write


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    """Gaussian numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def static(w: torch.Tensor) -> StaticInt8Weight:
    """A statically quantised weight without a bias."""
    values, scale = rounding.int8_weight(w)
    input_scale, offset = rounding.int8_range(-2, 5)
    correction = (-offset * values.sum(-1)).to(torch.int32)
    return StaticInt8Weight(values, scale[:, 0] * input_scale, correction, input_scale, offset)


def int4(w: torch.Tensor, slices: int = 16) -> Int4Weight:
    """A packed weight whose correction comes in partial sums."""
    values, scale = rounding.int4_weight(w)
    return Int4Weight(rounding.pack_int4(values), scale, rounding.int4_correction(values, scale, slices))


def grouped(w: torch.Tensor, groups: int = 4) -> Int8Weight:
    """An int8 weight with a scale for each of some groups of inputs."""
    values, scale = rounding.int8_weight(w.unflatten(-1, (groups, -1)))
    return Int8Weight(values.flatten(-2), scale[..., 0])


def split(w: torch.Tensor) -> SplitWeight:
    """Three parts of three kinds."""
    one, two = w.shape[0] // 4 * 2, w.shape[0] // 4 * 3
    return SplitWeight((Int8Weight(*rounding.int8_weight(w[:one])), w[one:two], static(w[two:])))


MAKERS: dict[str, Callable[[torch.Tensor], QuantizedWeight]] = {
    "int8": lambda w: Int8Weight(*rounding.int8_weight(w)),
    "groups": grouped,
    "static": static,
    "int4": int4,
    "int4, one correction": lambda w: int4(w, 1),
    "mxfp8": lambda w: MXFP8Weight(*rounding.mxfp8(w, "half_away")),
    "mxfp4": lambda w: MXFP4Weight(*rounding.mxfp4(w)),
    "split": split,
}
FOR_EXPERTS = ("int8", "groups", "int4", "mxfp8", "mxfp4")


def held(weight: Any, rule: Rule, rank: int, size: int) -> Any:
    """What a rank holds of a weight, without the value that says what is exchanged."""
    spec = {"w": params.TensorSpec(tuple(weight.shape), shard=rule)}
    part = params.shard({"w": weight}, spec, params.Ranks(rank, size, "g"))["w"]
    return part.weight if isinstance(rule, Inputs) else part


def by_outputs(*blocks: int) -> Outputs:
    """Blocks of rows, each shared out in units of two."""
    return Outputs(tuple((rows, rows // 2) for rows in blocks))


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_outputs(kind: str, size: int) -> None:
    """A rank's float weight is its rows of the float weight: of each block, in order."""
    weight = MAKERS[kind](random(24, 160))
    whole = weight.dequantized()
    for rank in range(size):
        part = held(weight, by_outputs(8, 16), rank, size)
        rows = [
            whole[start + rank * each : start + (rank + 1) * each] for start, each in ((0, 8 // size), (8, 16 // size))
        ]
        assert torch.equal(dequantized(part, torch.float32), torch.cat(rows))


@pytest.mark.parametrize("kind", sorted(MAKERS.keys() - {"int4, one correction"}))
@pytest.mark.parametrize("size", [1, 2, 4])
def test_inputs(kind: str, size: int) -> None:
    """A rank's float weight is its columns of the float weight."""
    weight = MAKERS[kind](random(24, 160))
    whole = weight.dequantized()
    for rank in range(size):
        part = held(weight, Inputs(4), rank, size)
        assert tuple(part.shape) == (24, 160 // size)
        assert torch.equal(dequantized(part, torch.float32), whole[:, rank * 160 // size : (rank + 1) * 160 // size])


@pytest.mark.parametrize("kind", FOR_EXPERTS)
@pytest.mark.parametrize("whole_experts", [False, True])
def test_experts(kind: str, whole_experts: bool) -> None:
    """Some experts, or some rows and columns of every one."""
    weight = MAKERS[kind](random(6, 8, 64))
    whole = weight.dequantized()
    ranks = params.Ranks(1, 2, "g", whole_experts)
    for rule, expected in ((by_outputs(4, 4), whole[:, [2, 3, 6, 7]]), (Inputs(2), whole[..., 32:])):
        spec = {"w": params.TensorSpec((6, 8, 64), shard=OfExperts(rule))}
        part: Any = params.shard({"w": weight}, spec, ranks)["w"]
        assert torch.equal(part.weight.dequantized(), whole[3:] if whole_experts else expected)


def test_static_products_add_up() -> None:
    """The correction goes with one rank: published integers, and a random sum over four."""
    w = torch.tensor([[10, -20, 30, 40], [-128, 127, 5, -7], [1, 2, 3, 4]], dtype=torch.int8)
    correction = torch.tensor([2480, -524, 80], dtype=torch.int32)
    deq = torch.tensor([0.00025, 0.0005, 0.000125])
    weight = StaticInt8Weight(w, deq, correction, torch.tensor([0.025]), torch.tensor([-8.0]))
    sums = products(weight, torch.tensor([32, -88, 12, 112]), 2)
    assert [total[0].item() for total in sums] == [4560, 4840]
    assert ((sums[0] + sums[1])[0] * deq[0]).item() == pytest.approx(2.35)
    wide = static(random(6, 32, seed=1))
    tokens = rounding.static_int8(random(32, seed=2), wide.input_scale, wide.input_offset).long()
    whole = tokens @ wide.values.long().T + wide.correction
    assert torch.equal(torch.stack(products(wide, tokens, 4)).sum(0), whole)


def products(weight: StaticInt8Weight, tokens: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Each rank's integer product."""
    parts = [held(weight, Inputs(size), rank, size) for rank in range(size)]
    pieces = tokens.chunk(size)
    return [piece @ part.values.long().T + part.correction for piece, part in zip(pieces, parts, strict=True)]


@pytest.mark.parametrize("size", [2, 4, 16])
def test_corrections_of_int4_add_up(size: int) -> None:
    """A rank takes its share of the 16 partial sums as they are stored."""
    weight = int4(random(6, 160))
    parts = [held(weight, Inputs(size), rank, size) for rank in range(size)]
    assert all(part.correction.shape == (6, 16 // size) for part in parts)
    assert torch.equal(torch.cat([part.correction for part in parts], -1), weight.correction)
    with pytest.raises(params.ConfigError, match=r"w: Int4Weight.correction has 1 for 160 .*take fewer ranks"):
        held(int4(random(6, 160), 1), Inputs(size), 0, size)


PLAN = {
    (4304, 2): [(0, 24, 0, 68), (8, 0, 67, 68)],
    (4304, 4): [(0, 12, 0, 34), (20, 24, 33, 35), (8, 4, 67, 34), (28, 0, 100, 35)],
    (96, 2): [(0, 16, 0, 2), (16, 0, 1, 2)],
    (128, 2): [(0, 0, 0, 2), (0, 0, 2, 2)],
}
"""Of each rank: inputs at the left and right that are its neighbours', first scale, number of scales. The last block of
the whole may be partial, and then the last rank's is."""


@pytest.mark.parametrize(("inputs", "size"), PLAN)
def test_parted_blocks(inputs: int, size: int) -> None:
    weight, other = MXFP8Weight(*rounding.mxfp8(random(2, inputs), "half_away")), MAKERS["mxfp4"](random(2, inputs))
    for rank, (left, right, first, count) in enumerate(PLAN[inputs, size]):
        part, narrow = (held(one, Inputs(size), rank, size) for one in (weight, other))
        assert part.padding == narrow.padding == (left, right) and part.shape == narrow.shape == (2, inputs // size)
        assert torch.equal(part.scale, weight.scale[:, first : first + count])
        assert part.values.shape[1] == 2 * narrow.packed.shape[1] == min(32 * count, inputs - 32 * first)


@pytest.mark.parametrize(("inputs", "size"), [(4304, 2), (4304, 4), (96, 2), (128, 4)])
def test_products_of_parted_blocks_add_up(inputs: int, size: int) -> None:
    """Inputs that each rank quantises after padding give nearly the whole product; without parted blocks, all of it."""
    weight, x = MXFP8Weight(*rounding.mxfp8(random(3, inputs), "half_away")), random(5, inputs, seed=1)
    whole = MXFP8Weight(*rounding.mxfp8(x, "half_even")).dequantized() @ weight.dequantized().T
    total = torch.zeros(5, 3)
    for rank, piece in enumerate(x.chunk(size, -1)):
        part = held(weight, Inputs(size), rank, size)
        own = torch.nn.functional.pad(piece, part.padding)
        stored = MXFP8Weight(part.values, part.scale).dequantized()
        total += MXFP8Weight(*rounding.mxfp8(own, "half_even")).dequantized() @ stored.T
    aligned = inputs // size % 32 == 0
    torch.testing.assert_close(total, whole, rtol=0, atol=1e-4 if aligned else 0.08 * whole.abs().max().item())


@pytest.mark.parametrize(
    ("kind", "rule", "message"),
    [
        ("int4", Outputs(((24, 24),)), r"w: Int4Weight.packed has 12 for 24 .*end between them"),
        ("groups", Inputs(32), r"w: Int8Weight.scale has 4 for 160 .*end between them"),
    ],
)
def test_refusals(kind: str, rule: Rule, message: str) -> None:
    """Two outputs of a byte, and inputs with one scale, stay together."""
    with pytest.raises(params.ConfigError, match=message):
        held(MAKERS[kind](random(24, 160)), rule, 0, 8)


MESH_NAMES = Names(
    "mesh",
    {
        "qkv.weight": Merged(("q.weight", "k.weight")),
        "out.weight": Plain("o.weight"),
        "experts.gate_up": ExpertStack("gate_up_proj", ("x.{e}.gate_proj.weight", "x.{e}.up_proj.weight")),
        "experts.down": ExpertStack("down_proj", ("x.{e}.down_proj.weight",)),
    },
)


def mesh_spec() -> Any:
    """An attention's projections and some experts, with rules."""
    spec = params.TensorSpec
    qkv = spec((24, 64), parts=(16, 8), shard=by_outputs(16, 8))
    gate_up = spec((4, 16, 64), shard=OfExperts(by_outputs(8, 8)))
    down = spec((4, 64, 96), shard=OfExperts(Inputs(2)))
    return {
        "qkv": params.unchecked(Linear, weight=qkv),
        "out": params.unchecked(Linear, weight=spec((64, 96), shard=Inputs(2))),
        "experts": params.unchecked(Experts, gate_up=gate_up, down=down),
    }


@pytest.mark.parametrize("word", ["W8A8_DYNAMIC", "W4A8_DYNAMIC", "W8A8_MXFP8"])
@pytest.mark.parametrize("whole_experts", [False, True])
def test_a_rank_reads_its_part(tmp_path: Path, word: str, whole_experts: bool) -> None:
    """Loading as a rank gives what is cut from the whole that was loaded."""
    spec = mesh_spec()
    floats = params.to_checkpoint(params.init(spec, seed=5), spec, MESH_NAMES)
    apart = {name: value for name, value in floats.items() if not name.endswith("_proj")}
    for expert in range(4):
        gate, up = floats["gate_up_proj"][expert].chunk(2)
        each = {"gate": gate, "up": up, "down": floats["down_proj"][expert]}
        apart |= {f"x.{expert}.{name}_proj.weight": value for name, value in each.items()}

    def slices(module: str) -> dict[str, int]:
        return {"slices": 16} if word == "W4A8_DYNAMIC" and module.endswith(("o", "down_proj")) else {}

    tensors, words, _ = export(apart, lambda module: word, slices)
    directory = write(tmp_path / "x", tensors, words)
    whole = params.load(directory, spec, MESH_NAMES, dtype=None)
    for rank in range(2):
        ranks = params.Ranks(rank, 2, "g", whole_experts)
        part = params.load(directory, spec, MESH_NAMES, dtype=None, ranks=ranks)
        expected = params.shard(whole, spec, ranks)
        assert all(params.equal(part[name], expected[name]) for name in spec)
        assert params.num_bytes(part) < 0.7 * params.num_bytes(whole)
