"""The gated delta rule against its textbook form: a loop in float64 over transposed states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import lowering
from lowering.target import named
from tests.cases import Draw
from tests.lowering.npu_reference.calls import assert_like, call, refused
from tests.tolerances import assert_close

RECURRENT, CHUNK = "npu_recurrent_gated_delta_rule_functional", "npu_chunk_gated_delta_rule"
BFLOAT = torch.bfloat16
K_HEADS, V_HEADS = 2, 6


def tokens(lengths: list[int], k_dim: int, v_dim: int, states: int, seed: int = 1) -> dict[str, Any]:
    draw = Draw(BFLOAT, seed)
    count = sum(lengths)
    q, k = (torch.nn.functional.normalize(draw.normal(count, K_HEADS, k_dim).float(), dim=-1) for _ in range(2))
    return {
        "query": q.to(BFLOAT), "key": k.to(BFLOAT), "value": draw.normal(count, V_HEADS, v_dim),
        "beta": draw.uniform(0, 1, count, V_HEADS).to(BFLOAT), "scale": 0.37, "g": -draw.uniform(0, 2, count, V_HEADS),
        "actual_seq_lengths": torch.tensor(lengths, dtype=torch.int32),
        "state": draw.normal(states, V_HEADS, v_dim, k_dim),
    }  # fmt: skip


def recurrent(lengths: list[int], slots: list[int], k_dim: int = 24, v_dim: int = 40) -> dict[str, Any]:
    made = tokens(lengths, k_dim, v_dim, states=max(*slots, sum(lengths)) + 2)
    return made | {"ssm_state_indices": torch.tensor(slots, dtype=torch.int32)}


def chunked(lengths: list[int]) -> dict[str, Any]:
    made = tokens(lengths, 128, 128, states=len(lengths), seed=2)
    return {"initial_state": made.pop("state"), **made}


def textbook(start: Tensor, made: dict[str, Any], part: slice) -> list[tuple[Tensor, Tensor]]:
    """State and output after each token, from S [k_dim v_dim] <- exp(g) (I - beta k k^T) S + beta k v^T.

    With gk in the place of g, diag(exp(gk)) in the place of exp(g), before the rest.
    """
    found, now = [], start.double().mT
    for t in range(part.start, part.stop):
        outputs, states = [], []
        for head in range(V_HEADS):
            own = head // (V_HEADS // K_HEADS)
            q, k = (made[name][t, own].double() for name in ("query", "key"))
            beta, log = made["beta"][t, head].double(), made["g"] if made.get("gk") is None else made["gk"]
            decay = log[t, head].double().exp().expand(len(k))
            gone = (torch.eye(len(k)).double() - beta * torch.outer(k, k)) @ decay.diag()
            states.append(gone @ now[head] + beta * torch.outer(k, made["value"][t, head].double()))
            outputs.append(states[-1].T @ q * made["scale"])
        now = torch.stack(states)
        found.append((now.mT, torch.stack(outputs)))
    return found


def test_a_slot_for_each_token() -> None:
    lengths, slots = [1, 8, 3], [5, 0, 1, 2, 3, 4, 6, 7, 8, 11, 10, 9]
    made = recurrent(lengths, slots)
    out, after = call(RECURRENT, made)
    expected, token = made["state"].clone(), 0
    for length in lengths:
        part = slice(token, token + length)
        for t, (state, y) in enumerate(textbook(made["state"][slots[token]], made, part), token):
            assert_close(out[t], y.to(BFLOAT))
            expected[slots[t]] = state.to(BFLOAT)
        token += length
    assert_close(after, expected)
    assert out.dtype == after.dtype == BFLOAT
    assert_like(RECURRENT, made)


def test_one_slot_for_a_request_keeps_the_last_state() -> None:
    made = recurrent([3, 2], [2, 2, 2, 0, 0])
    before = made["state"].clone()
    out, after = call(RECURRENT, made)
    for slot, part in ((2, slice(0, 3)), (0, slice(3, 5))):
        found = textbook(before[slot], made, part)
        assert_close(after[slot], found[-1][0].to(BFLOAT))
        assert_close(out[part], torch.stack([y for _, y in found]).to(BFLOAT))
    assert torch.equal(after[1], before[1]) and torch.equal(after[3], before[3])
    assert torch.equal(made["state"], before)


def test_a_decay_a_channel() -> None:
    """From CANN 9.0.0 on."""
    made = recurrent([1, 3], [0, 1, 2, 3])
    made |= {"g": None, "gk": -Draw(BFLOAT, 3).uniform(0, 2, 4, V_HEADS, 24)}
    out, after = call(RECURRENT, made)
    for part in (slice(0, 1), slice(1, 4)):
        for t, (state, y) in enumerate(textbook(made["state"][part.start], made, part), part.start):
            assert_close(out[t], y.to(BFLOAT))
            assert_close(after[t], state.to(BFLOAT))
    with lowering.use(target=named("ascend910b", cann="8.5.0")):
        refused(RECURRENT, made, "takes no log decays a channel")


def test_a_float32_state_where_cann_takes_it() -> None:
    made = recurrent([1, 3], [0, 1, 2, 3])
    made["state"] = made["state"].float()
    with lowering.use(target=named("ascend910b", cann="master")):
        _, after = call(RECURRENT, made)
    assert_close(after[0], textbook(made["state"][0], made, slice(0, 1))[0][0].float())


def test_a_request_resumes_behind_what_was_accepted() -> None:
    made = recurrent([3, 2], [0, 1, 2, 3, 4]) | {"num_accepted_tokens": torch.tensor([2, 1], dtype=torch.int32)}
    out, _ = call(RECURRENT, made)
    assert_close(out[0], textbook(made["state"][1], made, slice(0, 1))[0][1].to(BFLOAT))
    assert_close(out[3], textbook(made["state"][3], made, slice(3, 4))[0][1].to(BFLOAT))


def test_a_token_of_zeros_changes_nothing() -> None:
    made = recurrent([4], [1] * 4)
    for name in ("query", "key", "value", "beta", "g"):
        made[name][2:] = 0
    out, after = call(RECURRENT, made)
    found = textbook(made["state"][1], made, slice(0, 2))
    assert_close(after[1], found[-1][0].to(BFLOAT))
    assert (out[2:] == 0).all()


def test_no_decay_is_a_decay_of_zero() -> None:
    made = recurrent([2], [0, 1])
    assert torch.equal(call(RECURRENT, made | {"g": None})[0], call(RECURRENT, made | {"g": made["g"] * 0})[0])


def test_chunks_of_any_length() -> None:
    lengths = [9, 1, 70]
    made = chunked(lengths)
    before = made["initial_state"].clone()
    out, final = call(CHUNK, made)
    token = 0
    for row, length in enumerate(lengths):
        found = textbook(before[row], made, slice(token, token + length))
        assert_close(out[token : token + length], torch.stack([y for _, y in found]).to(BFLOAT), length=128)
        assert_close(final[row], found[-1][0].to(BFLOAT), length=128)
        token += length
    assert torch.equal(made["initial_state"], before)
    assert_like(CHUNK, made)


Change = Callable[[dict[str, Any]], dict[str, Any]]


def to(dtype: torch.dtype, *names: str) -> Change:
    return lambda made: {name: made[name].to(dtype) for name in names}


BOTH: dict[str, tuple[Change, str]] = {
    "float32 tokens": (to(torch.float32, "query", "key", "value"), "torch.float32"),
    "float16 tokens": (to(torch.float16, "query", "key", "value"), "torch.float16"),
    "float32 beta": (to(torch.float32, "beta"), "beta is torch.float32"),
    "bfloat16 g": (to(BFLOAT, "g"), "g is torch.bfloat16"),
    "int64 lengths": (to(torch.int64, "actual_seq_lengths"), "actual_seq_lengths is torch.int64"),
    "no beta": (lambda made: {"beta": None}, "beta: left out"),
    "no scale": (lambda made: {"scale": None}, "scale: left out"),
    "no lengths": (lambda made: {"actual_seq_lengths": None}, "actual_seq_lengths: left out"),
    "running lengths": (
        lambda made: {"actual_seq_lengths": made["actual_seq_lengths"].cumsum(0).int()},
        "add up to 5 for 4|one length a request|not a running sum",
    ),
    "an empty request": (
        lambda made: {"actual_seq_lengths": torch.tensor([0, 4], dtype=torch.int32)},
        "expected 1 to",
    ),
    "tokens of value": (lambda made: {"value": made["value"][:3]}, "tokens differ"),
    "heads of value": (lambda made: {"value": made["value"][:, :5].contiguous()}, "multiple"),
    "key unlike query": (lambda made: {"key": made["key"][:, :1].contiguous()}, "key is"),
    "shape of beta": (lambda made: {"beta": made["beta"][:, :1]}, "beta is"),
    "shape of g": (lambda made: {"g": made["g"][:, :1]}, "g is"),
    "rank": (lambda made: {"query": made["query"][None]}, "4-dimensional"),
}


@pytest.mark.parametrize("limit", BOTH)
@pytest.mark.parametrize("name", [RECURRENT, CHUNK])
def test_limits_of_both(name: str, limit: str) -> None:
    made = recurrent([1, 3], [0, 1, 2, 3]) if name == RECURRENT else chunked([1, 3])
    change, words = BOTH[limit]
    refused(name, made | change(made), words)


def test_limits_of_the_recurrent_operator() -> None:
    made = recurrent([1, 3], [0, 1, 2, 3])
    slots = made["ssm_state_indices"]
    refused(RECURRENT, made | {"ssm_state_indices": None}, "ssm_state_indices: left out")
    refused(RECURRENT, made | {"ssm_state_indices": slots.long()}, "int64")
    refused(RECURRENT, made | {"ssm_state_indices": slots[:2]}, "one slot a token")
    refused(RECURRENT, made | {"ssm_state_indices": slots - 1}, "negative ones are not skipped")
    refused(RECURRENT, made | {"ssm_state_indices": slots + 3}, "slots")
    refused(RECURRENT, made | {"ssm_state_indices": slots // 2}, "slot 0 to two requests")
    refused(RECURRENT, made | {"num_accepted_tokens": torch.tensor([1, 4], dtype=torch.int32)}, "has 4; expected 1 to")
    refused(RECURRENT, made | {"num_accepted_tokens": torch.tensor([0, 1], dtype=torch.int32)}, "has 0; expected 1 to")
    refused(RECURRENT, made | {"num_accepted_tokens": torch.ones(3, dtype=torch.int32)}, "one count a request")
    refused(RECURRENT, made | {"state": made["state"].float()}, "a bfloat16 state")
    refused(RECURRENT, made | {"state": made["state"].mT.contiguous()}, "states, v_heads, v_dim, k_dim")
    refused(RECURRENT, made | {"gk": torch.zeros(4, V_HEADS, 24)}, "g and gk are given")
    refused(RECURRENT, made | {"state": made["state"][:3]}, "slots as tokens|at least as many")
    long = recurrent([9], [0] * 9)
    refused(RECURRENT, long, "holds values from 9 to 9; expected 1 to 8")
    refused(RECURRENT, recurrent([1], [0], k_dim=520), "width of key: 520; expected at most 512")
    refused(RECURRENT, recurrent([1], [0], v_dim=520), "width of value: 520")
    refused(RECURRENT, {k: x[:0] if k != "state" and isinstance(x, Tensor) else x for k, x in made.items()}, "empty")


def test_limits_of_the_chunked_operator() -> None:
    made = chunked([1, 3])
    refused(CHUNK, made | {"g": None}, "g: left out")
    refused(CHUNK, made | {"initial_state": None}, "initial_state: left out")
    refused(CHUNK, made | {"initial_state": made["initial_state"][:1]}, "one length for each initial state")
    refused(CHUNK, made | {"initial_state": made["initial_state"].float()}, "state is torch.float32")
    wide = tokens([1, 3], 144, 128, states=2)
    refused(CHUNK, {"initial_state": wide.pop("state"), **wide}, "width of key: 144; expected at most 128")
    wide = tokens([1, 3], 128, 144, states=2)
    refused(CHUNK, {"initial_state": wide.pop("state"), **wide}, "width of value: 144; expected at most 128")
    many = {name: made[name].repeat_interleave(33, 1) for name in ("query", "key")}
    refused(CHUNK, made | many | {"value": made["value"].repeat_interleave(11, 1)}, "expected|heads")


def test_shapes_seen_on_the_real_meta_kernels() -> None:
    draw = Draw(BFLOAT)
    made = {
        "query": draw.normal(200, 4, 128), "key": draw.normal(200, 4, 128), "value": draw.normal(200, 8, 128),
        "beta": draw.normal(200, 8), "g": torch.zeros(200, 8), "scale": 1.0,
        "initial_state": draw.normal(2, 8, 128, 128), "actual_seq_lengths": torch.tensor([90, 110], dtype=torch.int32),
    }  # fmt: skip
    out, final = call(CHUNK, made)
    assert (out.shape, final.shape, final.dtype) == ((200, 8, 128), (2, 8, 128, 128), BFLOAT)
