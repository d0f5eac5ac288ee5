"""The causal convolution against a loop over tokens and taps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lowering
from tests.cases import Draw
from tests.lowering.npu_reference.calls import assert_like, assert_rounded_once, call, refused

CONV = "npu_fused_causal_conv1d"
STARTS = [0, 4, 4, 5, 7]


def valid(dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Rows of 4, 0, 1 and 2 tokens."""
    draw = Draw(dtype, seed=1)
    return {
        "x": draw.normal(7, 128), "weight": draw.normal(3, 128), "conv_states": draw.normal(6, 2, 128),
        "query_start_loc": torch.tensor(STARTS, dtype=torch.int32),
        "cache_indices": torch.tensor([3, 0, 5, 1], dtype=torch.int32), "max_query_len": 9,
    }  # fmt: skip


@pytest.mark.parametrize("residual", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_each_token_sees_the_two_before_it(dtype: torch.dtype, residual: int) -> None:
    made: dict[str, Any] = valid(dtype) | {"residual_connection": residual}
    past = made["conv_states"].clone()
    with lowering.use(target="ascend950"):
        assert_like(CONV, made)
        made["conv_states"].copy_(past)
        y = call(CONV, made)
    kept = past.clone()
    for row, slot in enumerate(made["cache_indices"].tolist()):
        tokens = made["x"][STARTS[row] : STARTS[row + 1]]
        seen = torch.cat((past[slot], tokens)).double()
        for t in range(len(tokens)):
            own = sum(made["weight"][tap].double() * seen[t + tap] for tap in range(3)) + residual * seen[t + 2]
            assert_rounded_once(y[STARTS[row] + t], own)
        kept[slot] = seen[-2:].to(dtype)
    assert torch.equal(made["conv_states"], kept)


LIMITS: dict[str, tuple[dict[str, Any], str]] = {
    "float32": ({"x": torch.zeros(7, 128)}, "x is torch.float32"),
    "dtypes": ({"weight": torch.zeros(3, 128).half()}, "dtypes differ"),
    "rank": ({"x": torch.zeros(1, 7, 128).bfloat16()}, "3-dimensional"),
    "channels": (
        {
            "x": torch.zeros(7, 72).bfloat16(),
            "weight": torch.zeros(3, 72).bfloat16(),
            "conv_states": torch.zeros(6, 2, 72).bfloat16(),
        },
        "multiples of 16",
    ),
    "no longest row": ({"max_query_len": -1}, "the longest row's tokens"),
    "a window without room": ({"max_query_len": 4}, "slots, past tokens, channels"),
    "longer rows than said": ({"max_query_len": 1}, "4 tokens a row; 1 were said"),
    "taps": ({"weight": torch.zeros(4, 128).bfloat16()}, "taps, channels"),
    "states": ({"conv_states": torch.zeros(6, 3, 128).bfloat16()}, "slots, past tokens, channels"),
    "activation": ({"activation": "silu"}, "takes and ignores"),
    "bias": ({"bias": torch.zeros(128).bfloat16()}, "bias"),
    "accepted": ({"num_accepted_tokens": torch.ones(4).int()}, "num_accepted_tokens"),
    "mode": ({"conv_mode": "pangu"}, "modes"),
    "residual": ({"residual_connection": 2}, "residual_connection is 2"),
    "no starts": ({"query_start_loc": None}, "missing"),
    "int64 starts": ({"query_start_loc": torch.tensor(STARTS)}, "int64"),
    "lengths for starts": ({"query_start_loc": torch.tensor([4, 0, 1, 2, 0]).int()}, "running sums from 0"),
    "starts short of the tokens": ({"query_start_loc": torch.tensor([0, 4, 4, 5, 6]).int()}, "to the 7 tokens"),
    "slots": ({"cache_indices": torch.tensor([3, 0, 5]).int()}, "one slot a request"),
    "slot that does not exist": ({"cache_indices": torch.tensor([3, 0, 6, 1]).int()}, "values from 0 to 6"),
    "slot twice": ({"cache_indices": torch.tensor([3, 0, 3, 1]).int()}, "to two requests"),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_limits(limit: str) -> None:
    changes, words = LIMITS[limit]
    with lowering.use(target="ascend950"):
        refused(CONV, valid() | changes, words)


@pytest.mark.parametrize("target", ["ascend910b", "ascend910_93"])
def test_950_only(target: str) -> None:
    with lowering.use(target=target):
        refused(CONV, valid(), f"documented for ascend950; the call is lowered to {target}")
