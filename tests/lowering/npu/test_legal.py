"""No call that the host code refuses, of any family, on any machine with any CANN: at published sizes, without values.

Kernels run through the operators' references on tensors without values, so that documentation and host code are both
asked, of the target and its CANN.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import funcmodels as fm
import lowering
import params
from lowering import npu_reference
from lowering.target import ASCEND, Target, named
from tests.lowering.npu.published import FAMILIES, PHASES

CANN = ("8.5.0", "9.0.0", "9.1.0")


@pytest.fixture(scope="module", autouse=True)
def operators() -> None:
    """The namespace `npu`, on the CPU."""
    npu_reference.load()


@cache
def made(name: str, scheme: str | None) -> tuple[fm.Model, Any]:
    """A family and its parameters without values."""
    config = FAMILIES[name]
    if scheme is not None and "num_experts" in config:
        config = config | {"num_experts": 32}  # Torch takes them one by one where nothing is fused
    model = fm.build(config)
    plain = model.init_params(dtype=torch.bfloat16, device="meta")
    # Ranges are values, which nothing here has.
    ranges = {path: (-1.0, 1.0) for path, _ in params.items(plain)}
    return model, plain if scheme is None else params.quantize(plain, scheme, input_ranges=ranges)


def explained(name: str, phase: str, target: Target, scheme: str | None = None) -> lowering.Report:
    """The kernels of one forward, each of which has run."""
    (model, weights), (counts, held, keep_steps) = made(name, scheme), PHASES[phase]
    state = model.init_state(len(counts), 2048, torch.bfloat16, torch.bfloat16, "meta")
    state = replace(state, ledger=state.ledger.at([held] * len(counts)))
    batch = fm.Batch.from_lists([[0] * count for count in counts], state)
    batch = batch.pad(16) if phase == "padded" else batch
    return lowering.explain(model.forward, weights, state, batch, keep_steps=keep_steps, target=target)


@pytest.mark.plain
@pytest.mark.parametrize("target", ASCEND)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_call_is_legal(name: str, target: str) -> None:
    """Whatever evidence is wanted; and the calls are there: every machine runs something fused in every phase."""
    for cann, evidence in (*((cann, "stated") for cann in CANN), (CANN[-1], "in use")):
        with lowering.use(evidence=evidence):
            for phase in PHASES if cann == CANN[-1] else ("chunk", "decode", "verify 16"):
                report = explained(name, phase, named(target, cann=cann))
                assert any(row.evidence for row in report.rows), (cann, phase)


QUANTISED = (
    ("Qwen3.5-35B-A3B", "W8A8_DYNAMIC"),
    ("Qwen3.5-35B-A3B", "W8A8_MXFP8"),
    ("Qwen3-8B", "W8A8"),
    ("DeepSeek-V2-Lite", "W8A8_DYNAMIC"),
    ("Kimi-K3", "W4A16_MXFP4"),
)
"""Families with weights of a scheme."""


@pytest.mark.plain
@pytest.mark.parametrize("target", ASCEND)
@pytest.mark.parametrize(("name", "scheme"), QUANTISED)
def test_every_call_of_quantised_weights_is_legal(name: str, scheme: str, target: str) -> None:
    """In three phases: weights meet one token or many."""
    for cann in CANN:
        with lowering.use(evidence="stated"):
            for phase in ("prefill", "decode", "verify 4"):
                explained(name, phase, named(target, cann=cann), scheme)
