"""What a rank holds and reads: rules against numbers worked out by hand, slices and loads against the whole."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import funcmodels as fm
import lowering
import params as trees
from funcmodels.blocks.linear import Linear
from lowering import ops
from params import reading
from params.sharding import Cut, Inputs, Outputs, Ranks, Vocabulary
from tests.sharding.kinds import EXPERTS, KINDS, whole

SIZES = (2, 4)
kinds = pytest.mark.parametrize(
    ("kind", "whole_experts"),
    [(kind, experts) for kind in KINDS for experts in ((False, True) if kind in EXPERTS else (False,))],
)


def rows_of(cut: Cut) -> list[int]:
    """The rows of the whole that a rank holds, one by one."""
    return [row for held in cut.ranges for row in held]


def test_heads_of_a_delta_net() -> None:
    """Queries, keys and values lie below one another, and each is cut by itself."""
    rule = Outputs(((4, 2), (4, 2), (8, 4)))
    assert rows_of(rule.cut((16, 3), Ranks(0, 2, "g"))) == [0, 1, 4, 5, 8, 9, 10, 11]
    assert rows_of(rule.cut((16, 3), Ranks(1, 2, "g"))) == [2, 3, 6, 7, 12, 13, 14, 15]


def test_key_heads_are_repeated_where_there_are_fewer_than_ranks() -> None:
    """Two heads on eight ranks: the first four have the first."""
    held = [rows_of(Outputs(((6, 2),)).cut((6, 5), Ranks(rank, 8, "g"))) for rank in range(8)]
    assert held == [[0, 1, 2]] * 4 + [[3, 4, 5]] * 4


@pytest.mark.parametrize(
    ("vocab", "size", "each", "last"), [(1000, 8, 128, 104), (163840, 32, 5120, 5120), (151936, 8, 18992, 18992)]
)
def test_rows_of_a_vocabulary(vocab: int, size: int, each: int, last: int) -> None:
    """Equally many for every rank; the last has fewer tokens and zeros below them."""
    cuts = [Vocabulary().cut((vocab, 3), Ranks(rank, size, "g")) for rank in range(size)]
    assert {cut.length for cut in cuts} == {each}
    assert len(rows_of(cuts[-1])) == last
    assert [row for cut in cuts for row in rows_of(cut)] == list(range(vocab))


@pytest.mark.parametrize("rule", [Outputs(((12, 6),)), Inputs(6)])
def test_heads_that_cannot_be_shared_out(rule: Outputs | Inputs) -> None:
    """Six heads on four ranks."""
    with pytest.raises(fm.ConfigError, match=r"6 units.*cannot be shared out among 4 ranks"):
        rule.cut((12, 12), Ranks(0, 4, "g"))


def test_a_model_that_cannot_be_shared_out_says_which_weight() -> None:
    """Before anything is read."""
    model = fm.build(KINDS["gemma3"] | {"num_attention_heads": 6, "num_key_value_heads": 2})
    with pytest.raises(fm.ConfigError, match=r"layers\.0\.attn\.qkv\.weight: .*cannot be shared out among 4 ranks"):
        model.sharded(Ranks(0, 4, "g"))


@kinds
@pytest.mark.parametrize("size", SIZES)
def test_a_rank_reads_its_slices_and_nothing_else(
    kind: str, whole_experts: bool, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `load` reads equals what `shard` cuts out of the whole, from several files, for every family."""
    model, params = whole(kind)
    trees.save(params, tmp_path, model.whole_spec(), model.family.names, dict(model.config_json), max_shard_bytes=40000)
    ranks = Ranks(random.Random(f"{kind}{size}").randrange(size), size, "g", whole_experts)
    monkeypatch.setattr(reading, "CHUNK", 1024)
    advanced: list[int] = []
    jobs: list[reading.Job] = []
    plain = reading.read_all

    def read_all(wanted: list[reading.Job], advance: Any) -> None:
        jobs.extend(wanted)
        plain(wanted, advanced.append)

    monkeypatch.setattr("params.checkpoint.read_all", read_all)
    mine, found = fm.load(tmp_path, torch.float32, mesh=ranks)
    expected = trees.shard(params, model.whole_spec(), ranks)
    assert trees.equal(found, expected)
    assert mine.ranks == ranks
    zeros = sum(leaf.numel() for _, leaf in trees.items(expected)) * 4 - sum(advanced)
    assert 0 <= zeros <= 2 * 64 * 24 * 4, "only the rows below the vocabulary are not read"


@kinds
def test_the_slices_put_together_are_the_whole(kind: str, whole_experts: bool) -> None:
    """Every number is on some rank, and as often as the rule says."""
    model, params = whole(kind)
    shards = [trees.shard(params, model.whole_spec(), Ranks(rank, 2, "g", whole_experts)) for rank in range(2)]
    specs = dict(trees.items(model.whole_spec()))
    for path, value in trees.items(params):
        rule = specs[path].shard
        held = [at(one, path) for one in shards]
        if rule is None:
            assert all(torch.equal(part, value) for part in held), path
            continue
        cuts = [rule.cut(value.shape, Ranks(rank, 2, "g", whole_experts)) for rank in range(2)]
        for cut, part in zip(cuts, held, strict=True):
            rows = torch.tensor(rows_of(cut), dtype=torch.long)
            assert torch.equal(part.narrow(cut.axis, 0, len(rows)), value.index_select(cut.axis, rows)), path
            assert not part.narrow(cut.axis, len(rows), cut.padding).any(), path
        assert set(rows_of(cuts[0])) | set(rows_of(cuts[1])) == set(range(value.shape[cuts[0].axis])), path


def at(tree: Any, path: str) -> torch.Tensor:
    """The tensor at a path, taken out of the value that says how it is shared."""
    found = trees.at(tree, path)
    return found if isinstance(found, torch.Tensor) else found.weight


@kinds
def test_a_shared_model_lowers_abstractly(kind: str, whole_experts: bool) -> None:
    """Without weights or other ranks: one of four, with its collectives, on a target that is not here."""
    model = fm.build(KINDS[kind]).sharded(Ranks(2, 4, "tp", whole_experts))
    state = model.init_state(2, 32, device="meta")
    batch = fm.Batch.from_lists([[1, 2], [3]], state)
    lowered = lowering.lower(model.forward, model.param_spec(torch.bfloat16), state, batch, target="ascend910b")
    chosen = {(row.op, row.kernel) for row in lowered.explain().rows}
    assert {("linear", "all_reduce"), ("linear", "all_gather"), ("embedding", "all_reduce")} <= chosen
    assert ("all_reduce", "torch") in chosen
    if kind in EXPERTS:
        assert ("experts", "whole_experts" if whole_experts else "all_reduce") in chosen


def test_a_rank_costs_its_share() -> None:
    """At a vocabulary of 163,840 a rank of 32 reads 5,120 rows of the head."""
    model = fm.build(KINDS["gemma3"] | {"vocab_size": 163840, "num_attention_heads": 32, "intermediate_size": 64})
    flops = []
    for one in (model, model.sharded(Ranks(3, 32, "tp"))):
        state = one.init_state(1, 16, device="meta")
        spec, batch = one.param_spec(torch.bfloat16), fm.Batch.from_lists([[1]], state)
        costs = lowering.lower(one.forward, spec, state, batch, target="ascend910b").cost_analysis()
        flops.append(sum(row.cost.flops for row in costs.rows if row.op == "linear"))
    assert model.sharded(Ranks(3, 32, "tp")).param_spec().embed.weight.weight.shape == (5120, 24)
    # Keys and values are on several ranks each, which is the rest.
    assert 31 < flops[0] / flops[1] <= 32


SCHEMES: dict[str, Any] = {
    "W8A8_DYNAMIC": "W8A8_DYNAMIC",
    "W8A8_MXFP8": "W8A8_MXFP8",
    "W4A16_MXFP4": "W4A16_MXFP4",
    "W4A8_DYNAMIC": {"**.experts.*": "W4A8_DYNAMIC", "**": "W8A8_DYNAMIC"},
}


@pytest.mark.parametrize("whole_experts", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", ["qwen_moe", "kimi_linear"])
def test_quantised_weights_are_cut_alike(kind: str, scheme: str, whole_experts: bool, tmp_path: Path) -> None:
    """Scales, packed bytes and exponents go with their weights; blocks of MX may be parted by two ranks."""
    model = fm.build(KINDS[kind] | {"moe_intermediate_size": 32})
    params = trees.quantize(model.init_params(seed=2), SCHEMES[scheme])
    trees.save(params, tmp_path, model.whole_spec(), model.family.names, dict(model.config_json))
    for rank in range(2):
        ranks = Ranks(rank, 2, "g", whole_experts)
        expected = trees.shard(params, model.whole_spec(), ranks)
        assert trees.equal(fm.load(tmp_path, torch.float32, mesh=ranks)[1], expected)


@pytest.mark.parametrize("inputs", [96, 64])
def test_products_of_parted_blocks_add_up(inputs: int) -> None:
    """Two ranks' products of MX weights, of which both have a part of one block, are near the whole's."""
    draw = torch.Generator().manual_seed(inputs)
    spec = Linear.spec(inputs, 10, shard=Inputs(4))
    weight = torch.randn(10, inputs, generator=draw)
    params = trees.quantize(Linear(weight), "W8A8_MXFP8")
    x = torch.randn(3, inputs, generator=draw)
    found = torch.zeros(3, 10)
    for rank in range(4):
        held = at(trees.shard(params, spec, Ranks(rank, 4, "g")), "weight")
        found += ops.linear(x[:, rank * inputs // 4 : (rank + 1) * inputs // 4], held)
    assert (found - x @ weight.T).norm() < 0.055 * (x @ weight.T).norm()


def test_int4_that_would_be_parted_within_a_byte_is_refused() -> None:
    """Three rows of gate and of up a rank."""
    model = fm.build(KINDS["qwen_moe"])
    params = trees.quantize(model.init_params(), {"**.experts.*": "W4A8_DYNAMIC"})
    with pytest.raises(
        fm.ConfigError, match=r"layers\.0\.mlp\.experts\.gate_up: Int4Weight\.packed .* take fewer ranks"
    ):
        trees.shard(params, model.whole_spec(), Ranks(0, 4, "g"))
