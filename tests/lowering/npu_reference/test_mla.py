"""The merge of partial attentions and the ring, against float64 formulas written down here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import lowering
from lowering.npu_reference import OperatorError
from tests.cases import Draw
from tests.lowering.npu_reference.calls import assert_like, assert_rounded_once, call, refused
from tests.tolerances import assert_close

UPDATE, RING, BY_HEAD = "npu_attention_update", "npu_ring_mla", "npu_transpose_batchmatmul"
BFLOAT = torch.bfloat16
HEADS, KV_HEADS, SCALE = 6, 3, 0.11
MASK = torch.ones(512, 512, dtype=BFLOAT).triu(1)


def parts(count: int = 3, rows: int = 10, width: int = 24, dtype: torch.dtype = BFLOAT) -> dict[str, Any]:
    draw = Draw(dtype, seed=count)
    lse = [3 * draw.normal(rows, dtype=torch.float32) for _ in range(count)]
    return {"lse": lse, "local_out": [draw.normal(rows, width) for _ in range(count)], "update_type": 1}


@pytest.mark.parametrize("dtype", [torch.float16, BFLOAT, torch.float32], ids=str)
@pytest.mark.parametrize("count", [1, 2, 5, 16])
def test_parts_are_weighted_by_their_denominators(count: int, dtype: torch.dtype) -> None:
    arguments = parts(count, dtype=dtype)
    out, lse = call(UPDATE, arguments)
    weights = torch.stack(arguments["lse"]).double().exp()
    values = torch.stack(arguments["local_out"]).double()
    assert_rounded_once(out, (weights[..., None] * values).sum(0) / weights.sum(0)[:, None])
    assert_close(lse, weights.sum(0).log(), dtype=torch.float32)
    assert_like(UPDATE, arguments)
    assert call(UPDATE, arguments | {"update_type": 0})[1].isnan().all()


def test_merged_halves_equal_the_whole() -> None:
    """Attention on some of the keys, and on the others."""
    draw = Draw(torch.float64, seed=4)
    q, k, v = draw.normal(7, 32), draw.normal(40, 32), draw.normal(40, 16)
    scores = q @ k.T / 4
    halves = [slice(0, 13), slice(13, 40)]
    lse = [scores[:, keys].logsumexp(1).float() for keys in halves]
    out = [(scores[:, keys].softmax(1) @ v[keys]).float() for keys in halves]
    merged, _ = call(UPDATE, {"lse": lse, "local_out": out, "update_type": 0})
    assert_close(merged, scores.softmax(1) @ v, dtype=torch.float32)


def test_weights_at_infinity() -> None:
    """-inf is no weight; inf, as attention leaves it for a row without keys, and -inf everywhere are NaN."""
    arguments = parts(2, rows=3)
    arguments["lse"][1][:] = torch.tensor([-torch.inf, torch.inf, -torch.inf])
    arguments["lse"][0][2] = -torch.inf
    out, lse = call(UPDATE, arguments)
    assert torch.equal(out[0], arguments["local_out"][0][0]) and lse[0] == arguments["lse"][0][0]
    assert out[1:].isnan().all()


def test_limits_of_the_merge() -> None:
    good = parts()
    lse, out = good["lse"], good["local_out"]
    refused(UPDATE, good | {"update_type": 2}, "update_type is 2")
    refused(UPDATE, good | {"lse": lse[:2]}, "2 lse and 3 local_out")
    refused(UPDATE, parts(17), "17 lse")
    refused(UPDATE, good | {"lse": [one.to(BFLOAT) for one in lse]}, "float32")
    refused(UPDATE, good | {"lse": [*lse[:2], lse[2][:, None]]}, "one a row")
    refused(UPDATE, good | {"local_out": [*out[:2], out[2][:9]]}, r"lse\[2\] is \[10\]|local_out\[2\]")
    refused(UPDATE, good | {"local_out": [*out[:2], out[2].float()]}, "dtypes differ")
    refused(UPDATE, good | {"local_out": [one.double() for one in out]}, "float64")
    refused(UPDATE, good | {"local_out": [one.T.contiguous().T for one in out]}, "not contiguous")
    refused(UPDATE, good | {"lse": [one.repeat(2)[::2] for one in lse]}, "not contiguous")
    refused(UPDATE, parts(width=12), "multiple of 8")
    refused(UPDATE, parts(width=520), "up to 512")
    with lowering.use(target="ascend950"):
        call(UPDATE, good)


def ring(queries: Sequence[int], held: Sequence[int], dtype: torch.dtype = BFLOAT, **more: Any) -> dict[str, Any]:
    """A ring over all keys of each request."""
    draw = Draw(dtype, seed=sum(held))
    arguments: dict[str, Any] = {"q_nope": draw.normal(sum(queries), HEADS, 128)}
    arguments |= {"q_rope": draw.normal(sum(queries), HEADS, 64)}
    arguments |= {name: draw.normal(sum(held), KV_HEADS, width) for name, width in
                  (("k_nope", 128), ("k_rope", 64), ("value", 128))}  # fmt: skip
    lengths = torch.tensor([list(queries), list(held)], dtype=torch.int32)
    return arguments | {
        "mask": MASK.to(dtype), "seqlen": lengths, "head_num": HEADS, "kv_head_num": KV_HEADS, "qk_scale": SCALE,
        "mask_type": "no_mask", "calc_type": "calc_type_first_ring", "input_layout": "type_bsnd",
        "kernel_type": "kernel_type_high_precision", **more,
    }  # fmt: skip


def naive(arguments: dict[str, Any], queries: Sequence[int], held: Sequence[int], causal: bool) -> list[list[Tensor]]:
    """Of each request, scores [queries heads keys] and values [keys heads width] in float64."""
    names = ("q_nope", "q_rope", "k_nope", "k_rope", "value")
    shared = HEADS // KV_HEADS
    split = [arguments[name].double().split(list(queries if name[0] == "q" else held)) for name in names]
    found = []
    for q, q_rope, k, k_rope, v in zip(*split, strict=True):
        scores = torch.full((len(q), HEADS, len(k)), -torch.inf, dtype=torch.float64)
        for i in range(len(q)):
            for head in range(HEADS):
                last = i + 1 if causal else len(k)
                own = k[:last, head // shared] @ q[i, head] + k_rope[:last, head // shared] @ q_rope[i, head]
                scores[i, head, :last] = SCALE * own
        found.append([scores, v.repeat_interleave(shared, 1)])
    return found


def call_ring(arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return torch.ops.atb.npu_ring_mla(**arguments)


@pytest.mark.parametrize("dtype", [BFLOAT, torch.float16], ids=str)
def test_two_rings_equal_attention_on_all_keys(dtype: torch.dtype) -> None:
    """New tokens among themselves, then over what was there before; lse has heads first."""
    queries, past = [3, 5, 1], [4, 5, 7]
    first = ring(queries, queries, dtype, mask_type="mask_type_triu")
    out, lse = call_ring(first)
    causal = naive(first, queries, queries, causal=True)
    expected = torch.cat([torch.einsum("qhk,khd->qhd", scores.softmax(-1), v) for scores, v in causal])
    assert_rounded_once(out, expected)
    assert_close(lse, torch.cat([scores.logsumexp(-1) for scores, _ in causal]).T, dtype=torch.float32)
    second = ring(queries, past, dtype, pre_out=out, prev_lse=lse, calc_type="calc_type_default")
    second |= {name: first[name] for name in ("q_nope", "q_rope")}
    whole, lse = call_ring(second)
    both = zip(naive(second, queries, past, causal=False), causal, strict=True)
    joined = [[torch.cat((one[0], two[0]), 2), torch.cat((one[1], two[1]))] for one, two in both]
    expected = torch.cat([torch.einsum("qhk,khd->qhd", scores.softmax(-1), v) for scores, v in joined])
    assert_close(whole, expected.to(dtype), length=12)
    assert_close(lse, torch.cat([scores.logsumexp(-1) for scores, _ in joined]).T, dtype=torch.float32)


def test_one_line_of_lengths_is_for_queries_and_keys() -> None:
    arguments = ring([3, 2], [3, 2], mask_type="mask_type_triu")
    both = call_ring(arguments)
    one = call_ring(arguments | {"seqlen": torch.tensor([3, 2], dtype=torch.int32)})
    assert all(torch.equal(x, y) for x, y in zip(both, one, strict=True))
    hollow = {k: x.to("meta") if isinstance(x, Tensor) else x for k, x in arguments.items()}
    assert [(x.shape, x.dtype) for x in call_ring(hollow)] == [(x.shape, x.dtype) for x in both]


def test_requests_without_keys_are_undefined() -> None:
    out, lse = call_ring(ring([3, 2], [4, 0]))
    assert out[:3].isfinite().all() and out[3:].isnan().all() and lse[:, 3:].isnan().all()


def test_limits_of_the_ring() -> None:
    good = ring([3, 2], [4, 2])
    call_ring(good)

    def no(changes: dict[str, Any], words: str) -> None:
        with pytest.raises(OperatorError, match=words):
            call_ring(good | changes)

    no({"q_nope": good["q_nope"].float()}, "float32")
    no({"mask": MASK.half()}, "dtypes differ")
    no({"q_rope": good["q_rope"][..., :32].contiguous()}, r"q_rope .* expected \[5, 6, 64\]")
    no({"value": good["value"][:5]}, r"value .* expected \[6, 3, 128\]")
    no({"k_nope": good["k_nope"].transpose(0, 1).contiguous().transpose(0, 1)}, "not contiguous")
    no({"head_num": 5}, r"expected \[5, 5, 128\]")
    no({"mask": MASK[:256, :256].contiguous()}, r"expected \[512, 512\]")
    no({"seqlen": good["seqlen"].long()}, "int64")
    no({"seqlen": good["seqlen"][None]}, r"\[B\] or \[2, B\]")
    no({"seqlen": torch.tensor([[3, 3], [4, 2]], dtype=torch.int32)}, "3 queries and 2 keys")
    no({"seqlen": torch.tensor([[5, 0], [6, 0]], dtype=torch.int32)}, "0 queries")
    no({"seqlen": torch.tensor([[3, 1], [4, 2]], dtype=torch.int32)}, "seqlen has 4 queries, q_nope has 5")
    no({"seqlen": torch.tensor([[3, 2], [3, 2]], dtype=torch.int32)}, "seqlen has 5 keys, k_nope has 6")
    no({"mask_type": "mask_type_triu"}, "3 queries and 4 keys; masked, as many of both")
    no({"mask_type": "causal"}, "mask_type is 'causal'")
    no({"calc_type": "calc_type_default"}, "pre_out is given unless")
    no({"pre_out": good["q_nope"]}, "pre_out is given unless")
    no({"kernel_type": "fast"}, "kernel_type is 'fast'")
    no({"input_layout": "type_bnsd"}, "input_layout is 'type_bnsd'")
    empty = {name: good[name][:0] for name in ("k_nope", "k_rope", "value")}
    no(empty, "leave the call out")
    later = good | {"calc_type": "calc_type_default", "pre_out": good["q_nope"]}
    for lse, words in ((torch.zeros(5, HEADS), "heads first"), (torch.zeros(HEADS, 5).double(), "float64")):
        no(later | {"prev_lse": lse}, words)
    same = ring([2, 3], [2, 3], mask_type="mask_type_triu")
    with pytest.raises(OperatorError, match="1 strictly above"):
        call_ring(same | {"mask": 1 - MASK})
    uneven = ring([2], [2], kv_head_num=4)
    for name, width in (("k_nope", 128), ("k_rope", 64), ("value", 128)):
        uneven[name] = torch.zeros(2, 4, width, dtype=BFLOAT)
    with pytest.raises(OperatorError, match="a multiple of kv_head_num"):
        call_ring(uneven)
    with lowering.use(target="ascend950"):
        no({}, "lowered to ascend950")


def by_head(dtype: torch.dtype = BFLOAT, tokens: int = 5, heads: int = 3) -> dict[str, Any]:
    """Tokens before heads, as queries lie."""
    x, weight = torch.randn(tokens, heads, 32), torch.randn(heads, 32, 48)
    return {"input": x.to(dtype), "weight": weight.to(dtype), "perm_x1": [1, 0, 2]}


@pytest.mark.parametrize("dtype", [torch.float16, BFLOAT, torch.float32], ids=str)
def test_products_by_head(dtype: torch.dtype) -> None:
    """Each head times its own weight, whichever of tokens and heads comes first; and of strided factors."""
    arguments = by_head(dtype)
    x, weight = arguments["input"], arguments["weight"]
    exact = torch.stack([x[:, head].double() @ weight[head].double() for head in range(3)], 1)
    y = call(BY_HEAD, arguments)
    assert_rounded_once(y, exact)
    assert_like(BY_HEAD, arguments)
    heads_first = {"input": x.transpose(0, 1).contiguous(), "weight": weight.mT.contiguous().mT}
    assert torch.equal(call(BY_HEAD, heads_first), y)


def test_limits_of_products_by_head() -> None:
    good = by_head()
    for changes, words in (
        ({"perm_x1": [2, 1, 0]}, "perm_x1 is"),
        ({"perm_x2": [0, 2, 1]}, "perm_x2 is"),
        ({"perm_y": [0, 1, 2]}, "perm_y is"),
        ({"weight": good["weight"].float()}, "dtypes differ"),
        ({"weight": torch.zeros(3, 32, 40, dtype=BFLOAT)}, "multiples of 16"),
        ({"weight": torch.zeros(2, 32, 48, dtype=BFLOAT)}, "inner as in input"),
        ({"batch_split_factor": 3}, "batch_split_factor is 3"),
        ({"input": torch.zeros(1, 2048, 32, dtype=BFLOAT), "weight": torch.zeros(2048, 32, 16, dtype=BFLOAT)}, "65536"),
    ):
        refused(BY_HEAD, good | changes, words)
