"""Mixture-of-experts operators against plain loops, alone and as one feed-forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cases import Draw
from tests.lowering.npu_reference.calls import assert_like, assert_rounded_once, call, refused
from tests.tolerances import assert_close

GATING, ROUTING = "npu_moe_gating_top_k_softmax_v2", "npu_moe_init_routing_v2"
MATMUL, UNPERMUTE = "npu_grouped_matmul", "npu_moe_token_unpermute"
BFLOAT = torch.bfloat16
TOKENS, EXPERTS, CHOICES, HIDDEN, INNER = 9, 7, 3, 24, 40


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("lead", [(5,), (2, 4)], ids=str)
@pytest.mark.parametrize("renorm", [0, 1])
def test_gating(renorm: int, lead: tuple[int, ...], dtype: torch.dtype) -> None:
    x = Draw(dtype, seed=renorm).normal(*lead, EXPERTS)
    arguments = {"x": x, "k": CHOICES, "renorm": renorm, "output_softmax": True}
    weights, ids, third = call(GATING, arguments)
    every = x.double().exp() / x.double().exp().sum(-1, keepdim=True)
    for at in torch.cartesian_prod(*map(torch.arange, lead)).reshape(-1, len(lead)).tolist():
        row = x[tuple(at)].tolist()
        chosen = sorted(range(EXPERTS), key=lambda expert: (-row[expert], expert))[:CHOICES]
        assert ids[tuple(at)].tolist() == chosen
        own = every[tuple(at)][chosen]
        assert_rounded_once(weights[tuple(at)], own / own.sum() if renorm else own)
    assert ids.dtype == torch.int32
    if renorm:
        assert third.shape == (0,)
    else:
        assert_close(third, every)
    assert_like(GATING, arguments)


def test_the_lower_id_wins_among_equals() -> None:
    assert torch.ops.npu.npu_moe_gating_top_k_softmax_v2(torch.zeros(1, 6), k=4)[1].tolist() == [[0, 1, 2, 3]]


def test_limits_of_gating() -> None:
    x = torch.randn(4, EXPERTS)
    refused(GATING, {"x": x, "k": 8}, "k is 8 for 7 experts")
    refused(GATING, {"x": x, "k": 0}, "k is 0")
    refused(GATING, {"x": torch.randn(1, 2000), "k": 1025}, "up to 1024")
    refused(GATING, {"x": x[0], "k": 1}, "1-dimensional")
    refused(GATING, {"x": x.double(), "k": 1}, "float64")
    refused(GATING, {"x": x, "k": 1, "renorm": 2}, "renorm is 2")
    refused(GATING, {"x": x, "k": 1, "finished": torch.zeros(4).bool()}, "finished")


def routing(dtype: torch.dtype = BFLOAT, **changes: Any) -> dict[str, Any]:
    draw = Draw(dtype, seed=5)
    made = {
        "x": draw.normal(TOKENS, HIDDEN), "expert_idx": draw.distinct(EXPERTS, TOKENS, CHOICES).int(),
        "active_num": TOKENS * CHOICES, "expert_num": EXPERTS, "drop_pad_mode": 0, "expert_tokens_num_type": 1,
        "expert_tokens_num_flag": True, "quant_mode": -1, "active_expert_range": [0, EXPERTS], "row_idx_type": 0,
    }  # fmt: skip
    return made | changes


@pytest.mark.parametrize("row_idx_type", [0, 1])
@pytest.mark.parametrize("active", [[0, EXPERTS], [2, 5]], ids=str)
def test_routing(active: list[int], row_idx_type: int) -> None:
    made = routing(active_expert_range=active, row_idx_type=row_idx_type)
    rows, places, counts, scales = call(ROUTING, made)
    chosen = made["expert_idx"].flatten().tolist()
    order = [flat for expert in range(*active) for flat in range(len(chosen)) if chosen[flat] == expert]
    assert counts.tolist() == [chosen.count(expert) for expert in range(*active)] and counts.dtype == torch.int64
    assert torch.equal(rows[: len(order)], made["x"][[flat // CHOICES for flat in order]])
    assert rows[len(order) :].isnan().all() and scales.isnan().all()
    where = [order.index(flat) if flat in order else -1 for flat in range(len(chosen))]
    assert places.tolist() == where if row_idx_type == 0 else places.tolist()[: len(order)] == order
    assert places.dtype == torch.int32
    assert_like(ROUTING, made)


ROUTING_LIMITS: dict[str, tuple[dict[str, Any], str]] = {
    "ids of another dtype": ({"expert_idx": torch.zeros(TOKENS, CHOICES).long()}, "expert_idx is torch.int64"),
    "ids past the experts": ({"expert_idx": torch.full((TOKENS, CHOICES), EXPERTS).int()}, "expert ids"),
    "other tokens": ({"expert_idx": torch.zeros(TOKENS + 1, CHOICES).int()}, "tokens differ"),
    "rank": ({"expert_idx": torch.zeros(TOKENS).int()}, "1-dimensional"),
    "no tokens": ({"x": torch.zeros(0, HIDDEN), "expert_idx": torch.zeros(0, CHOICES).int()}, "without tokens"),
    "no experts": ({"expert_num": 0}, "expert_num is 0"),
    "too many experts": ({"expert_num": 10241}, "expert_num is 10241"),
    "padding": ({"drop_pad_mode": 1}, "drop_pad_mode is 1"),
    "running sums of rows": ({"expert_tokens_num_type": 0}, "expert_tokens_num_type is 0"),
    "no counts": ({"expert_tokens_num_flag": False}, "takes True only"),
    "static quantisation": ({"quant_mode": 0}, "quant_mode is 0"),
    "quantised twice": ({"quant_mode": 1, "x": torch.zeros(TOKENS, HIDDEN).to(torch.int8)}, "x is int8 already"),
    "no range": ({"active_expert_range": []}, "name both ends"),
    "empty range": ({"active_expert_range": [3, 3]}, "start < end"),
    "range past the experts": ({"active_expert_range": [0, 8]}, "start < end <= expert_num"),
    "kind of places": ({"row_idx_type": 2}, "row_idx_type is 2"),
    "fewer rows": ({"active_num": 5}, "active_num is 5"),
    "scale": ({"scale": torch.zeros(TOKENS)}, "scale"),
    "dtype": ({"x": torch.zeros(TOKENS, HIDDEN).double()}, "float64"),
}


@pytest.mark.parametrize("limit", ROUTING_LIMITS)
def test_limits_of_routing(limit: str) -> None:
    changes, words = ROUTING_LIMITS[limit]
    refused(ROUTING, routing(**changes), words)


COUNTS = [4, 0, 1, 6]


def matmul(kind: int = 1, dtype: torch.dtype = BFLOAT, turned: bool = False, **changes: Any) -> dict[str, Any]:
    draw = Draw(dtype, seed=6)
    weight = draw.normal(4, INNER, HIDDEN).mT if turned else draw.normal(4, HIDDEN, INNER)
    counts = torch.tensor(COUNTS)
    made = {
        "x": [draw.normal(11, HIDDEN)], "weight": [weight], "group_list": counts if kind else counts.cumsum(0),
        "split_item": 2, "group_type": 0, "group_list_type": kind,
    }  # fmt: skip
    return made | changes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("kind", [0, 1], ids=["running sums", "counts"])
def test_grouped_matmul(kind: int, turned: bool, dtype: torch.dtype) -> None:
    made = matmul(kind, dtype, turned)
    (y,) = call(MATMUL, made)
    groups = [group for group, count in enumerate(COUNTS) for _ in range(count)]
    x, weight = made["x"][0].double(), made["weight"][0].double()
    assert_rounded_once(y, torch.stack([x[row] @ weight[group] for row, group in enumerate(groups)]))
    assert_like(MATMUL, made)


MATMUL_LIMITS: dict[str, tuple[dict[str, Any], str]] = {
    "counts as running sums": ({"group_list_type": 0}, "running sums, does not cover the 11 rows"),
    "rows left over": ({"group_list": torch.tensor([4, 0, 1, 5])}, "counts, does not cover"),
    "negative count": ({"group_list": torch.tensor([-1, 5, 1, 6])}, "values from -1"),
    "int32 counts": ({"group_list": torch.tensor(COUNTS).int()}, "group_list is torch.int32"),
    "groups": ({"group_list": torch.tensor([4, 7])}, "one entry a group"),
    "no counts": ({"group_list": None}, "group_list is missing"),
    "kind of counts": ({"group_list_type": 2}, "group_list_type is 2"),
    "axis": ({"group_type": -1}, "group_type is -1"),
    "no axis": ({"group_type": None}, "group_type is None"),
    "many outputs": ({"split_item": 0}, "split_item is 0"),
    "activation": ({"act_type": 5}, "act_type"),
    "bias": ({"bias": [torch.zeros(4, INNER)]}, "bias"),
    "two factors": ({"x": [torch.zeros(11, HIDDEN).bfloat16()] * 2}, "2 tensors x"),
    "dtypes": ({"x": [torch.zeros(11, HIDDEN)]}, "dtypes differ"),
    "float64": ({"x": [torch.zeros(11, HIDDEN).double()]}, "float64"),
    "rank of weight": ({"weight": [torch.zeros(HIDDEN, INNER).bfloat16()]}, "2-dimensional"),
    "inner axes": ({"x": [torch.zeros(11, 8).bfloat16()]}, "inner axes differ"),
    "strided x": ({"x": [torch.zeros(HIDDEN, 11).bfloat16().T]}, "x .* not contiguous"),
    "strided weight": ({"weight": [torch.zeros(4, HIDDEN, 2 * INNER).bfloat16()[..., ::2]]}, "strides"),
    "inner limit": ({"x": [torch.zeros(11, 1).bfloat16()], "weight": [torch.zeros(4, 1, 65536).bfloat16()]}, "65536"),
}


@pytest.mark.parametrize("limit", MATMUL_LIMITS)
def test_limits_of_grouped_matmul(limit: str) -> None:
    changes, words = MATMUL_LIMITS[limit]
    refused(MATMUL, matmul(**changes), words)


def test_limits_on_the_number_of_groups() -> None:
    one = matmul(weight=[torch.zeros(1, HIDDEN, INNER).bfloat16()], group_list=torch.tensor([11]))
    refused(MATMUL, one, "takes two or more")
    call(MATMUL, one | {"group_list_type": 0})
    counts = torch.zeros(1025, dtype=torch.int64)
    many = matmul(x=[torch.zeros(0, 1).bfloat16()], weight=[torch.zeros(1025, 1, 1).bfloat16()], group_list=counts)
    refused(MATMUL, many, "at most 1024")


def unpermute(dtype: torch.dtype = BFLOAT) -> dict[str, Any]:
    draw = Draw(dtype, seed=7)
    places = draw.distinct(TOKENS * CHOICES, 1, TOKENS * CHOICES)[0].int()
    return {
        "permuted_tokens": draw.normal(TOKENS * CHOICES, HIDDEN), "sorted_indices": places,
        "probs": draw.normal(TOKENS, CHOICES),
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_unpermute(dtype: torch.dtype) -> None:
    made = unpermute(dtype)
    rows, places, probs = (made[name] for name in ("permuted_tokens", "sorted_indices", "probs"))
    for token, y in enumerate(call(UNPERMUTE, made)):
        own = [rows[places[token * CHOICES + j]].double() * probs[token, j].double() for j in range(CHOICES)]
        assert_close(y, torch.stack(own).sum(0).to(dtype), scale=1.0, reason="three terms of size 1 may cancel")
    assert torch.equal(call(UNPERMUTE, made | {"probs": None}), rows[places.long()])
    assert_like(UNPERMUTE, made)


def test_limits_of_unpermute() -> None:
    made = unpermute()
    places, probs = made["sorted_indices"], made["probs"]
    refused(UNPERMUTE, made | {"sorted_indices": places.long()}, "int64")
    refused(UNPERMUTE, made | {"sorted_indices": places[:-1]}, "one place a row")
    refused(UNPERMUTE, made | {"sorted_indices": places - 1}, "values from -1")
    refused(UNPERMUTE, made | {"sorted_indices": places // 2}, "names a row twice")
    refused(UNPERMUTE, made | {"probs": probs.float()}, "dtypes differ")
    refused(UNPERMUTE, made | {"probs": probs[:-1]}, "tokens, choices")
    refused(UNPERMUTE, made | {"padded_mode": True}, "padded_mode")
    refused(UNPERMUTE, made | {"restore_shape": [3, 3]}, "restore_shape")
    refused(UNPERMUTE, {name: x.double() if x.is_floating_point() else x for name, x in made.items()}, "float64")
    many = torch.zeros(513, 2).bfloat16()
    wide = {"permuted_tokens": many, "sorted_indices": torch.arange(513).int(), "probs": torch.zeros(1, 513).bfloat16()}
    refused(UNPERMUTE, wide, "1 to 512")


def test_one_feed_forward() -> None:
    """Gating, routing, product and sum together, against a loop over tokens and their experts."""
    made, weight = routing(torch.float32), Draw(torch.float32, seed=8).normal(EXPERTS, INNER, HIDDEN)
    weights, ids, _ = torch.ops.npu.npu_moe_gating_top_k_softmax_v2(made["x"][:, :EXPERTS], k=CHOICES, renorm=1)
    rows, places, counts, _ = call(ROUTING, made | {"expert_idx": ids})
    (y,) = torch.ops.npu.npu_grouped_matmul(
        [rows], [weight.mT], group_list=counts, split_item=2, group_type=0, group_list_type=1
    )
    expected = [
        sum((weights[t, j].double() * (weight[ids[t, j]].double() @ made["x"][t].double()) for j in range(CHOICES)),
            torch.zeros(INNER).double())
        for t in range(TOKENS)
    ]  # fmt: skip
    assert_close(call(UNPERMUTE, {"permuted_tokens": y, "sorted_indices": places, "probs": weights}),
                 torch.stack(expected).float())  # fmt: skip


def test_format_cast_is_a_copy() -> None:
    x = torch.randn(3, 16, 32)
    y = torch.ops.npu.npu_format_cast(x, 29)
    assert torch.equal(x, y) and x.data_ptr() != y.data_ptr()
    refused("npu_format_cast", {"input": x, "acl_format": 3}, "acl_format is 3")
    refused("npu_format_cast", {"input": x.mT, "acl_format": 29}, "not contiguous")


def test_shapes_seen_on_the_real_meta_kernels() -> None:
    made = routing(x=torch.zeros(5, 64), expert_idx=torch.zeros(5, 2).int(), active_num=10, expert_num=8,
                   active_expert_range=[0, 8])  # fmt: skip
    outputs: list[Tensor] = list(call(ROUTING, made))
    assert [tuple(y.shape) for y in outputs] == [(10, 64), (10,), (8,), (10,)]
    counts = torch.tensor([3, 3, 4])
    y = torch.ops.npu.npu_grouped_matmul(
        [torch.zeros(10, 64).bfloat16()], [torch.zeros(3, 64, 96).bfloat16()], group_list=counts, split_item=3,
        group_type=0, group_list_type=1,
    )  # fmt: skip
    assert [x.shape for x in y] == [(10, 96)]


GROUPED = "npu_moe_gating_top_k"


def grouped(dtype: torch.dtype = torch.float32, tokens: int = 9, experts: int = 20, **more: Any) -> dict[str, Any]:
    """Two of four groups of five experts, three choices; no two logits of a token are equal."""
    x = (Draw(torch.float32, seed=8).distinct(experts, tokens, experts) / 4).to(dtype)
    return {"x": x, "k": 3, "k_group": 2, "group_count": 4, "routed_scaling_factor": 2.5, **more}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_best_experts_of_the_best_groups(dtype: torch.dtype) -> None:
    arguments = grouped(dtype)
    weights, ids, every = call(GROUPED, arguments | {"out_flag": True})
    for token, logits in enumerate(arguments["x"].double()):
        chances = logits.exp() / logits.exp().sum()
        best = sorted(range(4), key=lambda group: -max(chances[5 * group + i] for i in range(5)))[:2]
        inside = [5 * group + i for group in best for i in range(5)]
        chosen = sorted(inside, key=lambda expert: -chances[expert])[:3]
        assert ids[token].tolist() == chosen
        assert_close(weights[token], (2.5 * chances[chosen]).to(dtype))
        assert_close(every[token], chances, dtype=torch.float32)
    assert weights.dtype == dtype and ids.dtype == torch.int32
    assert_like(GROUPED, arguments)
    assert call(GROUPED, arguments)[2].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_sigmoids_chosen_by_a_bias_from_groups_with_the_two_best(biased: bool, dtype: torch.dtype) -> None:
    """The bias chooses and weighs nothing; sigmoids are renormalised over those chosen."""
    bias = Draw(torch.float32, seed=4).uniform(-1.0, 1.0, 20).to(dtype)
    given: dict[str, Any] = {"bias": bias} if biased else {}
    arguments = grouped(dtype, norm_type=1, group_select_mode=1, **given)
    arguments["x"] = arguments["x"] - 2
    weights, ids, every = call(GROUPED, arguments | {"out_flag": True})
    for token, logits in enumerate(arguments["x"].double()):
        scores = 1 / (1 + (-logits).exp())
        choice = (scores + bias.double() if biased else scores).tolist()
        sums = [sum(sorted(choice[5 * group : 5 * group + 5])[-2:]) for group in range(4)]
        best = sorted(range(4), key=lambda group, sums=sums: -sums[group])[:2]
        inside = [5 * group + i for group in best for i in range(5)]
        chosen = sorted(inside, key=lambda expert, choice=choice: -choice[expert])[:3]
        assert ids[token].tolist() == chosen
        assert_close(weights[token], (2.5 * scores[chosen] / (scores[chosen].sum() + 1e-20)).to(dtype))
        assert_close(every[token], scores, dtype=torch.float32)
    assert_like(GROUPED, arguments)


def test_equal_groups_and_experts_go_by_number() -> None:
    _, ids, _ = call(GROUPED, grouped(x=torch.zeros(1, 20)))
    assert ids.tolist() == [[0, 1, 2]]


def test_limits_of_choosing_by_groups() -> None:
    good = grouped()
    refused(GROUPED, good | {"x": good["x"].double()}, "float64")
    refused(GROUPED, good | {"x": good["x"][0]}, "1-dimensional")
    refused(GROUPED, good | {"renorm": 1}, "renorm is 1")
    refused(GROUPED, good | {"norm_type": 2}, "norm_type is 2")
    refused(GROUPED, good | {"group_select_mode": 2}, "group_select_mode is 2")
    refused(GROUPED, good | {"bias": torch.zeros(20).bfloat16()}, "dtypes differ")
    refused(GROUPED, good | {"bias": torch.zeros(4)}, "one an expert")
    refused(GROUPED, good | {"group_count": 3}, "make no 3 groups")
    call(GROUPED, good | {"group_count": 10, "group_select_mode": 1})
    refused(GROUPED, good | {"group_count": 20, "k_group": 3, "group_select_mode": 1}, "takes groups of two experts")
    refused(GROUPED, good | {"k_group": 5}, "expected 1 to 4")
    refused(GROUPED, good | {"k": 11}, "expected 1 to 10")
    refused(GROUPED, good | {"x": torch.zeros(1, 2049), "group_count": 1, "k_group": 1}, "up to 2048 experts")
    refused(GROUPED, good | {"x": torch.zeros(1, 2000), "group_count": 100}, "up to 2048 experts in groups filled up")
    refused(GROUPED, good | {"x": good["x"][:0]}, "without tokens")
    refused(GROUPED, good | {"input_ids": torch.zeros(9).long()}, "input_ids")
