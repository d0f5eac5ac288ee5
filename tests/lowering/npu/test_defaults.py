"""What a default decides gets the fused kernels: the dtype of recurrent states, by target, CANN and policy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import funcmodels as fm
import lowering
from funcmodels.attention.gated_delta import DeltaNetState
from lowering.target import named
from tests.checkpoints import CONFIGS

BF16, FP32 = torch.bfloat16, torch.float32


def made_in(family: str, target: Any, evidence: str = "in use", dtype: torch.dtype = BF16, **kinds: Any) -> torch.dtype:
    """The dtype of the delta-rule matrices of a state that `init_state` makes on the target."""
    with lowering.use(target=target, evidence=evidence):
        state = fm.build(CONFIGS[family]()).init_state(2, 64, dtype, device="meta", **kinds)
    (found,) = {entry.delta.dtype for entry in state.layers if isinstance(entry, DeltaNetState)}
    return found


@pytest.mark.parametrize(
    ("family", "target", "cann", "evidence", "expected"),
    [
        ("qwen3_5", "ascend910b", "8.5.0", "in use", BF16),
        ("qwen3_5", "ascend910_93", "9.1.0", "documented", BF16),
        ("flash_next", "ascend910b", "9.0.0", "in use", BF16),
        # The chunked operator goes on to take bfloat16 alone, which serves prefill.
        ("qwen3_5", "ascend910b", "master", "in use", BF16),
        # Nothing but CANN's statement speaks for the recurrent operator there.
        ("qwen3_5", "ascend950", "9.1.0", "in use", FP32),
        ("qwen3_5", "ascend950", "9.1.0", "stated", BF16),
        # Decays a channel came with 9.0.0, float32 states after 9.1.0; the chunked operator takes no such decays.
        ("kimi_linear", "ascend910b", "8.5.0", "in use", FP32),
        ("kimi_linear", "ascend910b", "9.0.0", "in use", BF16),
        ("kimi_linear", "ascend910b", "master", "in use", FP32),
    ],
)
def test_states_are_kept_in_what_the_fused_rule_takes(
    family: str, target: str, cann: str, evidence: str, expected: torch.dtype
) -> None:
    assert made_in(family, named(target, cann=cann), evidence) == expected


def test_elsewhere_nothing_changes() -> None:
    """On a CPU, beside activations that no fused rule takes, and where the caller says."""
    assert made_in("qwen3_5", "cpu") == made_in("qwen3_5", "cuda") == made_in("qwen3_5", None) == FP32
    assert made_in("qwen3_5", "ascend910b", dtype=FP32) == made_in("qwen3_5", "ascend910b", dtype=torch.half) == FP32
    assert made_in("qwen3_5", "ascend910b", recurrent_dtype=FP32) == FP32


def test_explain_says_what_the_default_decided() -> None:
    model = fm.build(CONFIGS["qwen3_5"]())
    for given, said in ((None, 1), (FP32, 0)):
        with lowering.use(target="ascend910b"):
            state = model.init_state(1, 64, BF16, given, device="meta")
            batch = fm.Batch.from_lists([[1]], state)
            report = lowering.explain(model.forward, model.param_spec(BF16), state, batch)
        (row,) = [row for row in report.rows if row.op == "gated_delta_rule"]
        assert row.reasons().count("a bfloat16 state is the default here") == said
        assert row.kernel.startswith("npu_") == bool(said)
